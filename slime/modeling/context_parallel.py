"""Attention over sequences that are spread over ranks in the zigzag layout (DeepSpeed-Ulysses, arXiv 2309.14509).

Before attention every rank gives away its tokens for all heads and gets all tokens for a part of the heads; after
it the same way back. In between the shared attention runs on whole sequences, so sliding windows, any head size and
both passes are exactly those of one rank. Key and value heads fewer than ranks are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from slime.modeling.attention import PackedSequences


class ShardedSequences:
    """AttentionContext of a rank whose row holds two chunks of every sequence.

    Rank k of C holds chunks k and 2C - 1 - k of 2C equal ones; see `slime.training.context_parallel`.

    Args:
        lengths: this rank's tokens of each sequence, the same on all ranks and even.
        group: the ranks that share the sequences.
        device: where the row lives.
        packed: attends to the whole sequences.
    """

    def __init__(
        self,
        lengths: list[int],
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        packed: Callable[..., PackedSequences] = PackedSequences,
    ):
        self.group = group
        self.size = dist.get_world_size(group)
        self.packed = packed([n * self.size for n in lengths], device)
        self.order, self.inverse = (x.to(device) for x in _whole_row(lengths, self.size))

    def attend(self, layer_idx, query_THD, key_TGD, value_TGD, scale, window):
        heads, groups = query_THD.shape[1], key_TGD.shape[1]
        repeat = kv_repeat(heads, groups, self.size)
        if repeat > 1:
            key_TGD, value_TGD = (x.repeat_interleave(repeat, 1) for x in (key_TGD, value_TGD))
        parts = [x.reshape(len(x), self.size, -1) for x in (query_THD, key_TGD, value_TGD)]
        sent_CTX = torch.cat(parts, dim=-1).transpose(0, 1)
        whole = _AllToAll.apply(sent_CTX, self.group).flatten(0, 1).index_select(0, self.order)
        q, k, v = (
            piece.unflatten(-1, (-1, x.shape[-1]))
            for piece, x in zip(
                whole.split([part.shape[-1] for part in parts], dim=-1),
                (query_THD, key_TGD, value_TGD),
                strict=True,
            )
        )
        out = self.packed.attend(layer_idx, q, k, v, scale, window)
        back = out.index_select(0, self.inverse).unflatten(0, (self.size, -1))
        return _AllToAll.apply(back, self.group).transpose(0, 1).flatten(1, 2)


def kv_repeat(heads: int, kv_heads: int, size: int) -> int:
    """How often each key/value head is repeated, so that `size` ranks get the same number of them.

    Raises:
        ValueError: the ranks cannot share the heads evenly.
    """
    repeat = size // math.gcd(kv_heads, size)
    if heads % (kv_heads * repeat):
        raise ValueError(
            f"{size} context-parallel ranks cannot share {heads} attention heads, {kv_heads} key/value heads evenly"
        )
    return repeat


def _whole_row(lengths: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each token of the whole row stands in the ranks' rows one after the other, and the inverse."""
    row = sum(lengths)
    order, start = [torch.empty(0, dtype=torch.int64)], 0
    for length in lengths:
        chunk = length // 2
        for index in range(2 * size):
            rank, late = (index, 0) if index < size else (2 * size - 1 - index, chunk)
            first = rank * row + start + late
            order.append(torch.arange(first, first + chunk))
        start += length
    order = torch.cat(order)
    return order, torch.argsort(order)


class _AllToAll(torch.autograd.Function):
    """Block r of the result is what rank r had as this rank's block. Its own transpose, hence its own gradient."""

    @staticmethod
    def forward(ctx, blocks, group):
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.group), None


def _exchange(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=group)
    return out
