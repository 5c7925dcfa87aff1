"""`--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout`: generation that never stops.

A worker keeps groups in flight between and during rollouts and through weight updates; a rollout takes the oldest
groups that have finished. The engines pause for an update and go on with the same requests, so a sample may come from
several weight versions, span by span. `--max-weight-staleness` bounds their age by holding prompts back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.delivery import first_index, run_batch_hooks
from slime.rollout.errors import HookFailure, RolloutError, blame, describe
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import ABORT_INTERVAL, abort_all, generate_and_rm_group
from slime.rollout.rm_hub.guard import raise_if_overdue
from slime.rollout.staleness import StalenessBound, engine_weight_version, oldest_version
from slime.utils.async_utils import run
from slime.utils.misc import flatten, load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 30.0
"""Seconds between progress lines."""
MAX_INTERRUPTIONS = 20
"""How often in a row a group may come back aborted without one token more."""

_workers: weakref.WeakKeyDictionary[Any, RolloutWorker] = weakref.WeakKeyDictionary()


def generate_rollout(args, rollout_id: int, data_source, evaluation: bool = False):
    """One training rollout, or one evaluation (beside which the worker goes on).

    Raises:
        RewardError: a reward function raised or took longer than `--rm-timeout-secs`.
        HookFailure: a plug-in failed; the message names its flag.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    worker = _workers.get(data_source)
    if worker is None:
        worker = _workers[data_source] = RolloutWorker(args, data_source)
    return run(worker.collect(rollout_id), watchdog=raise_if_overdue)


generate_rollout.generates_in_background = True


@dataclass(eq=False)
class _Group:
    """A group on its way from prompt to trainer."""

    samples: list
    version: int
    """The oldest weights that may have generated a token of it; 0 where no bound asks for them."""
    tokens: int = 0
    """Response tokens at the last interruption."""
    interruptions: int = 0
    keep: bool = True
    """Not dropped by the filter. A dropped group that still waits may fill a batch (`keep_when_insufficient`)."""


