"""Log-prob and entropy where every rank of a group has the output matrix for a part of the vocabulary.

As `slime.training.logprobs.token_log_probs`, logits of a chunk of rows are computed, reduced and dropped. Each rank
summarises its part of the vocabulary; two small all-reduces put the summaries together, and backward needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from slime.training.kept_tokens import KeptTokens
from slime.training.logprobs import _add_matmul, _chunk_rows, _chunks, _math_dtype, has_kernels


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
    chunk_size = _chunk_rows(chunk_size, len(weight_VD), has_kernels(hidden_RD))
    logits = _Logits(temperature, first_token, targets_R - first_token, kept)
    log_probs, entropy = _VocabParallelLogProbs.apply(
        hidden_RD, weight_VD, logits, group, with_entropy and entropy_grad, chunk_size
    )
    return log_probs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Logits:
    """This rank's logits of a chunk of rows, not divided by the temperature."""

    temperature: float
    first_token: int
    targets: torch.Tensor
    """Counted from `first_token`: other ranks' are negative or too large."""
    kept: KeptTokens | None

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden[rows], weight)
        return logits if self.kept is None else self._restricted(logits, rows)

    def _restricted(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """-inf for what could not be sampled."""
        offsets = self.kept.offsets[rows.start : rows.stop + 1]
        owner = torch.arange(len(logits)).repeat_interleave(offsets.diff()).to(logits.device)
        ids = self.kept.ids[int(offsets[0]) : int(offsets[-1])] - self.first_token
        here = (ids >= 0) & (ids < logits.shape[1])
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        allowed[owner[here], ids[here]] = True
        targets = self.targets[rows]
        here = (targets >= 0) & (targets < logits.shape[1])
        allowed[here.nonzero().squeeze(-1), targets[here]] = True
        return logits.masked_fill(~allowed, -torch.inf)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, logits, group, entropy_grad, chunk_size):
        owned = (logits.targets >= 0) & (logits.targets < len(weight))
        targets = torch.where(owned, logits.targets, -1)
        # Of this rank's part alone: log softmax of the target, entropy, log sum exp.
        options = {"dtype": _math_dtype(hidden.dtype), "device": hidden.device}
        picked, entropies = (torch.zeros(len(hidden), **options) for _ in range(2))
        log_sums = torch.full_like(picked, -torch.inf)
        for rows in _chunks(len(hidden), chunk_size) if len(weight) else []:
            _summarise(
                logits(hidden, weight, rows),
                targets[rows].clamp(min=0),
                logits.temperature,
                picked[rows],
                entropies[rows],
                log_sums[rows],
            )
        log_probs, entropy, log_sums = _combine(picked, entropies, log_sums, owned, group)
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.logits, ctx.entropy_grad, ctx.chunk_size = logits, entropy_grad, chunk_size
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=_math_dtype(weight.dtype))
        for rows in _chunks(len(hidden), ctx.chunk_size) if len(weight) else []:
            grad = _logits_gradient(
                ctx.logits(hidden, weight, rows),
                targets[rows],
                ctx.logits.temperature,
                log_sums[rows],
                grad_log_probs[rows],
                entropy[rows] if ctx.entropy_grad else None,
                grad_entropy[rows] if ctx.entropy_grad else None,
            ).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            _add_matmul(grad_weight, grad.t(), hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _summarise(logits, targets, temperature, log_probs_out, entropy_out, log_sums_out) -> None:
    """Write log softmax of the targets, entropy and log sum exp of logits / temperature, all over this part alone.

    Where nothing of it could be sampled they are not finite.
    """
    if has_kernels(logits):
        from slime.training.logit_kernels import summarise

        return summarise(logits, targets, temperature, log_probs_out, entropy_out, log_sums_out)
    z = logits.to(_math_dtype(logits.dtype)) / temperature
    log_sums_out.copy_(z.logsumexp(-1))
    log_probs = z - log_sums_out[:, None]
    log_probs_out.copy_(log_probs.gather(-1, targets[:, None]).squeeze(-1))
    entropy_out.copy_(torch.special.entr(log_probs.exp()).sum(-1))


def _combine(picked, entropies, log_sums, owned, group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropy, log-sums) over all parts.

    With a part's weight w = exp(its log-sum) and W the sum of them: H = sum over parts of w / W (H_part - log(w / W)).
    """
    top = log_sums.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    log_weight = log_sums - top
    weight = log_weight.exp()
    surprise = torch.where(weight > 0, weight * (entropies - log_weight), 0.0)
    sums = torch.stack([weight, surprise, torch.where(owned, picked + log_weight, 0.0)])
    dist.all_reduce(sums, group=group)
    log_total = sums[0].log()
    return sums[2] - log_total, sums[1] / sums[0] + log_total, top + log_total


def _logits_gradient(logits, targets, temperature, log_sums, grad_log_probs, entropy, grad_entropy) -> torch.Tensor:
    """d log p_target / dz = onehot - p;  dH / dz = -p (log p + H);  z = logits / temperature.

    Args:
        targets: -1 where the target is in another part.
        log_sums, entropy: over all parts; `entropy` and `grad_entropy` are None where the entropy has no gradient.
    """
    if has_kernels(logits):
        from slime.training.logit_kernels import gradient_

        return gradient_(logits, targets, temperature, log_sums, grad_log_probs, entropy, grad_entropy)
    probs = (logits.to(_math_dtype(logits.dtype)) / temperature - log_sums[:, None]).exp_()
    grad = probs * -grad_log_probs[:, None]
    if entropy is not None:
        # -p log p = entr(p) is 0 where p underflows; p * log p need not be.
        grad += torch.special.entr(probs).sub_(probs * entropy[:, None]).mul_(grad_entropy[:, None])
    here = torch.where(targets >= 0, grad_log_probs, 0.0)
    grad.scatter_add_(-1, targets.clamp(min=0)[:, None], here[:, None])
    return grad.div_(temperature)
