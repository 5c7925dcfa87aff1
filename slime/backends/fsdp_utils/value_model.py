"""The critic's model: the policy's architecture with one output per token instead of the vocabulary."""

from __future__ import annotations

import torch
from torch import nn

from slime.backends.fsdp_utils.model import PolicyModel
from slime.training.batch import MicroBatch
from slime.training.context_parallel import ALONE, ContextParallel, local_row

HEAD = "value_head.weight"


class ValueModel(PolicyModel):
    """Expected return of each response token, given what stands before it.

    The head starts at zero, so an untrained critic predicts 0 everywhere. The output layer over the vocabulary is left
    out unless it is the embedding itself.
    """

    def __init__(self, model: nn.Module, gradient_checkpointing: bool = False, cp: ContextParallel = ALONE):
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        super().__init__(model, gradient_checkpointing, cp)
        if output is not None and output.weight is not embedding.weight:
            model.set_output_embeddings(None)
        weight = embedding.weight
        self.value_head = nn.Linear(weight.shape[1], 1, bias=False, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Values [R] in fp32: the head's output at the position that predicts each response token."""
        row = local_row(batch, self.cp)
        hidden_KD = self._hidden_states(row)[row.rows]
        values_K = self.value_head(hidden_KD).squeeze(-1)
        return row.gather(values_K.to(torch.promote_types(torch.float32, values_K.dtype)))

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        return {**super().hf_parameters(), HEAD: self.value_head.weight}
