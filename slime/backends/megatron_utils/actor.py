"""The Megatron trainer rank: SPEC's training step on model, optimizer, checkpoint and weight sync of this room."""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.fsdp_utils import checks
from slime.backends.fsdp_utils.checkpoint import Progress
from slime.backends.fsdp_utils.host_memory import HostCopy, swapped
from slime.backends.fsdp_utils.metrics import memory_metrics, rollout_means, speed_metrics, sum_over_ranks
from slime.backends.fsdp_utils.optimizer import schedule_from_args
from slime.backends.megatron_utils import compat
from slime.backends.megatron_utils.architecture import is_hf_directory, read_architecture
from slime.backends.megatron_utils.settings import config_overrides, parallel_sizes
from slime.observability.timer import Timer
from slime.ray.train_actor import TrainRayActor
from slime.training.advantages import compute_advantages
from slime.training.batch import MicroBatch
from slime.training.hooks import call_data_postprocess
from slime.training.losses import compute_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData
from slime.weight_sync.connect import EngineConnections
from slime.weight_sync.updater import WeightUpdater

logger = logging.getLogger(__name__)


class MegatronTrainRayActor(TrainRayActor):
    """Trains the policy over tensor, sequence, pipeline, context, expert and data parallelism."""

    # -- setup --------------------------------------------------------------------------------------------------------

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        self.args = args
        self.role = role
        self.timer = Timer()
        self.device = torch.device(args.device)
        if args.device == "cuda":
            # Megatron overlaps tensor-parallel communication only if kernels start in the order of their launch.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            torch.cuda.set_device(0)
            self.device = torch.device("cuda", 0)
        compat.install()
        # Megatron is imported only now: it reads what `compat` prepares.
        from slime.backends.megatron_utils.weights import load_hf

        if args.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(args.seed + self.rank)
        self.join_world(args.distributed_backend, args.distributed_timeout_minutes)
        self._build_model()
        self.reference: HostCopy | None = None
        if with_ref:
            # The trained model starts as the reference; a checkpoint is read into it only afterwards.
            self.reference = HostCopy(self._params.tensors)
            self.reference.save()
        if is_hf_directory(args.load) and args.load != (args.ref_load or args.hf_checkpoint):
            load_hf(self.model, self.architecture, args.load)
        self._build_optimizer()
        self.progress = Progress()
        self._resumed = self._resume()
        self.updater: WeightUpdater | None = None
        self._connections: EngineConnections | None = None
        self._sent_at: int | None = None  # optimizer steps done at the last update
        self._last_train_end = time.perf_counter()
        return self.progress.next_rollout_id if args.start_rollout_id is None else args.start_rollout_id

    def _build_model(self) -> None:
        from megatron.core import parallel_state

        from slime.backends.megatron_utils.forward import Forward
        from slime.backends.megatron_utils.model_config import transformer_config
        from slime.backends.megatron_utils.model_provider import build_model
        from slime.backends.megatron_utils.optimizer import wrap_chunks
        from slime.backends.megatron_utils.parallel import context_parallel, init_parallel
        from slime.backends.megatron_utils.rotary import Rotary
        from slime.backends.megatron_utils.weights import MegatronWeights, load_hf

        args = self.args
        sizes = parallel_sizes(args)
        init_parallel(sizes, args.seed, args.distributed_timeout_minutes)
        self.dp_group = parallel_state.get_data_parallel_group()
        self.cp = context_parallel()
        self.dtype = getattr(torch, args.dtype)
        path = args.ref_load or args.hf_checkpoint
        self.architecture = read_architecture(args.hf_checkpoint)
        config = transformer_config(self.architecture, sizes, self.dtype, self.device, **config_overrides(args))
        model = build_model(self.architecture, config, args.make_vocab_size_divisible_by).to(self.device)
        self.model = [model]
        load_hf(self.model, self.architecture, path)
        self.chunks = wrap_chunks(self.model, config)
        latent = self.architecture.get("multi_latent_attention")
        self.forward = Forward(
            self.chunks,
            config,
            self.cp,
            None if latent else Rotary(self.architecture.rope, self.device),
            temperature=args.rollout_temperature,
            pad_multiple=args.data_pad_size_multiplier,
            chunk_size=args.log_probs_chunk_size,
        )
        self.weights = MegatronWeights(self.model, self.architecture, self.dtype, self.device)
        self._params = HostCopy(p.detach() for p in model.parameters())

    def _build_optimizer(self) -> None:
        from slime.backends.megatron_utils.memory import DeviceMemory
        from slime.backends.megatron_utils.optimizer import Optimizer

        args = self.args
        steps_per_rollout = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
        total_steps = None if args.num_rollout is None else args.num_rollout * steps_per_rollout
        self.optimizer = Optimizer(
            self.chunks,
            schedule_from_args(args, total_steps),
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
        )
        self.memory = DeviceMemory(self.chunks, self.optimizer, self._params, self.device)

    def _resume(self) -> bool:
        from slime.backends.megatron_utils.checkpoint import latest_checkpoint, load_checkpoint

        args = self.args
        path = latest_checkpoint(args.load, args.ckpt_step)
        if path is None:
            return False
        with_optimizer = not (args.finetune or args.no_load_optim)
        with_rng = not (args.finetune or args.no_load_rng)
        progress = load_checkpoint(path, self.model, self.optimizer, with_optimizer, with_rng)
        if args.finetune:
            logger.info("took the weights of %s", path)
        else:
            self.progress = progress
            self.optimizer.steps_done = progress.global_step
            logger.info("resumed %s: next rollout %d", path, progress.next_rollout_id)
        return True

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, refs: list[Any], shared: Sequence[list[Any]] = ()) -> dict[str, float] | None:
        import ray

        self.timer.add("train_wait", time.perf_counter() - self._last_train_end)
        with self.timer("train"):
            with self.timer("data_preprocess"):
                data = RankData(ray.get(refs[dist.get_rank(self.dp_group)]))
            metrics = self.train_on(rollout_id, data)
        metrics |= self._perf_metrics(data)
        self._last_train_end = time.perf_counter()
        return metrics if self.rank == 0 else None

    def train_on(self, rollout_id: int, data: RankData) -> dict[str, float]:
        """Log-probs, advantages, optimizer steps; metrics of the global batch, the same on every rank."""
        args = self.args
        self._prepare(data)
        if args.rollout_data_postprocess_path:
            call_data_postprocess(args, rollout_id, data)
        self._dump_train_data(rollout_id, data)
        with self.timer("actor_train"):
            steps = [self._train_step(data, step) for step in range(len(data.steps))]
        if args.ci_test:
            fresh = rollout_id == 0 and not self._resumed
            checks.check_first_step(args, steps[0], data, fresh_reference=fresh)
        metrics = {f"train/{key}": sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        metrics["train/skipped_steps"] = sum(step["skipped_steps"] for step in steps)
        metrics["train/step"] = self.optimizer.steps_done
        return metrics | rollout_means(data, self.dp_group, self.device)

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
            compute_advantages(args, data, self.dp_group)

    def _skips_log_prob_pass(self, data: RankData) -> bool:
        """Whether nothing needs log-probs from before the update.

        In the only step of a rollout the old policy is the current one, so training itself gives them.
        """
        args = self.args
        if args.loss_type == "sft_loss":
            return True
        if args.kl_coef != 0 or args.use_rollout_entropy:
            return False
        if args.custom_advantage_function_path or args.rollout_data_postprocess_path:
            return False
        # The mismatch is measured between the engine and the weights before the update.
        return len(data.steps) == 1 or (args.use_rollout_logprobs and not args.get_mismatch_metrics)

    @torch.no_grad()
    def _log_probs(
        self, data: RankData, with_entropy: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Per-sample log-probs (and entropy) of the weights that the model holds now, in training's micro-batches."""
        batches = [
            data.micro_batch(step, index, self.device)
            for step, micro_batches in enumerate(data.steps)
            for index in range(len(micro_batches))
        ]
        order = [sample for micro_batches in data.steps for samples in micro_batches for sample in samples]

        def keep(index: int, batch: MicroBatch, log_probs_R, entropy_R):
            return log_probs_R.new_zeros(()), (batch.split(log_probs_R), with_entropy and batch.split(entropy_R))

        kept = self.forward(batches, keep, backward=False, with_entropy=with_entropy)
        log_probs = self._by_sample(data, order, [value for first, _ in kept for value in first])
        if not with_entropy:
            return log_probs, None
        return log_probs, self._by_sample(data, order, [value for _, second in kept for value in second])

    def _by_sample(self, data: RankData, order: list[int], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Values in the order of micro-batches, on the last stage -> in the order of samples, on all stages."""
        from slime.backends.megatron_utils.pipeline import samples_from_last_stage

        lengths = [data["response_lengths"][sample] for sample in order]
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        whole = samples_from_last_stage(values, lengths, kind, self.device)
        out: list[Any] = [None] * data.num_samples
        for sample, value in zip(order, whole, strict=True):
            out[sample] = value
        return out

    def _train_step(self, data: RankData, step: int) -> dict[str, float]:
        """One optimizer step over its micro-batches."""
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

    def _gradients(self, data: RankData, step: int) -> dict[str, float]:
        """Gradients of a step, summed over all micro-batches and ranks; the loss metrics of the global batch."""
        from slime.backends.megatron_utils.pipeline import is_last_stage, object_from_last_stage

        args = self.args
        samples = data.steps[step]
        batches = [data.micro_batch(step, index, self.device) for index in range(len(samples))]

        def result(index: int, batch: MicroBatch, log_probs_R, entropy_R):
            reduce = make_reducer(batch, args.calculate_per_token_loss)
            loss, metrics = compute_loss(args, batch, log_probs_R, entropy_R, reduce)
            return loss, (metrics, batch.split(log_probs_R.detach()))

        self.optimizer.zero_grad()
        kept = self.forward(
            batches,
            result,
            backward=True,
            with_entropy=args.loss_type == "policy_loss",
            entropy_grad=args.entropy_coef != 0,
        )
        out: dict[str, float] = {}
        if is_last_stage():
            totals: dict[str, torch.Tensor] = {}
            for metrics, _ in kept:
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value.detach().double()
            out = sum_over_ranks(totals, self.dp_group, self.device)
        out = object_from_last_stage(out)
        if "log_probs" not in data and args.loss_type == "policy_loss" and len(data.steps) == 1:
            order = [sample for micro_batch in samples for sample in micro_batch]
            data.set_flat("log_probs", self._by_sample(data, order, [value for _, parts in kept for value in parts]))
        return out

    def _dump_train_data(self, rollout_id: int, data: RankData) -> None:
        if self.args.save_debug_train_data is None or not self._first_of_data_rank():
            return
        path = Path(self.args.save_debug_train_data.format(rollout_id=rollout_id, rank=self.rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {key: data[key] for key in list(data.keys())}
        torch.save({"rollout_id": rollout_id, "rank": self.rank, "rollout_data": content}, path)

    def _first_of_data_rank(self) -> bool:
        """Of the ranks that share a part of the rollout, this one writes it down."""
        from megatron.core import parallel_state

        tensor = parallel_state.get_tensor_model_parallel_rank()
        return tensor == 0 and self.cp.rank == 0 and parallel_state.get_pipeline_model_parallel_rank() == 0

    def _perf_metrics(self, data: RankData) -> dict[str, float]:
        times, lengths = self.timer.pop(), data["total_lengths"]
        speed = speed_metrics(times, "actor", self.args.hf_checkpoint, lengths, self.dp_group, self.device)
        return {**times, **speed, **memory_metrics(self.device)}

    # -- weights ------------------------------------------------------------------------------------------------------

    def set_rollout_engines(self, urls: list[str], engine_slots: list[list[int]]) -> None:
        version = self.progress.weight_version if self.updater is None else self.updater.version
        if self.updater is not None:
            self.updater.close()
        self.updater = self._updater_for(urls, engine_slots, version)

    def sync_new_engines(self, urls: list[str], engine_slots: list[list[int]]) -> None:
        updater = self._connected()
        if self.optimizer.steps_done != self._sent_at:
            updater.version += 1  # newer weights than the others serve must not carry their version
        new = self._updater_for(urls, engine_slots, updater.version - 1)
        try:
            self.memory.with_parameters(new.update)
        finally:
            new.close()

    def _updater_for(self, urls: list[str], engine_slots: list[list[int]], version: int) -> WeightUpdater:
        if self._connections is None:
            self._connections = EngineConnections(
                self.args, self.weights, self.rank, self.device, self.role, self.node_address()
            )
        return self._connections.connect(urls, engine_slots, version)

    def update_weights(self) -> dict[str, float] | None:
        return self._timed("update_weights", lambda: self.memory.with_parameters(self._send))

    def _send(self) -> dict[str, float]:
        metrics = self._connected().update()
        self._sent_at = self.optimizer.steps_done
        return metrics

    def check_weights(self) -> None:
        self.memory.with_parameters(self._connected().check)

    def _connected(self) -> WeightUpdater:
        if self.updater is None:
            raise RuntimeError("set_rollout_engines must be called before weights can be sent")
        return self.updater

    # -- checkpoints and memory ---------------------------------------------------------------------------------------

    def save_model(self, rollout_id: int) -> dict[str, float] | None:
        return self._timed("save_model", lambda: self._save(rollout_id))

    def _save(self, rollout_id: int) -> None:
        from slime.backends.megatron_utils.checkpoint import save_checkpoint
        from slime.backends.megatron_utils.hf_export import export_hf

        args = self.args
        released = self.memory.rest_released
        if released:
            self.memory.onload()
        if args.save is not None:
            self.progress.next_rollout_id = rollout_id + 1
            if self.updater is not None:
                self.progress.weight_version = self.updater.version
            optimizer = None if args.no_save_optim else self.optimizer
            save_checkpoint(args.save, rollout_id, self.model, optimizer, self.progress)
        if args.save_hf is not None:
            export_hf(args.save_hf.format(rollout_id=rollout_id), self.weights, args.hf_checkpoint)
        if released:
            self.memory.offload()

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
        from slime.backends.megatron_utils.parallel import destroy_parallel

        if self.updater is not None:
            self.updater.close()
            self.updater = None
        if dist.is_initialized():
            destroy_parallel()
            dist.destroy_process_group()
