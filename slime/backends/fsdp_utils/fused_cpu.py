"""RMS norms and rotary embeddings for training in float32 on a CPU, in few passes over the activations.

On a CPU the small operations of transformers' modules, and of their gradients, take as long as the matrix products.
"""

from __future__ import annotations

import torch
from torch import nn

from slime.modeling.fuse import fuse


class _RMSNorm(torch.autograd.Function):
    """y = u w with u = x / rms(x);  dL/dx = (h - u mean(h u)) / rms(x) with h = w dL/dy."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        width = x.shape[-1]
        rms = torch.linalg.vector_norm(x, 2, -1, True).square_().div_(width).add_(eps).sqrt_()
        unit = x / rms
        ctx.save_for_backward(unit, rms, weight)
        return unit * weight

    @staticmethod
    def backward(ctx, grad):
        unit, rms, weight = ctx.saved_tensors
        product = grad * unit
        mean = torch.matmul(product, weight).unsqueeze(-1).div_(-unit.shape[-1])
        grad_x = torch.addcmul(grad * weight, unit, mean).div_(rms)
        return grad_x, product.flatten(0, -2).sum(0), None


class _Rotary(torch.autograd.Function):
    """x cos + rotate_half(x) sin. Both halves of cos and of sin are the same, so backward turns the other way."""

    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    @staticmethod
    def backward(ctx, grad_query, grad_key):
        cos, sin = ctx.saved_tensors
        return _rotated(grad_query, cos, -sin), _rotated(grad_key, cos, -sin), None, None


def _rotated(x_1HTD: torch.Tensor, cos_1TD: torch.Tensor, sin_1TD: torch.Tensor) -> torch.Tensor:
    """In the memory order [T, H, D], as attention takes it."""
    x = x_1HTD.transpose(1, 2)
    half = x.shape[-1] // 2
    cos, sin = cos_1TD[:, :, None], sin_1TD[:, :, None]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out.transpose(1, 2)


def fuse_for_cpu_training(model: nn.Module) -> None:
    """Use the functions in `model` where they compute what its own code computes."""
    fuse(model, _RMSNorm.apply, _Rotary.apply)
