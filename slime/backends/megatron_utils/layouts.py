"""How checkpoint tensors lie inside a Megatron parameter, and how that is cut over tensor-parallel ranks.

`shard` makes one rank's parameter of the checkpoint's tensors, `merge` the tensors of all ranks' parameters, bit for
bit. Both work on any number of ranks and on meta tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from slime.backends.megatron_utils.architecture import Architecture

Tensors = list[torch.Tensor]


class Layout(Protocol):
    def shard(self, hf: Tensors, rank: int, size: int, rows: int) -> torch.Tensor:
        """Parameter of `rank` of `size`; `rows` is its first dimension (the padded vocabulary needs it)."""
        ...

    def merge(self, shards: Tensors) -> Tensors:
        """The checkpoint's tensors from the parameters of all ranks, in order."""
        ...


def _joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat`, without a copy of a single part: a model has tens of thousands of them."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


class Replicated:
    """Every rank has the whole tensor."""

    def shard(self, hf, rank, size, rows):
        return hf[0]

    def merge(self, shards):
        return [shards[0]]


class Cut:
    """Ranks have consecutive parts along `dim`: 0 for column-, 1 for row-parallel layers."""

    def __init__(self, dim: int):
        self.dim = dim

    def shard(self, hf, rank, size, rows):
        return hf[0].chunk(size, self.dim)[rank]

    def merge(self, shards):
        return [_joined(shards, self.dim)]


class Turned(Cut):
    """The same after the halves of the last dimension have changed places."""

    def shard(self, hf, rank, size, rows):
        return super().shard([_turned(hf[0])], rank, size, rows)

    def merge(self, shards):
        return [_turned(whole) for whole in super().merge(shards)]


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2, -1)[::-1], -1)


class Vocabulary:
    """Rows per token, padded with zeros so that all ranks have equally many."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def shard(self, hf, rank, size, rows):
        part = hf[0][rank * rows : (rank + 1) * rows]
        return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])

    def merge(self, shards):
        return [_joined(shards)[: self.vocab_size]]


class Glu:
    """Gate above up; each rank has its part of both."""

    def shard(self, hf, rank, size, rows):
        return torch.cat([part.chunk(size)[rank] for part in hf])

    def merge(self, shards):
        pairs = [shard.chunk(2) for shard in shards]
        return [_joined(parts) for parts in zip(*pairs, strict=True)]


class FusedGlu(Glu):
    """The same where the checkpoint, too, has both in one tensor."""

    def shard(self, hf, rank, size, rows):
        return super().shard(hf[0].chunk(2), rank, size, rows)

    def merge(self, shards):
        return [torch.cat(super().merge(shards))]


class Grouped:
    """Per group of heads: its rows of each of the checkpoint's tensors. Ranks have consecutive groups.

    Works on weights [rows, ...] and biases [rows].

    Args:
        sizes: rows of a group in each tensor.
    """

    def __init__(self, groups: int, sizes: list[int]):
        self.groups = groups
        self.sizes = sizes

    def shard(self, hf, rank, size, rows):
        if self.groups % size:
            raise ValueError(f"{self.groups} groups of heads cannot be cut over {size} tensor-parallel ranks")
        parts = [part.unflatten(0, (self.groups, -1)) for part in hf]
        return torch.cat(parts, 1).chunk(size)[rank].flatten(0, 1)

    def merge(self, shards):
        whole = torch.cat(shards).unflatten(0, (self.groups, sum(self.sizes)))
        return [part.flatten(0, 1) for part in whole.split(self.sizes, 1)]


class FusedGrouped(Grouped):
    """The same where the checkpoint has all parts in one tensor, one above the other."""

    def shard(self, hf, rank, size, rows):
        return super().shard(hf[0].split([self.groups * n for n in self.sizes]), rank, size, rows)

    def merge(self, shards):
        return [torch.cat(super().merge(shards))]


class GatedQKV(Grouped):
    """Queries, keys and values where each head's query is above the gate of its output: in a group of Megatron's, all
    queries are above all gates."""

    def __init__(self, groups: int, sizes: list[int]):
        queries, *rest = sizes
        super().__init__(groups, [2 * queries, *rest])
        self.heads, self.head_dim = queries // rest[0], rest[0]

    def shard(self, hf, rank, size, rows):
        return super().shard([self._turned(hf[0], self.heads, 2), *hf[1:]], rank, size, rows)

    def merge(self, shards):
        queries, *rest = super().merge(shards)
        return [self._turned(queries, 2, self.heads), *rest]

    def _turned(self, rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
        return rows.unflatten(0, (self.groups, outer, inner, self.head_dim)).transpose(1, 2).flatten(0, 3)


def layouts_of(architecture: Architecture) -> dict[str, Layout]:
    """The layouts that name maps speak of, for one model."""
    heads, groups, head_dim = (architecture[n] for n in ("num_attention_heads", "num_query_groups", "kv_channels"))
    qkv = [heads // groups * head_dim, head_dim, head_dim]
    layouts: dict[str, Layout] = {
        "replicated": Replicated(),
        "column": Cut(0),
        "turned_column": Turned(0),
        "row": Cut(1),
        "glu": Glu(),
        "fused_glu": FusedGlu(),
        "vocab": Vocabulary(architecture.vocab_size),
        "qkv": Grouped(groups, qkv),
        "gated_qkv": GatedQKV(groups, qkv),
    }
    if any(architecture.delta_net_layers):
        keys, per_key = architecture["linear_num_key_heads"], architecture["linear_num_value_heads"]
        per_key //= keys
        key_dim, value_dim = architecture["linear_key_head_dim"], per_key * architecture["linear_value_head_dim"]
        layouts |= {
            "delta_in": Grouped(keys, [2 * (key_dim + value_dim), 2 * per_key]),
            "delta_conv": FusedGrouped(keys, [key_dim, key_dim, value_dim]),
        }
    return layouts
