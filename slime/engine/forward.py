"""The one way the engine calls a model."""

from __future__ import annotations

import torch


def model_logits(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    context,
    logits_to_keep: torch.Tensor | int,
) -> torch.Tensor:
    """Logits [N, V] of the row tokens `logits_to_keep` (0: all)."""
    # A ready-made mask (which the attention ignores) keeps transformers from looking for packed sequences in the
    # positions: that costs time and a synchronisation.
    mask = torch.empty(1, 1, 1, 1, device=input_ids.device)
    return model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=mask,
        attention_context=context,
        logits_to_keep=logits_to_keep,
        use_cache=False,
    ).logits[0]
