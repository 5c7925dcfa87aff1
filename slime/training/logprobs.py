"""Log-prob and entropy of response tokens without ever holding `tokens x vocabulary` in fp32.

The logits of a chunk of rows are computed, reduced and dropped; backward computes them again. Memory is bounded by
the chunk, whatever the sequence length and vocabulary.
"""

from __future__ import annotations

import torch

from slime.training.kept_tokens import KeptTokens

CHUNK_ELEMENTS = 2**27
"""Default size of a chunk of logits (rows x vocabulary): 512 MiB in fp32."""
KERNEL_CHUNK_ELEMENTS = 2**29
"""The same for the GPU's kernels, which need no fp32 copies: 1 GiB in bf16."""


def token_log_probs(
    hidden_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_R: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_size: int | None = None,
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature)[target] and entropy per row, from the hidden states that predict the targets.

    Logits are computed in the dtype of `hidden_RD` and everything after them in fp32 (float64 for float64 inputs).
    The weight gradient is accumulated over chunks in fp32.

    Args:
        hidden_RD: last hidden states one position before each target.
        weight_VD: output embedding; in the dtype of `hidden_RD`.
        targets_R: int64.
        bias: [V] of the output layer, if it has one.
        with_entropy: also return -sum p log p of the temperature-scaled distribution.
        entropy_grad: the entropy has a gradient. Off, it costs nothing in backward.
        chunk_size: rows per chunk; None or below 1 picks it by the vocabulary (`CHUNK_ELEMENTS`).
        kept: top-p replay: each row's distribution is renormalised over these tokens and its target.

    Returns:
        log_probs [R] and entropy [R] (None without `with_entropy`), fp32.
    """
    kernels = has_kernels(hidden_RD)
    chunk_size = _chunk_rows(chunk_size, len(weight_VD), kernels)
    log_probs, entropy = _HeadLogProbs.apply(
        hidden_RD,
        weight_VD,
        bias,
        targets_R,
        temperature,
        with_entropy,
        with_entropy and entropy_grad,
        chunk_size,
        kept,
        kernels,
    )
    return log_probs, entropy if with_entropy else None


def log_probs_from_logits(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_size: int | None = None,
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_log_probs` where the logits are there already; they are kept in their dtype only."""
    chunk_size = _chunk_rows(chunk_size, logits_RV.shape[1])
    log_probs, entropy = _LogitsLogProbs.apply(
        logits_RV, targets_R, temperature, with_entropy, with_entropy and entropy_grad, chunk_size, kept
    )
    return log_probs, entropy if with_entropy else None


def has_kernels(hidden: torch.Tensor) -> bool:
    """Whether `slime.training.logit_kernels` do what follows from these hidden states."""
    return hidden.is_cuda and hidden.dtype != torch.float64


