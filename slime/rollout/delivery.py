"""The last step of every rollout: hooks over the whole batch, and who logs it."""

from __future__ import annotations

from typing import Any

from slime.rollout.errors import blame
from slime.utils.misc import flatten, load_function


def first_index(group: list) -> int:
    """`Sample.index` of the first sample of a group, the order in which prompts were handed out; -1 without one."""
    index = next(flatten(group)).index
    return -1 if index is None else index


def run_batch_hooks(args, groups: list[list], finished: list[list], data_source: Any) -> None:
    """`--rollout-sample-filter-path` over the groups to train on, `--rollout-all-samples-process-path` over all that
    finished, filtered ones included.

    The hooks get flat groups: the pieces of a trajectory stand beside each other and share `rollout_id`.
    """
    if args.rollout_sample_filter_path:
        function = load_function(args.rollout_sample_filter_path, "--rollout-sample-filter-path")
        with blame("--rollout-sample-filter-path", function):
            function(args, [list(flatten(group)) for group in groups])
    if args.rollout_all_samples_process_path:
        function = load_function(args.rollout_all_samples_process_path, "--rollout-all-samples-process-path")
        with blame("--rollout-all-samples-process-path", function):
            in_order = sorted(finished, key=first_index)
            function(args, [list(flatten(group)) for group in in_order], data_source)


def call_log_function(path: str | None, flag: str, *arguments: Any) -> Any:
    """What a user's log function (`--custom-rollout-log-function-path`, `--custom-eval-rollout-log-function-path`)
    returns: True when it took the logging over. None without one."""
    if path is None:
        return None
    function = load_function(path, flag)
    with blame(flag, function):
        return function(*arguments)
