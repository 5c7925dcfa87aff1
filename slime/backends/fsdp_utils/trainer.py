"""What policy and critic ranks share: a model sharded over the ranks, its optimizer, checkpoints and memory."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slime.backends.common.checkpoint import Progress
from slime.backends.common.host_memory import HostCopy
from slime.backends.common.lr_schedule import schedule_from_args
from slime.backends.common.metrics import memory_metrics, speed_metrics, sum_over_ranks
from slime.backends.fsdp_utils.checkpoint import Extras, latest_checkpoint, load_checkpoint, save_checkpoint
from slime.backends.fsdp_utils.lora import LoraOptions, write_adapter
from slime.backends.fsdp_utils.model import (
    InvariantPolicyModel,
    ModelOptions,
    PolicyModel,
    build_policy,
    full_tensor,
    local_tensor,
)
from slime.backends.fsdp_utils.optimizer import Optimizer
from slime.backends.fsdp_utils.trainable import select_trainable
from slime.modeling.cudnn_attention import prefers_cudnn
from slime.observability.profiling import MemoryHistory, PhaseTimer, peak_tflops, utilization
from slime.ray.train_actor import TrainRayActor
from slime.training.batch import MicroBatch
from slime.training.context_parallel import ALONE, ContextParallel
from slime.training.losses import LossOutput
from slime.training.rollout_data import RankData

logger = logging.getLogger(__name__)


class FSDPTrainer(TrainRayActor):
    """A data-parallel rank over a Hugging Face model. A role adds `train_on`, and what it keeps beside the model."""

    # -- setup --------------------------------------------------------------------------------------------------------

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        self.args = args
        self.role = role
        self.timer = PhaseTimer(args, self.rank)
        self.device = torch.device(args.device)
        if args.device == "cuda":
            torch.cuda.set_device(0)
            self.device = torch.device("cuda", 0)
        self._memory_history = MemoryHistory(args, self.rank)
        self._peak_tflops = peak_tflops(args)
        if args.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(args.seed + self.rank)
        self.join_world(args.distributed_backend, args.distributed_timeout_minutes)
        self.mesh = init_device_mesh(self.device.type, (self.world_size,))
        self._split_world(args.context_parallel_size)
        self.dtype = getattr(torch, args.dtype)

        self.lora: LoraOptions | None = None
        if args.lora_rank is not None:
            self.lora = LoraOptions(
                args.lora_rank,
                args.lora_alpha,
                tuple(args.lora_target_modules),
                tuple(args.lora_exclude_modules or ()),
            )
        self.model = self._build(args.ref_load or args.hf_checkpoint)
        select_trainable(self.model.hf_parameters(), args.only_train_params_name_list, args.freeze_params_name_list)
        parameters = list(self.model.parameters())
        self._trained = HostCopy(local_tensor(p) for p in parameters if p.requires_grad)
        self._frozen = HostCopy((local_tensor(p) for p in parameters if not p.requires_grad), constant=True)
        self._moments: HostCopy | None = None
        self._moments_released = self._parameters_released = False
        self.optimizer = self._build_optimizer()
        self.progress = Progress()
        self._copy_initial_weights(with_ref)
        self._resumed = self._resume()
        self._last_train_end = time.perf_counter()
        return self.progress.next_rollout_id if args.start_rollout_id is None else args.start_rollout_id

    def _copy_initial_weights(self, with_ref: bool) -> None:
        """What a role keeps of the weights that the run started from; called before a checkpoint is read."""

    def _split_world(self, cp_size: int) -> None:
        """Ranks next to each other share sequences (`cp`); ranks `cp_size` apart have other samples (`dp_group`)."""
        self.dp_rank, self.dp_group, self.cp = self.rank, self.mesh.get_group(), ALONE
        if cp_size > 1:
            shape = (self.world_size // cp_size, cp_size)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "cp"))
            self.dp_rank, self.dp_group = mesh.get_local_rank("dp"), mesh.get_group("dp")
            self.cp = ContextParallel.of(mesh.get_group("cp"))

    def _build(self, path: str) -> PolicyModel:
        wrap = InvariantPolicyModel if self.args.true_on_policy_mode else PolicyModel
        return build_policy(self._model_options(path), self.mesh, self.device, self.cp, wrap)

    def _model_options(self, path: str) -> ModelOptions:
        args = self.args
        return ModelOptions(
            path,
            compute_dtype=self.dtype,
            gradient_checkpointing=args.gradient_checkpointing,
            cpu_offload=args.fsdp_cpu_offload,
            trust_remote_code=args.trust_remote_code,
            offload_activations=args.fsdp_offload_activations,
            lora=self.lora,
            batch_invariant=args.true_on_policy_mode,
            cudnn_attention=prefers_cudnn(args.attn_implementation, self.device, self.dtype, args.deterministic_mode),
            compile_backend=args.fsdp_compile,
        )

    def _build_optimizer(self) -> Optimizer:
        args = self.args
        steps_per_rollout = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
        total_steps = None if args.num_rollout is None else args.num_rollout * steps_per_rollout
        return Optimizer(
            self.model.hf_parameters(),
            schedule_from_args(args, total_steps),
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            group=self.mesh.get_group() if self.world_size > 1 else None,
            host=args.optimizer == "cpu_adam",
        )

    def _resume(self) -> bool:
        args = self.args
        path = latest_checkpoint(args.load, args.ckpt_step)
        if path is None:
            return False
        optimizer = None if args.finetune or args.no_load_optim else self.optimizer
        progress = load_checkpoint(path, self.model, optimizer, with_rng=not (args.finetune or args.no_load_rng))
        if args.finetune:
            logger.info("took the weights of %s", path)
        else:
            self.progress = progress
            self.optimizer.steps_done = progress.global_step
            logger.info("resumed %s: next rollout %d", path, progress.next_rollout_id)
        return True

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

    def _train_step(self, data: RankData, step: int) -> dict[str, float]:
        """One optimizer step over its micro-batches.

        Gradients are reduced over the ranks after each, so that a rank holds its shard of them alone; or after the
        last only, for which every rank adds up all gradients in fp32 (`--fsdp-reduce-grads-once`).
        """
        totals: dict[str, torch.Tensor] = {}
        count = len(data.steps[step])
        for index in range(count):
            self.model.set_gradient_sync(index == count - 1 or not self.args.fsdp_reduce_grads_once)
            batch = data.micro_batch(step, index, self.device)
            loss, metrics = self._loss(batch, data.steps[step][index])
            # FSDP averages gradients over all ranks; each has its share of their sum.
            (loss * self.world_size).backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.double()
        out = sum_over_ranks(totals, self.dp_group, self.device)
        out |= self.optimizer.step()
        if out["skipped_steps"]:
            logger.warning(
                "step %d skipped: the gradient norm is %s (loss %s)",
                self.optimizer.steps_done,
                out["grad_norm"],
                out["loss"],
            )
        self.progress.global_step = self.optimizer.steps_done
        self.progress.micro_step += count
        return out

    def _loss(self, batch: MicroBatch, samples: list[int]) -> LossOutput:
        """Loss and metrics of a micro-batch, which holds these samples of the rank's part."""
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
        released = self._moments_released
        if released:
            self._onload()
        self.progress.next_rollout_id = rollout_id + 1
        self._write(rollout_id)
        if released:
            self._offload()

    def _write(self, rollout_id: int) -> None:
        """With the model on the device."""
        args = self.args
        if args.save is not None:
            optimizer = None if args.no_save_optim else self.optimizer
            extras = Extras(self._reference_to_save(), self._write_adapter if self.lora is not None else None)
            save_checkpoint(args.save, rollout_id, self.model, optimizer, self.progress, extras)

    def _write_adapter(self, directory: Path) -> None:
        """The adapters as peft reads them; collective."""
        parameters = {name: p for name, p in self.model.hf_parameters().items() if ".lora_" in name}
        full = {name: full_tensor(p) for name, p in parameters.items()}
        if self.rank == 0:
            write_adapter(directory, {name: p.cpu() for name, p in full.items()}, self.lora, self.args.hf_checkpoint)

    def _reference_to_save(self) -> Callable[[], AbstractContextManager] | None:
        """A context in which the model holds the reference, when that cannot be found elsewhere."""
        return None

    def offload(self, keep_parameters: bool = False) -> dict[str, float] | None:
        """Give device memory back; `keep_parameters`: what weights are sent from stays for now."""
        return self._timed("sleep", lambda: self._offload(keep_parameters))

    def onload(self) -> dict[str, float] | None:
        return self._timed("wake_up", self._onload)

    def _offload(self, keep_parameters: bool = False) -> None:
        """Parameters and optimizer state to pinned host memory. On CPU there is nothing to give back."""
        if self.device.type == "cpu" or self.args.fsdp_cpu_offload:
            return
        if not self._moments_released:
            if self._moments is None and self.optimizer.adam.state:
                self._moments = HostCopy(self.optimizer.local_tensors())
            self.model.free_unsharded()
            if self._moments is not None:
                self._moments.release()
            self._moments_released = True
        if not keep_parameters and not self._parameters_released:
            self._trained.release()
            self._frozen.release()
            self._parameters_released = True
        torch.cuda.empty_cache()

    def _onload(self) -> None:
        if self._parameters_released:
            self._restore_parameters()
            self._parameters_released = False
        if self._moments_released and self._moments is not None:
            self._moments.restore()
        self._moments_released = False

    def _restore_parameters(self) -> None:
        self._trained.restore()
        self._frozen.restore()

    def _timed(self, name: str, action: Callable[[], dict[str, float] | None]) -> dict[str, float] | None:
        """Run, and on rank 0 return what `action` returns with the time it took."""
        start = time.perf_counter()
        metrics = action() or {}
        seconds = time.perf_counter() - start
        return {**metrics, f"perf/{name}_time": seconds} if self.rank == 0 else None

    def dispose(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
