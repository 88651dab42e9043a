"""Pieces: what is left to deliver of units, as ranges of positions in each unit's own frame sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.plan.hashing import permute
from ingest.plan.units import Units, canonical_order

_COLUMNS = ("unit", "lo", "hi", "start", "stop", "copy", "listed")


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Parts of units that together are one share of an epoch; struct of arrays, one row per piece.

    A piece stands for positions ``start..stop`` of a frame sequence: of the frames ``lo..hi`` of its unit (in
    order, or under a keyed permutation, as the order mode says), or, where ``listed``, of ``table``.

    Attributes:
        units: the table that ``unit`` points into.
        unit: int64, unit numbers.
        lo: int64, first frame of the sequence, inside the episode.
        hi: int64, end (exclusive) of the sequence's frames.
        start: int64, first position still to deliver.
        stop: int64, end (exclusive) of the positions.
        copy: int64, number of the pass over the dataset in a weighted mixture, otherwise 0.
        listed: bool, whether positions index ``table``.
        table: int64, frames of all listed pieces, one after another.
    """

    units: Units
    unit: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    copy: NDArray[np.int64]
    listed: NDArray[np.bool_]
    table: NDArray[np.int64]

    @classmethod
    def whole(cls, units: Units) -> Pieces:
        """All units with frames, undivided, sorted by (dataset, episode, lo)."""
        order = canonical_order(units.dataset, units.episode, units.lo)
        lo, hi = (units.lo, units.hi) if order is None else (units.lo[order], units.hi[order])
        order = np.arange(len(units)) if order is None else order
        if not (hi > lo).all():
            order = order[hi > lo]
            lo, hi = units.lo[order], units.hi[order]
        zeros = np.zeros(len(order), dtype=np.int64)
        return cls(units, order, lo, hi, zeros, hi - lo, zeros, zeros.astype(np.bool_), np.zeros(0, dtype=np.int64))

    @classmethod
    def listing(cls, units: Units, unit: int, frames: NDArray[np.int64], *, lo: int, hi: int, copy: int = 0) -> Pieces:
        """One piece of explicitly listed frames of a unit."""
        one = np.zeros(1, dtype=np.int64)
        return cls(units, one + unit, one + lo, one + hi, one, one + len(frames), one + copy, one == 0, frames)

    @classmethod
    def concatenate(cls, units: Units, parts: Sequence[Pieces]) -> Pieces:
        """All pieces of several shares, in the order given."""
        if not parts:
            return cls.whole(units).take(np.zeros(0, dtype=np.int64))
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        before = np.cumsum([0] + [len(part.table) for part in parts[:-1]])
        shift = np.repeat(before, [len(part) for part in parts]) * columns["listed"]
        columns["start"] = columns["start"] + shift
        columns["stop"] = columns["stop"] + shift
        return cls(units, table=np.concatenate([part.table for part in parts]), **columns)

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def count(self) -> NDArray[np.int64]:
        """Frames still to deliver of each piece, int64[P]."""
        return self.stop - self.start

    @property
    def dataset(self) -> NDArray[np.int32]:
        """Dataset number of each piece, int32[P]."""
        return self.units.dataset[self.unit]

    @property
    def episode(self) -> NDArray[np.int64]:
        """Episode index of each piece, int64[P]."""
        return self.units.episode[self.unit]

    @property
    def bytes(self) -> NDArray[np.int64]:
        """Bytes to reserve for each piece, int64[P]: those of its whole unit, an upper bound for a part."""
        return self.units.bytes[self.unit]

    @property
    def cost(self) -> NDArray[np.float64]:
        """Decode cost of each piece, float64[P], by its part of the unit's frames."""
        return self.units.cost[self.unit] * self.count / np.maximum(self.units.frames[self.unit], 1)

    @property
    def fresh(self) -> NDArray[np.bool_]:
        """Whether a piece still is the whole of its frame range, bool[P]."""
        return ~self.listed & (self.start == 0) & (self.stop == self.hi - self.lo)

    def take(self, rows: NDArray[Any]) -> Pieces:
        """The pieces of the given rows (indices or a mask); the table of listed frames shrinks to what is used."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        taken = Pieces(self.units, table=self.table, **columns)
        if not len(self.table):
            return taken
        parts = [self.table[a:b] for a, b in zip(taken.start[taken.listed], taken.stop[taken.listed], strict=True)]
        counts = np.array([len(part) for part in parts], dtype=np.int64)
        start, stop = taken.start.copy(), taken.stop.copy()
        stop[taken.listed] = np.cumsum(counts)
        start[taken.listed] = stop[taken.listed] - counts
        table = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return replace(taken, start=start, stop=stop, table=table)

    def sorted_by_episode(self) -> Pieces:
        """The pieces in the order (dataset, episode, lo, start, copy)."""
        order = canonical_order(self.dataset, self.episode, self.lo, self.start, self.copy)
        return self if order is None else self.take(order)

    def groups(self) -> NDArray[np.int64]:
        """Number of the episode (dataset, episode, copy) of each piece, int64[P], counted along the rows.

        Pieces of one episode must stand together, as they do after ``sorted_by_episode``.
        """
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        dataset, episode = self.dataset, self.episode
        new = (dataset[1:] != dataset[:-1]) | (episode[1:] != episode[:-1]) | (self.copy[1:] != self.copy[:-1])
        return np.concatenate(([0], np.cumsum(new)))

    def cut(self, ends: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
        """Lay the pieces end to end and cut the line at ``ends``.

        A fresh piece is cut into frame ranges, so that each part decodes its own frames only; a begun one is cut
        into ranges of positions.

        Args:
            ends: int64[K], ascending ends of the parts, the last one being the number of all frames.

        Returns:
            The pieces along the line, and the part (0..K-1) of each, int64.
        """
        line_end = np.cumsum(self.count)
        points = np.sort(np.concatenate((np.zeros(1, dtype=np.int64), line_end, ends)), kind="stable")
        points = points[np.flatnonzero(np.diff(points, append=points[-1] + 1))]
        left, size = points[:-1], np.diff(points)
        row = np.searchsorted(line_end, left, side="right")
        part = np.searchsorted(ends, left, side="right")
        offset = left - (line_end[row] - self.count[row])
        fresh = self.fresh[row]
        start = np.where(fresh, 0, self.start[row] + offset)
        lo = np.where(fresh, self.lo[row] + offset, self.lo[row])
        hi = np.where(fresh, lo + size, self.hi[row])
        pieces = Pieces(self.units, self.unit[row], lo, hi, start, start + size, self.copy[row], self.listed[row], self.table)
        return pieces, part

    def drop_before(self, keep_from: NDArray[np.int64]) -> Pieces:
        """The pieces without their first ``keep_from`` positions each (int64[P]); emptied ones vanish."""
        start = self.start + np.minimum(keep_from, self.count)
        return replace(self, start=start).take(start < self.stop)

    def frames(self, row: NDArray[np.int64], offset: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> NDArray[np.int64]:
        """Frames inside the episode at ``offset`` positions into pieces.

        Args:
            row: int64[N], piece numbers.
            offset: int64[N], positions counted from each piece's ``start``.
            keys: uint64[P], permutation key of each piece, or None for frames in order.
        """
        position = self.start[row] + offset
        lo = self.lo[row]
        inside = position if keys is None else _permuted(position, self.hi[row] - lo, keys[row], self.listed[row])
        frames = lo + inside
        if len(self.table):
            listed = self.listed[row]
            frames[listed] = self.table[position[listed]]
        return frames


def _permuted(
    position: NDArray[np.int64], size: NDArray[np.int64], key: NDArray[np.uint64], listed: NDArray[np.bool_]
) -> NDArray[np.int64]:
    # Positions of listed pieces index the table and may exceed the size of the frame range.
    return permute(np.where(listed, 0, position), size, key)
