"""The compatibility orders ``remaining`` and ``round_robin``: the coverage pool over pieces, replayed to seek."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ingest.plan.order import CHUNK, Admission, Order, Span
from ingest.plan.pieces import Pieces
from ingest.plan.pool import CoveragePool, PoolStrategy
from ingest.plan.pool_state import dump_pool, load_pool


class PoolOrder(Order):
    """Samples drawn from a coverage pool.

    Reading forward is cheap; going back, and entering at sample n without a stored state, replays the draws from the
    beginning (about a second for a million samples, without I/O).

    Args:
        pieces: the consumer's share.
        pool_size: most pieces in the pool.
        byte_budget: most bytes of the pool, or None.
        strategy: ``remaining`` or ``round_robin``.
        seed: generator seed, ``[seed, epoch]`` for the first segment of an epoch.
    """

    def __init__(self, pieces: Pieces, *, pool_size: int, byte_budget: int | None, strategy: PoolStrategy, seed: Sequence[int]) -> None:
        self.pieces: Pieces = pieces.sorted_by_episode()
        self._counts: NDArray[np.int64] = self.pieces.count
        self._total = int(self._counts.sum())
        self._pool_size = pool_size
        self._byte_budget = byte_budget
        self._strategy: PoolStrategy = strategy
        self._seed = tuple(seed)
        self._pool: CoveragePool | None = None
        # Reading runs ahead of what is committed, so states are taken from a second planner that follows behind.
        self._trailing: CoveragePool | None = None
        # Admissions are found by a third one that runs ahead of reading.
        self._scout: CoveragePool | None = None
        self._stored: bytes | None = None
        # The last sample fills batches; without it at hand, asking for it again would replay the whole order.
        self._tail: Span | None = None

    def __len__(self) -> int:
        return self._total

    def _new_pool(self) -> CoveragePool:
        return CoveragePool(
            self._counts,
            pool_size=self._pool_size,
            seed=self._seed,
            strategy=self._strategy,
            sizes=self.pieces.bytes,
            byte_budget=self._byte_budget,
            names=self.pieces.episode,
        )

    def _advanced(self, pool: CoveragePool | None, sample: int) -> CoveragePool:
        if pool is None or pool.emitted > sample:
            pool = self._new_pool()
            if self._stored is not None:
                load_pool(pool, self._stored)
                if pool.emitted > sample:
                    pool = self._new_pool()
        while pool.emitted < sample:
            pool.take(min(CHUNK, sample - pool.emitted))
        return pool

    def pool_at(self, sample: int) -> CoveragePool:
        """The planner after ``sample`` samples; it belongs to this order and moves on with it."""
        self._pool = self._advanced(self._pool, sample)
        return self._pool

    def _span(self, start: int, stop: int) -> Span:
        if self._tail is not None and start == self._total - 1:
            return self._tail
        entry, offset = self.pool_at(start).take(stop - start)
        frame = self.pieces.frames(entry, offset, None)
        span = Span(entry, self.pieces.unit[entry], frame, self.pieces.copy[entry])
        if stop == self._total:
            self._tail = span.take(np.array([len(span) - 1]))
        return span

    def _admission(self, start: int, stop: int) -> Admission:
        pool = self._scout = self._advanced(self._scout, start)
        known = pool.resident
        earlier = len(pool.admitted)
        size, end = len(self._counts), len(self) - 1
        first, last = np.full(size, stop, dtype=np.int64), np.full(size, end, dtype=np.int64)
        while pool.emitted < stop:
            before = pool.emitted
            entry, _ = pool.take(min(CHUNK, stop - before))
            seen, index = np.unique(entry, return_index=True)
            first[seen] = np.minimum(first[seen], before + index)
            last[entry] = np.arange(before, before + len(entry))
        last[pool.resident] = end
        order = np.array(known + pool.admitted[earlier:], dtype=np.int64)
        admitted = np.array([start - 1] * len(known) + pool.admitted_at[earlier:], dtype=np.int64)
        unit, nbytes = self.pieces.unit[order], self.pieces.bytes[order]
        return Admission(order, unit, self._counts[order], nbytes, admitted, first[order], last[order])

    def leftover(self, samples: int) -> Pieces:
        """Residents as lists of their remaining frames, pending pieces as they are."""
        pool = self.pool_at(min(max(samples, 0), self._total))
        pieces = self.pieces
        parts = [pieces.take(np.array(pool.prefetch_candidates(len(pieces)), dtype=np.int64))]
        for one in pool.residents:
            row = one.slot
            rest = pieces.frames(np.full(one.left, row), np.sort(one.frames[: one.left]), None)
            unit, lo, hi, copy = (int(getattr(pieces, name)[row]) for name in ("unit", "lo", "hi", "copy"))
            parts.append(Pieces.listing(pieces.units, unit, rest, lo=lo, hi=hi, copy=copy))
        return Pieces.concatenate(pieces.units, parts)

    def dump_state(self, sample: int) -> bytes | None:
        """The planner's state after ``sample`` samples, or None when it would exceed 32 KiB."""
        self._trailing = self._advanced(self._trailing, sample)
        return dump_pool(self._trailing)

    def load_state(self, state: bytes) -> None:
        """Continue from a stored state instead of replaying the draws before it.

        Raises:
            CursorError: when the bytes are damaged, or belong to another share, seed or pool.
        """
        load_pool(self._new_pool(), state)
        self._stored = state
        self._pool = self._trailing = self._scout = None
