"""Log-prob, entropy and their gradient over a chunk of logits as one Triton kernel each.

Written with PyTorch's operations the chunk, in fp32, goes through memory about ten times; here it is read once for
the forward pass and read and written once, in its own precision, for the backward pass. For a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _forward_kernel(
    LOGITS,
    TARGETS,
    LOG_PROBS,
    ENTROPY,
    LOG_SUMS,
    stride,
    vocab,
    temperature,
    HAS_ENTROPY: tl.constexpr,
    B: tl.constexpr,
):
    """One program per row: log softmax(z)[target], entropy and log sum exp z of z = logits / temperature."""
    row = tl.program_id(0).to(tl.int64)
    start = LOGITS + row * stride
    # In units of exp(top): the sum of weights, and of weights times z - top.
    top = -1.0e30
    total = 0.0
    mean = 0.0
    for first in range(0, vocab, B):
        v = first + tl.arange(0, B)
        z = tl.load(start + v, mask=v < vocab, other=-float("inf")).to(tl.float32) / temperature
        higher = tl.maximum(top, tl.max(z, 0))
        weight = tl.exp(z - higher)
        scale = tl.exp(top - higher)
        # 0 where the weight is 0, also for z = -inf.
        surprise = tl.sum(tl.where(weight > 0, weight * (z - higher), 0.0), 0)
        mean = scale * (mean + total * (top - higher)) + surprise
        total = scale * total + tl.sum(weight, 0)
        top = higher
    target = tl.load(TARGETS + row)
    picked = tl.load(start + target).to(tl.float32) / temperature
    log_total = tl.log(total)
    tl.store(LOG_PROBS + row, picked - top - log_total)
    tl.store(LOG_SUMS + row, top + log_total)
    if HAS_ENTROPY:
        tl.store(ENTROPY + row, log_total - mean / total)


@triton.jit
def _backward_kernel(
    LOGITS,
    TARGETS,
    LOG_SUMS,
    GRAD_LOG_PROBS,
    ENTROPY,
    GRAD_ENTROPY,
    OUT,
    stride,
    out_stride,
    vocab,
    temperature,
    HAS_ENTROPY: tl.constexpr,
    B: tl.constexpr,
):
    """One program per block of a row. d log p_target / dz = onehot - p;  dH / dz = -p (log p + H)."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * B + tl.arange(0, B)
    logits = tl.load(LOGITS + row * stride + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
    log_p = logits / temperature - tl.load(LOG_SUMS + row)
    p = tl.exp(log_p)
    weight = tl.load(GRAD_LOG_PROBS + row)
    grad = tl.where(v == tl.load(TARGETS + row), weight, 0.0) - weight * p
    if HAS_ENTROPY:
        surprise = tl.where(p > 0, p * (log_p + tl.load(ENTROPY + row)), 0.0)
        grad -= surprise * tl.load(GRAD_ENTROPY + row)
    tl.store(OUT + row * out_stride + v, (grad / temperature).to(OUT.dtype.element_ty), mask=v < vocab)


def forward(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    log_probs_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
    log_sums_N: torch.Tensor,
) -> None:
    """Write the rows' log-probs, log-sums and (unless None) entropies, fp32.

    Log-probs have the same bits with and without the entropy.
    """
    logits_NV, targets_N = _dense_rows(logits_NV), targets_N.contiguous()
    rows, vocab = logits_NV.shape
    if rows == 0:
        return
    _forward_kernel[(rows,)](
        logits_NV,
        targets_N,
        log_probs_N,
        log_probs_N if entropy_N is None else entropy_N,
        log_sums_N,
        logits_NV.stride(0),
        vocab,
        temperature,
        HAS_ENTROPY=entropy_N is not None,
        B=BLOCK,
        num_warps=8,
    )


def backward(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    log_sums_N: torch.Tensor,
    grad_log_probs_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    out_NV: torch.Tensor,
) -> None:
    """Write the gradient of the logits, in the precision of `out_NV`, which may be `logits_NV` itself.

    `entropy_N` and `grad_entropy_N` are None where the entropy has no gradient. A target of -1 is none of these
    tokens.
    """
    logits_NV, targets_N = _dense_rows(logits_NV), targets_N.contiguous()
    rows, vocab = logits_NV.shape
    if rows == 0:
        return
    grad_log_probs_N = grad_log_probs_N.contiguous()
    _backward_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        logits_NV,
        targets_N,
        log_sums_N,
        grad_log_probs_N,
        log_sums_N if entropy_N is None else entropy_N,
        log_sums_N if grad_entropy_N is None else grad_entropy_N.contiguous(),
        out_NV,
        logits_NV.stride(0),
        out_NV.stride(0),
        vocab,
        temperature,
        HAS_ENTROPY=entropy_N is not None,
        B=BLOCK,
        num_warps=8,
    )


def _dense_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    return logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
