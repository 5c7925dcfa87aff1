"""RMS norms, rotary embeddings and SwiGLU as one Triton kernel each, for the embedded engine and both trainers.

The forward kernels round as transformers' own operations do, so trainer and engine compute alike. What a training pass
keeps for backward is its inputs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Short rows (head norms) share a program.
SHORT_ROW = 256
ROWS = 16
BLOCK = 1024
# Programs that sum up the gradient of a norm's weight, each for its own rows.
PROGRAMS = 528


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 rounded to what `dtype` holds. Compilers drop a cast there and back, hence the integers for bf16."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(X, WEIGHT, OUT, rows, eps, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = tl.arange(0, NP)
    ok = (row < rows)[:, None] & (n < N)[None, :]
    x = tl.load(X + row[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + n, mask=n < N, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    # As in transformers: the normalised row is rounded before the weight is applied.
    y = _rounded(x * scale[:, None], OUT.dtype.element_ty) * weight.to(tl.float32)[None, :]
    tl.store(OUT + row[:, None] * N + n[None, :], y.to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def _rotate(
    X, OUT, t, stride_t, stride_h, cos, sin, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr
):
    """x * cos + rotate_half(x) * sin of one token's heads, each product rounded as torch rounds it."""
    h, d = tl.arange(0, HP)[:, None], tl.arange(0, DP)[None, :]
    ok = (h < H) & (d < D)
    base = X + t * stride_t + h * stride_h
    x = tl.load(base + d, mask=ok, other=0.0).to(tl.float32)
    half = tl.load(base + (d + D // 2) % D, mask=ok, other=0.0).to(tl.float32)
    half = tl.where(d < D // 2, -half, half)
    dtype: tl.constexpr = OUT.dtype.element_ty
    y = _rounded(x * cos, dtype) + _rounded(half * sin, dtype)
    tl.store(OUT + (t * H + h) * D + d, _rounded(y, dtype).to(dtype), mask=ok)


@triton.jit
def _rope_kernel(
    Q,
    K,
    COS,
    SIN,
    Q_OUT,
    K_OUT,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,
    GP: tl.constexpr,
    DP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)[None, :]
    cos = tl.load(COS + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(SIN + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    _rotate(Q, Q_OUT, t, q_stride_t, q_stride_h, cos, sin, H, D, HP, DP)
    _rotate(K, K_OUT, t, k_stride_t, k_stride_h, cos, sin, G, D, GP, DP)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    x = x.contiguous()
    n = x.shape[-1]
    rows = x.numel() // n
    out = torch.empty_like(x)
    block = ROWS if n <= SHORT_ROW else 1
    _rms_norm_kernel[(triton.cdiv(rows, block),)](
        x, weight, out, rows, eps, N=n, NP=triton.next_power_of_2(n), ROWS=block, num_warps=4 if n < 4096 else 8
    )
    return out


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated q [1, H, T, D] and k [1, G, T, D] with cos and sin [1, T, D]; the memory order is [T, H, D]."""
    _, heads, tokens, dim = q.shape
    groups = k.shape[1]
    q_out = q.new_empty(tokens, heads, dim)
    k_out = k.new_empty(tokens, groups, dim)
    _rope_kernel[(tokens,)](
        q,
        k,
        cos.contiguous(),
        sin.contiguous(),
        q_out,
        k_out,
        q.stride(2),
        q.stride(1),
        k.stride(2),
        k.stride(1),
        H=heads,
        G=groups,
        D=dim,
        HP=triton.next_power_of_2(heads),
        GP=triton.next_power_of_2(groups),
        DP=triton.next_power_of_2(dim),
    )
    return q_out.transpose(0, 1)[None], k_out.transpose(0, 1)[None]


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


class RMSNorm(torch.autograd.Function):
    """`rms_norm` with gradients of x and weight."""

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
        block = ROWS if width <= SHORT_ROW else 1
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


class Rotary(torch.autograd.Function):
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


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of tensors of one shape, with their gradients."""

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
