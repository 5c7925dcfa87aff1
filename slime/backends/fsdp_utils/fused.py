"""RMS norms, rotary embeddings and SwiGLU of the trained model as one Triton kernel each, forward and backward.

The forward kernels of norms and rotary embeddings are the embedded engine's, which round as transformers does; so
trainer and engine compute alike. What a pass keeps for backward is its inputs only.
"""

from __future__ import annotations

import logging
from types import MethodType

import torch
import triton
import triton.language as tl
from torch import nn

from slime.engine import fused_ops
from slime.engine.fused_ops import _rounded, rms_norm, rotary
from slime.modeling.fuse import fuse, probe

logger = logging.getLogger(__name__)

BLOCK = 1024
# Programs that sum up the gradient of a norm's weight, each for its own rows.
PROGRAMS = 528


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_backward_kernel(
    X,
    WEIGHT,
    GRAD,
    GRAD_X,
    PARTIAL,
    rows,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    program = tl.program_id(0)
    n = tl.arange(0, NP)
    weight = tl.load(WEIGHT + n, mask=n < N, other=0.0).to(tl.float32)
    total = tl.zeros((NP,), dtype=tl.float32)
    for step in range(STEPS):
        row = ((program * STEPS + step) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        ok = (row < rows)[:, None] & (n < N)[None, :]
        x = tl.load(X + row[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + row[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]
        unit = x * scale
        total += tl.sum(grad * unit, 0)
        grad = grad * weight[None, :]
        mean = (tl.sum(grad * unit, 1) / N)[:, None]
        grad_x = scale * (grad - unit * mean)
        tl.store(GRAD_X + row[:, None] * N + n[None, :], grad_x.to(GRAD_X.dtype.element_ty), mask=ok)
    tl.store(PARTIAL + program * N + n, total, mask=n < N)


@triton.jit
def _silu_parts(gate, dtype: tl.constexpr):
    """sigmoid(gate), and silu(gate) rounded as an operation of its own."""
    denominator = 1.0 + tl.exp(-gate)
    return 1.0 / denominator, _rounded(gate / denominator, dtype)


@triton.jit
def _swiglu_kernel(GATE, UP, OUT, size, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    gate = tl.load(GATE + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(UP + i, mask=i < size, other=0.0).to(tl.float32)
    _, silu = _silu_parts(gate, OUT.dtype.element_ty)
    tl.store(OUT + i, (silu * up).to(OUT.dtype.element_ty), mask=i < size)


@triton.jit
def _swiglu_backward_kernel(GATE, UP, GRAD, GRAD_GATE, GRAD_UP, size, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    gate = tl.load(GATE + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(UP + i, mask=i < size, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + i, mask=i < size, other=0.0).to(tl.float32)
    sigmoid, silu = _silu_parts(gate, GRAD_UP.dtype.element_ty)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(GRAD_UP + i, (grad * silu).to(GRAD_UP.dtype.element_ty), mask=i < size)
    tl.store(GRAD_GATE + i, grad_gate.to(GRAD_GATE.dtype.element_ty), mask=i < size)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        block = fused_ops.ROWS if width <= fused_ops.SHORT_ROW else 1
        # A power of two, so that few shapes of the kernel occur.
        steps = triton.next_power_of_2(triton.cdiv(max(rows, 1), block * PROGRAMS))
        programs = triton.cdiv(rows, block * steps)
        grad_x = torch.empty_like(x)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _rms_norm_backward_kernel[(programs,)](
            x,
            weight,
            grad,
            grad_x,
            partial,
            rows,
            ctx.eps,
            N=width,
            NP=triton.next_power_of_2(width),
            ROWS=block,
            STEPS=steps,
            num_warps=4 if width < 4096 else 8,
        )
        return grad_x, partial.sum(0).to(weight.dtype), None


class _Rotary(torch.autograd.Function):
    """x cos + rotate_half(x) sin. Both halves of cos and of sin are the same, so backward turns the other way."""

    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotary(query, key, cos, sin)

    @staticmethod
    def backward(ctx, grad_query, grad_key):
        cos, sin = ctx.saved_tensors
        grads = (g if g.stride(-1) == 1 else g.contiguous() for g in (grad_query, grad_key))
        return *rotary(*grads, cos, -sin), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _swiglu_kernel[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), B=BLOCK)
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(grad.numel(), BLOCK),)
        _swiglu_backward_kernel[grid](gate, up, grad, grad_gate, grad_up, grad.numel(), B=BLOCK)
        return grad_gate, grad_up


def fuse_for_training(model: nn.Module, swiglu: bool = True) -> None:
    """Use the kernels in `model` (on a GPU) where they compute what its own code computes.

    The engine has norms and rotary embeddings alike, but not SwiGLU: leave it out for equal bits.
    """
    with torch.no_grad():
        fuse(model, _RMSNorm.apply, _Rotary.apply)
        swiglus = [module for module in model.modules() if swiglu and _is_swiglu(module)]
    for module in swiglus:
        module.forward = MethodType(_swiglu_forward, module)


def _swiglu_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


def _is_swiglu(module: nn.Module) -> bool:
    """The module is down(silu(gate(x)) * up(x)) of three linear layers and nothing else."""
    layers = dict(module.named_children())
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    if sorted(linear) != ["down_proj", "gate_proj", "up_proj"] or set(layers) - set(linear) > {"act_fn"}:
        return False
    weight = layers["gate_proj"].weight
    x = probe(weight, 3, weight.shape[1])
    expected = module(x)
    got = layers["down_proj"](nn.functional.silu(layers["gate_proj"](x)) * layers["up_proj"](x))
    return isinstance(expected, torch.Tensor) and torch.equal(expected, got)
