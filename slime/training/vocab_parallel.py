"""Log-prob and entropy where every rank of a group has the output matrix for a part of the vocabulary.

As `slime.training.logprobs.token_log_probs`, logits of a chunk of rows are computed, reduced and dropped; a chunk
costs two small all-reduces and backward none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from slime.training.kept_tokens import KeptTokens
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
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature)[target] and entropy per row, the same on all ranks of `group`.

    Args:
        hidden_RD: the same on all ranks; its gradient is this rank's part of a sum over the group.
        weight_VD: this rank's rows of the output matrix, the tokens `first_token`, `first_token + 1`, ... The parts
            may differ in size.
        targets_R: int64 token ids of the whole vocabulary.
        kept: top-p replay: each row's distribution is renormalised over these tokens and its target.

    Returns:
        log_probs [R] and entropy [R] (None without `with_entropy`), in fp32 (float64 for float64 inputs).
    """
    chunk_size = _chunk_rows(chunk_size, max(len(weight_VD), 1))
    logits = _Logits(temperature, first_token, targets_R - first_token, kept)
    log_probs, entropy = _VocabParallelLogProbs.apply(
        hidden_RD, weight_VD, logits, group, with_entropy and entropy_grad, chunk_size
    )
    return log_probs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Logits:
    """This rank's logits of a chunk of rows, divided by the temperature, in math precision."""

    temperature: float
    first_token: int
    targets: torch.Tensor
    """Counted from `first_token`: other ranks' are negative or too large."""
    kept: KeptTokens | None

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        z = torch.nn.functional.linear(hidden[rows], weight).to(_math_dtype(hidden.dtype))
        if self.temperature != 1.0:
            z = z / self.temperature
        return z if self.kept is None else self._restricted(z, rows)

    def _restricted(self, z: torch.Tensor, rows: slice) -> torch.Tensor:
        """-inf for what could not be sampled."""
        offsets = self.kept.offsets[rows.start : rows.stop + 1]
        owner = torch.arange(len(z)).repeat_interleave(offsets.diff()).to(z.device)
        ids = self.kept.ids[int(offsets[0]) : int(offsets[-1])] - self.first_token
        here = (ids >= 0) & (ids < z.shape[1])
        allowed = torch.zeros_like(z, dtype=torch.bool)
        allowed[owner[here], ids[here]] = True
        targets = self.targets[rows]
        here = (targets >= 0) & (targets < z.shape[1])
        allowed[here.nonzero().squeeze(-1), targets[here]] = True
        return z.masked_fill(~allowed, -torch.inf)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, logits, group, entropy_grad, chunk_size):
        rows, options = len(hidden), {"dtype": _math_dtype(hidden.dtype), "device": hidden.device}
        # Per row: log of the softmax's denominator, mean of z = logits / temperature under it, the target's z.
        log_sums, means, picked = (torch.empty(rows, **options) for _ in range(3))
        owned = (logits.targets >= 0) & (logits.targets < len(weight))
        local = torch.where(owned, logits.targets, 0)
        for part in _chunks(rows, chunk_size):
            z = logits(hidden, weight, part)
            top = z.amax(-1) if len(weight) else torch.full((len(z),), -torch.inf, **options)
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            z = z - top[:, None]
            target = z.gather(-1, local[part, None]).squeeze(-1) if len(weight) else torch.zeros_like(top)
            weights = z.exp()
            # w log w is 0 where w underflows; w * z need not be.
            mean = -torch.special.entr(weights).sum(-1)
            sums = torch.stack([weights.sum(-1), mean, torch.where(owned[part], target, 0.0)])
            dist.all_reduce(sums, group=group)
            log_sums[part] = sums[0].log() + top
            means[part] = sums[1] / sums[0] + top
            picked[part] = sums[2] + top
        entropy = log_sums - means
        ctx.save_for_backward(hidden, weight, local, owned, log_sums, entropy)
        ctx.logits, ctx.entropy_grad, ctx.chunk_size = logits, entropy_grad, chunk_size
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return picked - log_sums, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, local, owned, log_sums, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=_math_dtype(weight.dtype))
        for part in _chunks(len(hidden), ctx.chunk_size):
            probs = (ctx.logits(hidden, weight, part) - log_sums[part, None]).exp()
            # d log p_target / dz = onehot - p;  dH / dz = -p (log p + H)
            grad = probs * -grad_log_probs[part, None]
            if ctx.entropy_grad:
                surprise = torch.special.entr(probs).sub_(probs * entropy[part, None])
                grad += surprise.mul_(grad_entropy[part, None])
            if len(weight):
                grad.scatter_add_(-1, local[part, None], torch.where(owned[part], grad_log_probs[part], 0.0)[:, None])
            grad = grad.div_(ctx.logits.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            _add_matmul(grad_weight, grad.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
