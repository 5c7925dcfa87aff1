"""Core attention over packed rows, rotary embedding and context parallelism included, for Megatron's layer specs.

Stock Megatron has packed sequences and context parallelism only with Transformer Engine. This module needs PyTorch
alone: flash kernels or cuDNN on CUDA, SDPA per sequence on CPU, as the other trainer and the embedded engine do.

Context parallelism gathers keys and values of the whole group (backward: reduce-scatter), so that each of a rank's two
chunks attends to all tokens before it. Chunks are those of `slime.training.context_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import nn

from slime.backends.megatron_utils.rotary import RotaryTables
from slime.modeling.attention import PackedSequences, flash_varlen
from slime.training.context_parallel import ContextParallel, LocalRow


class Sequences(Protocol):
    """Causal attention within each sequence of a row: q [T, H, D], k [T, G, D], v [T, G, Dv] -> [T, H, Dv]."""

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale: float, window: int | None) -> torch.Tensor: ...


@dataclass
class PackedRow(PackedSeqParams):
    """A packed row on its way through Megatron's layers, with all that attention needs, made once per row."""

    attention: Sequences | None = None
    lengths: list[int] | None = None
    """Tokens of each sequence; None where context-parallel ranks share sequences."""
    rotary: RotaryTables | None = None
    """None where the attention layers rotate by themselves (latent attention)."""


def packed_row(
    row: LocalRow, rotary: RotaryTables | None, whole: Callable[..., Sequences] = PackedSequences
) -> PackedRow:
    """Everything about the layout of `row`.

    Args:
        whole: (lengths, device) -> attention of sequences that are not cut over context-parallel ranks.
    """
    longest = max(row.lengths) * row.cp.size
    if row.cp.size == 1:
        attention = whole(row.lengths, row.tokens.device)
    else:
        attention = ZigzagSequences(row.lengths, row.cp, row.tokens.device)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=row.cu_seqlens,
        cu_seqlens_kv=row.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        attention=attention,
        lengths=row.lengths if row.cp.size == 1 else None,
        rotary=rotary,
    )


class PackedAttention(nn.Module):
    """Takes the place of Megatron's DotProductAttention; queries and keys come without rotary embedding."""

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ):
        super().__init__()
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type=None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> torch.Tensor:
        """q [T, H, D], k [T, G, D], v [T, G, Dv] -> [T, H * Dv].

        Raises:
            ValueError: the row is not packed.
        """
        if packed_seq_params is None or packed_seq_params.attention is None:
            raise ValueError("PackedAttention computes on packed rows alone: give the model a PackedRow")
        if packed_seq_params.rotary is not None:
            query, key = packed_seq_params.rotary.rotate(query, key)
        # Not the layer's number: those of draft layers are others' as well.
        out = packed_seq_params.attention.attend(id(self), query, key, value, self.scale, None)
        return out.flatten(1)


class ZigzagSequences:
    """Attention of one context-parallel rank's part of packed sequences.

    Args:
        lengths: the rank's tokens of each sequence: two chunks of the same length.
        cp: the rank in its group.
    """

    def __init__(self, lengths: list[int], cp: ContextParallel, device: torch.device):
        self.group = cp.group
        chunks = 2 * cp.size
        own = (cp.rank, chunks - 1 - cp.rank)
        row_length, start = sum(lengths), 0
        keys: list[torch.Tensor] = []
        self.query_lengths: list[int] = []
        self.key_lengths: list[int] = []
        for length in lengths:
            chunk = length // 2
            for mine in own:
                # Chunk j is with rank min(j, chunks - 1 - j), in the second half of its part if j >= C.
                for j in range(mine + 1):
                    holder, late = min(j, chunks - 1 - j), j >= cp.size
                    first = holder * row_length + start + (chunk if late else 0)
                    keys.append(torch.arange(first, first + chunk))
                self.query_lengths.append(chunk)
                self.key_lengths.append((mine + 1) * chunk)
            start += length
        self.keys = torch.cat(keys).to(device)
        self.cu_queries, self.cu_keys = _bounds(self.query_lengths, device), _bounds(self.key_lengths, device)

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        head_dim = key_TGD.shape[-1]
        both = gather_from_sequence_parallel_region(
            torch.cat([key_TGD, value_TGD], -1), tensor_parallel_output_grad=True, group=self.group
        )
        key, value = both.index_select(0, self.keys).split([head_dim, value_TGD.shape[-1]], -1)
        if query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16):
            return flash_varlen(
                query_THD,
                key,
                value,
                self.cu_queries,
                self.cu_keys,
                max(self.query_lengths),
                max(self.key_lengths),
                scale,
                window,
            )
        return self._one_by_one(query_THD, key, value, scale)

    def _one_by_one(self, query, key, value, scale):
        repeat = query.shape[1] // key.shape[1]
        parts = zip(
            query.split(self.query_lengths),
            key.repeat_interleave(repeat, 1).split(self.key_lengths),
            value.repeat_interleave(repeat, 1).split(self.key_lengths),
            strict=True,
        )
        out = []
        for q, k, v in parts:
            mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1))
        return torch.cat(out)


def _bounds(lengths: list[int], device: torch.device) -> torch.Tensor:
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return bounds.to(device)
