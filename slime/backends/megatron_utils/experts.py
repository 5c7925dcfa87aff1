"""Experts whose matrix products are one grouped product per projection, where the GPU has a kernel for it.

Stock Megatron has such experts in Transformer Engine alone; its other ones are a loop with small products. These are
the loop's modules, with its parameters, checkpoint format and results. What the kernel does not cover, the loop does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn
from torch.nn import functional as F

MAX_GROUPS = 1023
"""The kernel has a thread per group."""
KERNEL_CAPABILITIES = (9, 10)
"""Major compute capabilities for which PyTorch has a kernel; for others `grouped_mm` is a loop, too."""


@dataclass(frozen=True)
class Groups:
    """How many of the rows belong to each expert, in order."""

    sizes: list[int]
    ends: torch.Tensor
    """int32 [E] on the rows' device: where each group ends."""

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> Groups:
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(sizes, ends.to(device, non_blocking=True))


class GroupedLinear(torch.autograd.Function):
    """Rows of consecutive groups, each group times the transpose of its own weight.

    The weights are stacked for the product and again in backward, not kept stacked: that would double their memory
    in every layer.
    """

    @staticmethod
    def forward(ctx, x_TI: torch.Tensor, groups: Groups, *weights_OI: torch.Tensor) -> torch.Tensor:
        """[T, O]: of each group of the T rows, the product with its weight."""
        x_TI = x_TI.contiguous()
        ctx.save_for_backward(x_TI, *weights_OI)
        ctx.groups = groups
        return F.grouped_mm(x_TI, torch.stack(weights_OI).transpose(1, 2), offs=groups.ends)

    @staticmethod
    def backward(ctx, grad_TO: torch.Tensor):
        x_TI, *weights_OI = ctx.saved_tensors
        sizes, ends = ctx.groups.sizes, ctx.groups.ends
        grad_TO = grad_TO.contiguous()
        grad_x, grads = None, [None] * len(weights_OI)
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad_TO, torch.stack(weights_OI), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            # With the contraction as the slower dimension of both, groups may have any number of rows.
            grads = list(F.grouped_mm(grad_TO.t(), x_TI, offs=ends).unbind())
            for index, (size, needed) in enumerate(zip(sizes, ctx.needs_input_grad[2:], strict=True)):
                if not needed:
                    grads[index] = None
                elif size == 0:
                    grads[index].zero_()  # Blackwell's kernel leaves it as it was allocated
        return grad_x, None, *grads


class _Same(nn.Module):
    """A linear layer's place, with nothing in it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


class GroupedExperts(SequentialMLP):
    """Stock experts that are computed together on a GPU, in bf16."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.config
        self._can_group = config.moe_grouped_gemm and self._covered()
        self._recomputes = config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        # Stock's feed-forward without its products is the activation, fused or not, times the probabilities.
        activation = self.local_experts[0].activation_func
        self._around = SimpleNamespace(
            config=config, activation_func=activation, linear_fc1=_Same(), linear_fc2=_Same()
        )

    def _covered(self) -> bool:
        """Whether the grouped computation is that of these experts: no biases, and widths that the kernel can load."""
        config, first = self.config, self.local_experts[0]
        sizes = (*first.linear_fc1.weight.shape, *first.linear_fc2.weight.shape)
        return (
            1 < self.num_local_experts <= MAX_GROUPS
            and not (config.add_bias_linear or config.moe_apply_probs_on_input or config.fp8 or config.fp4)
            and all(size * first.linear_fc1.weight.element_size() % 16 == 0 for size in sizes)
        )

    def has_kernel(self, x_TI: torch.Tensor) -> bool:
        """Whether a grouped product is faster than a loop here."""
        return (
            x_TI.is_cuda
            and x_TI.dtype == self.config.params_dtype == torch.bfloat16
            and torch.cuda.get_device_capability(x_TI.device)[0] in KERNEL_CAPABILITIES
        )

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ):
        """[T, D] tokens sorted by expert, [E], [T] -> ([T, D], None)."""
        hidden_TD, probs_T = permuted_local_hidden_states, permuted_probs
        # A single row is laid out both ways, of which the kernel may take the wrong one.
        if not (self._can_group and len(hidden_TD) > 1 and self.has_kernel(hidden_TD)):
            return super().forward(hidden_TD, tokens_per_expert, probs_T)
        groups = Groups.of(tokens_per_expert.tolist(), hidden_TD.device)
        experts = self.local_experts
        first_TF = GroupedLinear.apply(hidden_TD, groups, *(expert.linear_fc1.weight for expert in experts))
        if self._recomputes and torch.is_grad_enabled():
            kept = CheckpointWithoutOutput(fp8=None)
            activated_TF = kept.checkpoint(self._activated, first_TF, probs_T)
        else:
            kept, activated_TF = None, self._activated(first_TF, probs_T)
        out_TD = GroupedLinear.apply(activated_TF, groups, *(expert.linear_fc2.weight for expert in experts))
        if kept is not None:
            kept.discard_output_and_register_recompute(out_TD)
        return out_TD, None

    def _activated(self, hidden_TF: torch.Tensor, probs_T: torch.Tensor) -> torch.Tensor:
        return MLP.forward(self._around, hidden_TF, probs_T)[0]
