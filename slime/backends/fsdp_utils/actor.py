"""The FSDP2 trainer rank: what SPEC's training step is, on top of model, optimizer, checkpoint and weight sync."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slime.backends.fsdp_utils import checks
from slime.backends.fsdp_utils.checkpoint import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from slime.backends.fsdp_utils.hf_export import export_hf
from slime.backends.fsdp_utils.host_memory import HostCopy, swapped
from slime.backends.fsdp_utils.metrics import memory_metrics, rollout_means, sum_over_ranks
from slime.backends.fsdp_utils.model import ModelOptions, PolicyModel, build_policy, local_tensor
from slime.backends.fsdp_utils.optimizer import Optimizer, schedule_from_args
from slime.backends.fsdp_utils.weights import ShardedWeights
from slime.observability.timer import Timer
from slime.ray.train_actor import TrainRayActor
from slime.training.advantages import compute_advantages
from slime.training.losses import compute_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData
from slime.utils.misc import load_function, parameters
from slime.weight_sync.distributed import DistributedTransport
from slime.weight_sync.engines import Engines
from slime.weight_sync.tensor import TensorTransport
from slime.weight_sync.updater import WeightUpdater

logger = logging.getLogger(__name__)


class FSDPTrainRayActor(TrainRayActor):
    """Data-parallel trainer over Hugging Face models."""

    # -- setup --------------------------------------------------------------------------------------------------------

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        self.args = args
        self.role = role
        self.timer = Timer()
        self.device = torch.device(args.device)
        if args.device == "cuda":
            torch.cuda.set_device(0)
            self.device = torch.device("cuda", 0)
        if args.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(args.seed + self.rank)
        self.join_world(args.distributed_backend, args.distributed_timeout_minutes)
        self.mesh = init_device_mesh(self.device.type, (self.world_size,))
        self.dtype = getattr(torch, args.dtype)

        initial = args.ref_load or args.hf_checkpoint
        self.policy = self._build(initial)
        self._params = HostCopy(local_tensor(p) for p in self.policy.parameters())
        self._moments: HostCopy | None = None
        self._released = False
        self.reference: HostCopy | None = None
        if with_ref:
            # The trained model starts as the reference; a checkpoint is read into it only afterwards.
            self.reference = HostCopy(local_tensor(p) for p in self.policy.parameters())
            self.reference.save()
        self.optimizer = self._build_optimizer()
        self.progress = Progress()
        self._resumed = self._resume()
        self.weights = ShardedWeights(self.policy, self.dtype, self.mesh, self.device)
        self.updater: WeightUpdater | None = None
        self._last_train_end = time.perf_counter()
        return self.progress.next_rollout_id if args.start_rollout_id is None else args.start_rollout_id

    def _build(self, path: str) -> PolicyModel:
        args = self.args
        options = ModelOptions(
            path,
            compute_dtype=self.dtype,
            gradient_checkpointing=args.gradient_checkpointing,
            cpu_offload=args.fsdp_cpu_offload,
            trust_remote_code=args.trust_remote_code,
        )
        return build_policy(options, self.mesh, self.device)

    def _build_optimizer(self) -> Optimizer:
        args = self.args
        steps_per_rollout = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
        total_steps = None if args.num_rollout is None else args.num_rollout * steps_per_rollout
        return Optimizer(
            self.policy.hf_parameters(),
            schedule_from_args(args, total_steps),
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            group=self.mesh.get_group() if self.world_size > 1 else None,
        )

    def _resume(self) -> bool:
        args = self.args
        path = latest_checkpoint(args.load)
        if path is None:
            return False
        optimizer = None if args.finetune or args.no_load_optim else self.optimizer
        progress = load_checkpoint(path, self.policy, optimizer, with_rng=not (args.finetune or args.no_load_rng))
        if args.finetune:
            logger.info("took the weights of %s", path)
        else:
            self.progress = progress
            self.optimizer.steps_done = progress.global_step
            logger.info("resumed %s: next rollout %d", path, progress.next_rollout_id)
        return True

    def set_rollout_engines(self, urls: list[str], engine_slots: list[list[int]]) -> None:
        args = self.args
        version = self.progress.weight_version if self.updater is None else self.updater.version
        if self.updater is not None:
            self.updater.close()
        engines = Engines(urls)
        size = args.update_weight_buffer_size
        if args.colocate:
            transport = TensorTransport(engines, engine_slots, self.rank, self.device)
        else:
            transport = DistributedTransport(
                engines,
                [len(slots) for slots in engine_slots],
                self.rank,
                self.device,
                args.distributed_backend,
                self.node_address(),
                f"slime-{self.role}",
                timeout=60.0 * args.distributed_timeout_minutes,
            )
        self.updater = WeightUpdater(self.weights, transport, engines, self.rank, size, version)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, refs: list[Any]) -> dict[str, float] | None:
        import ray

        self.timer.add("train_wait", time.perf_counter() - self._last_train_end)
        with self.timer("train"):
            with self.timer("data_preprocess"):
                data = RankData(ray.get(refs[self.mesh.get_rank()]))
            metrics = self.train_on(rollout_id, data)
        metrics |= self._perf_metrics(data)
        self._last_train_end = time.perf_counter()
        return metrics if self.rank == 0 else None

    def train_on(self, rollout_id: int, data: RankData) -> dict[str, float]:
        """Log-probs, advantages, optimizer steps; metrics of the global batch, the same on every rank."""
        args = self.args
        self._prepare(data)
        if args.rollout_data_postprocess_path:
            self._call_postprocess(rollout_id, data)
        self._dump_train_data(rollout_id, data)
        with self.timer("actor_train"):
            steps = [self._train_step(data, step) for step in range(len(data.steps))]
        if args.ci_test:
            fresh = rollout_id == 0 and not self._resumed
            checks.check_first_step(args, steps[0], data, fresh_reference=fresh)
        metrics = {f"train/{key}": sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        metrics["train/skipped_steps"] = sum(step["skipped_steps"] for step in steps)
        metrics["train/step"] = self.optimizer.steps_done
        return metrics | rollout_means(data, self.mesh.get_group(), self.device)

    def _prepare(self, data: RankData) -> None:
        """Reference and old log-probs where they are needed, then advantages."""
        args = self.args
        if self.reference is not None:
            with self.timer("ref_log_probs"), swapped(self._params, self.reference):
                data.set_flat("ref_log_probs", self._log_probs(data)[0])
        if not self._skips_log_prob_pass(data):
            with self.timer("log_probs"):
                log_probs, entropy = self._log_probs(data, args.use_rollout_entropy)
            data.set_flat("log_probs", log_probs)
            if entropy is not None:
                data.set_flat("entropy", entropy)
        if args.compute_advantages_and_returns and args.loss_type != "sft_loss":
            compute_advantages(args, data, self.mesh.get_group())

    def _skips_log_prob_pass(self, data: RankData) -> bool:
        """Whether nothing needs log-probs from before the update.

        In the only step of a rollout the old policy is the current one, so training itself gives them.
        """
        args = self.args
        if args.loss_type == "sft_loss":
            return True
        if args.loss_type == "custom_loss" or args.kl_coef != 0 or args.use_rollout_entropy:
            return False
        if args.custom_advantage_function_path or args.rollout_data_postprocess_path:
            return False
        return len(data.steps) == 1 or args.use_rollout_logprobs

    @torch.no_grad()
    def _log_probs(
        self, data: RankData, with_entropy: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Per-sample log-probs (and entropy) of the weights that the policy holds now, in training's micro-batches."""
        log_probs: list[Any] = [None] * data.num_samples
        entropy: list[Any] = [None] * data.num_samples
        self.policy.free_unsharded()
        for step, micro_batches in enumerate(data.steps):
            for index, samples in enumerate(micro_batches):
                batch = data.micro_batch(step, index, self.device)
                log_probs_R, entropy_R, _ = self._forward(batch, with_entropy)
                for i, sample in enumerate(samples):
                    log_probs[sample] = batch.split(log_probs_R)[i]
                    if entropy_R is not None:
                        entropy[sample] = batch.split(entropy_R)[i]
        self.policy.free_unsharded()
        return log_probs, entropy if with_entropy else None

    def _forward(self, batch, with_entropy: bool, with_logits: bool = False):
        args = self.args
        return self.policy(
            batch,
            temperature=args.rollout_temperature,
            with_entropy=with_entropy,
            entropy_grad=args.entropy_coef != 0,
            chunk_size=args.log_probs_chunk_size,
            with_logits=with_logits,
        )

    def _train_step(self, data: RankData, step: int) -> dict[str, float]:
        """One optimizer step over its micro-batches. Gradients are reduced over ranks with the last one only."""
        args = self.args
        keep = "log_probs" not in data and args.loss_type == "policy_loss"
        kept: dict[int, torch.Tensor] = {}
        totals: dict[str, torch.Tensor] = {}
        count = len(data.steps[step])
        for index in range(count):
            self.policy.set_gradient_sync(index == count - 1)
            batch = data.micro_batch(step, index, self.device)
            log_probs_R, entropy_R, logits = self._forward(
                batch, with_entropy=args.loss_type == "policy_loss", with_logits=args.loss_type == "custom_loss"
            )
            reduce = make_reducer(batch, args.calculate_per_token_loss)
            loss, metrics = compute_loss(args, batch, log_probs_R, entropy_R, reduce, logits)
            # FSDP averages gradients over the ranks; the loss is a sum over them.
            (loss * self.world_size).backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.double()
            if keep:
                kept.update(zip(data.steps[step][index], batch.split(log_probs_R.detach()), strict=True))
        out = sum_over_ranks(totals, self.mesh.get_group(), self.device)
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
        if keep and len(data.steps) == 1:
            data.set_flat("log_probs", [kept[i] for i in range(data.num_samples)])
        return out

    def _call_postprocess(self, rollout_id: int, data: RankData) -> None:
        """`--rollout-data-postprocess-path` in any of its historical forms."""
        hook = load_function(self.args.rollout_data_postprocess_path, "--rollout-data-postprocess-path")
        forms = {1: (self.args,), 2: (self.args, data)}
        hook(*forms.get(len(parameters(hook)), (self.args, rollout_id, data)))

    def _dump_train_data(self, rollout_id: int, data: RankData) -> None:
        if self.args.save_debug_train_data is None:
            return
        path = Path(self.args.save_debug_train_data.format(rollout_id=rollout_id, rank=self.rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {key: data[key] for key in list(data.keys())}
        torch.save({"rollout_id": rollout_id, "rank": self.rank, "rollout_data": content}, path)

    def _perf_metrics(self, data: RankData) -> dict[str, float]:
        mine = {"tokens": torch.tensor(float(sum(data["total_lengths"])), dtype=torch.float64)}
        tokens = sum_over_ranks(mine, self.mesh.get_group(), self.device)["tokens"]
        out = {**self.timer.pop(), **memory_metrics(self.device)}
        wait, train = out["perf/train_wait_time"], out["perf/train_time"]
        out["perf/step_time"] = wait + train
        out["perf/wait_time_ratio"] = wait / (wait + train)
        out["perf/actor_train_tok_per_s"] = tokens / out["perf/actor_train_time"]
        return out

    # -- weights and memory -------------------------------------------------------------------------------------------

    def update_weights(self) -> dict[str, float] | None:
        return self._timed("update_weights", lambda: self._with_parameters(self._connected().update))

    def check_weights(self) -> None:
        self._with_parameters(self._connected().check)

    def _connected(self) -> WeightUpdater:
        if self.updater is None:
            raise RuntimeError("set_rollout_engines must be called before weights can be sent")
        return self.updater

    def _with_parameters(self, action: Callable[[], Any]) -> Any:
        """Run what only reads the parameters with them on the device, even while the rest is offloaded."""
        if not self._released:
            return action()
        self._params.restore()
        try:
            return action()
        finally:
            self._params.drop()
            torch.cuda.empty_cache()

    def save_model(self, rollout_id: int) -> dict[str, float] | None:
        return self._timed("save_model", lambda: self._save(rollout_id))

    def _save(self, rollout_id: int) -> None:
        args = self.args
        released = self._released
        if released:
            self._onload()
        if args.save is not None:
            self.progress.next_rollout_id = rollout_id + 1
            if self.updater is not None:
                self.progress.weight_version = self.updater.version
            optimizer = None if args.no_save_optim else self.optimizer
            save_checkpoint(args.save, rollout_id, self.policy, optimizer, self.progress)
        if args.save_hf is not None:
            path = args.save_hf.format(rollout_id=rollout_id)
            export_hf(path, self.weights, args.hf_checkpoint, args.trust_remote_code)
        if released:
            self._offload()

    def offload(self) -> dict[str, float] | None:
        return self._timed("sleep", self._offload)

    def onload(self) -> dict[str, float] | None:
        return self._timed("wake_up", self._onload)

    def _offload(self) -> None:
        """Parameters and optimizer state to pinned host memory. On CPU there is nothing to give back."""
        if self.device.type == "cpu" or self.args.fsdp_cpu_offload or self._released:
            return
        if self._moments is None and self.optimizer.adam.state:
            self._moments = HostCopy(self.optimizer.local_tensors())
        self.policy.free_unsharded()
        self._params.release()
        if self._moments is not None:
            self._moments.release()
        torch.cuda.empty_cache()
        self._released = True

    def _onload(self) -> None:
        if not self._released:
            return
        self._params.restore()
        if self._moments is not None:
            self._moments.restore()
        self._released = False

    def _timed(self, name: str, action: Callable[[], dict[str, float] | None]) -> dict[str, float] | None:
        """Run, and on rank 0 return what `action` returns with the time it took."""
        start = time.perf_counter()
        metrics = action() or {}
        seconds = time.perf_counter() - start
        return {**metrics, f"perf/{name}_time": seconds} if self.rank == 0 else None

    def dispose(self) -> None:
        if self.updater is not None:
            self.updater.close()
            self.updater = None
        if dist.is_initialized():
            dist.destroy_process_group()
