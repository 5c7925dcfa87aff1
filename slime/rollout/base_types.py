"""What a rollout function returns (`--rollout-function-path`, `--eval-function-path`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from slime.rollout.errors import HookFailure, blame, describe
from slime.utils.misc import accepted, flatten, function_name
from slime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """Samples of one rollout: `rollout_batch_size` groups of `n_samples_per_prompt` samples.

    A member of a group may itself be a list: the pieces of one trajectory, which share `rollout_id`.
    """

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per dataset name: `{"rewards": [...], "truncated": [...], "samples": [...]}`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn, args, rollout_id: int, data_source, evaluation: bool = False):
    """Call a rollout function and wrap the historical bare list / dict results.

    Raises:
        HookFailure: it failed, or returned something it must not; the message names its flag.
    """
    flag = "--eval-function-path" if evaluation and args.eval_function_path else "--rollout-function-path"
    own = (getattr(fn, "__module__", None) or "").startswith("slime.")
    with contextlib.nullcontext() if own else blame(flag, fn):
        output = fn(args, rollout_id, data_source, **accepted(fn, evaluation=evaluation))
    if not isinstance(output, (RolloutFnTrainOutput, RolloutFnEvalOutput)):
        output = RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)
    wanted = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    content = getattr(output, "data" if evaluation else "samples", None)
    if not isinstance(output, wanted) or not isinstance(content, dict if evaluation else list):
        expected = "RolloutFnEvalOutput or a dict of data sets" if evaluation else "RolloutFnTrainOutput"
        raise HookFailure(f"{flag} {function_name(fn)} returned {output!r:.200}; return a {expected}")
    if not evaluation:
        _check_trajectories(output.samples, f"{flag} {function_name(fn)}")
    return output


def _check_trajectories(groups: list, who: str) -> None:
    """Pieces of a trajectory, which stand in a list of their own, say so by `rollout_id`; no two prompts share one."""
    groups_of: dict[int | str, int] = {}
    for number, group in enumerate(groups):
        members = group if isinstance(group, list) else [group]
        for sample in flatten(members):
            if not isinstance(sample, Sample):
                raise HookFailure(f"{who} returned {sample!r:.200} among the samples")
            if sample.rollout_id is not None and groups_of.setdefault(sample.rollout_id, number) != number:
                raise HookFailure(
                    f"{who}: rollout_id {sample.rollout_id!r} is in groups {groups_of[sample.rollout_id]} and "
                    f"{number}; it names one trajectory of one prompt"
                )
        for pieces in (member for member in members if isinstance(member, list)):
            if any(piece.rollout_id is None for piece in flatten(pieces)):
                raise HookFailure(f"{who}: {describe(pieces)} are pieces of a trajectory but have no rollout_id")
