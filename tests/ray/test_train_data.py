import json
from argparse import Namespace

import numpy as np
import pytest

from slime.ray.train_data import batch_metrics, build_schedule, samples_to_batch, trajectory_ids, trim
from slime.rollout.errors import HookFailure
from slime.utils.types import Sample

pytestmark = pytest.mark.unit


def make_args(**changes):
    values = {
        "global_batch_size": 4,
        "disable_rollout_trim_samples": False,
        "use_dynamic_global_batch_size": False,
        "num_steps_per_rollout": 1,
        "use_dynamic_batch_size": False,
        "max_tokens_per_gpu": None,
        "micro_batch_size": 1,
        "context_parallel_size": 1,
        "balance_data": False,
        "balance_by_flops": False,
        "loss_type": "policy_loss",
        "compute_advantages_and_returns": True,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "reward_key": None,
        "keep_old_actor": False,
        "use_rollout_top_p_replay": False,
        "custom_convert_samples_to_train_data_path": None,
        "custom_reward_post_process_path": None,
    }
    return Namespace(**{**values, **changes})


def make_sample(index, group=0, reward=0.0, response=3, **fields):
    tokens = list(range(2 + response))
    return Sample(index=index, group_index=group, reward=reward, tokens=tokens, response_length=response, **fields)


def test_pieces_of_a_trajectory_are_one():
    samples = [make_sample(0), make_sample(1, rollout_id=1), make_sample(1, rollout_id=1), make_sample(2)]
    assert trajectory_ids(samples) == [0, 1, 1, 2]


def test_trim_counts_trajectories_and_keeps_pieces_together():
    samples = [make_sample(i) for i in range(3)] + [make_sample(3, rollout_id=3) for _ in range(3)] + [make_sample(4)]
    assert len(trim(make_args(), samples)) == 6
    assert len(trim(make_args(disable_rollout_trim_samples=True), samples)) == 7
    with pytest.raises(ValueError, match="--global-batch-size 8"):
        trim(make_args(global_batch_size=8), samples)


def test_schedule_of_the_flags():
    batch = {"total_lengths": [10, 20, 30, 40, 50, 60, 70], "rollout_ids": [0, 0, 1, 2, 3, 4, 5]}
    args = make_args(global_batch_size=3, micro_batch_size=2)
    assert [step.num_rollouts for step in build_schedule(args, batch, dp_size=2).steps] == [3, 3]
    args = make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=50, context_parallel_size=2, global_batch_size=6)
    for multiple, count in ((1, 3), (4, 4)):
        (step,) = build_schedule(args, batch, dp_size=1, micro_batch_multiple=multiple).steps
        totals = [sum(batch["total_lengths"][i] for i in mb) for mb in step.micro_batches[0]]
        assert len(totals) == count and max(totals) <= 100


def test_dynamic_global_batch_size_uses_every_sample():
    args = make_args(use_dynamic_global_batch_size=True, num_steps_per_rollout=2, global_batch_size=4)
    samples = [make_sample(i) for i in range(7)]
    assert trim(args, samples) == samples
    batch = {"total_lengths": [5] * 7, "rollout_ids": list(range(7))}
    assert [step.num_rollouts for step in build_schedule(args, batch, dp_size=2).steps] == [3, 4]
    few = {"total_lengths": [5] * 3, "rollout_ids": list(range(3))}
    assert [step.num_rollouts for step in build_schedule(args, few, dp_size=2).steps] == [3]


def test_balance_by_flops(tmp_path):
    """One long sample costs as much as many short ones of the same total length."""
    sizes = {"hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    batch = {"total_lengths": [4000, *[400] * 20], "rollout_ids": list(range(21))}
    packed = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 8000, "global_batch_size": 21}
    args = make_args(**packed, balance_by_flops=True, hf_checkpoint=str(tmp_path))
    ranks = [[i for mb in rank for i in mb] for rank in build_schedule(args, batch, dp_size=2).steps[0].micro_batches]
    assert min(ranks, key=len) == [0]
    args = make_args(**packed, balance_data=True)
    ranks = [[i for mb in rank for i in mb] for rank in build_schedule(args, batch, dp_size=2).steps[0].micro_batches]
    assert min(map(len, ranks)) > 4


