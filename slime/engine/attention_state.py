"""Attention over paged KV for one engine step: the context that `slime.modeling.attention` calls.

This one uses SDPA on gathered blocks and runs anywhere; `attention_cuda` has the kernels for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from slime.engine.decode_cache import DecodeCache
from slime.engine.kv_cache import KVMemory
from slime.modeling.batch_invariant import invariant_attention

# Sequences of different length share a padded call while padding costs less than another call (in elements of KV).
DECODE_WASTE = 1 << 16
# Prompt pieces share a padded call when the shortest is at least this fraction of the longest.
PREFILL_FILL = 0.7


@dataclass
class ChunkPlan:
    """A prompt piece: `query_len` row tokens from `row_start`; the last of them sees `kv_len` keys."""

    row_start: int
    query_len: int
    kv_len: int
    blocks: np.ndarray


@dataclass
class StepPlan:
    """What one model call computes, on the host. The first `len(decode_lengths)` row tokens are decode tokens."""

    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    """Where each row token's KV goes: block * page_size + offset."""
    decode_lengths: np.ndarray
    """Keys each decode token sees, itself included; longest first."""
    decode_blocks: np.ndarray
    """int32 [decode tokens, blocks of the longest]."""
    chunks: list[ChunkPlan]
    logit_rows: np.ndarray
    """Row tokens whose logits are needed."""


@dataclass
class _Group:
    """Sequences attended in one padded call."""

    rows: slice | torch.Tensor
    """Which row tokens: a slice, or indices [B * Q]."""
    size: int
    query_len: int
    blocks: torch.Tensor | None
    """Blocks [B * N] to gather; None when all keys stand in the row itself."""
    query_positions: torch.Tensor
    """[B, Q] position of each query."""
    kv_len: int
    cached: bool = False
    """Decode tokens whose keys stand in the decode cache."""


def split_by_length(lengths: list[int], waste_limit: float) -> list[tuple[int, int]]:
    """Cut lengths (longest first) into runs whose padding to the run's longest stays under `waste_limit`."""
    runs, first, waste = [], 0, 0
    for i, length in enumerate(lengths):
        waste += lengths[first] - length
        if waste > waste_limit:
            runs.append((first, i))
            first, waste = i, 0
    runs.append((first, len(lengths)))
    return runs


