"""The bound on the age of samples, as a simulation with random finish times, and the loop that obeys it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.observability.staleness import count_token_versions, staleness_metrics
from slime.rollout.errors import RolloutError
from slime.rollout.staleness import StalenessBound, oldest_version
from slime.utils.types import Sample

pytestmark = pytest.mark.unit


def simulate(limit, batch, interval, in_flight, seed, rollouts=30, drop=0.0):
    """A worker and a trainer that follow the bound; returns the age of every group that is trained on."""
    rng = random.Random(seed)
    bound = StalenessBound(limit, batch, interval)
    running: list[list[int]] = []  # [version, steps left]
    waiting: list[int] = []
    version, ages, steps = 1, [], 0

    def tick():
        nonlocal steps
        steps += 1
        assert steps < 100_000, "no progress"
        for group in running:
            group[1] -= 1
        for group in [g for g in running if g[1] <= 0]:
            running.remove(group)
            if rng.random() >= drop:
                waiting.append(group[0])
        wanted = in_flight - len(running) if len(waiting) < batch else 0
        room = bound.room(len(running) + len(waiting))
        # The heavy tail: one group in ten takes fifty times as long.
        for _ in range(wanted if room is None else min(wanted, room)):
            running.append([bound.version, rng.randint(1, 4) * (50 if rng.random() < 0.1 else 1)])

    for rollout_id in range(rollouts):
        bound.begin(version, rollout_id)
        while True:
            chosen = sorted(waiting)[:batch]
            left = [g[0] for g in running] + sorted(waiting)[batch:]
            if len(chosen) == batch and bound.may_deliver([g[0] for g in running], left):
                break
            tick()
        waiting[:] = sorted(waiting)[batch:]
        ages += [version - v for v in chosen]
        bound.delivered()
        for _ in range(rng.randint(0, 6)):  # the trainer trains
            tick()
        if (rollout_id + 1) % interval == 0:
            version += 1
    return ages


@given(
    limit=st.integers(0, 4),
    batch=st.integers(1, 6),
    interval=st.integers(1, 3),
    extra=st.integers(0, 12),
    drop=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_no_group_is_older_than_the_limit_and_none_waits_for_ever(limit, batch, interval, extra, drop, seed):
    ages = simulate(limit, batch, interval, batch + extra, seed, drop=drop)
    assert len(ages) == 30 * batch and min(ages) >= 0 and max(ages) <= limit


def test_without_a_limit_slow_groups_get_older_than_with_one():
    assert max(simulate(None, 4, 1, 12, 0)) > 3
    assert max(simulate(3, 4, 1, 12, 0)) == 3


def spans(*entries, **kwargs):
    length = max((end for *_, end in entries), default=0)
    return Sample(response_length=length, weight_version_spans=list(entries), **kwargs)


def test_metrics_weigh_tokens_and_skip_what_is_not_trained_on():
    samples = [
        spans(("3", 0, 4), ("5", 4, 6)),
        spans(("2", 0, 3), ("4", 3, 5), loss_mask=[0, 0, 0, 1, 1]),
        spans(("1", 0, 9), remove_sample=True),
        spans(("default", 0, 9)),
    ]
    counts = count_token_versions(samples)
    assert counts == {3: 4, 5: 2, 4: 2}
    metrics = staleness_metrics(counts, 5)
    assert metrics["rollout/staleness/mean"] == pytest.approx((4 * 2 + 0 + 2 * 1) / 8)
    assert metrics["rollout/staleness/max"] == 2 and metrics["rollout/staleness/stale_ratio"] == pytest.approx(6 / 8)
    assert staleness_metrics(counts, None) == staleness_metrics({}, 3) == {}


def test_oldest_version_of_a_group():
    assert oldest_version([spans(("3", 0, 1)), [spans(("2", 0, 1), ("4", 1, 2))]], 5) == 2
    assert oldest_version([Sample()], 5) == 5
    with pytest.raises(RolloutError, match="'default' is not a number"):
        oldest_version([spans(("default", 0, 1))], 5)
