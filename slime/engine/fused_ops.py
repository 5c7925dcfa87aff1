"""RMS norms and rotary embeddings as one Triton kernel each.

transformers' many small operations take most of a decode step that does little work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.modeling.fuse import fuse as fuse_modules

# Short rows (head norms) share a program.
SHORT_ROW = 256
ROWS = 16


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


def fuse(model: torch.nn.Module) -> tuple[int, int]:
    """Use the kernels in `model` where they apply; returns how many norms and attention modules changed."""
    return fuse_modules(model, rms_norm, rotary)
