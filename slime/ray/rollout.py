"""The rollout manager: the actor between generation and training.

It owns engines, router and data source, calls the rollout function, turns samples into train data, and hands each
data-parallel rank a reference to its own part.
"""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.observability import stacks
from slime.observability.dumps import load_rollout_dump, save_rollout_dump, save_tokenizer
from slime.observability.rollout_metrics import eval_metrics, rollout_metrics
from slime.observability.run_dir import RunDir, redirect_output
from slime.observability.staleness import count_token_versions
from slime.ray.fleet import EngineFleet
from slime.ray.fleets import Fleets
from slime.ray.http_posters import start_posters
from slime.ray.placement_group import PlacementSlice
from slime.ray.session import Session
from slime.ray.train_data import batch_metrics, build_schedule, samples_to_batch, trim
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import open_data_source
from slime.rollout.delivery import call_log_function
from slime.rollout.generate_state import GenerateState
from slime.training.rollout_data import partition_rollout_data
from slime.utils.async_utils import running_loop
from slime.utils.http_utils import init_http_client, send_through
from slime.utils.logging_utils import configure_logging
from slime.utils.misc import flatten, load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

METRIC_AXES = ("rollout", "perf", "multi_turn", "passrate", "eval", "train")


@dataclass
class GenerateResult:
    """What the driver gets of a rollout."""

    refs: list[ray.ObjectRef]
    """One per data-parallel rank; empty under `--debug-rollout-only`."""
    metrics: dict[str, Any]
    sample_indices: list[int] = field(default_factory=list)
    """`Sample.index` of every sample that the trainers get."""
    token_versions: dict[int, int] = field(default_factory=dict)
    """Trained tokens per weight version that generated them."""


