"""Matrix product on a GPU whose rows do not depend on how many there are: one tile size, no split of the sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    X,
    WEIGHT,
    OUT,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        x = tl.load(X + m[:, None] * K + start + k[None, :], mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(WEIGHT + n[None, :] * K + start + k[:, None], mask=(n < N)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    mask = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(OUT + m[:, None] * N + n[None, :], total.to(OUT.dtype.element_ty), mask=mask)


def invariant_matmul(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """x @ weight^T in fp32, rounded once."""
    x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
    (rows, width), size = x_TK.shape, weight_NK.shape[0]
    out = x_TK.new_empty(rows, size)
    if rows:
        _matmul_kernel[(triton.cdiv(rows, BLOCK_M), triton.cdiv(size, BLOCK_N))](
            x_TK,
            weight_NK,
            out,
            rows,
            N=size,
            K=width,
            BM=BLOCK_M,
            BN=BLOCK_N,
            BK=BLOCK_K,
            PRECISION="ieee",
            num_warps=8,
            num_stages=3,
        )
    return out