def test_batch_by_hand():
    samples = [
        make_sample(0, 0, 1.0, loss_mask=[1, 0, 1], rollout_log_probs=[-1.0, -2.0, -3.0]),
        make_sample(1, 0, 0.0, remove_sample=True, rollout_log_probs=[-1.0] * 3),
        make_sample(2, 1, 0.5, status=Sample.Status.TRUNCATED, rollout_log_probs=[-1.0] * 3),
        make_sample(3, 1, 0.5, rollout_log_probs=[-1.0] * 3, metadata={"raw_reward": 7.0}),
    ]
    batch = samples_to_batch(make_args(), samples)
    assert batch["loss_masks"] == [[1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    scale = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert batch["rewards"] == pytest.approx([scale, -scale, 0.0, 0.0])
    assert batch["raw_reward"] == [1.0, 0.0, 0.5, 7.0]
    assert batch["truncated"] == [0, 0, 1, 0]
    assert batch["total_lengths"] == [5] * 4 and batch["sample_indices"] == [0, 1, 2, 3]
    assert batch["rollout_log_probs"][0] == [-1.0, -2.0, -3.0]
    assert "teacher_log_probs" not in batch
    assert batch_metrics(batch)["rollout/raw_reward"] == 8.5 / 4


def test_a_split_trajectory_counts_once_in_its_group():
    samples = [make_sample(0, 0, 1.0, rollout_id=0), make_sample(0, 0, 1.0, rollout_id=0), make_sample(1, 0, 0.0)]
    rewards = samples_to_batch(make_args(grpo_std_normalization=False), samples)["rewards"]
    assert rewards == [0.5, 0.5, -0.5]


def test_log_probs_that_some_samples_lack_are_left_out():
    samples = [make_sample(0, rollout_log_probs=[0.0] * 3), make_sample(1)]
    assert "rollout_log_probs" not in samples_to_batch(make_args(), samples)


@pytest.mark.parametrize("reward", [None, "text", {"score": 1.0}, float("nan"), float("-inf")])
def test_a_reward_that_is_no_number_names_the_sample(reward):
    with pytest.raises(ValueError, match="sample 3 "):
        samples_to_batch(make_args(), [make_sample(3, reward=reward)])


def test_top_p_replay_needs_the_kept_tokens():
    samples = [make_sample(0, rollout_top_p_token_ids=[1, 2], rollout_top_p_token_offsets=[0, 1, 1, 2])]
    samples.append(make_sample(1, response=0))
    batch = samples_to_batch(make_args(use_rollout_top_p_replay=True), samples)
    assert batch["rollout_top_p_token_ids"] == [[1, 2], []]
    assert batch["rollout_top_p_token_offsets"] == [[0, 1, 1, 2], [0]]
    assert "rollout_top_p_token_ids" not in samples_to_batch(make_args(), samples)
    with pytest.raises(ValueError, match="sample 2 has no rollout_top_p_token_ids"):
        samples_to_batch(make_args(use_rollout_top_p_replay=True), [*samples, make_sample(2)])


def test_sft_needs_no_reward():
    args = make_args(loss_type="sft_loss")
    batch = samples_to_batch(args, [make_sample(0, reward=None)])
    assert not {"rewards", "raw_reward"} & batch.keys()
    assert not {"rollout/rewards", "rollout/raw_reward"} & batch_metrics(batch).keys()
    assert samples_to_batch(args, [make_sample(0, reward=0.5)])["raw_reward"] == [0.5]


def test_wrong_mask_names_the_sample():
    with pytest.raises(ValueError, match="sample 5: loss_mask has 1 entries"):
        samples_to_batch(make_args(), [make_sample(5, loss_mask=[1])])


def post_process(args, samples):
    return [s.reward for s in samples], [10.0 * s.reward for s in samples]


def convert(args, samples):
    return {"tokens": [s.tokens for s in samples], "response_lengths": [s.response_length for s in samples]}


def nothing(args, samples):
    return None


def post_process_nan(args, samples):
    return [1.0, 2.0], [1.0, float("nan")]


def post_process_broken(args, samples):
    return sum(samples)


def convert_wrongly(args, samples):
    return {"tokens": []}


def test_hooks():
    here = "tests.ray.test_train_data"
    samples = [make_sample(0, reward=1.0), make_sample(1, reward=2.0)]
    batch = samples_to_batch(make_args(custom_reward_post_process_path=f"{here}.post_process"), samples)
    assert batch["raw_reward"] == [1.0, 2.0] and batch["rewards"] == [10.0, 20.0]
    batch = samples_to_batch(make_args(custom_convert_samples_to_train_data_path=f"{here}:convert"), samples)
    assert batch["total_lengths"] == [5, 5] and batch["loss_masks"] == [[1, 1, 1]] * 2
    with pytest.raises(ValueError, match="response_lengths"):
        samples_to_batch(make_args(custom_convert_samples_to_train_data_path=f"{here}.convert_wrongly"), samples)
    with pytest.raises(HookFailure, match=r"--custom-convert-samples.* returned None, not a dict"):
        samples_to_batch(make_args(custom_convert_samples_to_train_data_path=f"{here}.nothing"), samples)
    with pytest.raises(HookFailure, match=r"--custom-reward-post-process-path .* not finite: raw .*processed .*nan"):
        samples_to_batch(make_args(custom_reward_post_process_path=f"{here}.post_process_nan"), samples)
    with pytest.raises(HookFailure, match=r"--custom-reward-post-process-path .*TypeError.*train_data.py:\d+\)"):
        samples_to_batch(make_args(custom_reward_post_process_path=f"{here}.post_process_broken"), samples)