@ray.remote(concurrency_groups={"watch": 1, "side": 1, "recovery": 3})
class RolloutManager:
    """One per run. `start` must be called first; all other methods run one at a time, in order."""

    def __init__(self, args: Namespace, placement: PlacementSlice) -> None:
        self.run_dir = RunDir(args.run_dir)
        redirect_output(self.run_dir.log_file("rollout-manager"))
        configure_logging(prefix="rollout")
        stacks.dump_on_signal()
        self.args = args
        self.placement = placement
        self.fleets: Fleets | None = None
        self._restarts_seen = 0
        self._parallel: dict[str, int] = {}
        self.data_source: Any = None
        self.rollout_fn: Any = None
        self.eval_fn: Any = None

    # -- servers ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the data, start engines and router (not under `--debug-train-only`), wait until all are healthy.

        Raises:
            DataError: prompt data that cannot be read; file, line and key are in the message.
            ServerError: a server did not start; its message ends with the end of its log.
        """
        args = self.args
        # Here and not in the constructor, whose errors reach the driver as a dead actor.
        if args.load_debug_rollout_data is None:
            self.data_source = open_data_source(args)
        self.rollout_fn = load_function(args.rollout_function_path, "--rollout-function-path")
        self.eval_fn = load_function(args.eval_function_path or args.rollout_function_path, "--eval-function-path")
        if args.dump_details is not None and args.hf_checkpoint is not None:
            save_tokenizer(args.hf_checkpoint, args.dump_details)
        if args.debug_train_only:
            return
        self.fleets = Fleets(args, self.placement)
        self.fleets.start()
        init_http_client(args)
        if args.use_distributed_post:
            send_through(start_posters(args))

    @property
    def fleet(self) -> EngineFleet:
        """The policy's engines."""
        return self.fleets.policy

    @ray.method(concurrency_group="watch")
    def wait_for_death(self) -> str | None:
        """Block until a server dies that is not restarted; how it died. None after `dispose`."""
        return None if self.fleets is None else self.fleets.wait_for_death()

    @ray.method(concurrency_group="side")
    def dispose(self) -> None:
        """End all servers."""
        if self.fleets is not None:
            self.fleets.dispose()

    @ray.method(concurrency_group="side")
    def get_rollout_engines(self) -> tuple[list[Any], list[list[int]]]:
        """Engine actors, and for each the worker slots it stands on (under --colocate these are trainer ranks)."""
        engines = [] if self.fleets is None else self.fleet.engines
        return [engine.actor for engine in engines], [self.fleet.slots(engine) for engine in engines]

    @ray.method(concurrency_group="recovery")
    def prepare_weight_update(self) -> tuple[list[str], list[list[int]]]:
        """URLs and slots of all engines, once those that failed are started again."""
        return self.fleet.prepare_update()

    @ray.method(concurrency_group="recovery")
    def finish_weight_update(self) -> None:
        """All engines of `prepare_weight_update` have the new weights: requests may go to them."""
        self.fleet.finish_update()

    @ray.method(concurrency_group="recovery")
    def wait_for_unsynced_engines(self) -> list[tuple[int, str, list[int]]]:
        """Block until restarted engines wait for weights: rank, URL and slots of each."""
        return self.fleet.wait_for_unsynced()

    @ray.method(concurrency_group="recovery")
    def admit_engine(self, rank: int, url: str) -> None:
        """A restarted engine has the current weights."""
        self.fleet.admit(rank, url)

    @ray.method(concurrency_group="side")
    def pids(self) -> dict[str, int]:
        return {"rollout-manager": os.getpid()} | ({} if self.fleets is None else self.fleets.pids())

    @ray.method(concurrency_group="side")
    def progress(self) -> str:
        """`groups done/groups wanted` of the rollout that runs now."""
        done, wanted = GenerateState(self.args).progress
        return f"{done}/{wanted} groups" if wanted else ""

    @ray.method(concurrency_group="side")
    def waiting(self) -> str:
        """What the rollout's coroutines wait for."""
        loop = running_loop()
        return "" if loop is None else stacks.describe_tasks(loop)

    def offload(self) -> None:
        """Engines drop their caches and release weights and KV memory."""
        self.fleet.offload()

    def onload(self, tags: list[str] | None = None) -> None:
        """Engines take the memory back; without weights pushed afterwards they must not serve."""
        self.fleet.onload(tags)

    def check_weights(self, action: str) -> list[Any]:
        return ray.get([engine.actor.weights_checker.remote(action) for engine in self.fleet.engines])

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_num_rollout_per_epoch(self) -> int | None:
        """Rollouts in one pass over the prompts; None without a dataset of known size."""
        if (
            self.data_source is None
            or not self.args.rollout_global_dataset
            or not hasattr(self.data_source, "__len__")
        ):
            return None
        return len(self.data_source) // self.args.rollout_batch_size

    def generates_in_background(self) -> bool:
        """Whether the rollout function goes on generating between its calls, through weight updates."""
        return getattr(self.rollout_fn, "generates_in_background", False)

    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        """Trainers say how many parts a rollout is cut into (`dp_size`), and of how many micro-batches a part has a
        multiple (`micro_batch_multiple`, 1 if left out)."""
        self._parallel = config

    def save(self, rollout_id: int) -> None:
        """Write the data source's position and buffer, as they are after rollout `rollout_id`."""
        if self.data_source is not None:
            self.data_source.save(rollout_id)

    def load(self, rollout_id: int) -> None:
        """Go back to where `save(rollout_id)` was; -1 is the start."""
        if self.data_source is not None:
            self.data_source.load(rollout_id)

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> GenerateResult:
        """Generate (or load) the samples of a rollout and cut them up for the trainers."""
        start = time.perf_counter()
        samples, extra = self._samples(rollout_id)
        seconds = time.perf_counter() - start
        self.run_dir.write_samples(f"rollout_{rollout_id:06d}", samples)
        metrics = self._rollout_metrics(rollout_id, samples, extra, seconds)
        if self.args.use_fault_tolerance and self.fleets is not None:
            restarts, self._restarts_seen = self.fleets.restarts - self._restarts_seen, self.fleets.restarts
            metrics["rollout/engine_restarts"] = restarts  # since the last rollout
        if self.args.debug_rollout_only:
            return GenerateResult([], metrics, [s.index for s in samples], count_token_versions(samples))
        with_data = time.perf_counter()
        samples = trim(self.args, samples)
        batch = samples_to_batch(self.args, samples)
        refs = self._distribute(batch)
        metrics |= batch_metrics(batch) | {"perf/train_data_time": time.perf_counter() - with_data}
        return GenerateResult(refs, metrics, list(batch["sample_indices"]), count_token_versions(samples))

    def _samples(self, rollout_id: int) -> tuple[list[Sample], dict[str, Any]]:
        args = self.args
        if args.load_debug_rollout_data is not None:
            subsample = args.load_debug_rollout_data_subsample
            return load_rollout_dump(args.load_debug_rollout_data, rollout_id, subsample), {}
        output = call_rollout_fn(self.rollout_fn, args, rollout_id, self.data_source, evaluation=False)
        samples = list(flatten(output.samples))
        if args.save_debug_rollout_data is not None:
            save_rollout_dump(args.save_debug_rollout_data, rollout_id, samples)
        return samples, output.metrics or {}

    def _rollout_metrics(
        self, rollout_id: int, samples: list[Sample], extra: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """The built-in metrics with those of the rollout function, unless the user's log function took over."""
        args = self.args
        path, flag = args.custom_rollout_log_function_path, "--custom-rollout-log-function-path"
        if call_log_function(path, flag, rollout_id, args, samples, extra, seconds):
            return {"perf/rollout_time": seconds}
        slots = 1 if self.fleets is None else self.fleet.model.num_gpus
        return {**rollout_metrics(args, samples, seconds, slots), **_on_axis("rollout", extra)}

    def _distribute(self, batch: dict[str, list[Any]]) -> list[ray.ObjectRef]:
        schedule = build_schedule(self.args, batch, **self._parallel)
        return [ray.put(part) for part in partition_rollout_data(batch, schedule)]

    def eval(self, rollout_id: int) -> dict[str, Any]:
        """Evaluate with the weights that the engines hold; metrics per dataset.

        Args:
            rollout_id: rollouts trained so far, which is the step of the metrics.
        """
        args = self.args
        start = time.perf_counter()
        output = call_rollout_fn(self.eval_fn, args, rollout_id, self.data_source, evaluation=True)
        seconds = time.perf_counter() - start
        for name, result in output.data.items():
            samples = result.get("samples") or []
            self.run_dir.write_samples(f"eval_{name.replace('/', '_')}_{rollout_id:06d}", samples)
        if args.save_debug_rollout_data is not None:
            samples = [s for result in output.data.values() for s in result.get("samples") or []]
            save_rollout_dump(args.save_debug_rollout_data, f"eval_{rollout_id}", samples)
        extra = output.metrics or {}
        path, flag = args.custom_eval_rollout_log_function_path, "--custom-eval-rollout-log-function-path"
        if call_log_function(path, flag, rollout_id, args, output.data, extra):
            return {"perf/eval_time": seconds}
        return {**eval_metrics(args, output.data), **_on_axis("eval", extra), "perf/eval_time": seconds}


def _on_axis(axis: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics of plug-ins may come with or without their axis in front."""
    return {key if key.split("/")[0] in METRIC_AXES else f"{axis}/{key}": value for key, value in metrics.items()}


def create_rollout_manager(args: Namespace, placement: PlacementSlice, session: Session) -> Any:
    """The manager on the driver's node; `start` starts its servers."""
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    manager = RolloutManager.options(num_cpus=0, scheduling_strategy=node).remote(args, placement)
    session.on_close(manager.dispose.remote)
    session.explain_with("rollout-manager", manager.waiting.remote)
    return session.name_actor(manager, "rollout-manager")
