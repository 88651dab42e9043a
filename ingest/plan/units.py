"""Unit arrays: the one input of every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ingest.errors import PlanError

_DTYPES: dict[str, type[np.generic]] = {
    "dataset": np.int32,
    "episode": np.int64,
    "lo": np.int64,
    "hi": np.int64,
    "bytes": np.int64,
    "cost": np.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What can be planned: whole episodes, or runs of frames of episodes, as a struct of arrays.

    The row number of a unit is its identity in every plan made from the table, and the row order is the
    selection order that ``sequential`` follows. All arrays are one-dimensional, of equal length and read-only.

    Attributes:
        dataset: int32, number of the dataset in the caller's list.
        episode: int64, episode index inside the dataset.
        lo: int64, first frame of the unit inside its episode.
        hi: int64, end (exclusive) of the unit's frames inside its episode.
        bytes: int64, compressed bytes to hold while the unit is open.
        cost: float64, estimated cost of decoding the unit, in any one scale.

    Raises:
        PlanError: when the arrays have unequal lengths, or a value is negative, out of order, repeated or not finite.
    """

    dataset: NDArray[np.int32]
    episode: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    bytes: NDArray[np.int64]
    cost: NDArray[np.float64]

    def __post_init__(self) -> None:
        size = len(self.episode)
        for name, dtype in _DTYPES.items():
            column = np.array(getattr(self, name), dtype=dtype)
            if column.shape != (size,):
                raise PlanError(f"units.{name} must have shape ({size},) like units.episode, found {column.shape}")
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        _refuse(self.hi < self.lo, self, "hi", "a frame number not below lo")
        for name in ("dataset", "episode", "lo", "bytes", "cost"):
            _refuse(~(getattr(self, name) >= 0), self, name, "a number >= 0")
        _refuse(~np.isfinite(self.cost), self, "cost", "a finite number")
        self._refuse_overlaps()

    @classmethod
    def from_lengths(
        cls,
        lengths: ArrayLike,
        *,
        episodes: ArrayLike | None = None,
        dataset: int = 0,
        nbytes: ArrayLike | None = None,
        cost: ArrayLike | None = None,
    ) -> Units:
        """Whole episodes of one dataset.

        Args:
            lengths: frames of each episode, int[E].
            episodes: episode indices in selection order; default ``0..E-1``.
            dataset: number of the dataset.
            nbytes: compressed bytes of each episode; default 0 (no byte budget can be exceeded).
            cost: decode cost of each episode; default its frames.
        """
        frames = np.asarray(lengths, dtype=np.int64)
        size = len(frames)
        return cls(
            dataset=np.full(size, dataset, dtype=np.int32),
            episode=np.arange(size, dtype=np.int64) if episodes is None else np.asarray(episodes, dtype=np.int64),
            lo=np.zeros(size, dtype=np.int64),
            hi=frames,
            bytes=np.zeros(size, dtype=np.int64) if nbytes is None else np.asarray(nbytes, dtype=np.int64),
            cost=frames.astype(np.float64) if cost is None else np.asarray(cost, dtype=np.float64),
        )

    @classmethod
    def concatenate(cls, tables: Sequence[Units]) -> Units:
        """All rows of several tables, in the order given."""
        if not tables:
            raise PlanError("no unit table given: expected at least one")
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in _DTYPES})

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def frames(self) -> NDArray[np.int64]:
        """Frames of each unit, int64[U]."""
        return self.hi - self.lo

    def take(self, rows: NDArray[Any]) -> Units:
        """The units of the given rows (indices or a mask), renumbered from 0."""
        return Units(**{name: getattr(self, name)[rows] for name in _DTYPES})

    def with_bytes(self, nbytes: NDArray[np.int64]) -> Units:
        """The same units with other sizes, int64[U]."""
        return replace(self, bytes=nbytes)

    def _refuse_overlaps(self) -> None:
        order = canonical_order(self.dataset, self.episode, self.lo)
        keys = (self.dataset, self.episode, self.lo, self.hi)
        dataset, episode, lo, hi = keys if order is None else (key[order] for key in keys)
        clash = (lo[1:] < hi[:-1]) & (episode[1:] == episode[:-1]) & (dataset[1:] == dataset[:-1])
        if clash.any():
            row = int(np.flatnonzero(clash)[0])
            one, two = (row, row + 1) if order is None else (int(order[row]), int(order[row + 1]))
            raise PlanError(
                f"units {one} and {two} share frames of episode {self.episode[one]} of dataset {self.dataset[one]}: "
                f"[{self.lo[one]}, {self.hi[one]}) and [{self.lo[two]}, {self.hi[two]}); select every frame once"
            )


