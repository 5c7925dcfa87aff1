"""What policy and critic ranks share on FSDP: a Hugging Face model sharded over the ranks, and its checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from slime.backends.common.host_memory import HostCopy
from slime.backends.common.metrics import sum_over_ranks
from slime.backends.common.trainer import Trainer
from slime.backends.fsdp_utils.checkpoint import Extras, latest_checkpoint, load_checkpoint, save_checkpoint
from slime.backends.fsdp_utils.lora import LoraOptions, write_adapter
from slime.backends.fsdp_utils.memory import FSDPMemory
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
from slime.training.batch import MicroBatch
from slime.training.context_parallel import ALONE, ContextParallel
from slime.training.losses import LossOutput
from slime.training.rollout_data import RankData

logger = logging.getLogger(__name__)


class FSDPTrainer(Trainer):
    """A data-parallel rank, or one of several that share sequences."""

    # -- setup --------------------------------------------------------------------------------------------------------

    def _build(self, with_ref: bool) -> None:
        args = self.args
        self.mesh = init_device_mesh(self.device.type, (self.world_size,))
        self._split_world(args.context_parallel_size)
        self.lora: LoraOptions | None = None
        if args.lora_rank is not None:
            self.lora = LoraOptions(
                args.lora_rank,
                args.lora_alpha,
                tuple(args.lora_target_modules),
                tuple(args.lora_exclude_modules or ()),
            )
        self.model = self._load(args.ref_load or args.hf_checkpoint)
        select_trainable(self.model.hf_parameters(), args.only_train_params_name_list, args.freeze_params_name_list)
        self.trained = HostCopy(local_tensor(p) for p in self.model.parameters() if p.requires_grad)
        self._keep_initial_weights(with_ref)
        self.optimizer = Optimizer(
            self.model.hf_parameters(),
            self._schedule(),
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            group=self.mesh.get_group() if self.world_size > 1 else None,
            host=args.optimizer == "cpu_adam",
        )
        stays = args.device == "cpu" or args.fsdp_cpu_offload
        self.memory = FSDPMemory(self.model, self.optimizer, self.trained, stays)

    def _split_world(self, cp_size: int) -> None:
        """Ranks next to each other share sequences (`cp`); ranks `cp_size` apart have other samples (`dp_group`)."""
        self.dp_rank, self.dp_group, self.cp = self.rank, self.mesh.get_group(), ALONE
        if cp_size > 1:
            shape = (self.world_size // cp_size, cp_size)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "cp"))
            self.dp_rank, self.dp_group = mesh.get_local_rank("dp"), mesh.get_group("dp")
            self.cp = ContextParallel.of(mesh.get_group("cp"))

    def _load(self, path: str) -> PolicyModel:
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

    def _gradients(self, data: RankData, step: int) -> dict[str, float]:
        """Gradients are reduced over the ranks after each micro-batch, so that a rank holds its shard of them alone;
        or after the last only, for which every rank adds up all gradients in fp32 (`--fsdp-reduce-grads-once`).
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
        return sum_over_ranks(totals, self.dp_group, self.device)

    def _loss(self, batch: MicroBatch, samples: list[int]) -> LossOutput:
        """Loss and metrics of a micro-batch, which holds these samples of the rank's part."""
        raise NotImplementedError

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _write(self, rollout_id: int) -> None:
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
