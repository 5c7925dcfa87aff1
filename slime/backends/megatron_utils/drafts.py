"""Layers for multi-token prediction: what they are made of, and which response tokens they predict where.

Layer k predicts the token k + 1 after the one that the model itself predicts (DeepSeek-V3, arXiv 2412.19437, section
2.2), from the hidden states before it and the embedding of the token in between. Engines draft with it. It is trained
on the rollouts' tokens, from detached hidden states, embedding and output matrix, so that the policy does not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from slime.backends.megatron_utils.norm import RMSNorm
from slime.training.batch import MicroBatch
from slime.training.context_parallel import LocalRow, local_row


def draft_block_spec(config, layer: ModuleSpec, vp_stage: int | None) -> MultiTokenPredictionBlockSubmodules | None:
    """The block of this chunk, each of whose layers contains a `layer`; None where there is none."""
    count = get_mtp_num_layers_to_build(config, vp_stage=vp_stage)
    if not count:
        return None
    spec = get_mtp_layer_spec(layer, False)
    for norm in ("enorm", "hnorm", "layer_norm"):
        setattr(spec.submodules, norm, RMSNorm)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * count)


def keep_activations(block: MultiTokenPredictionBlock) -> None:
    """Switch `--recompute-granularity full` off for draft layers: Megatron cannot recompute them over packed rows."""
    for layer in block.layers:
        layer.config = copy(layer.config)
        layer.config.recompute_granularity = None


def unnoticed(x: torch.Tensor) -> torch.Tensor:
    """`x` with a gradient of zeros: the last stage's copy of the embedding has no other, and every parameter must have
    one when gradients are reduced while others are computed."""
    return x.detach() + 0.0 * x


@dataclass(frozen=True)
class Drafting:
    """A head that also wants what the draft layers predict.

    Args:
        main: (hidden states [T, D], output matrix) -> what the loss wants of the model itself.
        log_probs: (row, hidden states, output matrix) -> (log_probs [K], ...).
        rows: per draft layer: as the row, but for what is predicted where.
    """

    main: Callable[[torch.Tensor, torch.Tensor], tuple]
    log_probs: Callable[[LocalRow, torch.Tensor, torch.Tensor], tuple]
    rows: list[LocalRow]

    def __call__(self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> tuple:
        return self.main(hidden_TD, weight_VD)

    def drafts(self, hidden_states: list[torch.Tensor], weight_VD: torch.Tensor) -> torch.Tensor:
        """[draft layers, R]: log-probs of all response tokens; 0 where a layer predicts none, the prompt being too
        short."""
        out = []
        for row, hidden_TD in zip(self.rows, hidden_states, strict=True):
            log_probs_K = self.log_probs(row, hidden_TD, weight_VD)[0]
            if row.cp.size > 1:
                out.append(row.gather(log_probs_K))
            else:
                out.append(log_probs_K.new_zeros(row.num_response_tokens).index_copy(0, row.response, log_probs_K))
        return torch.stack(out)


def draft_row(batch: MicroBatch, row: LocalRow, depth: int) -> LocalRow:
    """`row` with the places from which draft layer `depth` (1, 2, ...) predicts response tokens: `depth` tokens before
    those from which the model itself does.

    Args:
        batch: what `row` is of, padding included.
    """
    numbers = torch.zeros(len(batch.tokens), dtype=torch.int64)  # 1 + the response token, 0 for none
    start = response = 0
    for total, count in zip(batch.total_lengths, batch.response_lengths, strict=True):
        first = total - count - 1 - depth
        begin, end = max(first, 0), max(first + count, 0)
        numbers[start + begin : start + end] = torch.arange(begin - first, end - first) + response + 1
        start, response = start + total, response + count
    local = local_row(replace(batch, tokens=numbers), row.cp).tokens
    rows = local.nonzero().squeeze(-1)
    predicted = (local[rows] - 1).to(batch.tokens.device)
    labels = batch.tokens[batch.response_token_indices[predicted]]
    return replace(row, rows=rows.to(row.rows.device), labels=labels, response=predicted, kept=None)
