"""Reward types other than math grading, and the dispatch to them."""

import json

import numpy as np
import pytest

from slime.rollout.errors import RewardError
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.dapo import compute_dapo_reward
from slime.rollout.rm_hub.text_rewards import compute_gpqa_reward, f1_score
from slime.utils.types import Sample
from tests.rollout import hooks
from tests.rollout.support import make_args

HOOKS = "tests.rollout.hooks."
pytestmark = pytest.mark.unit


def sample_of(response="", label=None, **fields):
    return Sample(index=3, group_index=1, response=response, label=label, **fields)


@pytest.mark.parametrize(
    "prediction, label, expected",
    [
        ("The cat sat", "cat sat", 1.0),
        ("cat", "the cat sat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("yes it is", "yes", 0.0),
        ("Yes.", "yes", 1.0),
        ("a b b c", "b b d", 2 * 2 / (3 + 3)),
    ],
)
def test_f1(prediction, label, expected):
    assert f1_score(prediction, label) == pytest.approx(expected)


@pytest.mark.parametrize(
    "response, label, metadata, expected",
    [
        ("I think \\boxed{C}", "C", {}, 1),
        ("\\boxed{\\text{(B)}}", "B", {}, 1),
        ("Answer: (D) because", "D", {}, 1),
        ("The correct answer is A.", "B", {}, 0),
        ("answer: A\n... so the answer is **B**", "B", {}, 1),
        ("thinking A</think>\n\nC", "C", {}, 1),
        ("A good option is hard", "A", {}, 0),
        ("the answer is B", "blue", {"choices": ["red", "blue"]}, 1),
        ("\\boxed{Blue}", "B", {"choices": {"A": "red", "B": "blue"}}, 1),
        ("\\boxed{A}", "x", {"choices": ["x", "y"], "correct_letter": "B"}, 0),
        ("nothing", "A", {}, 0),
    ],
)
def test_gpqa(response, label, metadata, expected):
    assert compute_gpqa_reward(response, label, metadata) == expected


@pytest.mark.parametrize(
    "response, label, score, pred",
    [
        ("... so\nAnswer: 42", "42", 1.0, "42"),
        ("Answer: \\boxed{42}", "42", 1.0, "42"),
        ("Answer: $\\frac{1}{2}$", "1/2", 1.0, "$\\frac{1}{2}$"),
        ("Answer: 41\nAnswer: 42", "42", 1.0, "42"),
        ("Answer: 41", "42", -1.0, "41"),
        ("Answer: 42" + " filler" * 60, "42", -1.0, "[INVALID]"),
        ("no answer", "42", -1.0, "[INVALID]"),
    ],
)
def test_dapo(response, label, score, pred):
    assert compute_dapo_reward(response, label) == {"score": score, "acc": score > 0, "pred": pred}


async def test_types_by_flag_row_and_boxed_prefix():
    assert await async_rm(make_args(rm_type="f1"), sample_of("cat", "the cat")) == 1.0
    row = sample_of("say \\boxed{the cat} now", "cat", metadata={"rm_type": "boxed_f1"})
    assert await async_rm(make_args(rm_type="math"), row) == 1.0
    assert await async_rm(make_args(rm_type="boxed_f1"), sample_of("the cat", "cat")) == 0.0
    flips = [await async_rm(make_args(rm_type="random"), Sample(index=i)) for i in range(20)]
    assert set(flips) == {0.0, 1.0}
    assert flips == [await async_rm(make_args(rm_type="random"), Sample(index=i)) for i in range(20)]


@pytest.mark.parametrize(
    "args, message",
    [
        ({"rm_type": None}, r"pass --rm-type or --custom-rm-path.*\(sample 3 of group 1\)"),
        ({"rm_type": "maths"}, "'maths' is unknown; use one of boxed_<type>, dapo, deepscaler, f1"),
        ({"rm_type": "ifbench"}, "ifbench needs metadata.instruction_id_list"),
        ({"rm_type": "f1"}, "needs a label: pass --label-key"),
        ({"rm_type": "remote_rm"}, "needs --rm-url"),
        ({"custom_rm_path": "no.such.fn"}, "--custom-rm-path 'no.such.fn'"),
    ],
)
async def test_errors_say_what_to_do(args, message):
    with pytest.raises((RewardError, ValueError), match=message):
        await async_rm(make_args(**args), sample_of("x"))


async def test_custom_functions_in_every_form():
    pair = [sample_of(tokens=[2], response_length=1), sample_of(tokens=[3], response_length=1)]
    assert await batched_async_rm(make_args(custom_rm_path=HOOKS + "reward_parity"), pair) == [1.0, 0.0]
    assert await batched_async_rm(make_args(custom_rm_path=HOOKS + "reward_sync"), pair) == [0.25, 0.25]
    assert await batched_async_rm(make_args(custom_rm_path=HOOKS + "reward_group"), pair) == [0.0, 1.0]
    assert await async_rm(make_args(custom_rm_path=HOOKS + "reward_group"), pair[0]) == 0.0
    assert await async_rm(make_args(custom_rm_path=HOOKS + "reward_length"), pair[0]) == {"score": 1.0, "other": 0}
    own = sample_of(custom_rm_path=HOOKS + "reward_sync")
    assert await batched_async_rm(make_args(rm_type="random"), [own, Sample(index=0, custom_rm_path=None)]) == [
        0.25,
        await async_rm(make_args(rm_type="random"), Sample(index=0)),
    ]
    with pytest.raises(RewardError, match=r"returned .1\.0., not a list of 2 rewards"):
        await batched_async_rm(make_args(custom_rm_path=HOOKS + "reward_group_short", group_rm=True), pair)
    assert hooks.CALLS


@pytest.mark.parametrize(
    ("reward", "key", "message"),
    [
        ("good", None, "returned 'good', not a number or a dict"),
        (float("nan"), None, "returned nan, not a finite number"),
        (np.float32("inf"), None, "returned inf, not a finite number"),
        (np.ones(2), None, "not one number"),
        ({"score": "high"}, "score", "not a finite number, under --reward-key score"),
        ({"score": float("nan"), "pred": "x"}, "score", "not a finite number, under --reward-key score"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused(reward, key, message):
    async def judge(args, sample):
        return reward

    args = make_args(custom_rm_path=judge, reward_key=key)
    with pytest.raises(RewardError, match=message + r".*sample 3 of group 1"):
        await async_rm(args, sample_of("x"))


async def test_an_error_names_the_line_of_the_users_code():
    async def judge(args, sample):
        return json.loads("{")

    with pytest.raises(RewardError, match=r"raised JSONDecodeError: .*tests/rollout/test_rewards.py:\d+\) \(sample 3"):
        await async_rm(make_args(custom_rm_path=judge), sample_of("x"))


def test_reward_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(RewardError.about(sample_of(), "a.b", "raised X")))
    assert str(error) == "reward function a.b raised X (sample 3 of group 1)"
    assert (error.sample_index, error.group_index, error.function) == (3, 1, "a.b")
