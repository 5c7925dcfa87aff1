"""Log-prob and entropy where every tensor-parallel rank has the output matrix for a part of the vocabulary.

As `slime.training.logprobs.token_log_probs`, logits of a chunk of rows are computed, reduced and dropped; a chunk
costs two small all-reduces and backward none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slime.training.logprobs import _add_matmul, _chunk_rows, _chunks, _math_dtype


def vocab_parallel_log_probs(
    hidden_RD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_R: torch.Tensor,
    first_token: int,
    group: dist.ProcessGroup,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature)[target] and entropy per row, the same on all ranks of `group`.

    Args:
        hidden_RD: the same on all ranks; its gradient is this rank's part of a sum over the group.
        weight_VD: this rank's rows of the output matrix, the tokens `first_token`, `first_token + 1`, ... The parts
            may differ in size.
        targets_R: int64 token ids of the whole vocabulary.

    Returns:
        log_probs [R] and entropy [R] (None without `with_entropy`), in fp32 (float64 for float64 inputs).
    """
    chunk_size = _chunk_rows(chunk_size, max(len(weight_VD), 1))
    log_probs, entropy = _VocabParallelLogProbs.apply(
        hidden_RD, weight_VD, targets_R - first_token, group, temperature, with_entropy and entropy_grad, chunk_size
    )
    return log_probs, entropy if with_entropy else None


def _logits(hidden, weight, temperature):
    """In math precision."""
    logits = torch.nn.functional.linear(hidden, weight).to(_math_dtype(hidden.dtype))
    return logits if temperature == 1.0 else logits / temperature


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, group, temperature, entropy_grad, chunk_size):
        rows, options = len(hidden), {"dtype": _math_dtype(hidden.dtype), "device": hidden.device}
        # Per row: log of the softmax's denominator, mean of z = logits / temperature under it, the target's z.
        log_sums, means, picked = (torch.empty(rows, **options) for _ in range(3))
        owned = (targets >= 0) & (targets < len(weight))
        local = torch.where(owned, targets, 0)
        for part in _chunks(rows, chunk_size):
            z = _logits(hidden[part], weight, temperature)
            top = z.amax(-1) if len(weight) else torch.full((len(z),), -torch.inf, **options)
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            z -= top[:, None]
            target = z.gather(-1, local[part, None]).squeeze(-1) if len(weight) else torch.zeros_like(top)
            weights = z.exp()
            sums = torch.stack([weights.sum(-1), (weights * z).sum(-1), torch.where(owned[part], target, 0.0)])
            dist.all_reduce(sums, group=group)
            log_sums[part] = sums[0].log() + top
            means[part] = sums[1] / sums[0] + top
            picked[part] = sums[2] + top
        entropy = log_sums - means
        ctx.save_for_backward(hidden, weight, local, owned, log_sums, entropy)
        ctx.temperature, ctx.entropy_grad, ctx.chunk_size = temperature, entropy_grad, chunk_size
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return picked - log_sums, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, local, owned, log_sums, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=_math_dtype(weight.dtype))
        for part in _chunks(len(hidden), ctx.chunk_size):
            log_probs = _logits(hidden[part], weight, ctx.temperature).sub_(log_sums[part, None])
            probs = log_probs.exp()
            # d log p_target / dz = onehot - p;  dH / dz = -p (log p + H)
            grad = probs * -grad_log_probs[part, None]
            if ctx.entropy_grad:
                surprise = torch.special.entr(probs).sub_(probs * entropy[part, None])
                grad += surprise.mul_(grad_entropy[part, None])
            if len(weight):
                grad.scatter_add_(-1, local[part, None], torch.where(owned[part], grad_log_probs[part], 0.0)[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            _add_matmul(grad_weight, grad.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