def _chunk_rows(chunk_size: int | None, vocab_size: int, kernels: bool = False) -> int:
    if chunk_size is not None and chunk_size > 0:
        return chunk_size
    return max((KERNEL_CHUNK_ELEMENTS if kernels else CHUNK_ELEMENTS) // max(vocab_size, 1), 1)


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A fresh tensor in math precision; at temperature 1 the kernel widens on the fly."""
    dtype = _math_dtype(logits.dtype)
    if temperature != 1.0:
        logits = logits.to(dtype, copy=True).div_(temperature)
    return torch.log_softmax(logits, -1, dtype=dtype)


def _restricted(logits: torch.Tensor, kept: KeptTokens | None, rows: slice, targets: torch.Tensor) -> torch.Tensor:
    return logits if kept is None else kept.restrict(logits, rows.start, targets[rows])


def _forward_chunk(logits, targets, temperature, log_probs_out, entropy_out, log_sums_out=None) -> None:
    """Write one chunk's rows; `entropy_out` None leaves the entropy out. With `log_sums_out` by the GPU's kernel."""
    if log_sums_out is not None:
        from slime.training.logit_kernels import summarise

        return summarise(logits, targets, temperature, log_probs_out, entropy_out, log_sums_out)
    log_probs = _log_softmax(logits, temperature)
    log_probs_out.copy_(log_probs.gather(-1, targets[:, None]).squeeze(-1))
    if entropy_out is not None:
        entropy_out.copy_(torch.special.entr(log_probs.exp_()).sum(-1))


def _backward_chunk(
    logits, targets, temperature, grad_log_probs, entropy, grad_entropy, log_sums=None
) -> torch.Tensor:
    """Gradient of one chunk's logits, in math precision; `grad_entropy` None where the entropy has none. With
    `log_sums` by the GPU's kernel, in the place and dtype of the logits.

    d log p_target / dz = onehot - p;  dH / dz = -p (log p + H);  z = logits / temperature.
    """
    if log_sums is not None:
        from slime.training.logit_kernels import gradient_

        return gradient_(logits, targets, temperature, log_sums, grad_log_probs, entropy, grad_entropy)
    probs = _log_softmax(logits, temperature).exp_()
    if grad_entropy is None:
        grad = probs.mul_(-grad_log_probs[:, None])
    else:
        # -p log p = entr(p) is 0 where p underflows; p * log p need not be.
        grad = torch.special.entr(probs).sub_(probs * entropy[:, None]).mul_(grad_entropy[:, None])
        grad.sub_(probs.mul_(grad_log_probs[:, None]))
    grad.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    return grad if temperature == 1.0 else grad.div_(temperature)


def _outputs(inputs: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"dtype": _math_dtype(inputs.dtype), "device": inputs.device}
    rows = inputs.shape[0]
    return torch.empty(rows, **options), torch.empty(rows if with_entropy else 0, **options)


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, with_entropy, entropy_grad, chunk_size, kept, kernels
    ):
        log_probs, entropy = _outputs(hidden, with_entropy)
        log_sums = torch.empty_like(log_probs) if kernels else None
        for rows in _chunks(hidden.shape[0], chunk_size):
            logits = _restricted(torch.nn.functional.linear(hidden[rows], weight, bias), kept, rows, targets)
            out = entropy[rows] if with_entropy else None
            sums = log_sums[rows] if kernels else None
            _forward_chunk(logits, targets[rows], temperature, log_probs[rows], out, sums)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, log_sums)
        ctx.temperature, ctx.entropy_grad, ctx.chunk_size, ctx.kept = temperature, entropy_grad, chunk_size, kept
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, targets, entropy, log_sums = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        dtype = _math_dtype(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if want_bias else None
        for rows in _chunks(hidden.shape[0], ctx.chunk_size):
            grad = _backward_chunk(
                _restricted(torch.nn.functional.linear(hidden[rows], weight, bias), ctx.kept, rows, targets),
                targets[rows],
                ctx.temperature,
                grad_log_probs[rows],
                entropy[rows] if ctx.entropy_grad else None,
                grad_entropy[rows] if ctx.entropy_grad else None,
                None if log_sums is None else log_sums[rows],
            )
            if want_bias:
                grad_bias += grad.sum(0, dtype=dtype)
            grad = grad.to(hidden.dtype)
            if want_hidden:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if want_weight:
                _add_matmul(grad_weight, grad.t(), hidden[rows])
        if want_weight:
            grad_weight = grad_weight.to(weight.dtype)
        if want_bias:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _add_matmul(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where `total` may be wider than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class _LogitsLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, with_entropy, entropy_grad, chunk_size, kept):
        log_probs, entropy = _outputs(logits, with_entropy)
        for rows in _chunks(logits.shape[0], chunk_size):
            out = entropy[rows] if with_entropy else None
            _forward_chunk(
                _restricted(logits[rows], kept, rows, targets), targets[rows], temperature, log_probs[rows], out
            )
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature, ctx.entropy_grad, ctx.chunk_size, ctx.kept = temperature, entropy_grad, chunk_size, kept
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, targets, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits.shape[0], ctx.chunk_size):
            grad_logits[rows] = _backward_chunk(
                _restricted(logits[rows], ctx.kept, rows, targets),
                targets[rows],
                ctx.temperature,
                grad_log_probs[rows],
                entropy[rows] if ctx.entropy_grad else None,
                grad_entropy[rows] if ctx.entropy_grad else None,
            )
        return grad_logits, None, None, None, None, None, None