class RolloutWorker:
    """Keeps `--over-sampling-batch-size` groups in flight and up to `--rollout-batch-size` finished ones waiting.

    All methods but the constructor and `hold` run on the event loop of `async_utils.run`.
    """

    def __init__(self, args, data_source) -> None:
        if not hasattr(data_source, "holders"):
            raise HookFailure(
                f"--data-source-path {args.data_source_path}: {type(data_source).__name__} cannot save what a rollout "
                "function has in hand; derive it from slime.rollout.data_source.RolloutDataSourceWithBuffer"
            )
        self.args = args
        self._data_source = weakref.ref(data_source)
        self.state = GenerateState(args)
        self.bound = StalenessBound(args.max_weight_staleness, args.rollout_batch_size, args.update_weights_interval)
        path = args.dynamic_sampling_filter_path
        self.filter = load_function(path, "--dynamic-sampling-filter-path") if path else None
        self.running: dict[asyncio.Task, _Group] = {}
        self.waiting: list[_Group] = []
        """Finished, not taken yet."""
        self.interrupted: list[_Group] = []
        """What `hold` has stopped; it continues afterwards."""
        self.holding = False
        self.failure: BaseException | None = None
        self.changed: asyncio.Event | None = None
        self._begin_statistics()
        data_source.holders.append(self.hold)

    @property
    def data_source(self) -> Any:
        return self._data_source()

    def _begin_statistics(self) -> None:
        self.gatherer = MetricGatherer()
        self.finished: list[list] = []
        """Every group that finished since the last rollout, filtered ones included."""
        self.held_since: float | None = None
        self.held_time = 0.0

    # -- a rollout ----------------------------------------------------------------------------------------------------

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The oldest `--rollout-batch-size` finished groups, in the order of their prompts; waits until there are."""
        args = self.args
        self.changed = asyncio.Event()
        self.state.rollout_id = rollout_id
        if self.bound.limit is not None:
            self.bound.begin(await engine_weight_version(args), rollout_id)
        if not self.running and not self.waiting:
            self._start_prompts(self.data_source.get_buffer_length())
        self._admit()
        reported = time.monotonic()
        while self.failure is None and not (batch := self._batch()):
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), REPORT_INTERVAL)
            if time.monotonic() - reported >= REPORT_INTERVAL:
                reported = time.monotonic()
                logger.info(
                    "rollout %d: %d of %d groups wait, %d in flight", rollout_id, len(self.waiting),
                    args.rollout_batch_size, len(self.running),
                )  # fmt: skip
        if self.failure is not None:
            raise self.failure
        self.waiting = [group for group in self.waiting if group.keep and group not in batch]
        self.bound.delivered()
        metrics = self._metrics()
        groups, finished = sorted((group.samples for group in batch), key=first_index), self.finished
        self._begin_statistics()
        self._admit()
        run_batch_hooks(args, groups, finished, self.data_source)
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _batch(self) -> list[_Group]:
        """The groups of the next rollout; empty while there are too few, or one that is due still runs."""
        count = self.args.rollout_batch_size
        batch = sorted(self.waiting, key=lambda g: (not g.keep, g.version, first_index(g.samples)))[:count]
        self.state.progress = (min(len(self.waiting), count), count)
        if len(batch) < count:
            return []
        running = [group.version for group in self.running.values()]
        left = [group.version for group in self.waiting if group.keep and group not in batch]
        return batch if self.bound.may_deliver(running, running + left) else []

    def _metrics(self) -> dict[str, Any]:
        if self.held_since is not None:
            self.held_time += time.monotonic() - self.held_since
        return {
            **self.gatherer.collect(),
            "rollout/fully_async/waiting_groups": len(self.waiting),
            "rollout/fully_async/running_groups": len(self.running),
            "perf/held_back_time": self.held_time,
        }

    # -- groups in flight ---------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start as many prompts as concurrency, the finished ones that wait, and their age allow."""
        if self.holding or self.failure is not None:
            return
        args = self.args
        waiting = sum(group.keep for group in self.waiting)
        wanted = args.over_sampling_batch_size - len(self.running) if waiting < args.rollout_batch_size else 0
        room = self.bound.room(len(self.running) + waiting)
        allowed = wanted if room is None else min(wanted, room)
        self._count_held_time(held=allowed < wanted)
        self._start_prompts(max(0, allowed))

    def _start_prompts(self, count: int) -> None:
        """Start groups of the data source: first those that a checkpoint or a plug-in has put into its buffer."""
        for samples in self.data_source.get_samples(count):
            bounded = self.bound.limit is not None
            version = oldest_version(samples, self.bound.version) if bounded else 0
            self._start(_Group(samples, version, _token_count(samples)))

    def _count_held_time(self, held: bool) -> None:
        now = time.monotonic()
        if self.held_since is not None:
            self.held_time += now - self.held_since
        self.held_since = now if held else None

    def _start(self, group: _Group) -> None:
        args = self.args
        task = asyncio.ensure_future(generate_and_rm_group(args, group.samples, self.state.sampling_params.copy()))
        self.running[task] = group
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task) -> None:
        group = self.running.pop(task)
        if task.cancelled():
            return
        try:
            self._take(group, task.result())
            self._admit()
        except Exception as error:
            self._fail(error)
        if self.changed is not None:
            self.changed.set()

    def _take(self, group: _Group, samples: list) -> None:
        """A task's result: a finished group waits or is dropped, an aborted one goes on."""
        group.samples = samples
        if any(sample.aborted for sample in flatten(samples)):
            self._interrupt(group)
            return
        self.finished.append(samples)
        with blame("--dynamic-sampling-filter-path", self.args.dynamic_sampling_filter_path or "none", samples):
            output = call_dynamic_filter(self.filter, self.args, samples)
        group.keep = output.keep
        if not output.keep:
            self.gatherer.on_dynamic_filter_drop(output.reason)
        if output.keep or output.keep_when_insufficient:
            self.waiting.append(group)
        elif not self.waiting:
            self.gatherer.warn_if_nothing_passes(self.args)

    def _interrupt(self, group: _Group) -> None:
        if self.holding:
            self.interrupted.append(group)
            return
        tokens = _token_count(group.samples)
        group.interruptions = 0 if tokens > group.tokens else group.interruptions + 1
        group.tokens = tokens
        if group.interruptions > MAX_INTERRUPTIONS:
            raise RolloutError(
                f"{describe(group.samples)}: aborted {MAX_INTERRUPTIONS} times in a row without a new token (by the "
                "engine, or by a custom generate function that sets the status)"
            )
        self._start(group)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for task in self.running:
            task.cancel()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self) -> Iterator[list[list[Sample]]]:
        """All groups in hand, stopped with every token generated so far; they go on afterwards."""
        groups = run(self._stop())
        try:
            yield groups
        finally:
            run(self._go_on())

    async def _stop(self) -> list[list[Sample]]:
        self.holding = self.state.aborted = True
        try:
            while self.running:
                await abort_all(self.args)
                if self.running:
                    await asyncio.wait(list(self.running), timeout=ABORT_INTERVAL)
        finally:
            self.state.aborted = False
        if self.failure is not None:
            raise self.failure
        return [group.samples for group in [*self.waiting, *self.interrupted] if group.keep]

    async def _go_on(self) -> None:
        self.holding = False
        interrupted, self.interrupted = self.interrupted, []
        for group in interrupted:
            self._start(group)
        self._admit()


def _token_count(samples: list) -> int:
    return sum(sample.response_length for sample in flatten(samples))