def _refuse(bad: NDArray[np.bool_], units: Units, name: str, expected: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        value = getattr(units, name)[row]
        raise PlanError(f"units.{name}[{row}] (episode {units.episode[row]}) must be {expected}, found {value}")


def canonical_order(dataset: NDArray[Any], episode: NDArray[Any], *more: NDArray[Any]) -> NDArray[np.int64] | None:
    """Row numbers sorted by (dataset, episode, *more), int64; None when the rows are sorted already."""
    keys = (dataset, episode, *more)
    size = len(episode)
    decided = np.zeros(max(size - 1, 0), dtype=np.bool_)
    for key in keys:
        if bool((~decided & (key[1:] < key[:-1])).any()):
            return np.lexsort(keys[::-1]).astype(np.int64, copy=False)
        decided |= key[1:] > key[:-1]
    return None


def cut_units(
    units: Units,
    boundaries: Mapping[int, ArrayLike],
    *,
    max_frames: int | None = None,
    max_bytes: int | None = None,
) -> Units:
    """Cut units into runs of GOPs no larger than asked, so that memory does not depend on episode length.

    Runs are filled greedily from the unit's first frame and end only at boundaries; a single GOP that is larger
    than a limit stays whole, since decoding half of it costs the whole. Bytes and cost are divided by frames,
    rounding so that the sum of a unit's bytes is kept. Frames before a run that its first picture or its windows
    need are the caller's matter.

    Args:
        units: the table to cut.
        boundaries: for a unit number, the frames (numbered inside the episode) where a clean decode can begin;
            units that are missing here stay whole.
        max_frames: most frames of a run.
        max_bytes: most bytes of a run, by even division of the unit's bytes over its frames.

    Raises:
        PlanError: when a limit is not positive.
    """
    for name, value in (("max_frames", max_frames), ("max_bytes", max_bytes)):
        if value is not None and value < 1:
            raise PlanError(f"{name} must be positive, found {value}")
    source: list[NDArray[np.int64]] = []
    starts: list[NDArray[np.int64]] = []
    los: list[int] = units.lo.tolist()
    his: list[int] = units.hi.tolist()
    for unit, (lo, hi) in enumerate(zip(los, his, strict=True)):
        limit = hi - lo if max_frames is None else max_frames
        if max_bytes is not None and units.bytes[unit] > 0:
            limit = min(limit, max(1, max_bytes * (hi - lo) // int(units.bytes[unit])))
        cuts = [lo]
        if unit in boundaries and limit < hi - lo:
            inside = np.unique(np.asarray(boundaries[unit], dtype=np.int64))
            edges = np.append(inside[(inside > lo) & (inside < hi)], hi)
            while hi - cuts[-1] > limit:
                # The furthest boundary within the limit, or else the end of the GOP that alone exceeds it.
                reach = int(np.searchsorted(edges, cuts[-1] + limit, side="right")) - 1
                edge = int(edges[reach]) if reach >= 0 else cuts[-1]
                if edge <= cuts[-1]:
                    edge = int(edges[int(np.searchsorted(edges, cuts[-1], side="right"))])
                if edge >= hi:
                    break
                cuts.append(edge)
        starts.append(np.asarray(cuts, dtype=np.int64))
        source.append(np.full(len(cuts), unit, dtype=np.int64))
    row = np.concatenate(source) if source else np.zeros(0, dtype=np.int64)
    lo = np.concatenate(starts) if starts else np.zeros(0, dtype=np.int64)
    last = np.append(row[1:] != row[:-1], np.ones(min(len(row), 1), dtype=np.bool_))
    hi = np.where(last, units.hi[row], np.append(lo[1:], 0))
    size = np.maximum(units.frames[row], 1)
    before, after = lo - units.lo[row], hi - units.lo[row]
    # Split as quotient and remainder: bytes times frames can leave 64 bits.
    quotient, remainder = units.bytes[row] // size, units.bytes[row] % size
    nbytes = quotient * (after - before) + remainder * after // size - remainder * before // size
    nbytes = np.where(units.frames[row] == after - before, units.bytes[row], nbytes)
    return Units(
        dataset=units.dataset[row],
        episode=units.episode[row],
        lo=lo,
        hi=hi,
        bytes=nbytes,
        cost=np.where(units.frames[row] > 0, units.cost[row] * (hi - lo) / size, units.cost[row]),
    )
