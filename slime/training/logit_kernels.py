"""Log-prob, entropy and their gradient from a chunk of logits, each in one pass over them, as Triton kernels.

With PyTorch's operations the logits are read and written in fp32 half a dozen times, which takes longer than the
matrix products that make them. Here they are read once, in their own dtype; the arithmetic is in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _summary_kernel(
    LOGITS, TARGETS, PICKED, ENTROPY, LOG_SUMS, stride, vocab, temperature, ENTROPY_TOO: tl.constexpr, B: tl.constexpr
):
    """One row, with a running maximum (online softmax, arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    logits = LOGITS + row * stride
    top = -float("inf")
    total = 0.0  # of exp(z - top)
    moment = 0.0  # of (z - top) exp(z - top)
    for start in range(0, vocab, B):
        v = start + tl.arange(0, B)
        z = tl.load(logits + v, mask=v < vocab, other=-float("inf")).to(tl.float32) / temperature
        new = tl.maximum(top, tl.max(z, 0))
        base = tl.where(new == -float("inf"), 0.0, new)  # nothing so far that could be sampled
        shift = tl.where(top == -float("inf"), 0.0, top - base)
        below = z - base
        weight = tl.exp(below)
        moment = tl.exp(shift) * (moment + shift * total) + tl.sum(tl.where(weight > 0, below * weight, 0.0), 0)
        total = tl.exp(shift) * total + tl.sum(weight, 0)
        top = new
    log_total = tl.log(total)
    target = tl.load(TARGETS + row)
    here = (target >= 0) & (target < vocab)
    z = tl.load(logits + tl.where(here, target, 0)).to(tl.float32) / temperature
    tl.store(PICKED + row, tl.where(here, z - top - log_total, 0.0))
    tl.store(LOG_SUMS + row, top + log_total)
    if ENTROPY_TOO:
        tl.store(ENTROPY + row, log_total - moment / total)


@triton.jit
def _gradient_kernel(
    LOGITS,
    TARGETS,
    LOG_SUMS,
    GRAD,
    ENTROPY,
    GRAD_ENTROPY,
    stride,
    vocab,
    temperature,
    ENTROPY_TOO: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * B + tl.arange(0, B)
    place = LOGITS + row * stride + v
    log_p = tl.load(place, mask=v < vocab, other=-float("inf")).to(tl.float32) / temperature - tl.load(LOG_SUMS + row)
    p = tl.exp(log_p)
    hit = v == tl.load(TARGETS + row)
    grad = tl.load(GRAD + row) * (tl.where(hit, 1.0, 0.0) - p)
    if ENTROPY_TOO:
        surprise = tl.where(p > 0, log_p + tl.load(ENTROPY + row), 0.0)
        grad -= tl.load(GRAD_ENTROPY + row) * p * surprise
    tl.store(place, (grad / temperature).to(LOGITS.dtype.element_ty), mask=v < vocab)


def summarise(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: float,
    log_probs_R: torch.Tensor,
    entropy_R: torch.Tensor | None,
    log_sums_R: torch.Tensor,
) -> None:
    """Write log softmax of the targets (0 for those outside 0 .. V - 1), entropy and log sum exp of logits /
    temperature to the last three, which are contiguous and fp32; `entropy_R` None leaves the entropy out."""
    rows, vocab = logits_RV.shape
    _summary_kernel[(rows,)](
        logits_RV,
        targets_R,
        log_probs_R,
        log_probs_R if entropy_R is None else entropy_R,
        log_sums_R,
        logits_RV.stride(0),
        vocab,
        temperature,
        ENTROPY_TOO=entropy_R is not None,
        B=BLOCK,
        num_warps=8,
    )


def gradient_(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: float,
    log_sums_R: torch.Tensor,
    grad_log_probs_R: torch.Tensor,
    entropy_R: torch.Tensor | None,
    grad_entropy_R: torch.Tensor | None,
) -> torch.Tensor:
    """Replace the logits by their gradient and return it.

    d log p_target / dz = onehot - p;  dH / dz = -p (log p + H);  z = logits / temperature.

    Args:
        targets_R: those outside 0 .. V - 1 are in another part of the vocabulary.
        log_sums_R, entropy_R: over the whole vocabulary; `entropy_R` and `grad_entropy_R` are None where the entropy
            has no gradient.
    """
    rows, vocab = logits_RV.shape
    grad = grad_log_probs_R.contiguous()
    _gradient_kernel[(rows, triton.cdiv(vocab, BLOCK))](
        logits_RV,
        targets_R,
        log_sums_R,
        grad,
        grad if entropy_R is None else entropy_R,
        grad if grad_entropy_R is None else grad_entropy_R.contiguous(),
        logits_RV.stride(0),
        vocab,
        temperature,
        ENTROPY_TOO=entropy_R is not None,
        B=BLOCK,
        num_warps=8,
    )
    return logits_RV
