"""What policy and critic ranks share on Megatron: a model cut over the ranks, its optimizer and checkpoints."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.common.host_memory import HostCopy
from slime.backends.common.metrics import sum_over_ranks
from slime.backends.common.trainer import Trainer
from slime.backends.megatron_utils import compat, hooks
from slime.backends.megatron_utils.architecture import Architecture, read_architecture
from slime.backends.megatron_utils.groups import ReleasableGroups
from slime.backends.megatron_utils.settings import config_overrides, ddp_options, optimizer_options, parallel_sizes
from slime.modeling.cudnn_attention import prefers_cudnn
from slime.training.batch import MicroBatch
from slime.training.rollout_data import RankData
from slime.utils.checkpoint_files import is_hf_directory

logger = logging.getLogger(__name__)


class MegatronTrainer(Trainer):
    """A rank over tensor, sequence, pipeline, context, expert and data parallelism.

    Megatron is imported only where it is used: it reads what `compat` prepares.
    """

    # -- setup --------------------------------------------------------------------------------------------------------

    def init(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> int:
        self._saving: Any = None
        if args.device == "cuda":
            # Megatron overlaps tensor-parallel communication only if kernels start in the order of their launch.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        compat.install()
        return super().init(args, role, with_ref)

    def _build(self, with_ref: bool) -> None:
        args = self.args
        self._build_model()
        self._keep_initial_weights(with_ref)
        if is_hf_directory(args.load) and args.load != (args.ref_load or args.hf_checkpoint):
            from slime.backends.megatron_utils.checkpoint import load_model

            load_model(self.model, self.architecture, args.load)
        self._build_optimizer()

    def _build_model(self) -> None:
        from megatron.core import parallel_state

        from slime.backends.megatron_utils.optimizer import wrap_chunks
        from slime.backends.megatron_utils.parallel import context_parallel, init_parallel
        from slime.backends.megatron_utils.trainable import select_trainable
        from slime.backends.megatron_utils.weights import MegatronWeights

        args = self.args
        self.sizes = parallel_sizes(args)
        self.groups = ReleasableGroups()
        releasable = self.groups if args.offload_train and dist.get_world_size() > 1 else None
        init_parallel(self.sizes, args.seed, args.distributed_timeout_minutes, releasable)
        hooks.after_init(args)
        self.dp_group = parallel_state.get_data_parallel_group()
        self.dp_rank = dist.get_rank(self.dp_group)
        self.cp = context_parallel()
        self.architecture = read_architecture(args.hf_checkpoint)
        path = args.ref_load or args.hf_checkpoint
        self.model, config = self._load_model(self.architecture, path, step=args.ref_ckpt_step)
        self.weights = MegatronWeights(self.model, self.architecture, self.dtype, self.device)
        select_trainable(
            self.model,
            self.architecture,
            [spec.name for spec in self.weights.tensor_specs()],
            args.only_train_params_name_list,
            args.freeze_params_name_list,
        )
        self.chunks = wrap_chunks(self.model, config, **ddp_options(args))
        self.forward = self._forward_of(self.chunks, config, self.architecture)
        self.trained = HostCopy(p.detach() for chunk in self.model for p in chunk.parameters())

    def _load_model(
        self, architecture: Architecture, path: str, step: int | None = None, stock: bool = False, **overrides: Any
    ) -> tuple[list[Any], Any]:
        """(this rank's model chunks with the weights of `path`, their TransformerConfig).

        Args:
            path: a Hugging Face directory or a torch_dist checkpoint.
            step: iteration of a torch_dist checkpoint instead of the latest.
            stock: without `--custom-model-provider-path`.
            overrides: fields of the config that win over the flags.
        """
        from slime.backends.megatron_utils.checkpoint import load_model
        from slime.backends.megatron_utils.model_config import transformer_config
        from slime.backends.megatron_utils.model_provider import build_chunks

        args = self.args
        fields = {**config_overrides(args), **overrides}
        config = transformer_config(architecture, self.sizes, self.dtype, self.device, **fields)
        chunks = build_chunks(
            architecture,
            config,
            args.make_vocab_size_divisible_by,
            with_values=self.role == "critic",
            provider=None if stock else hooks.model_provider(args),
        )
        chunks = [chunk.to(self.device) for chunk in chunks]
        load_model(chunks, architecture, path, step)
        return chunks, config

    def _forward_of(self, chunks: Sequence[Any], config: Any, architecture: Architecture) -> Any:
        """Runs micro-batches through the chunks and computes what the role wants of each token."""
        raise NotImplementedError

    def _rows(self, chunks: Sequence[Any], config: Any, architecture: Architecture) -> dict[str, Any]:
        """What every `RowForward` is made of."""
        from slime.backends.megatron_utils.rotary import Rotary

        args = self.args
        latent = architecture.get("multi_latent_attention")
        return {
            "chunks": chunks,
            "config": config,
            "cp": self.cp,
            "rotary": None if latent else Rotary(architecture.rope, self.device),
            "pad_multiple": args.data_pad_size_multiplier,
            "cudnn_attention": prefers_cudnn(
                args.attn_implementation, self.device, self.dtype, args.deterministic_mode
            ),
        }

    def _build_optimizer(self) -> None:
        from slime.backends.megatron_utils.memory import MegatronMemory
        from slime.backends.megatron_utils.optimizer import Optimizer

        args = self.args
        self.optimizer = Optimizer(
            self.chunks,
            self._schedule(),
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            **optimizer_options(args),
        )
        self.memory = MegatronMemory(
            self.chunks, self.optimizer, self.trained, self.groups, stays=args.device == "cpu"
        )

    def _resume(self) -> bool:
        from slime.backends.megatron_utils.checkpoint import latest_checkpoint, load_checkpoint, load_weights

        args = self.args
        if args.finetune and args.load == args.ref_load:
            return False  # the run has started from its weights already
        path = latest_checkpoint(args.load, args.ckpt_step)
        if path is None:
            return False
        if args.finetune:
            load_weights(path, self.model)
            self.optimizer.megatron.reload_model_params()
            logger.info("took the weights of %s", path)
            return True
        with_optimizer, with_rng = not args.no_load_optim, not args.no_load_rng
        self.progress = load_checkpoint(path, self.model, self.optimizer, with_optimizer, with_rng)
        self.optimizer.steps_done = self.progress.global_step
        logger.info("resumed %s: next rollout %d", path, self.progress.next_rollout_id)
        return True

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, refs: list[Any], shared: Sequence[list[Any]] = ()) -> dict[str, float] | None:
        self._finish_save(wait=False)
        return super().train(rollout_id, refs, shared)

    def _before_train_step(self, rollout_id: int, step: int) -> None:
        hooks.before_train_step(self.args, rollout_id, step, self.chunks, self.optimizer)

    def _gradients(self, data: RankData, step: int) -> dict[str, float]:
        from slime.backends.megatron_utils.pipeline import is_last_stage, object_from_last_stage

        batches = [data.micro_batch(step, index, self.device) for index in range(len(data.steps[step]))]
        self.optimizer.zero_grad()
        kept = self._backward(batches, data, step)
        out: dict[str, float] = {}
        if is_last_stage():
            totals: dict[str, torch.Tensor] = {}
            for metrics in kept:
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value.detach().double()
            out = sum_over_ranks(totals, self.dp_group, self.device)
        return object_from_last_stage(out)

    def _backward(self, batches: list[MicroBatch], data: RankData, step: int) -> list[dict[str, torch.Tensor]]:
        """Forward and backward of a step's micro-batches; their metrics, on the last pipeline stage."""
        raise NotImplementedError

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

    def _all_batches(self, data: RankData) -> tuple[list[MicroBatch], list[int]]:
        """All micro-batches of a rollout in the order of training, and the samples in theirs."""
        batches = [
            data.micro_batch(step, index, self.device)
            for step, micro_batches in enumerate(data.steps)
            for index in range(len(micro_batches))
        ]
        return batches, [sample for step in data.steps for samples in step for sample in samples]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _write(self, rollout_id: int) -> None:
        from slime.backends.megatron_utils.checkpoint import save_checkpoint

        args = self.args
        if args.save is not None:
            optimizer = None if args.no_save_optim else self.optimizer
            save_checkpoint(
                args.save,
                rollout_id,
                self.model,
                optimizer,
                self.progress,
                reference=self._reference_to_save(),
                background=self._background_save(rollout_id),
            )

    def _background_save(self, rollout_id: int) -> Any:
        """What writes checkpoints while training goes on; None without `--async-save` and for the last one."""
        from slime.backends.megatron_utils.async_save import BackgroundSave

        if self.args.num_rollout is not None and rollout_id + 1 >= self.args.num_rollout:
            self._finish_save(wait=True)
            return None
        if self.args.async_save and self._saving is None:
            self._saving = BackgroundSave()
        return self._saving

    def _finish_save(self, wait: bool) -> None:
        """Publish the checkpoint that is being written, if there is one; without `wait` only if it is done."""
        if self._saving is None:
            return
        if wait:
            self._saving.finish()
        else:
            self._saving.poll()

    def dispose(self) -> None:
        from slime.backends.megatron_utils.parallel import destroy_parallel

        if dist.is_initialized():
            self._finish_save(wait=True)
            destroy_parallel()
        super().dispose()