class PagedAttention:
    """AttentionContext of one step: writes the new KV, then attends to the cache.

    Args:
        plan: the step.
        memory: the KV tensors.
        decode_cache: holds the KV of the decode tokens' sequences, in their order.
    """

    def __init__(self, plan: StepPlan, memory: KVMemory, decode_cache: DecodeCache | None = None):
        self.memory = memory
        self.decode_cache = decode_cache
        self.device = memory.device
        self.slots = self._tensor(plan.slots)
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self.groups = self._decode_groups(plan) + self._prefill_groups(plan)
        in_order = all(isinstance(group.rows, slice) for group in self.groups)
        if in_order:
            self.groups.sort(key=lambda group: group.rows.start)
        self.gather = None if in_order else self._gather(len(plan.input_ids))
        self.all_cached = len(self.groups) == 1 and self.groups[0].cached

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        keys, values = self.memory.layers[layer_idx]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self.slots, key_TGD)
        values.view(-1, *values.shape[2:]).index_copy_(0, self.slots, value_TGD)
        if self.all_cached:
            return self.decode_cache.attend(layer_idx, query_THD, key_TGD, value_TGD, scale, window)
        outputs = [
            self._attend(layer_idx, i, group, query_THD, key_TGD, value_TGD, keys, values, scale, window)
            for i, group in enumerate(self.groups)
        ]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if self.gather is None else out.index_select(0, self.gather)

    def _gather(self, tokens: int) -> torch.Tensor:
        """Where each row token stands in the concatenated, padded outputs (of repeats, the first)."""
        every = torch.arange(tokens, device=self.device)
        rows = torch.cat([every[g.rows] if isinstance(g.rows, slice) else g.rows for g in self.groups])
        padded = torch.arange(len(rows), device=self.device)
        return torch.full_like(every, len(rows)).scatter_reduce_(0, rows, padded, "amin")

    def _attend(self, layer_idx, index, group, query_THD, key_TGD, value_TGD, keys, values, scale, window):
        """Output [B * Q, H, Dv] of one group."""
        if group.cached:
            parts = (x[: group.size] for x in (query_THD, key_TGD, value_TGD))
            return self.decode_cache.attend(layer_idx, *parts, scale, window)
        size, queries, heads = group.size, group.query_len, key_TGD.shape[1]
        repeat = query_THD.shape[1] // heads
        q = query_THD[group.rows]
        if group.blocks is None:
            k, v = (x[group.rows].view(size, queries, heads, -1).transpose(1, 2) for x in (key_TGD, value_TGD))
        else:
            k, v = (
                x.index_select(0, group.blocks).view(size, group.kv_len, heads, -1).transpose(1, 2)
                for x in (keys, values)
            )
        mask = self._mask(index, group, window, q.dtype)
        if queries == 1:
            # The query heads of one KV head act as its queries: no copy of K and V for grouped heads.
            out = F.scaled_dot_product_attention(q.view(size, heads, repeat, -1), k, v, attn_mask=mask, scale=scale)
            return out.reshape(size, heads * repeat, -1)
        q = q.view(size, queries, heads * repeat, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=repeat > 1
        )
        return out.transpose(1, 2).reshape(size * queries, heads * repeat, -1)

    def _mask(self, index: int, group: _Group, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, Q, K]; None for plain causal attention within the row. Built once for all layers."""
        if (index, window) not in self._masks:
            mask = None
            if group.blocks is not None or (window is not None and window < group.kv_len):
                age = group.query_positions[:, :, None] - torch.arange(group.kv_len, device=self.device)
                hidden = age < 0
                if window is not None:
                    hidden |= age >= window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
                mask = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
            self._masks[index, window] = mask
        return self._masks[index, window]

    def _decode_groups(self, plan: StepPlan) -> list[_Group]:
        lengths = plan.decode_lengths
        if not len(lengths):
            return []
        if self.decode_cache is not None:
            return [_Group(slice(0, len(lengths)), len(lengths), 1, None, self.slots[:0], 0, cached=True)]
        heads, key_dim, value_dim = self.memory.layer_shapes[0]
        page = self.memory.page_size
        groups = []
        for first, end in split_by_length(lengths.tolist(), DECODE_WASTE / (heads * (key_dim + value_dim))):
            count = -(-int(lengths[first]) // page)
            blocks = self._tensor(plan.decode_blocks[first:end, :count].reshape(-1))
            positions = self._tensor(lengths[first:end] - 1)[:, None]
            groups.append(_Group(slice(first, end), end - first, 1, blocks, positions, count * page))
        return groups

    def _prefill_groups(self, plan: StepPlan) -> list[_Group]:
        chunks = sorted(plan.chunks, key=lambda c: (c.kv_len == c.query_len, c.query_len, c.kv_len), reverse=True)
        groups = []
        while chunks:
            head, members = chunks[0], []
            for chunk in chunks:
                in_row = (chunk.kv_len == chunk.query_len) == (head.kv_len == head.query_len)
                alike = PREFILL_FILL * head.query_len <= chunk.query_len
                alike &= PREFILL_FILL * head.kv_len <= chunk.kv_len <= head.kv_len
                if not (in_row and alike):
                    break
                members.append(chunk)
            chunks = chunks[len(members) :]
            groups.append(self._prefill_group(members))
        return groups

    def _prefill_group(self, members: list[ChunkPlan]) -> _Group:
        head, queries = members[0], members[0].query_len
        offsets = np.stack([np.minimum(np.arange(queries), c.query_len - 1) for c in members])
        if len(members) == 1:
            rows = slice(head.row_start, head.row_start + queries)
        else:
            rows = self._tensor((offsets + np.array([[c.row_start] for c in members])).reshape(-1))
        positions = self._tensor(offsets + np.array([[c.kv_len - c.query_len] for c in members]))
        if head.kv_len == queries:
            return _Group(rows, len(members), queries, None, positions, queries)
        count = -(-head.kv_len // self.memory.page_size)
        blocks = np.zeros((len(members), count), dtype=np.int64)
        for i, chunk in enumerate(members):
            used = -(-chunk.kv_len // self.memory.page_size)
            blocks[i, :used] = chunk.blocks[:used]
        blocks = self._tensor(blocks.reshape(-1))
        return _Group(rows, len(members), queries, blocks, positions, count * self.memory.page_size)

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)).to(self.device)


class InvariantPagedAttention(PagedAttention):
    """The same, each query's result in an order of summation that depends on its own sequence alone."""

    def _attend(self, layer_idx, index, group, query_THD, key_TGD, value_TGD, keys, values, scale, window):
        size, queries, heads = group.size, group.query_len, key_TGD.shape[1]
        q = query_THD[group.rows].view(size, queries, query_THD.shape[1], -1)
        if group.blocks is None:
            k, v = (x[group.rows].view(size, queries, heads, -1) for x in (key_TGD, value_TGD))
        else:
            k, v = (x.index_select(0, group.blocks).view(size, group.kv_len, heads, -1) for x in (keys, values))
        return invariant_attention(q, k, v, group.query_positions, scale, window).flatten(0, 1)


class ShapeProbe:
    """AttentionContext that records (G, Dk, Dv) of each layer; the answer is zeros."""

    def __init__(self):
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        self.shapes[layer_idx] = (key_TGD.shape[1], key_TGD.shape[2], value_TGD.shape[2])
        return query_THD.new_zeros(*query_THD.shape[:2], value_TGD.shape[2])
