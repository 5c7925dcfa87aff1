"""Load balance of mixture-of-experts models: what their routers chose, as metrics and as an auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Balance:
    """Of the tokens of one forward pass, over all its MoE layers."""

    loss: torch.Tensor
    """Switch Transformer's auxiliary loss (arXiv 2101.03961, eq. 4-6), mean over layers: E sum_i f_i P_i with the
    share f_i of choices that fell on expert i and its mean router probability P_i. Balanced: 1. P has a gradient."""
    max_load: torch.Tensor
    """Tokens of the busiest expert of any layer, relative to an equal share."""


class RouterTap:
    """Records the router logits of a transformers MoE model. Nothing of a model without routers."""

    def __init__(self, model: PreTrainedModel):
        self._top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        self._logits: list[torch.Tensor] | None = None
        self.found = False
        for inner in model.modules():
            if not isinstance(inner, PreTrainedModel) or not inner._can_record_outputs:
                continue
            recorder = inner._can_record_outputs.get("router_logits")
            if recorder is not None:
                self._watch(inner, recorder.target_class, recorder.index)

    def _watch(self, model: nn.Module, kind: type[nn.Module], index: int) -> None:
        def record(module, inputs, output) -> None:
            if self._logits is not None:
                logits = output[index] if isinstance(output, tuple) else output
                self._logits.append(logits.reshape(-1, logits.shape[-1]))

        for module in model.modules():
            if isinstance(module, kind):
                module.register_forward_hook(record)
                self.found = True

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """The list that a forward pass fills: [tokens, experts] per layer. Recomputation in backward adds nothing."""
        self._logits = logits = []
        try:
            yield logits
        finally:
            self._logits = None

    def balance(self, logits: list[torch.Tensor]) -> Balance:
        """Of what was recorded."""
        losses, loads = [], []
        for logits_TE in logits:
            probs_TE = logits_TE.float().softmax(-1)
            experts = probs_TE.shape[-1]
            chosen = probs_TE.detach().topk(self._top_k, dim=-1).indices.reshape(-1)
            share_E = torch.zeros(experts, device=chosen.device).index_add_(
                0, chosen, torch.ones_like(chosen, dtype=torch.float32)
            ) / len(chosen)
            losses.append(experts * (share_E * probs_TE.mean(0)).sum())
            loads.append(experts * share_E.max())
        return Balance(torch.stack(losses).mean(), torch.stack(loads).max())
