"""Balanced shares: the greedy rule of LeRobot (longest first, to the least loaded), and exact cuts of a line."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ingest.errors import PlanError

_HEAP_LIMIT = 20_000
_SHORT_RUN = 6


def balanced_shards(counts: Iterable[tuple[int, int]], shards: int) -> list[list[int]]:
    """Whole episodes over shards: most frames first, each to the shard with the fewest frames so far.

    Ties go to the lower episode id and to the lower shard number. Seed and epoch play no part.

    Args:
        counts: pairs (episode id, frames).
        shards: number of shards.

    Returns:
        One list of episode ids per shard, in the order of assignment.

    Raises:
        PlanError: when ``shards`` is not positive or a count is negative.
    """
    if shards <= 0:
        raise PlanError(f"the number of shards must be positive, found {shards}")
    pairs = sorted(counts, key=lambda pair: (-pair[1], pair[0]))
    if pairs and pairs[-1][1] < 0:
        raise PlanError(f"episode {pairs[-1][0]} has a negative frame count: {pairs[-1][1]}")
    assigned = assign_balanced(np.array([count for _, count in pairs], dtype=np.int64), shards)
    lists: list[list[int]] = [[] for _ in range(shards)]
    numbers: list[int] = assigned.tolist()
    for (episode, _), shard in zip(pairs, numbers, strict=True):
        lists[shard].append(episode)
    return lists


def descending_order(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row numbers by count, largest first, ties by row number, int64."""
    if not len(counts):
        return np.zeros(0, dtype=np.int64)
    inverted = counts.max() - counts
    if inverted.max() < 1 << 16:
        # NumPy sorts 16-bit integers by radix: linear, which is what makes 10 million episodes cheap.
        return np.argsort(inverted.astype(np.uint16), kind="stable").astype(np.int64, copy=False)
    return np.argsort(inverted, kind="stable").astype(np.int64, copy=False)


def assign_balanced(counts: NDArray[np.int64], shards: int) -> NDArray[np.int32]:
    """The greedy rule on counts that are sorted, largest first: the shard of each, int32[len(counts)].

    Equal counts are handled together: handing out m equal items one by one takes the m smallest elements of the
    sequences ``load_s, load_s + n, load_s + 2n, …``, ties by shard number, so one sort replaces m heap operations.
    """
    total = int(counts.sum())
    if len(counts) <= _HEAP_LIMIT or total >= (1 << 62) // shards:
        return _assign_by_heap(counts, shards)
    assigned = np.empty(len(counts), dtype=np.int32)
    loads = np.zeros(shards, dtype=np.int64)
    ranks = np.arange(1, shards + 1)
    edges = np.flatnonzero(np.diff(counts)) + 1
    starts, stops = np.concatenate(([0], edges)), np.append(edges, len(counts))
    runs: list[tuple[int, int]] = list(zip(starts.tolist(), stops.tolist(), strict=True))
    for start, stop in runs:
        length, items = int(counts[start]), stop - start
        if length == 0:
            assigned[start:stop] = loads.argmin()
            continue
        if items <= _SHORT_RUN:
            for row in range(start, stop):
                shard = int(loads.argmin())
                assigned[row] = shard
                loads[shard] += length
            continue
        by_load = np.argsort(loads, kind="stable")
        sorted_loads = loads[by_load]
        before = np.cumsum(sorted_loads)
        # Pour items * length into the shards: the level is at least the m-th smallest element wanted.
        filled = int(np.searchsorted(sorted_loads * ranks - before, items * length, side="right"))
        level = (items * length + int(before[filled - 1])) // filled
        tops = (level - sorted_loads[:filled]) // length + 1
        owner = np.repeat(np.arange(filled), tops)
        turn = np.arange(len(owner)) - np.repeat(np.cumsum(tops) - tops, tops)
        keys = np.sort((sorted_loads[owner] + turn * length) * shards + by_load[owner])[:items]
        taken = keys % shards
        assigned[start:stop] = taken
        loads += np.bincount(taken, minlength=shards) * length
    return assigned


def _assign_by_heap(counts: NDArray[np.int64], shards: int) -> NDArray[np.int32]:
    heap = [(0, shard) for shard in range(shards)]
    assigned: list[int] = []
    for count in counts.tolist():
        load, shard = heap[0]
        assigned.append(shard)
        heapq.heapreplace(heap, (load + count, shard))
    return np.array(assigned, dtype=np.int32)


def even_bounds(total: int, parts: int) -> NDArray[np.int64]:
    """Ends of ``parts`` consecutive ranges of ``range(total)`` whose sizes differ by at most one, larger first."""
    base, extra = divmod(total, parts)
    sizes = np.full(parts, base, dtype=np.int64)
    sizes[:extra] += 1
    return np.cumsum(sizes)


def quantised_costs(cost: ArrayLike) -> NDArray[np.int64]:
    """Costs as whole numbers of 1/4096 of the largest, at least 1 where there is any: comparable on every machine."""
    values = np.asarray(cost, dtype=np.float64)
    largest = float(values.max(initial=0.0))
    if largest <= 0:
        return np.zeros(len(values), dtype=np.int64)
    return np.where(values > 0, np.maximum(np.rint(values / largest * 4096), 1), 0).astype(np.int64)
