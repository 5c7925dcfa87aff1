"""A trajectory that comes as several samples counts once: from the engine to the loss it equals the unsplit one."""

import itertools
import math

import numpy as np
import pytest

from slime.ray.train_data import batch_metrics, samples_to_batch, trim
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.errors import HookFailure
from slime.rollout.sglang_rollout import generate, generate_rollout
from slime.training.rollout_data import RankData, partition_rollout_data
from slime.training.schedule import build_dp_schedule
from slime.utils.misc import flatten
from slime.utils.types import Sample
from tests.ray.test_train_data import make_args
from tests.rollout import hooks

HOOKS = "tests.rollout.hooks."
HERE = "tests.rollout.test_fan_out."
pytestmark = pytest.mark.integration


async def split_unevenly(args, sample, sampling_params):
    """Odd samples stay whole; the others come as two or three pieces with the same context."""
    whole = await generate(args, sample, sampling_params)
    count = 1 + whole.index % 3
    if count == 1:
        return whole
    bounds = [round(i * whole.response_length / count) for i in range(count + 1)]
    pieces = []
    for start, end in itertools.pairwise(bounds):
        piece = whole.clone()
        piece.loss_mask = [int(start <= i < end) for i in range(whole.response_length)]
        pieces.append(piece)
    return pieces


async def own_ids(args, sample, sampling_params):
    """Two trajectories of two and one pieces, under ids that every call uses."""
    pieces = []
    for trajectory in (0, 0, 7):
        piece = Sample(tokens=[1, 2, 40], response_length=1, rollout_log_probs=[-1.0], rollout_id=trajectory)
        piece.status = Sample.Status.COMPLETED
        pieces.append(piece)
    return pieces


async def reward_of_trajectory(args, sample, **kwargs):
    """The same for all pieces, since they hold the same tokens."""
    return float(sum(sample.tokens[-3:]) % 5)


def loss(samples, global_batch_size, dp_size):
    """(sum of reduce(x) over ranks and micro-batches, optimizer steps) for x = advantage x f(token)."""
    from slime.training.reducers import make_reducer

    samples = trim(make_args(global_batch_size=global_batch_size), samples)
    batch = samples_to_batch(make_args(), samples)
    schedule = build_dp_schedule(
        batch["total_lengths"],
        batch["rollout_ids"],
        dp_size=dp_size,
        global_batch_size=global_batch_size,
        max_tokens=64,
    )
    total = 0.0
    for part in partition_rollout_data(batch, schedule):
        data = RankData(part)
        for step in range(len(data.steps)):
            for index, positions in enumerate(data.steps[step]):
                if not positions:
                    continue
                mb = data.micro_batch(step, index, "cpu")
                rewards = [float(data["rewards"][i]) for i in positions]
                values = [
                    math.sin(token) * reward
                    for reward, i in zip(rewards, positions, strict=True)
                    for token in data["tokens"][i][-int(data["response_lengths"][i]) :].tolist()
                ]
                import torch

                total += float(make_reducer(mb, False)(torch.tensor(values, dtype=torch.float64)))
    return total, len(schedule.steps), batch


@pytest.mark.parametrize("dp_size", [1, 2])
def test_split_equals_whole_from_the_engine_to_the_loss(cluster_of, rollout_args, dp_size):
    port = cluster_of().port
    samples = {}
    for name, path in (("whole", None), ("split", HERE + "split_unevenly")):
        args = rollout_args(
            custom_rm_path=HERE + "reward_of_trajectory", custom_generate_function_path=path, sglang_router_port=port
        )
        output = call_rollout_fn(generate_rollout, args, 0, RolloutDataSourceWithBuffer(args))
        samples[name] = list(flatten(output.samples))
    assert len(samples["whole"]) == 8 and len(samples["split"]) == 15
    whole, whole_steps, whole_batch = loss(samples["whole"], 4, dp_size)
    split, split_steps, split_batch = loss(samples["split"], 4, dp_size)
    assert split_steps == whole_steps == 2
    assert split == pytest.approx(whole, rel=1e-9) and abs(whole) > 1e-3
    assert np.std(whole_batch["rewards"]) > 0
    for key in ("raw_reward", "rewards", "truncated"):
        name = f"rollout/{key}"
        assert batch_metrics(split_batch)[name] == pytest.approx(batch_metrics(whole_batch)[name])


def test_ids_of_the_generate_function_are_its_own_business(cluster_of, rollout_args):
    args = rollout_args(custom_generate_function_path=HERE + "own_ids", custom_rm_path=HOOKS + "reward_sync")
    args.sglang_router_port = cluster_of().port
    output = call_rollout_fn(generate_rollout, args, 0, RolloutDataSourceWithBuffer(args))
    batch = samples_to_batch(make_args(), list(flatten(output.samples)))
    assert len(set(batch["rollout_ids"])) == 2 * 8 and len(batch["tokens"]) == 3 * 8


def test_filters_get_flat_groups(cluster_of, rollout_args):
    args = rollout_args(
        custom_generate_function_path=HOOKS + "generate_pieces", custom_rm_path=HOOKS + "reward_sync",
        dynamic_sampling_filter_path=HERE + "keep_flat", rollout_sample_filter_path=HOOKS + "remove_first",
        rollout_all_samples_process_path=HOOKS + "all_samples",
    )  # fmt: skip
    args.sglang_router_port = cluster_of().port
    hooks.CALLS.clear()
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert all(group[0][0].remove_sample and not group[0][1].remove_sample for group in output.samples)


def keep_flat(args, samples):
    return all(isinstance(sample, Sample) for sample in samples) and len(samples) == 4


def piece(group, rollout_id):
    return Sample(index=0, group_index=group, rollout_id=rollout_id)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[[piece(0, None), piece(0, None)]]], r"are pieces of a trajectory but have no rollout_id"),
        ([[[piece(0, 5)]], [[piece(1, 5)]]], r"rollout_id 5 is in groups 0 and 1"),
        ([[None]], r"returned None among the samples"),
        (None, r"samples=None.*; return a RolloutFnTrainOutput"),
    ],
)
def test_a_rollout_function_that_mixes_trajectories_up_is_named(rollout_args, groups, message):
    def rollout(args, rollout_id, data_source):
        return None if groups is None else RolloutFnTrainOutput(samples=groups)

    with pytest.raises(HookFailure, match=r"--rollout-function-path .*rollout.*" + message):
        call_rollout_fn(rollout, rollout_args(), 0, None)
