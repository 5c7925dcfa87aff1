"""Context parallelism: how a packed row is cut over the ranks of a group, in one place for every trainer.

Layout (zigzag): a sequence of L tokens is padded to 2 C chunks of ceil(L / 2C) tokens and rank k of C holds chunks k
and 2C - 1 - k, so that causal attention costs every rank the same. A rank's row is its two chunks of sequence 0, then
those of sequence 1, and so on. Padding stands at the end of a sequence, where causality hides it from real tokens.

Only the model's forward works on such rows. `LocalRow.gather` puts the log-probs of all ranks together again, so
losses, advantages, sequence statistics and plug-ins see whole samples on every rank and know nothing of the layout:
`loss(gather(local log-probs))` is the same number on all ranks of the group, and its gradient through a rank's own
tokens is that rank's share. Summed over data- and context-parallel ranks the shares are the gradient of the global
batch; a backend that averages over both multiplies the loss by dp_size * cp_size. Metrics are whole on every
context-parallel rank: they are summed over data-parallel ranks only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from slime.training.batch import MicroBatch
from slime.training.kept_tokens import KeptTokens


@dataclass(frozen=True)
class ContextParallel:
    """Where this process stands in its context-parallel group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Needed to gather; None suffices for the layout alone."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ContextParallel:
        return cls(dist.get_rank(group), dist.get_world_size(group), group)


ALONE = ContextParallel()


