"""Balanced partitions of sequences by their lengths: the Karmarkar-Karp largest differencing method."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Split the positions of `seqlen_list` into `k_partitions` lists with nearly equal length totals.

    Each state is a k-way partition of some items. The two states with the largest spread are merged, the largest set
    of one with the smallest of the other, until one is left (Karmarkar and Karp 1982, k-way). Deterministic.

    Args:
        equal_size: every partition gets the same number of items; needs a multiple of `k_partitions` items.

    Returns:
        Partitions, each sorted, none empty when all lengths are positive, ordered by their first position.

    Raises:
        ValueError: fewer items than partitions, or no multiple of them under `equal_size`.
    """
    count = len(seqlen_list)
    if k_partitions < 1 or count < k_partitions:
        raise ValueError(f"cannot split {count} sequences into {k_partitions} partitions: give at least one each")
    if equal_size and count % k_partitions:
        raise ValueError(f"cannot split {count} sequences into {k_partitions} partitions of equal size")

    # A set is (total, first position, positions); a state lists its non-empty sets, largest first.
    order = sorted(range(count), key=lambda i: (-seqlen_list[i], i))
    width = k_partitions if equal_size else 1
    heap = []
    for start in range(0, count, width):
        sets = [(seqlen_list[i], i, [i]) for i in order[start : start + width]]
        heap.append((-_spread(sets, k_partitions), start, sets))
    heapq.heapify(heap)
    serial = count
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merge(first, second, k_partitions)
        heapq.heappush(heap, (-_spread(merged, k_partitions), serial, merged))
        serial += 1
    return sorted(sorted(members) for _, _, members in heap[0][2])


def _spread(sets: list, k: int) -> int:
    smallest = sets[-1][0] if len(sets) == k else 0
    return sets[0][0] - smallest


def _merge(first: list, second: list, k: int) -> list:
    """Pair the largest sets of one state with the smallest (or empty) ones of the other."""
    overlap = max(len(first) + len(second) - k, 0)
    merged = first[: len(first) - overlap] + second[: len(second) - overlap]
    for a, b in zip(first[len(first) - overlap :], reversed(second[len(second) - overlap :]), strict=True):
        merged.append((a[0] + b[0], min(a[1], b[1]), a[2] + b[2]))
    merged.sort(key=lambda s: (-s[0], s[1]))
    return merged
