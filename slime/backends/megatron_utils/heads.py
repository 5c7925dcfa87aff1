"""What the last pipeline stage computes of a row's hidden states: log-probs over a cut vocabulary, or values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import nn

from slime.training.context_parallel import LocalRow
from slime.training.logprobs import token_log_probs
from slime.training.vocab_parallel import vocab_parallel_log_probs


@dataclass(frozen=True)
class LogProbs:
    """(log_probs [K], entropy [K] or None) of a row's response tokens; with `with_logits` also logits [1, T, V].

    Args:
        rows_per_rank: of the output matrix, padding included.
        vocab_size: without padding.
    """

    rows_per_rank: int
    vocab_size: int
    temperature: float
    chunk_size: int | None
    with_entropy: bool = False
    entropy_grad: bool = False
    with_logits: bool = False

    def __call__(self, row: LocalRow, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> tuple:
        hidden_KD = hidden_TD[row.rows]
        options = {
            "temperature": self.temperature,
            "with_entropy": self.with_entropy,
            "entropy_grad": self.entropy_grad,
            "chunk_size": self.chunk_size,
            "kept": row.kept,
        }
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            out = token_log_probs(hidden_KD, weight_VD, row.labels, **options)
        else:
            first = parallel_state.get_tensor_model_parallel_rank() * self.rows_per_rank
            group = parallel_state.get_tensor_model_parallel_group()
            out = vocab_parallel_log_probs(hidden_KD, weight_VD, row.labels, first, group, **options)
        return (*out, self._logits(hidden_TD, weight_VD)) if self.with_logits else out

    def _logits(self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Of the whole vocabulary on every rank, undivided; each rank's gradient is taken from its own part."""
        logits = nn.functional.linear(hidden_TD, weight_VD)
        logits = nn.functional.pad(logits, (0, self.rows_per_rank - len(weight_VD)))
        return gather_from_tensor_model_parallel_region(logits)[None, :, : self.vocab_size]


def values(row: LocalRow, hidden_TD: torch.Tensor, weight_1D: torch.Tensor) -> tuple[torch.Tensor]:
    """(values [K]), at the positions that predict response tokens, in fp32."""
    values_K = nn.functional.linear(hidden_TD[row.rows], weight_1D).squeeze(-1)
    return (values_K.to(torch.promote_types(torch.float32, values_K.dtype)),)
