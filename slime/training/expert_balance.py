"""Load balance of mixture-of-experts models: what a router chose of a micro-batch, as metrics and as a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Balance:
    """Of a micro-batch's tokens. The same numbers on all ranks that share it."""

    loss: torch.Tensor
    """Switch Transformer's auxiliary loss (arXiv 2101.03961, eq. 4-6): E sum_i f_i P_i with the share f_i of choices
    that fell on expert i and its mean router probability P_i. Balanced: 1. P has a gradient, through this rank's
    tokens: summed over the ranks that share the micro-batch it is whole."""
    max_load: torch.Tensor
    """Tokens of the busiest expert, relative to an equal share."""


def expert_balance(logits_TE: torch.Tensor, top_k: int, group: dist.ProcessGroup | None = None) -> Balance:
    """Of one layer.

    Args:
        logits_TE: of this rank's tokens, without padding; T may be 0.
        group: ranks that have the micro-batch's other tokens; a collective call then.
    """
    probs_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    experts = probs_TE.shape[-1]
    chosen = probs_TE.detach().topk(top_k, dim=-1).indices.reshape(-1)
    mine_E = probs_TE.sum(0)
    count_E = torch.zeros_like(mine_E).index_add_(0, chosen, torch.ones_like(chosen, dtype=mine_E.dtype))
    whole = torch.stack([count_E, mine_E.detach()])
    if group is not None:
        dist.all_reduce(whole, group=group)
    count_E, prob_E = whole
    choices = count_E.sum().clamp(min=1)
    share_E = count_E / choices
    weight_E = experts * share_E * top_k / choices
    mine = (weight_E * mine_E).sum()
    loss = mine + ((weight_E * prob_E).sum() - mine.detach())
    return Balance(loss, experts * share_E.max())
