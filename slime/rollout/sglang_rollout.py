"""The default rollout function: fill a batch of rewarded groups through the router, with dynamic sampling.

Groups are submitted until enough have finished and passed the filter; the surplus is aborted and, with
`--partial-rollout`, goes back to the buffer with what it has generated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.delivery import first_index, run_batch_hooks
from slime.rollout.errors import RolloutError, blame, describe
from slime.rollout.eval_rollout import eval_rollout
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import abort, generate, generate_and_rm, generate_and_rm_group
from slime.rollout.rm_hub.guard import raise_if_overdue
from slime.rollout.staleness import StalenessBound, engine_weight_version, oldest_version
from slime.utils.async_utils import run
from slime.utils.misc import flatten, load_function
from slime.utils.types import Sample

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
]

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 30.0
"""Seconds between progress lines."""
MAX_INTERRUPTIONS = 20
"""How often a group may come back aborted before the rollout is full."""


def generate_rollout(args, rollout_id: int, data_source, evaluation: bool = False):
    """`--rollout-function-path`: one training rollout, or one evaluation.

    Raises:
        RewardError: a reward function raised or took longer than `--rm-timeout-secs`.
    """
    if evaluation:
        return run(_evaluate(args, rollout_id), watchdog=raise_if_overdue)
    return run(generate_rollout_async(args, rollout_id, data_source), watchdog=raise_if_overdue)


async def _evaluate(args, rollout_id: int) -> RolloutFnEvalOutput:
    return RolloutFnEvalOutput(data=await eval_rollout(args, rollout_id))


async def generate_rollout_async(args, rollout_id: int, data_source) -> RolloutFnTrainOutput:
    """Generate `rollout_batch_size` groups, in the order of their prompts."""
    state = GenerateState(args)
    state.reset()
    state.rollout_id = rollout_id
    batch = _Batch(args, state)
    try:
        await batch.fill(data_source)
        recycled = await abort(args, rollout_id)
    except BaseException:
        state.aborted = True
        for task in state.pendings:
            task.cancel()
        await asyncio.gather(*state.pendings, return_exceptions=True)
        raise
    finally:
        metrics = batch.metrics()
        state.reset()
    if args.partial_rollout:
        recycled = [*batch.surplus, *recycled]
        if recycled:
            data_source.add_samples(recycled)
        metrics["rollout/recycled_groups"] = len(recycled)
    groups = sorted(batch.groups, key=first_index)
    run_batch_hooks(args, groups, batch.finished, data_source)
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


class _Batch:
    """The groups of one rollout while they come in."""

    def __init__(self, args, state: GenerateState) -> None:
        self.args = args
        self.state = state
        self.target = args.rollout_batch_size
        self.bound = StalenessBound(args.max_weight_staleness, self.target)
        self.kept: list[list[Sample]] = []
        """Finished and kept by the filter; more than the target when a group that is due came late."""
        self.fallback: list[list[Sample]] = []
        """Dropped by the filter, but good enough to fill the batch before more prompts are tried."""
        self.finished: list[list[Sample]] = []
        """Every finished group, filtered ones included."""
        self.gatherer = MetricGatherer()
        self.interruptions: Counter[int] = Counter()
        path = args.dynamic_sampling_filter_path
        self.filter = load_function(path, "--dynamic-sampling-filter-path") if path else None
        self.reported = time.monotonic()

    async def fill(self, data_source) -> None:
        """Submit and collect until the batch is full."""
        state = self.state
        state.progress = (0, self.target)
        if self.bound.limit is not None:
            self.bound.begin(await engine_weight_version(self.args), 0)
            # All that may be due takes part, whatever its number.
            state.submit_generate_tasks(data_source.get_samples(data_source.get_buffer_length()))
        while not self.is_full():
            while state.remaining_batch_size + len(self.fallback) < self.target:
                room = self.bound.room(len(state.pendings) + len(self.kept))
                count = self.args.over_sampling_batch_size
                state.submit_generate_tasks(data_source.get_samples(count if room is None else min(count, room)))
            if not state.pendings:
                self.kept += self.fallback[: self.target - len(self.kept)]
                break
            done, state.pendings = await asyncio.wait(
                state.pendings, timeout=REPORT_INTERVAL, return_when=asyncio.FIRST_COMPLETED
            )
            for group in await asyncio.gather(*sorted(done, key=lambda task: first_index(task.group))):
                self.take(group)
            state.progress = (len(self.kept), self.target)
            self.report()

    @property
    def groups(self) -> list[list[Sample]]:
        """What is trained on: the first to finish, or with a bound on their age the oldest."""
        return self._by_age()[: self.target]

    @property
    def surplus(self) -> list[list[Sample]]:
        return self._by_age()[self.target :]

    def _by_age(self) -> list[list[Sample]]:
        if self.bound.limit is None:
            return self.kept
        return sorted(self.kept, key=lambda group: (self._version(group), first_index(group)))

    def _version(self, group: list) -> int:
        return oldest_version(group, self.bound.version)

    def is_full(self) -> bool:
        """There are enough groups, and none that still runs is due."""
        if len(self.kept) < self.target or self.bound.limit is None:
            return len(self.kept) >= self.target
        running = [self._version(task.group) for task in self.state.pendings]
        return self.bound.may_deliver(running, running + [self._version(group) for group in self.surplus])

    def take(self, group: list) -> None:
        """Accept, drop or set aside a finished group. One that something else aborted is continued."""
        if any(sample.aborted for sample in flatten(group)):
            self.resubmit(group)
            return
        self.finished.append(group)
        with blame("--dynamic-sampling-filter-path", self.args.dynamic_sampling_filter_path or "none", group):
            output = call_dynamic_filter(self.filter, self.args, group)
        if not output.keep:
            self.gatherer.on_dynamic_filter_drop(output.reason)
            self.state.remaining_batch_size -= 1
            if output.keep_when_insufficient:
                self.fallback.append(group)
            elif not self.kept:
                self.gatherer.warn_if_nothing_passes(self.args)
        else:
            self.kept.append(group)

    def resubmit(self, group: list) -> None:
        first = first_index(group)
        self.interruptions[first] += 1
        if self.interruptions[first] > MAX_INTERRUPTIONS:
            raise RolloutError(
                f"{describe(group)}: aborted {MAX_INTERRUPTIONS} times although the rollout did not ask for it "
                "(by the engine, or by a custom generate function that sets the status)"
            )
        self.state.remaining_batch_size -= 1
        self.state.submit_generate_tasks([group])

    def report(self) -> None:
        now = time.monotonic()
        if now - self.reported >= REPORT_INTERVAL:
            self.reported = now
            logger.info(
                "rollout %s: %d of %d groups, %d in flight, %d dropped by the filter %s",
                self.state.rollout_id, len(self.kept), self.target, len(self.state.pendings), self.gatherer.dropped,
                self.gatherer.collect() or "",
            )  # fmt: skip

    def metrics(self) -> dict[str, Any]:
        return self.gatherer.collect()
