"""One contract per hook: the hook is called as a run calls it, in the historical form that it is written in, and what
it did is checked.

    pytest -p slime.testing.plugin --pyargs slime.testing.contracts --contract custom-rm=my.module.reward
    slime test-hooks --custom-rm-path my.module.reward      (the same)

Without `--contract` the functions that come with slime are tested.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from slime.rollout import generation
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.delivery import call_log_function, run_batch_hooks
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.rm_hub import async_rm, batched_async_rm, takes_group
from slime.testing.kit import Kit, kit
from slime.utils.async_utils import run
from slime.utils.misc import flatten, load_function
from slime.utils.types import Sample

Contract = Callable[[Kit, str], None]
CONTRACTS: dict[str, Contract] = {}
BUILT_IN = [
    ("rollout-function", "slime.rollout.sglang_rollout.generate_rollout"),
    ("rollout-function", "slime.rollout.fully_async_rollout.generate_rollout"),
    ("eval-function", "slime.rollout.sglang_rollout.generate_rollout"),
    ("custom-generate-function", "slime.rollout.sglang_rollout.generate"),
    ("dynamic-sampling-filter", "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
    ("dynamic-sampling-filter", "slime.rollout.filter_hub.dynamic_sampling_filters.prefer_reward_nonzero_std"),
    ("buffer-filter", "slime.rollout.data_source.pop_first"),
    ("data-source", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
    ("custom-tis-function", "slime.training.corrections.vanilla_tis_function"),
    ("custom-tis-function", "slime.training.corrections.icepop_function"),
    ("slime-router-middleware", "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"),
]


def contract(hook: str) -> Callable[[Contract], Contract]:
    def register(function: Contract) -> Contract:
        CONTRACTS[hook] = function
        return function

    return register


def test_contract(contract: tuple[Contract, str], tmp_path, pytestconfig) -> None:
    check, path = contract
    with kit(tmp_path, load_samples(pytestconfig.getoption("--contract-samples"))) as parts:
        check(parts, path)


def load_samples(dump: str | None) -> list[list[Sample]] | None:
    """The groups of a rollout dump."""
    if dump is None:
        return None
    from slime.observability.dumps import load_rollout_dump
    from slime.observability.rollout_metrics import group_by_prompt

    return group_by_prompt(load_rollout_dump(dump, 0))


# -- generation -------------------------------------------------------------------------------------------------------


@contract("rollout-function")
def rollout_function(kit: Kit, path: str) -> None:
    """Returns groups that become train data."""
    from slime.ray.train_data import samples_to_batch, trim

    args = kit.args(rollout_function_path=path)
    output = call_rollout_fn(load_function(path), args, 0, kit.data_source(args))
    assert len(output.samples) == args.rollout_batch_size, "as many groups as --rollout-batch-size"
    samples = list(flatten(output.samples))
    assert all(sample.status is not Sample.Status.PENDING for sample in samples), "no sample is pending"
    schedule_and_cut(args, samples_to_batch(args, trim(args, samples)))


@contract("eval-function")
def eval_function(kit: Kit, path: str) -> None:
    """Returns a dict of data sets whose rewards are numbers, one per sample."""
    args = kit.args(eval_function_path=path)
    output = call_rollout_fn(load_function(path), args, 0, kit.data_source(args), evaluation=True)
    for name, result in output.data.items():
        assert all(isinstance(reward, (int, float)) for reward in result["rewards"]), f"{name}: rewards are numbers"
        if result.get("samples"):
            assert len(result["samples"]) == len(result["rewards"]), f"{name}: a reward per sample"


@contract("custom-generate-function")
def custom_generate_function(kit: Kit, path: str) -> None:
    """Finishes the sample (or returns its pieces) with lists that fit each other; in training and in evaluation."""
    for evaluation in (False, True):
        args = kit.args(custom_generate_function_path=path)
        params = generation.GenerateState(args).sampling_params
        before = copy.deepcopy(params)
        for group in kit.pending(args):
            result = run(generation.generate_and_rm_group(args, group, params.copy(), evaluation=evaluation))
            for sample in flatten(result):
                assert sample.status is not Sample.Status.PENDING, "the status is set (completed, truncated, aborted)"
                assert sample.response_length <= len(sample.tokens), "tokens are the prompt's and the response's"
                assert sample.response_length > 0, "there is a response"
                assert sample.rollout_log_probs is None or len(sample.rollout_log_probs) == sample.response_length
                assert sample.reward is not None, "the sample was rewarded"
        assert params == before, "the sampling parameters are left as they were"


@contract("rollout-sample-hook")
def rollout_sample_hook(kit: Kit, path: str) -> None:
    """Returns the sample or None, for every finished sample."""
    args = kit.args(rollout_sample_hook_path=[path])
    for group in kit.pending(args):
        params = generation.GenerateState(args).sampling_params
        samples = list(flatten(run(generation.generate_and_rm_group(args, group, params.copy()))))
        assert len(samples) == len(group) and all(isinstance(sample, Sample) for sample in samples)


# -- rewards ----------------------------------------------------------------------------------------------------------


@contract("custom-rm")
def custom_rm(kit: Kit, path: str) -> None:
    """A number or a dict per sample; the tokens are left alone."""
    grouped = takes_group(load_function(path))
    args = kit.args(custom_rm_path=path, group_rm=grouped)
    for group in kit.finished():
        tokens = [list(sample.tokens) for sample in group]
        if grouped:
            rewards = run(batched_async_rm(args, group))
        else:
            rewards = [run(async_rm(args, sample)) for sample in group]
        assert len(rewards) == len(group), "a reward per sample"
        assert [sample.tokens for sample in group] == tokens, "the tokens are left alone"


@contract("custom-reward-post-process")
def custom_reward_post_process(kit: Kit, path: str) -> None:
    """(raw rewards, rewards), a number per sample each."""
    from slime.ray.train_data import samples_to_batch

    args = kit.args(custom_reward_post_process_path=path)
    batch = samples_to_batch(args, list(flatten(kit.finished())))
    assert all(reward == reward for reward in batch["rewards"]), "no reward is NaN"
    schedule_and_cut(args, batch)


# -- filters and the buffer -------------------------------------------------------------------------------------------


@contract("dynamic-sampling-filter")
def dynamic_sampling_filter(kit: Kit, path: str) -> None:
    """A bool or a DynamicFilterOutput; samples are left alone."""
    args = kit.args(dynamic_sampling_filter_path=path)
    for group in kit.finished():
        before = [copy.deepcopy(sample.to_dict()) for sample in group]
        output = call_dynamic_filter(load_function(path), args, group)
        assert isinstance(output, DynamicFilterOutput)
        assert output.reason is None or isinstance(output.reason, str), "the reason is a text"
        assert [sample.to_dict() for sample in group] == before, "the samples are left alone"


@contract("buffer-filter")
def buffer_filter(kit: Kit, path: str) -> None:
    """Takes at most as many groups as asked for out of the buffer; what it takes is no longer in there."""
    args = kit.args(buffer_filter_path=path)
    source = kit.data_source(args)
    groups = source.get_samples(3)
    source.add_samples(groups)
    taken = source.get_samples(2)
    assert len(taken) == 2
    left = [id(group) for group in source.buffer]
    assert not set(left) & {id(group) for group in taken}, "a group is taken or left, not both"


@contract("rollout-sample-filter")
def rollout_sample_filter(kit: Kit, path: str) -> None:
    """Sets `remove_sample`, nothing else."""
    groups = kit.finished()
    rewards = [sample.reward for sample in flatten(groups)]
    run_batch_hooks(kit.args(rollout_sample_filter_path=path), groups, groups, None)
    assert all(isinstance(sample.remove_sample, bool) for sample in flatten(groups)), "remove_sample is a bool"
    assert [sample.reward for sample in flatten(groups)] == rewards, "rewards are left alone"


@contract("rollout-all-samples-process")
def rollout_all_samples_process(kit: Kit, path: str) -> None:
    """Is called with all finished groups and the data source."""
    args = kit.args(rollout_all_samples_process_path=path)
    groups = kit.finished()
    run_batch_hooks(args, groups[:1], groups, kit.data_source(args))


@contract("data-source")
def data_source(kit: Kit, path: str) -> None:
    """Hands out new groups for ever; a saved state continues with the next one and keeps what was put back."""
    args = kit.args(save=str(kit.directory / "state"), load=str(kit.directory / "state"))
    source = load_function(path)(args)
    first = source.get_samples(2)
    assert len(first) == 2 and all(len(group) == args.n_samples_per_prompt for group in first)
    indices = [sample.index for sample in flatten(first)]
    assert len(set(indices)) == len(indices), "every sample has an index of its own"
    source.add_samples(first[:1])
    source.save(0)
    again = load_function(path)(args)
    again.load(0)
    expected = [sample.index for sample in flatten(source.get_samples(2))]
    assert [sample.index for sample in flatten(again.get_samples(2))] == expected, "the state was restored"
    assert len(source) >= 0, "len() is the number of prompts per epoch"
    many = source.get_samples(2 * len(source) + 1)
    assert len(many) == 2 * len(source) + 1, "it goes on after the last prompt"


# -- train data and logging -------------------------------------------------------------------------------------------


@contract("custom-convert-samples-to-train-data")
def custom_convert_samples_to_train_data(kit: Kit, path: str) -> None:
    """A dict of per-sample lists that can be cut up for the trainers."""
    from slime.ray.train_data import samples_to_batch

    args = kit.args(custom_convert_samples_to_train_data_path=path)
    schedule_and_cut(args, samples_to_batch(args, list(flatten(kit.finished()))))


@contract("custom-rollout-log-function")
def custom_rollout_log_function(kit: Kit, path: str) -> None:
    """True when it took the logging over; it leaves the samples, which are trained on afterwards."""
    args, samples = kit.args(), list(flatten(kit.finished()))
    before = [copy.deepcopy(sample.to_dict()) for sample in samples]
    flag, extra = "--custom-rollout-log-function-path", {"rollout/extra": 1.0}
    replaced = call_log_function(path, flag, 0, args, samples, extra, 1.5)
    assert replaced is None or isinstance(replaced, bool), "returns True (skip the default metrics), False or None"
    assert [sample.to_dict() for sample in samples] == before, "the samples are left alone"


@contract("custom-eval-rollout-log-function")
def custom_eval_rollout_log_function(kit: Kit, path: str) -> None:
    """True when it took the logging over."""
    samples = list(flatten(kit.finished()))
    data = {"set": {"rewards": [s.reward for s in samples], "truncated": [False] * len(samples), "samples": samples}}
    replaced = call_log_function(path, "--custom-eval-rollout-log-function-path", 0, kit.args(), data, {})
    assert replaced is None or isinstance(replaced, bool), "returns True (skip the default metrics), False or None"


def schedule_and_cut(args, batch: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """What the rollout manager does with a batch; raises when its lists do not fit."""
    from slime.training.rollout_data import partition_rollout_data
    from slime.training.schedule import build_dp_schedule

    schedule = build_dp_schedule(
        batch["total_lengths"],
        batch["rollout_ids"],
        dp_size=1,
        global_batch_size=args.global_batch_size,
        max_tokens=4096,
    )
    return partition_rollout_data(batch, schedule)


# They register themselves.
from slime.testing import server_contracts, trainer_contracts  # noqa: E402, F401
