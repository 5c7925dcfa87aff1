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


class QKV:
    """Per group of query heads: its queries, its key, its value. Ranks have consecutive groups.

    Works on weights [rows, hidden] and biases [rows].
    """

    def __init__(self, heads: int, groups: int, head_dim: int):
        self.groups = groups
        self.sizes = [heads // groups * head_dim, head_dim, head_dim]

    def shard(self, hf, rank, size, rows):
        if self.groups % size:
            raise ValueError(f"{self.groups} query groups cannot be cut over {size} tensor-parallel ranks")
        parts = [part.unflatten(0, (self.groups, -1)) for part in hf]
        return torch.cat(parts, 1).chunk(size)[rank].flatten(0, 1)

    def merge(self, shards):
        whole = torch.cat(shards).unflatten(0, (self.groups, sum(self.sizes)))
        return [part.flatten(0, 1) for part in whole.split(self.sizes, 1)]


def layouts_of(architecture: Architecture) -> dict[str, Layout]:
    """The layouts that name maps speak of, for one model."""
    return {
        "replicated": Replicated(),
        "column": Cut(0),
        "turned_column": Turned(0),
        "row": Cut(1),
        "glu": Glu(),
        "fused_glu": FusedGlu(),
        "vocab": Vocabulary(architecture.vocab_size),
        "qkv": QKV(architecture["num_attention_heads"], architecture["num_query_groups"], architecture["kv_channels"]),
    }
