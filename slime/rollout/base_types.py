"""What a rollout function returns (`--rollout-function-path`, `--eval-function-path`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """Samples of one rollout: `rollout_batch_size` groups of `n_samples_per_prompt` samples."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per dataset name: `{"rewards": [...], "truncated": [...], "samples": [...]}`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn, args, rollout_id: int, data_source, evaluation: bool = False):
    """Call a rollout function and wrap the historical bare list / dict results."""
    output = fn(args, rollout_id, data_source, evaluation=evaluation)
    if isinstance(output, (RolloutFnTrainOutput, RolloutFnEvalOutput)):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)
