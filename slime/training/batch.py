"""The packed micro-batch: what a trainer computes on, and what the losses read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from slime.training.kept_tokens import KeptTokens


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
    """int32 [N + 1] (one more entry when a trailing dummy sequence pads the row). A micro-batch without samples, which
    a rank runs to stay in step with the others, is a row of one dummy token."""
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
    opd_reverse_kl: torch.Tensor | None = None
    """[R]; old - teacher log-prob, under on-policy distillation."""
    kept: KeptTokens | None = None
    """Of the R response tokens, under top-p replay."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Per-sample lists that hooks may read (metadata, prompt, ...)."""

    @property
    def sequence_lengths(self) -> list[int]:
        """Tokens of each sequence of the row, the trailing dummy sequence included. No device synchronisation."""
        padding = self.tokens.shape[0] - sum(self.total_lengths)
        return self.total_lengths + [padding] if padding else list(self.total_lengths)

    @property
    def response_token_indices(self) -> torch.Tensor:
        """int64 [R]: position in the row of each response token. The logits that predict it stand one earlier."""
        parts, end = [torch.empty(0, dtype=torch.int64)], 0
        for total, response in zip(self.total_lengths, self.response_lengths, strict=True):
            end += total
            parts.append(torch.arange(end - response, end))
        return torch.cat(parts).to(self.tokens.device)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Flat [R] -> one tensor per sample."""
        return list(torch.split(flat, self.response_lengths))

    def to_rollout_batch(self) -> dict[str, Any]:
        """The micro-batch under the names that plug-ins know: per-sample lists, keys of the rollout batch."""
        batch = {
            **self.extra,
            "tokens": list(torch.split(self.tokens[: sum(self.total_lengths)], self.total_lengths)),
            "total_lengths": self.total_lengths,
            "response_lengths": self.response_lengths,
            "sample_indices": self.sample_indices,
            "loss_masks": self.split(self.loss_masks),
        }
        for key, flat in {
            "log_probs": self.old_log_probs,
            "ref_log_probs": self.ref_log_probs,
            "rollout_log_probs": self.rollout_log_probs,
            "values": self.values,
            "advantages": self.advantages,
            "returns": self.returns,
        }.items():
            if flat is not None:
                batch[key] = self.split(flat)
        return batch
