"""A second, dense copy of the running sequences' KV on a CPU, so that a decode step gathers nothing.

The paged memory stays what counts: it feeds prefix sharing, and this copy can be made again from it at any time.
Here the newest tokens of all sequences stand in one column and older ones to the left of it. So a step writes one
column, the mask of a sequence never changes, and a sliding window is a range of columns.
"""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.kv_cache import KVMemory

# Free columns after the copy is made, at least.
ROOM = 64
# Columns read may be this many times the tokens that count.
MAX_PADDING = 2


class DecodeCache:
    """Keys [S, G, D, C] and values [S, G, C, D] of each layer for S sequences and C columns.

    Args:
        memory: the paged KV. The copy may become as large as it is.
    """

    def __init__(self, memory: KVMemory):
        self.memory = memory
        self.clear()

    def clear(self) -> None:
        """Forget all sequences and give the memory back."""
        self.ids = np.zeros(0, dtype=np.int64)
        """Who stands in each slot; see `RowTable.ids`."""
        self.lengths = np.zeros(0, dtype=np.int64)
        """Tokens of each, the newest included."""
        self.longest = 0
        self.columns = 0
        self.now = 0
        """Column of the newest tokens."""
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.bias = torch.empty(0)
        """[S, 1, 1, C]: -inf left of a sequence's first token."""

    def advance(self) -> bool:
        """Get ready for another step of the same sequences in the same order; False when `arrange` must do it."""
        if self.now + 1 >= self.columns:
            return False
        self.now += 1
        self.lengths += 1
        self.longest += 1
        return True

    def arrange(self, ids: np.ndarray, lengths: np.ndarray, blocks: np.ndarray) -> np.ndarray | None:
        """Get ready for a step of these sequences.

        Args:
            ids: who decodes.
            lengths: tokens of each, the newest (whose KV this step computes) included.
            blocks: [sequences, N] their blocks in the paged memory, which holds all tokens but the newest.
        Returns:
            The order in which the step must take them; None when the copy would be too large or mostly padding.
        """
        longest = int(lengths.max())
        if longest * len(ids) > MAX_PADDING * int(lengths.sum()) + ROOM * len(ids):
            self.clear()
            return None
        if not self._follow(ids, lengths, blocks) and not self._start(ids, lengths, blocks):
            self.clear()
            return None
        where = {key: slot for slot, key in enumerate(self.ids.tolist())}
        order = np.empty(len(ids), dtype=np.int64)
        for i, key in enumerate(ids.tolist()):
            order[where[key]] = i
        self.lengths = lengths[order]
        self.longest = longest
        return order

    def _follow(self, ids: np.ndarray, lengths: np.ndarray, blocks: np.ndarray) -> bool:
        """Go on with the sequences that are still there, drop those that left, add the new ones; False if no room."""
        place = {key: i for i, key in enumerate(ids.tolist())}
        found = [place.get(key, -1) for key in self.ids.tolist()]
        slots = [slot for slot, i in enumerate(found) if i >= 0]
        there = [found[slot] for slot in slots]
        now, count = self.now + 1, len(slots)
        if not count or now >= self.columns or len(ids) > len(self.bias) or int(lengths.max()) > now + 1:
            return False
        if (lengths[there] != self.lengths[slots] + 1).any():
            return False
        self.now = now
        # The last ones move into the places of those that left.
        holes = [slot for slot in range(count) if found[slot] < 0]
        movers = [slot for slot in slots if slot >= count]
        if holes:
            target, source = torch.tensor(holes), torch.tensor(movers)
            for x in (*(x for layer in self.layers for x in layer), self.bias):
                x.index_copy_(0, target, x.index_select(0, source))
            self.ids[holes] = self.ids[movers]
        new = [i for i in range(len(ids)) if i not in set(there)]
        self.ids = np.concatenate([self.ids[:count], ids[new]])
        if new:
            self._add(count, lengths[new], blocks[new])
        return True

    def _start(self, ids: np.ndarray, lengths: np.ndarray, blocks: np.ndarray) -> bool:
        """Make the copy anew, with room to grow; False when it would be too large."""
        longest = int(lengths.max())
        columns = longest + max(ROOM, longest // 2)
        memory = self.memory
        if memory.bytes_per_token(memory.layer_shapes, memory.dtype) * columns * len(ids) > memory.nbytes:
            return False
        count = len(ids)
        if count > len(self.bias) or columns > self.columns:
            slots, columns = max(count, len(self.bias)), max(columns, self.columns)
            self.layers = []
            for heads, key_dim, value_dim in memory.layer_shapes:
                keys = torch.zeros(slots, heads, key_dim, columns, dtype=memory.dtype)
                self.layers.append((keys, torch.zeros(slots, heads, columns, value_dim, dtype=memory.dtype)))
            self.bias = torch.zeros(slots, 1, 1, columns, dtype=memory.dtype)
            self.columns = columns
        self.now = longest - 1
        self.ids = ids.copy()
        self._add(0, lengths, blocks)
        return True

    def _add(self, first: int, lengths: np.ndarray, blocks: np.ndarray) -> None:
        """Copy sequences from the paged memory into the slots from `first` on."""
        page, count = self.memory.page_size, len(lengths)
        width = int(lengths.max()) - 1
        # Token of each column; columns left of a sequence repeat its first token and are masked.
        tokens = np.arange(-width, 0) + (lengths - 1)[:, None]
        shown = np.maximum(tokens, 0)
        at = np.take_along_axis(blocks, shown // page, 1).astype(np.int64) * page + shown % page
        index = torch.from_numpy(at.reshape(-1))
        span = slice(self.now - width, self.now)
        for (keys, values), (paged_keys, paged_values) in zip(self.layers, self.memory.layers, strict=True):
            k, v = (
                x.view(-1, *x.shape[2:]).index_select(0, index).view(count, width, *x.shape[2:])
                for x in (paged_keys, paged_values)
            )
            keys[first : first + count, :, :, span].copy_(k.permute(0, 2, 3, 1))
            values[first : first + count, :, span].copy_(v.transpose(1, 2))
        bias = self.bias[first : first + count, 0, 0]
        bias.zero_()
        bias[:, : self.now - width] = -torch.inf
        bias[:, span].masked_fill_(torch.from_numpy(tokens < 0), -torch.inf)

    def attend(self, layer_idx, query_BHD, key_BGD, value_BGD, scale, window) -> torch.Tensor:
        """Attention of each sequence's newest token, whose key and value are stored first; [B, H, Dv]."""
        keys, values = self.layers[layer_idx]
        size, heads, dim = query_BHD.shape
        groups, value_dim = value_BGD.shape[1:]
        now = self.now
        keys, values = keys[:size], values[:size]
        keys[..., now].copy_(key_BGD)
        values[:, :, now].copy_(value_BGD)
        first = now + 1 - (self.longest if window is None else min(window, self.longest))
        columns = slice(first, now + 1)
        # The query heads of one KV head act as its queries.
        query = (query_BHD * scale).reshape(size * groups, heads // groups, dim)
        scores = torch.bmm(query, keys.view(size * groups, dim, -1)[:, :, columns])
        scores.view(size, groups, heads // groups, -1).add_(self.bias[:size, :, :, columns])
        out = torch.bmm(torch.softmax(scores, -1), values.view(size * groups, -1, value_dim)[:, columns])
        return out.view(size, heads, value_dim)
