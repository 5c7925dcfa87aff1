"""What a trainer rank is, whatever its role and backend: the order of a rollout's training, metrics, saves and memory.

A backend fills in the model, its sharding, the gradients of a step and the checkpoint format; a role (`policy.py`,
`critic.py`) what is trained on.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.common.checkpoint import Progress
from slime.backends.common.device_memory import DeviceMemory
from slime.backends.common.lr_schedule import LRSchedule, schedule_from_args
from slime.backends.common.metrics import memory_metrics, speed_metrics
from slime.observability.memory_history import memory_history
from slime.observability.profiling import PhaseTimer, peak_tflops, utilization
from slime.ray.train_actor import TrainRayActor
from slime.training.context_parallel import ContextParallel
from slime.training.rollout_data import RankData

logger = logging.getLogger(__name__)


class Trainer(TrainRayActor):
    """A rank of a model that is trained.

    The backend's `_build` sets what is declared here.
    """

    model: Any
    optimizer: Any
    memory: DeviceMemory
    dp_group: dist.ProcessGroup
    """Ranks that hold other samples, between which losses add up."""
    dp_rank: int
    cp: ContextParallel

    # -- setup --------------------------------------------------------------------------------------------------------

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        self.args = args
        self.role = role
        self.timer = PhaseTimer(args, self.rank)
        self.device = torch.device(args.device)
        if args.device == "cuda":
            torch.cuda.set_device(0)
            self.device = torch.device("cuda", 0)
        self.dtype = getattr(torch, args.dtype)
        self._memory_history = memory_history(args, f"{role}-rank-{self.rank}")
        self._peak_tflops = peak_tflops(args)
        if args.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(args.seed + self.rank)
        self.join_world(args.distributed_backend, args.distributed_timeout_minutes)
        self.progress = Progress()
        self._build(with_ref)
        self._resumed = self._resume()
        self._last_train_end = time.perf_counter()
        return self.progress.next_rollout_id if args.start_rollout_id is None else args.start_rollout_id

    def _build(self, with_ref: bool) -> None:
        """The model with the weights that the run starts from, then `_keep_initial_weights`, then the optimizer."""
        raise NotImplementedError

    def _keep_initial_weights(self, with_ref: bool) -> None:
        """What a role keeps of the weights that the run started from; called before a checkpoint is read."""

    def _schedule(self) -> LRSchedule:
        args = self.args
        steps_per_rollout = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
        return schedule_from_args(args, None if args.num_rollout is None else args.num_rollout * steps_per_rollout)

    def _resume(self) -> bool:
        """Take over the checkpoint of `--load`; whether there was one."""
        raise NotImplementedError

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, refs: list[Any], shared: Sequence[list[Any]] = ()) -> dict[str, float] | None:
        self.timer.add("train_wait", time.perf_counter() - self._last_train_end)
        self.timer.rollout_id = rollout_id
        with self._memory_history.watch(rollout_id), self.timer("train"):
            with self.timer("data_preprocess"):
                data = self._receive(refs, shared)
            metrics = self.train_on(rollout_id, data)
        metrics |= self._perf_metrics(data)
        self._last_train_end = time.perf_counter()
        return metrics if self.rank == 0 else None

    def _receive(self, refs: list[Any], shared: Sequence[list[Any]] = ()) -> RankData:
        """This rank's part of a rollout, with what the other role computed for it."""
        import ray

        data = RankData(ray.get(refs[self.dp_rank]))
        for of_ranks in shared:
            for key, values in ray.get(of_ranks[self.rank]).items():
                data.set_flat(key, [torch.tensor(value, device=self.device) for value in values])
        return data

    def train_on(self, rollout_id: int, data: RankData) -> dict[str, float]:
        """Train on this rank's part; metrics of the global batch, the same on every rank."""
        raise NotImplementedError

    def _train_steps(self, rollout_id: int, data: RankData) -> list[dict[str, float]]:
        """All optimizer steps of a rollout, with the metrics of each."""
        with self.timer(f"{self.role}_train"):
            return [self._train_step(rollout_id, data, step) for step in range(len(data.steps))]

    def _train_step(self, rollout_id: int, data: RankData, step: int) -> dict[str, float]:
        """One optimizer step over its micro-batches."""
        self._before_train_step(rollout_id, step)
        out = self._gradients(data, step)
        out |= self.optimizer.step()
        if out["skipped_steps"]:
            logger.warning(
                "step %d skipped: the gradient norm is %s (loss %s)",
                self.optimizer.steps_done,
                out["grad_norm"],
                out["loss"],
            )
        self.progress.global_step = self.optimizer.steps_done
        self.progress.micro_step += len(data.steps[step])
        return out

    def _before_train_step(self, rollout_id: int, step: int) -> None:
        """A backend's hook."""

    def _gradients(self, data: RankData, step: int) -> dict[str, float]:
        """Gradients of a step, summed over all micro-batches and ranks; the loss metrics of the global batch."""
        raise NotImplementedError

    def _over_steps(self, steps: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of a rollout from those of its optimizer steps."""
        metrics = {f"train/{key}": sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        metrics["train/skipped_steps"] = sum(step["skipped_steps"] for step in steps)
        metrics["train/step"] = self.optimizer.steps_done
        return metrics

    def _perf_metrics(self, data: RankData) -> dict[str, float]:
        times, lengths = self.timer.pop(), data["total_lengths"]
        speed = speed_metrics(times, self.role, self.args.hf_checkpoint, lengths, self.dp_group, self.device)
        return {**times, **speed, **utilization(speed, self._peak_tflops), **memory_metrics(self.device)}

    # -- checkpoints and memory ---------------------------------------------------------------------------------------

    def save_model(self, rollout_id: int) -> dict[str, float] | None:
        return self._timed("save_model", lambda: self._save(rollout_id))

    def _save(self, rollout_id: int) -> None:
        released = self.memory.rest_released
        if released:
            self.memory.onload()
        self.progress.next_rollout_id = rollout_id + 1
        self._write(rollout_id)
        if released:
            self.memory.offload()

    def _write(self, rollout_id: int) -> None:
        """Write the checkpoint, with the model on the device."""
        raise NotImplementedError

    def _reference_to_save(self) -> Callable[[], AbstractContextManager] | None:
        """A context in which the model holds the reference, when that cannot be found elsewhere."""
        return None

    def offload(self, keep_parameters: bool = False) -> dict[str, float] | None:
        """Give device memory back; `keep_parameters`: what weights are sent from stays for now."""
        return self._timed("sleep", lambda: self.memory.offload(keep_parameters))

    def onload(self) -> dict[str, float] | None:
        return self._timed("wake_up", self.memory.onload)

    def _timed(self, name: str, action: Callable[[], dict[str, float] | None]) -> dict[str, float] | None:
        """Run, and on rank 0 return what `action` returns with the time it took."""
        start = time.perf_counter()
        metrics = action() or {}
        seconds = time.perf_counter() - start
        return {**metrics, f"perf/{name}_time": seconds} if self.rank == 0 else None

    def dispose(self) -> None:
        self._memory_history.close()
        if dist.is_initialized():
            dist.destroy_process_group()
