"""Megatron's distributed optimizer under slime's learning-rate schedule, and the gradients it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from slime.backends.common.lr_schedule import LRSchedule
from slime.backends.megatron_utils.adam import ChunkedAdamW, HostAdamW


def wrap_chunks(chunks: Sequence[nn.Module], config, **options: Any) -> list[DistributedDataParallel]:
    """Model chunks with gradient buffers: gradients are summed over data- and context-parallel ranks, in fp32.

    Args:
        options: further fields of DistributedDataParallelConfig.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype != torch.float64,
        use_distributed_optimizer=True,
        **options,
    )

    def finalize(model, num_tokens=None, **groups):
        # Without a count of tokens nothing is divided: the losses have done it.
        finalize_model_grads(model, None, **groups)

    config.finalize_model_grads_func = finalize
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if ddp_config.overlap_grad_reduce:  # gradients of all micro-batches but the last stay local
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync[0] if len(wrapped) == 1 else no_sync
    return wrapped


class Optimizer:
    """AdamW over shards of fp32 parameters; one `step` per global batch.

    Weight decay applies to matrices only. A step whose gradient norm is not finite is skipped: parameters, moments and
    schedule stay as they are.

    Args:
        chunks: wrapped for data parallelism.
        host: keep the moments in host memory and compute the step there.
        moment_dtypes: of `exp_avg` and `exp_avg_sq`, where not those of the fp32 parameters.
        options: further fields of OptimizerConfig.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        schedule: LRSchedule,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_grad: float,
        host: bool = False,
        moment_dtypes: Mapping[str, torch.dtype] | None = None,
        **options: Any,
    ):
        model_config = chunks[0].config
        self.chunks = list(chunks)
        self.schedule = schedule
        self.steps_done = 0
        self.config = OptimizerConfig(
            optimizer="adam",
            lr=schedule.max_lr,
            min_lr=schedule.min_lr,
            weight_decay=weight_decay,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_eps=eps,
            clip_grad=clip_grad,
            bf16=model_config.bf16,
            params_dtype=model_config.params_dtype,
            use_distributed_optimizer=True,
            **options,
        )
        self.megatron = get_megatron_optimizer(self.config, self.chunks, use_gloo_process_groups=False)
        for group in self.megatron.param_groups:
            group["weight_decay"] = weight_decay * group["wd_mult"]
        for part in self._parts():
            part.optimizer = HostAdamW(part.optimizer) if host else ChunkedAdamW(part.optimizer, moment_dtypes)

    @property
    def lr(self) -> float:
        """The rate that the next step uses."""
        return self.schedule.lr(self.steps_done)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip and update. Returns `grad_norm` (before clipping), `lr-pg_{i}`, `skipped_steps`; the same on all
        ranks."""
        lr = self.lr
        groups = self.megatron.param_groups
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        skipped = not math.isfinite(norm)
        if not skipped:
            for group in groups:
                group["lr"] = lr
            self.megatron.step()
            self.steps_done += 1
        return {"grad_norm": norm, "lr-pg_0": lr, "lr-pg_1": lr, "skipped_steps": float(skipped)}

    def reset_state(self) -> None:
        """Forget the moments and AdamW's bias correction, not the schedule; in place, as offloading wants it."""
        for torch_optimizer in self.torch_optimizers():
            for state in torch_optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def create_moments(self) -> None:
        """AdamW's state as its first step would make it, so that a checkpoint can be read into it."""
        for torch_optimizer in self.torch_optimizers():
            for group in torch_optimizer.param_groups:
                for parameter in group["params"]:
                    torch_optimizer.state[parameter] = torch_optimizer.new_state(parameter)

    def set_steps_done(self, steps: int) -> None:
        """After loading, which replaced AdamW's numbers by the checkpoint's: where schedule and bias correction stand,
        and the flags' numbers again."""
        self.steps_done = steps
        for torch_optimizer in self.torch_optimizers():
            for state in torch_optimizer.state.values():
                state["step"] = torch.tensor(float(steps))
            for group in torch_optimizer.param_groups:
                group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
                group["betas"] = (self.config.adam_beta1, self.config.adam_beta2)
                group["eps"] = self.config.adam_eps

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Moments and fp32 parameters of this rank, for offloading."""
        for torch_optimizer in self.torch_optimizers():
            for group in torch_optimizer.param_groups:
                yield from (parameter.detach() for parameter in group["params"])
            for state in torch_optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value) and value.ndim > 0)

    def torch_optimizers(self) -> list[ChunkedAdamW]:
        """The AdamW instances inside: one for dense parameters, one for experts."""
        return [part.optimizer for part in self._parts()]

    def _parts(self) -> list:
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in parts if part.optimizer is not None]
