"""Which DP rank computes which samples in which micro-batch: one pure function, called once per rollout.

All ranks meet in every micro-batch of a step, so every rank gets the same number of them, and the step lasts as long
as its largest ones. Importable without torch: the rollout manager builds the schedule.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime.utils.seqlen_balancing import get_seqlen_balanced_partitions

logger = logging.getLogger(__name__)


@dataclass
class Step:
    """One optimizer step."""

    micro_batches: list[list[list[int]]]
    """[rank][micro-batch] -> sample positions. Every rank has the same number of micro-batches. One is empty only if
    the step has too few samples to give each rank's micro-batch one without breaking the cap."""
    num_rollouts: int
    """Trajectories in the step, over all ranks."""


@dataclass
class DPSchedule:
    steps: list[Step]
    dp_size: int


def build_dp_schedule(
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    dp_size: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    balance: bool = True,
) -> DPSchedule:
    """Group samples into optimizer steps, pack each step into micro-batches, spread those over the DP ranks.

    A step holds `global_batch_size` trajectories in order of appearance (the last one what is left); the samples of
    one trajectory, which share a `rollout_ids` value, stay together and count once.

    Args:
        total_lengths: tokens of each sample, prompt and response.
        rollout_ids: trajectory of each sample.
        micro_batch_size: samples per micro-batch; used when `max_tokens` is None.
        max_tokens: strict cap of tokens per micro-batch. A sample longer than that gets its own, with a warning.
        balance: give micro-batches and ranks nearly equal token totals; otherwise bins go to ranks by stride.

    Raises:
        ValueError: a step has fewer samples than there are DP ranks, or sizes are missing or not positive.
    """
    if len(total_lengths) != len(rollout_ids):
        raise ValueError(f"{len(total_lengths)} total_lengths but {len(rollout_ids)} rollout_ids")
    if max_tokens is None and micro_batch_size is None:
        raise ValueError("give max_tokens or micro_batch_size")
    for name, value in (
        ("dp_size", dp_size),
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", micro_batch_size),
        ("max_tokens", max_tokens),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")

    limit = _Limit(list(total_lengths), max_tokens, micro_batch_size)
    if max_tokens is not None:
        for i, length in enumerate(total_lengths):
            if length > max_tokens:
                logger.warning(
                    "sample %d (rollout_id %s) has %d tokens, more than the cap of %d per micro-batch: it gets a "
                    "micro-batch of its own",
                    i,
                    rollout_ids[i],
                    length,
                    max_tokens,
                )

    members: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        members.setdefault(rollout_id, []).append(position)
    rollouts = list(members.values())
    steps = []
    for start in range(0, len(rollouts), global_batch_size):
        chosen = rollouts[start : start + global_batch_size]
        positions = sorted(position for rollout in chosen for position in rollout)
        if len(positions) < dp_size:
            raise ValueError(
                f"optimizer step {len(steps)} has {len(positions)} samples of {len(chosen)} rollouts, fewer than the "
                f"{dp_size} data-parallel ranks: raise the global batch size ({global_batch_size}) or use fewer ranks"
            )
        steps.append(Step(_plan_step(positions, limit, dp_size, balance), len(chosen)))
    return DPSchedule(steps, dp_size)


@dataclass
class _Limit:
    """What a micro-batch may hold."""

    lengths: list[int]
    max_tokens: int | None
    max_samples: int | None

    def tokens(self, positions: list[int]) -> int:
        return sum(self.lengths[i] for i in positions)

    def partition(self, positions: list[int], count: int, equal_size: bool) -> list[list[int]]:
        parts = get_seqlen_balanced_partitions([self.lengths[i] for i in positions], count, equal_size)
        return [[positions[i] for i in part] for part in parts]

    def pack(self, positions: list[int]) -> list[list[int]]:
        """Into as few bins as first fit (decreasing) needs."""
        if self.max_tokens is None:
            size = self.max_samples
            return [positions[i : i + size] for i in range(0, len(positions), size)]
        return _first_fit(self.falling(positions), self.lengths, self.max_tokens)

    def pack_evenly(self, positions: list[int], count: int) -> list[list[int]] | None:
        """Into exactly `count` non-empty bins of nearly equal token totals, or None where no such packing is found."""
        if len(positions) < count:
            return None
        if self.max_tokens is None:
            fits = len(positions) % count == 0 and len(positions) <= count * self.max_samples
            return self.partition(positions, count, equal_size=True) if fits else None
        # MULTIFIT (Coffman, Garey and Johnson 1978): the lowest capacity with which first fit needs `count` bins.
        order = self.falling(positions)
        bins = _first_fit(order, self.lengths, self.max_tokens)
        low, high = self.tokens(order) // count, self.max_tokens
        while len(bins) <= count and high - low > max(low // 1000, 1):
            middle = (low + high) // 2
            attempt = _first_fit(order, self.lengths, middle)
            if len(attempt) <= count:
                bins, high = attempt, middle
            else:
                low = middle
        return self.split_largest(bins, count) if len(bins) <= count else None

    def split_largest(self, bins: list[list[int]], count: int) -> list[list[int]]:
        """Halve the bin with the most tokens (of those with two samples or more) until there are `count`."""
        done = [b for b in bins if len(b) == 1]
        heap = [(-self.tokens(b), b) for b in bins if len(b) > 1]
        heapq.heapify(heap)
        while heap and len(done) + len(heap) < count:
            for half in self.partition(sorted(heapq.heappop(heap)[1]), 2, equal_size=False):
                if len(half) == 1:
                    done.append(half)
                else:
                    heapq.heappush(heap, (-self.tokens(half), half))
        return done + [b for _, b in heap]

    def falling(self, positions: list[int]) -> list[int]:
        return sorted(positions, key=lambda i: (-self.lengths[i], i))


def _first_fit(order: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Put each sample into the first bin with room for it, or into a new one. Longer ones than that stay alone."""
    free = np.zeros(len(order), dtype=np.int64)
    bins: list[list[int]] = []
    for i in order:
        fits = free[: len(bins)] >= lengths[i]
        slot = int(fits.argmax()) if bins else 0
        if not bins or not fits[slot]:
            slot = len(bins)
            bins.append([])
            free[slot] = capacity
        bins[slot].append(i)
        free[slot] -= lengths[i]
    return bins


def _plan_step(positions: list[int], limit: _Limit, dp_size: int, balance: bool) -> list[list[list[int]]]:
    """[rank][micro-batch] of one step, with as few micro-batches as packing the whole step needs."""
    bins = limit.pack(positions)
    per_rank = -(-len(bins) // dp_size)
    if balance:
        ranks = limit.partition(
            positions, dp_size, equal_size=limit.max_tokens is None and len(positions) % dp_size == 0
        )
        packed = [limit.pack_evenly(rank, per_rank) for rank in ranks]
        if None not in packed:
            return [_in_order(rank_bins, limit) for rank_bins in packed]
        # The ranks' samples do not fit so; balance whole bins instead.
        bins = limit.pack_evenly(positions, per_rank * dp_size) or bins
    bins = limit.split_largest(bins, per_rank * dp_size)
    bins = _in_order(bins + [[] for _ in range(per_rank * dp_size - len(bins))], limit)
    if not balance:
        return [bins[rank::dp_size] for rank in range(dp_size)]
    parts = get_seqlen_balanced_partitions([limit.tokens(b) for b in bins], dp_size, equal_size=True)
    return [[bins[i] for i in part] for part in parts]


def _in_order(bins: list[list[int]], limit: _Limit) -> list[list[int]]:
    """Falling in size, so that ranks meet with similar micro-batches."""
    return sorted((sorted(b) for b in bins), key=lambda b: (-limit.tokens(b), b))
