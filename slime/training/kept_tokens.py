"""Top-p replay: the tokens that sampling could have given, so that log-probs are those of what was sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeptTokens:
    """For each of R response tokens, the vocabulary entries that top-p (or top-k) left to choose from."""

    ids: torch.Tensor
    """int64 [M], on the device of the logits: the sets of all tokens one after the other."""
    offsets: torch.Tensor
    """int64 [R + 1], in host memory: token r has `ids[offsets[r]:offsets[r + 1]]`. The token itself always counts."""

    @classmethod
    def join(cls, ids: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], device) -> KeptTokens:
        """From one (ids, offsets) pair per sample."""
        counts = [o.diff() for o in offsets]
        return cls(torch.cat([torch.zeros(0, dtype=torch.int64), *ids]).long().to(device), _offsets(counts))

    def select(self, positions: torch.Tensor) -> KeptTokens:
        """Those of some response tokens; `positions` int64 [K] in host memory."""
        counts = self.offsets.diff()[positions]
        offsets = _offsets([counts])
        source = torch.arange(int(offsets[-1])) + (self.offsets[positions] - offsets[:-1]).repeat_interleave(counts)
        return KeptTokens(self.ids[source.to(self.ids.device)], offsets)

    def restrict(self, logits_NV: torch.Tensor, start: int, targets_N: torch.Tensor) -> torch.Tensor:
        """-inf for what could not be sampled at response tokens `start`, `start + 1`, ..."""
        end = start + logits_NV.shape[0]
        counts = self.offsets[start : end + 1].diff()
        rows = torch.arange(len(counts)).repeat_interleave(counts).to(logits_NV.device, non_blocking=True)
        ids = self.ids[int(self.offsets[start]) : int(self.offsets[end])]
        allowed = torch.zeros_like(logits_NV, dtype=torch.bool)
        allowed[rows, ids] = True
        allowed.scatter_(1, targets_N[:, None], True)
        return logits_NV.masked_fill(~allowed, -torch.inf)


def _offsets(counts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), *counts]).long().cumsum(0)
