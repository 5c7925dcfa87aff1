"""RMSNorm that works with sequence parallelism: Megatron's wrapper around torch's refuses it."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467, eq. 4) in the place of Megatron's norms.

    With sequence parallelism each tensor-parallel rank sees a part of the sequence, so its weight gradient is partial:
    the mark `sequence_parallel` makes Megatron sum it over the group.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **kwargs):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        # 1 + weight in the forward (Gemma's and Qwen3-Next's convention).
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.zero_centered:
            wide = torch.promote_types(x.dtype, torch.float32)
            return nn.functional.rms_norm(x.to(wide), x.shape[-1:], 1 + self.weight.to(wide), self.eps).to(x.dtype)
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
            from slime.modeling.triton_ops import RMSNorm as FusedNorm

            return FusedNorm.apply(x, self.weight, self.eps)
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For torch_dist checkpoints: some of Megatron's modules ask each of their children."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)