def chunk_length(total_length: int, cp_size: int) -> int:
    """Tokens of each of the 2 * cp_size chunks of a sequence, padding included."""
    return -(-total_length // (2 * cp_size))


def local_spans(total_length: int, cp: ContextParallel) -> tuple[tuple[int, int], tuple[int, int]]:
    """[start, end) of the rank's two chunks in the padded sequence. With one rank: the sequence and nothing."""
    if cp.size == 1:
        return (0, total_length), (total_length, total_length)
    chunk = chunk_length(total_length, cp.size)
    late = 2 * cp.size - 1 - cp.rank
    return (cp.rank * chunk, (cp.rank + 1) * chunk), (late * chunk, (late + 1) * chunk)


def logit_spans(
    total_length: int, response_length: int, cp: ContextParallel
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rank's positions [start, end) whose logits predict response tokens; (0, 0) where a chunk has none.

    The logits at position i predict token i + 1, so those of the response stand at [prompt - 1, total - 1).
    """
    first, last = total_length - response_length - 1, total_length - 1
    clipped = ((max(start, first), min(end, last)) for start, end in local_spans(total_length, cp))
    early, late = ((start, end) if start < end else (0, 0) for start, end in clipped)
    return early, late


def response_spans(
    total_length: int, response_length: int, cp: ContextParallel
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The same as spans of response tokens, counted from 0."""
    shift = total_length - response_length - 1
    early, late = (
        (start - shift, end - shift) if start < end else (0, 0)
        for start, end in logit_spans(total_length, response_length, cp)
    )
    return early, late


@dataclass(frozen=True)
class LocalRow:
    """What one rank computes of a micro-batch.

    Shapes: T = tokens of the rank's row (padding included), N = sequences, K = response tokens whose logits are in it
    (possibly 0), R = response tokens of the whole micro-batch.
    """

    tokens: torch.Tensor
    """int64 [T]; padding is token 0."""
    position_ids: torch.Tensor
    """int64 [T]; positions in the whole sequence, going on over its padding."""
    lengths: list[int]
    """[N]; the rank's tokens of each sequence, sum T. Each is two chunks of the same length (one whole sequence
    without context parallelism). The same on all ranks; `cp.size` times it is the padded sequence."""
    cu_seqlens: torch.Tensor
    """int32 [N + 1]; bounds of the sequences in the padded whole row."""
    rows: torch.Tensor
    """int64 [K]; positions in the rank's row whose logits predict response tokens."""
    labels: torch.Tensor
    """int64 [K]; those tokens."""
    response: torch.Tensor
    """int64 [K]; where they stand among the micro-batch's R response tokens."""
    num_response_tokens: int
    """R."""
    cp: ContextParallel
    kept: KeptTokens | None
    """Of the K response tokens, under top-p replay."""

    def slice(self, x_R: torch.Tensor) -> torch.Tensor:
        """The rank's part [K] of values of all response tokens."""
        return x_R if self.cp.size == 1 else x_R[self.response]

    def gather(self, x_K: torch.Tensor) -> torch.Tensor:
        """Values of all response tokens [R] from every rank's part; a collective call of the group.

        Bit-exact. The gradient of a rank's part is the gradient of its tokens; nothing is sent in backward.
        """
        if self.cp.size == 1:
            return x_K
        return _Gather.apply(x_K, self.response, self.num_response_tokens, self.cp.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, positions, size, group):
        ctx.save_for_backward(positions)
        whole = part.new_zeros(size).index_copy_(0, positions, part)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        (positions,) = ctx.saved_tensors
        return grad[positions], None, None, None


def local_row(mb: MicroBatch, cp: ContextParallel = ALONE) -> LocalRow:
    """The part of `mb` that rank `cp.rank` computes, on the device of `mb`."""
    device = mb.tokens.device
    padding = len(mb.sequence_lengths) - len(mb.total_lengths)
    responses = mb.response_lengths + [0] * padding
    source, positions, rows, labels, response = [], [], [], [], []
    lengths: list[int] = []
    sequence_start = row_start = response_start = 0
    for total, count in zip(mb.sequence_lengths, responses, strict=True):
        spans = local_spans(total, cp)
        shift = total - count - 1
        for (start, end), (first, last) in zip(spans, logit_spans(total, count, cp), strict=True):
            span = torch.arange(start, end)
            positions.append(span)
            source.append(torch.where(span < total, span + sequence_start, -1))
            picked = torch.arange(first, last)
            rows.append(picked - start + row_start)
            labels.append(picked + 1 + sequence_start)
            response.append(picked - shift + response_start)
            row_start += end - start
        lengths.append(sum(end - start for start, end in spans))
        sequence_start += total
        response_start += count
    source_T, response_K = torch.cat(source).to(device), torch.cat(response)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0) * cp.size
    return LocalRow(
        tokens=torch.where(source_T >= 0, mb.tokens[source_T.clamp(min=0)], 0),
        position_ids=torch.cat(positions).to(device),
        lengths=lengths,
        cu_seqlens=cu_seqlens.to(device),
        rows=torch.cat(rows).to(device),
        labels=mb.tokens[torch.cat(labels).to(device)],
        response=response_K.to(device),
        num_response_tokens=response_start,
        cp=cp,
        kept=None if mb.kept is None else mb.kept.select(response_K),
    )


def places(mb: MicroBatch, cp: ContextParallel = ALONE) -> torch.Tensor:
    """int64 [T] on the host, per token of the rank's row: 1 + its place among the samples' tokens; 0 is padding."""
    real = sum(mb.total_lengths)
    numbers = torch.zeros(len(mb.tokens), dtype=torch.int64)
    numbers[:real] = torch.arange(1, real + 1)
    return local_row(replace(mb, tokens=numbers), cp).tokens


def slice_log_prob_with_cp(
    log_prob: torch.Tensor, total_length: int, response_length: int, cp: ContextParallel = ALONE
) -> torch.Tensor:
    """A sample's response values [response_length] -> the rank's part.

    Plug-ins get whole samples and need neither this nor its inverse: without `cp` both change nothing.

    Raises:
        ValueError: the tensor does not have one value per response token.
    """
    if len(log_prob) != response_length:
        raise ValueError(f"{len(log_prob)} values for {response_length} response tokens: this is no whole sample")
    (a, b), (c, d) = response_spans(total_length, response_length, cp)
    return torch.cat([log_prob[a:b], log_prob[c:d]])


def all_gather_with_cp(
    tensor: torch.Tensor, total_length: int, response_length: int, cp: ContextParallel = ALONE
) -> torch.Tensor:
    """The inverse of `slice_log_prob_with_cp`; a collective call of `cp.group`. Gradient as in `LocalRow.gather`.

    Raises:
        ValueError: the tensor is not the rank's part of the sample.
    """
    spans = response_spans(total_length, response_length, cp)
    positions = torch.cat([torch.arange(start, end) for start, end in spans]).to(tensor.device)
    if len(tensor) != len(positions):
        raise ValueError(
            f"rank {cp.rank} of {cp.size} has {len(tensor)} values of a sample with {response_length} response "
            f"tokens, but its part are {len(positions)}"
        )
    if cp.size == 1:
        return tensor
    return _Gather.apply(tensor, positions, response_length, cp.group)
