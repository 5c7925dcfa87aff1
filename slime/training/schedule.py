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
        bins = _pack(positions, limit, dp_size, balance)
        steps.append(Step(_distribute(bins, limit, dp_size, balance), len(chosen)))
    return DPSchedule(steps, dp_size)


@dataclass
class _Limit:
    """What a micro-batch may hold."""

    lengths: list[int]
    max_tokens: int | None
    max_samples: int | None

    def tokens(self, positions: list[int]) -> int:
        return sum(self.lengths[i] for i in positions)

    def allows(self, positions: list[int]) -> bool:
        if self.max_tokens is None:
            return len(positions) <= self.max_samples
        return len(positions) <= 1 or self.tokens(positions) <= self.max_tokens

    def partition(self, positions: list[int], count: int, equal_size: bool = False) -> list[list[int]]:
        parts = get_seqlen_balanced_partitions([self.lengths[i] for i in positions], count, equal_size)
        return [[positions[i] for i in part] for part in parts]


def _pack(positions: list[int], limit: _Limit, dp_size: int, balance: bool) -> list[list[int]]:
    """Bins of one step; their number is a multiple of `dp_size` and the smallest such that first fit needs."""
    bins = _first_fit_decreasing(positions, limit) if limit.max_tokens is not None else _chunks(positions, limit)
    count = -(-len(bins) // dp_size) * dp_size
    if count >= len(positions):
        return [[i] for i in positions] + [[] for _ in range(count - len(positions))]
    if balance:
        # Equal bins keep the ranks in step; they may miss the cap where the step fills it almost wholly.
        equal_size = limit.max_tokens is None and len(positions) % count == 0
        balanced = limit.partition(positions, count, equal_size)
        if all(map(limit.allows, balanced)):
            return balanced
    return _split_largest(bins, limit, count)


def _chunks(positions: list[int], limit: _Limit) -> list[list[int]]:
    return [positions[i : i + limit.max_samples] for i in range(0, len(positions), limit.max_samples)]


def _first_fit_decreasing(positions: list[int], limit: _Limit) -> list[list[int]]:
    free = np.zeros(len(positions), dtype=np.int64)
    bins: list[list[int]] = []
    for i in sorted(positions, key=lambda i: (-limit.lengths[i], i)):
        length = limit.lengths[i]
        fits = free[: len(bins)] >= length
        slot = int(fits.argmax()) if fits.any() else len(bins)
        if slot == len(bins):
            bins.append([])
            free[slot] = limit.max_tokens
        bins[slot].append(i)
        free[slot] -= length
    return bins


def _split_largest(bins: list[list[int]], limit: _Limit, count: int) -> list[list[int]]:
    """Halve the bin with the most tokens (of those with two samples or more) until there are `count`."""
    done = [b for b in bins if len(b) == 1]
    heap = [(-limit.tokens(b), b) for b in bins if len(b) > 1]
    heapq.heapify(heap)
    while len(done) + len(heap) < count:
        for half in limit.partition(sorted(heapq.heappop(heap)[1]), 2):
            if len(half) == 1:
                done.append(half)
            else:
                heapq.heappush(heap, (-limit.tokens(half), half))
    return done + [b for _, b in heap]


def _distribute(bins: list[list[int]], limit: _Limit, dp_size: int, balance: bool) -> list[list[list[int]]]:
    """[rank][micro-batch]; each rank's micro-batches in falling size, so that ranks meet with similar ones."""
    bins = sorted((sorted(b) for b in bins), key=lambda b: (-limit.tokens(b), b))
    if balance:
        parts = get_seqlen_balanced_partitions([limit.tokens(b) for b in bins], dp_size, equal_size=True)
        return [[bins[i] for i in part] for part in parts]
    return [bins[rank::dp_size] for rank in range(dp_size)]
