"""Attention over paged KV on a GPU: a paged kernel for decode tokens, variable-length flash attention for prompts."""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.attention_state import ChunkPlan, StepPlan
from slime.engine.kv_cache import KVMemory
from slime.engine.paged_kernels import SPLIT, paged_decode, store_kv
from slime.modeling.attention import flash_varlen


def splits_for(length: int) -> int:
    """Pieces that cover `length` keys, as a power of two so that few shapes occur."""
    splits = 1
    while splits * SPLIT < length:
        splits *= 2
    return splits


class DecodeInputs:
    """Decode tokens as device tensors; also the static inputs of a captured step.

    Args:
        slots: int32 [B] where each token's KV goes.
        lengths: int32 [B] keys each token sees.
        table: int32 [B, N] blocks.
        splits: pieces that cover the longest.
    """

    def __init__(self, memory: KVMemory, slots, lengths, table, splits: int):
        self.memory = memory
        self.slots = slots
        self.lengths = lengths
        self.table = table
        self.splits = splits

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        keys, values = self.memory.layers[layer_idx]
        store_kv(key_TGD, value_TGD, self.slots, keys, values)
        return paged_decode(query_THD, keys, values, self.table, self.lengths, self.splits, scale, window)


class CudaInvariantAttention:
    """AttentionContext of one step that attends for decode tokens as for prompts: as the trainer does.

    The variable-length kernel goes over a query's keys in blocks counted from the first, whatever else is computed.
    """

    def __init__(self, plan: StepPlan, memory: KVMemory):
        lengths = plan.decode_lengths
        chunks = [ChunkPlan(i, 1, int(n), plan.decode_blocks[i]) for i, n in enumerate(lengths)] + plan.chunks
        page, queries = memory.page_size, np.array([chunk.query_len for chunk in chunks])
        kv_lens = np.array([chunk.kv_len for chunk in chunks])
        where = [np.arange(chunk.kv_len) for chunk in chunks]
        slots = [c.blocks[at // page].astype(np.int64) * page + at % page for c, at in zip(chunks, where, strict=True)]
        self.memory = memory
        self.slots, self.key_slots, self.cu_queries, self.cu_keys = (
            torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(memory.device, non_blocking=True)
            for x in (
                plan.slots,
                np.concatenate(slots),
                np.concatenate([[0], queries.cumsum()]),
                np.concatenate([[0], kv_lens.cumsum()]),
            )
        )
        # A longest query of 1 would choose a kernel of its own.
        self.max_query, self.max_key = max(2, int(queries.max())), int(kv_lens.max())

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        keys, values = self.memory.layers[layer_idx]
        store_kv(key_TGD, value_TGD, self.slots, keys, values)
        k, v = (x.view(-1, *x.shape[2:]).index_select(0, self.key_slots) for x in (keys, values))
        spans = (self.cu_queries, self.cu_keys, self.max_query, self.max_key)
        return flash_varlen(query_THD, k, v, *spans, scale, window)


class CudaPagedAttention:
    """AttentionContext of one step with prompt pieces in it (decode tokens come first in the row).

    Args:
        plan: the step.
        memory: the KV tensors, in bf16 or fp16.
    """

    def __init__(self, plan: StepPlan, memory: KVMemory):
        self.memory = memory
        self.num_decode = len(plan.decode_lengths)
        self.slots = self._int32(plan.slots)
        if self.num_decode:
            self.lengths = self._int32(plan.decode_lengths)
            self.table = self._int32(plan.decode_blocks)
            self.splits = splits_for(int(plan.decode_lengths[0]))
        self.has_prefill = bool(plan.chunks)
        if self.has_prefill:
            self._prefill_inputs(plan)

    def _prefill_inputs(self, plan: StepPlan) -> None:
        page = self.memory.page_size
        queries = np.array([chunk.query_len for chunk in plan.chunks])
        lengths = np.array([chunk.kv_len for chunk in plan.chunks])
        self.cu_queries = self._int32(np.concatenate([[0], queries.cumsum()]))
        self.cu_keys = self._int32(np.concatenate([[0], lengths.cumsum()]))
        self.max_query, self.max_key = int(queries.max()), int(lengths.max())
        # Without any cached prefix the keys are the row's own, in order.
        self.key_slots = None
        if (queries != lengths).any():
            where = [np.arange(chunk.kv_len) for chunk in plan.chunks]
            slots = [
                chunk.blocks[at // page].astype(np.int64) * page + at % page
                for chunk, at in zip(plan.chunks, where, strict=True)
            ]
            self.key_slots = self._int32(np.concatenate(slots))

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        keys, values = self.memory.layers[layer_idx]
        store_kv(key_TGD, value_TGD, self.slots, keys, values)
        count, outputs = self.num_decode, []
        if count:
            decoded = paged_decode(
                query_THD[:count], keys, values, self.table, self.lengths, self.splits, scale, window
            )
            outputs.append(decoded)
        if self.has_prefill:
            if self.key_slots is None:
                k, v = key_TGD[count:], value_TGD[count:]
            else:
                k, v = (x.view(-1, *x.shape[2:]).index_select(0, self.key_slots) for x in (keys, values))
            spans = (self.cu_queries, self.cu_keys, self.max_query, self.max_key)
            outputs.append(flash_varlen(query_THD[count:], k, v, *spans, scale, window))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _int32(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(self.memory.device, non_blocking=True)
