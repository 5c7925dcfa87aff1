"""Which DP rank computes which samples in which micro-batch: one pure function, called once per rollout.

All ranks meet in every micro-batch of a step, so every rank gets the same number of them, and the step lasts as long
as its largest ones. Importable without torch: the rollout manager builds the schedule.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    global_batch_size: int | None = None,
    num_steps: int | None = None,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    balance: bool = True,
    costs: Sequence[int] | None = None,
    micro_batch_multiple: int = 1,
) -> DPSchedule:
    """Group samples into optimizer steps, pack each step into micro-batches, spread those over the DP ranks.

    A step holds `global_batch_size` trajectories in order of appearance (the last one what is left), or a `num_steps`
    part of all of them. The samples of one trajectory, which share a `rollout_ids` value, stay together and count
    once.

    Args:
        total_lengths: tokens of each sample, prompt and response.
        rollout_ids: trajectory of each sample.
        global_batch_size, num_steps: one of the two.
        micro_batch_size: samples per micro-batch; used when `max_tokens` is None.
        max_tokens: strict cap of tokens per micro-batch. A sample longer than that gets its own, with a warning.
        balance: give ranks nearly equal costs, too; otherwise evenly filled micro-batches go to ranks by stride.
        costs: what to balance, per sample: FLOPs, for example. None: tokens.
        micro_batch_multiple: the count of a rank's micro-batches is a multiple of it (interleaved pipelines).

    Raises:
        ValueError: a step has fewer samples than there are DP ranks, or sizes are missing or not positive.
    """
    for name, given in (("rollout_ids", rollout_ids), ("costs", costs)):
        if given is not None and len(total_lengths) != len(given):
            raise ValueError(f"{len(total_lengths)} total_lengths but {len(given)} {name}")
    if max_tokens is None and micro_batch_size is None:
        raise ValueError("give max_tokens or micro_batch_size")
    if (global_batch_size is None) == (num_steps is None):
        raise ValueError("give global_batch_size or num_steps, and not both")
    for name, value in (
        ("dp_size", dp_size),
        ("global_batch_size", global_batch_size),
        ("num_steps", num_steps),
        ("micro_batch_size", micro_batch_size),
        ("max_tokens", max_tokens),
        ("micro_batch_multiple", micro_batch_multiple),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")

    lengths = list(total_lengths)
    limit = _Limit(lengths, lengths if costs is None else list(costs), max_tokens, micro_batch_size)
    for i, length in enumerate(lengths if max_tokens is not None else []):
        if length > max_tokens:
            logger.warning(
                "sample %d (rollout_id %s) has %d tokens, more than the cap of %d per micro-batch: it gets a "
                "micro-batch of its own",
                i,
                rollout_ids[i],
                length,
                max_tokens,
            )
    steps = []
    for chosen in _split_into_steps(rollout_ids, global_batch_size, num_steps):
        positions = sorted(position for rollout in chosen for position in rollout)
        if len(positions) < dp_size:
            raise ValueError(
                f"optimizer step {len(steps)} has {len(positions)} samples of {len(chosen)} rollouts, fewer than the "
                f"{dp_size} data-parallel ranks: raise the global batch size or use fewer ranks"
            )
        steps.append(Step(_plan_step(positions, limit, dp_size, balance, micro_batch_multiple), len(chosen)))
    return DPSchedule(steps, dp_size)


def _split_into_steps(
    rollout_ids: Sequence[int], global_batch_size: int | None, num_steps: int | None
) -> list[list[list[int]]]:
    """[step][trajectory] -> sample positions."""
    members: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        members.setdefault(rollout_id, []).append(position)
    rollouts = list(members.values())
    if global_batch_size is not None:
        bounds = [*range(0, len(rollouts), global_batch_size), len(rollouts)]
    else:
        count = min(num_steps, len(rollouts))
        bounds = [len(rollouts) * i // count for i in range(count + 1)] if count else [0]
    return [rollouts[start:end] for start, end in pairwise(bounds)]


@dataclass
class _Limit:
    """What a micro-batch may hold."""

    lengths: list[int]
    costs: list[int]
    """What is balanced."""
    max_tokens: int | None
    max_samples: int | None

    def cost(self, positions: list[int]) -> int:
        return sum(self.costs[i] for i in positions)

    def partition(self, positions: list[int], count: int, equal_size: bool) -> list[list[int]]:
        parts = get_seqlen_balanced_partitions([self.costs[i] for i in positions], count, equal_size)
        return [[positions[i] for i in part] for part in parts]

    def pack(self, positions: list[int]) -> list[list[int]]:
        """Into as few bins as first fit (decreasing) needs."""
        if self.max_tokens is None:
            size = self.max_samples
            return [positions[i : i + size] for i in range(0, len(positions), size)]
        return self.first_fit(sorted(positions, key=lambda i: (-self.lengths[i], i)))

    def pack_evenly(self, positions: list[int], count: int) -> list[list[int]] | None:
        """Into exactly `count` non-empty bins of nearly equal costs, or None where no such packing is found."""
        if len(positions) < count:
            return None
        if self.max_tokens is None:
            fits = len(positions) % count == 0 and len(positions) <= count * self.max_samples
            return self.partition(positions, count, equal_size=True) if fits else None
        bins = self.pack(positions)
        if len(bins) > count:
            return None
        # MULTIFIT (Coffman, Garey and Johnson 1978): the lowest capacity with which first fit needs `count` bins.
        order = sorted(positions, key=lambda i: (-self.costs[i], i))
        low, high = self.cost(order) // count, max(self.cost(b) for b in bins)
        while high - low > max(low // 1000, 1):
            middle = (low + high) // 2
            attempt = self.first_fit(order, middle)
            if len(attempt) <= count:
                bins, high = attempt, middle
            else:
                low = middle
        return self.split_largest(bins, count)

    def first_fit(self, order: list[int], max_cost: int | None = None) -> list[list[int]]:
        """Put each sample into the first bin with room for it, or into a new one. Larger ones than that stay alone."""
        free_tokens = np.zeros(len(order), dtype=np.int64)
        free_cost = np.zeros(len(order), dtype=np.int64)
        bins: list[list[int]] = []
        for i in order:
            used = len(bins)
            fits = free_tokens[:used] >= self.lengths[i]
            if max_cost is not None:
                fits &= free_cost[:used] >= self.costs[i]
            slot = int(fits.argmax()) if used else 0
            if not used or not fits[slot]:
                slot = used
                bins.append([])
                free_tokens[slot], free_cost[slot] = self.max_tokens, max_cost or 0
            bins[slot].append(i)
            free_tokens[slot] -= self.lengths[i]
            free_cost[slot] -= self.costs[i]
        return bins

    def split_largest(self, bins: list[list[int]], count: int) -> list[list[int]]:
        """Halve the bin with the largest cost (of those with two samples or more) until there are `count`."""
        done = [b for b in bins if len(b) == 1]
        heap = [(-self.cost(b), b) for b in bins if len(b) > 1]
        heapq.heapify(heap)
        while heap and len(done) + len(heap) < count:
            for half in self.partition(sorted(heapq.heappop(heap)[1]), 2, equal_size=False):
                if len(half) == 1:
                    done.append(half)
                else:
                    heapq.heappush(heap, (-self.cost(half), half))
        return done + [b for _, b in heap]


def _plan_step(
    positions: list[int], limit: _Limit, dp_size: int, balance: bool, multiple: int
) -> list[list[list[int]]]:
    """[rank][micro-batch] of one step, with as few micro-batches as packing the whole step needs."""
    bins = limit.pack(positions)
    per_rank = -(-len(bins) // (dp_size * multiple)) * multiple
    if balance:
        ranks = limit.partition(
            positions, dp_size, equal_size=limit.max_tokens is None and len(positions) % dp_size == 0
        )
        packed = [limit.pack_evenly(rank, per_rank) for rank in ranks]
        if None not in packed:
            return [_in_order(rank_bins, limit) for rank_bins in packed]
    # Full micro-batches beside a nearly empty one would let all other ranks wait for the full ones.
    if balance or limit.max_tokens is not None:
        bins = limit.pack_evenly(positions, per_rank * dp_size) or bins
    bins = limit.split_largest(bins, per_rank * dp_size)
    bins = _in_order(bins + [[] for _ in range(per_rank * dp_size - len(bins))], limit)
    if not balance:
        return [bins[rank::dp_size] for rank in range(dp_size)]
    parts = get_seqlen_balanced_partitions([limit.cost(b) for b in bins], dp_size, equal_size=True)
    return [[bins[i] for i in part] for part in parts]


def _in_order(bins: list[list[int]], limit: _Limit) -> list[list[int]]:
    """Falling in cost, so that ranks meet with similar micro-batches."""
    return sorted((sorted(b) for b in bins), key=lambda b: (-limit.cost(b), b))
