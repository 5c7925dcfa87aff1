"""The packed micro-batch: what a trainer computes on, and what the losses read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class MicroBatch:
    """Samples packed into one row without padding between them.

    Shapes: T = tokens of the row, N = samples, R = response tokens of all samples. Flat `[R]` tensors hold the
    response tokens of sample 0, then of sample 1, and so on.
    """

    tokens: torch.Tensor
    """int64 [T]; the samples' tokens one after the other."""
    position_ids: torch.Tensor
    """int64 [T]; restarts at 0 with each sample."""
    cu_seqlens: torch.Tensor
    """int32 [N + 1] (one more entry when a trailing dummy sequence pads the row)."""
    max_seqlen: int
    total_lengths: list[int]
    response_lengths: list[int]
    loss_masks: torch.Tensor
    """float32 [R]."""
    denominators: torch.Tensor
    """float32 [N]: what each sample's masked sum is divided by in sample-mean aggregation: the mask total of its
    whole trajectory (`rollout_id`) in the step, at least 1. So a trajectory split into K samples counts once."""
    num_rollouts: int = 1
    """Trajectories in the whole global batch of this step, over all DP ranks."""
    num_tokens: int = 1
    """Unmasked response tokens in the whole global batch of this step, over all DP ranks."""
    sample_indices: list[int] = field(default_factory=list)

    old_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Per-sample lists that hooks may read (metadata, prompt, ...)."""

    @property
    def response_token_indices(self) -> torch.Tensor:
        """int64 [R]: position in the row of each response token. The logits that predict it stand one earlier."""
        starts = self.cu_seqlens.tolist()
        parts = [
            torch.arange(start + total - response, start + total)
            for start, total, response in zip(starts, self.total_lengths, self.response_lengths)
        ]
        return torch.cat(parts).to(self.tokens.device) if parts else self.tokens.new_empty(0)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Flat [R] -> one tensor per sample."""
        return list(torch.split(flat, self.response_lengths))
