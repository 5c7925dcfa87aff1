import numpy as np
import pytest

from slime.training.rewards import normalize_rewards
from tests.training import reference
from tests.training.batches import make_args

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("std", [True, False])
def test_against_reference_with_uneven_groups_and_fan_out(estimator, std):
    rng = np.random.default_rng(3)
    groups = rng.integers(0, 6, 40).tolist()
    rollouts = [group * 100 + int(rng.integers(0, 4)) for group in groups]
    rewards = rng.normal(size=40).tolist()
    got = normalize_rewards(
        make_args(advantage_estimator=estimator, grpo_std_normalization=std), rewards, groups, rollouts
    )
    want = reference.group_rewards(
        rewards, groups, rollouts, divide=std and estimator != "reinforce_plus_plus_baseline"
    )
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_full_groups_equal_the_reshaped_form():
    rewards = np.random.default_rng(0).normal(size=(5, 8))
    got = normalize_rewards(make_args(), rewards.ravel().tolist(), np.repeat(range(5), 8).tolist(), list(range(40)))
    want = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got, want.ravel(), rtol=1e-12)


def test_split_trajectory_counts_once():
    """Trajectory 7 came as three samples; the group's statistics are those of rewards 1 and 0."""
    got = normalize_rewards(make_args(), [1.0, 1.0, 1.0, 0.0], [4, 4, 4, 4], [7, 7, 7, 8])
    np.testing.assert_allclose(got, [0.5 / (np.sqrt(0.5) + 1e-6)] * 3 + [-0.5 / (np.sqrt(0.5) + 1e-6)])


def test_groups_of_one_and_equal_rewards_give_zero():
    assert normalize_rewards(make_args(), [3.0, 2.0, 2.0], [0, 1, 1], [0, 1, 2]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("changes", [{"rewards_normalization": False}, {"advantage_estimator": "reinforce_plus_plus"}])
def test_raw_rewards_where_not_asked(changes):
    assert normalize_rewards(make_args(**changes), [3, 1], [0, 0], [0, 1]) == [3.0, 1.0]


def test_missing_group_is_named():
    with pytest.raises(ValueError, match=r"samples \[1\] have none"):
        normalize_rewards(make_args(), [1.0, 2.0], [0, None], [0, 1])
    with pytest.raises(ValueError, match="differ"):
        normalize_rewards(make_args(), [1.0, 2.0], [0], [0, 1])
