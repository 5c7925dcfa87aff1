"""What a dynamic sampling filter returns, how it is called, and the counts of what it dropped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from slime.utils.misc import flatten, function_name

logger = logging.getLogger(__name__)

MANY_BATCHES = 4
"""So many batches of groups dropped in a row are no accident."""


@dataclass
class DynamicFilterOutput:
    """Whether a finished group is trained on."""

    keep: bool
    reason: str | None = None
    """Why it was dropped; becomes the metric `rollout/dynamic_filter/drop_{reason}`."""
    keep_when_insufficient: bool = False
    """A dropped group that may still fill the batch before new prompts are submitted."""


def call_dynamic_filter(fn: Callable | None, args, samples, **kwargs) -> DynamicFilterOutput:
    """Call a filter and wrap the historical bare bool. No filter keeps everything.

    The filter gets a flat list: the pieces of a trajectory stand beside each other and share `rollout_id`.

    Raises:
        TypeError: the filter returned something else.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(args, list(flatten(samples)), **kwargs)
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, (bool, int)) or type(output).__name__ == "bool_":
        return DynamicFilterOutput(keep=bool(output))
    raise TypeError(
        f"--dynamic-sampling-filter-path {function_name(fn)} returned a {type(output).__name__}; "
        "return a bool or a DynamicFilterOutput"
    )


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self.dropped = 0
        """All of them, with a reason or without."""

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        self.dropped += 1
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}

    def warn_if_nothing_passes(self, args) -> None:
        """Once, while no group of a rollout was kept: prompts are tried until enough pass, and that may be never."""
        if self.dropped == MANY_BATCHES * args.rollout_batch_size:
            logger.warning(
                "--dynamic-sampling-filter-path %s has dropped all of %d groups %s: the rollout ends only when %d "
                "pass; look at the rewards and at how hard the prompts are, or let the filter return "
                "keep_when_insufficient",
                args.dynamic_sampling_filter_path,
                self.dropped,
                dict(self._dropped) or "",
                args.rollout_batch_size,
            )
