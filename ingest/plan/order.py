"""What an order of one consumer is: a sequence of samples that can be entered anywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import PlanError
from ingest.plan.pieces import Pieces

CHUNK = 1 << 16
"""Samples that iteration computes at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive samples of an order.

    Attributes:
        entry: int64[N], row of the order's ``pieces`` that each sample comes from.
        unit: int64[N], unit numbers.
        frame: int64[N], frame numbers inside the episode.
        cycle: int64[N], pass over the data: the mixture copy, or epochs completed by a looping consumer.
    """

    entry: NDArray[np.int64]
    unit: NDArray[np.int64]
    frame: NDArray[np.int64]
    cycle: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.unit)

    @classmethod
    def join(cls, parts: list[Span]) -> Span:
        """Several spans one after another."""
        if not parts:
            empty = np.zeros(0, dtype=np.int64)
            return cls(empty, empty, empty, empty)
        return cls(
            np.concatenate([part.entry for part in parts]),
            np.concatenate([part.unit for part in parts]),
            np.concatenate([part.frame for part in parts]),
            np.concatenate([part.cycle for part in parts]),
        )

    def take(self, rows: NDArray[np.int64]) -> Span:
        """The samples of the given rows."""
        return Span(self.entry[rows], self.unit[rows], self.frame[rows], self.cycle[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """When a reader needs each piece: rows in the order in which to fetch.

    Sample numbers count the consumer's own samples from 0.

    Attributes:
        entry: int64[P], row of the order's ``pieces``.
        unit: int64[P], unit numbers.
        frames: int64[P], samples taken from the piece.
        bytes: int64[P], bytes to reserve, an upper bound for a part of a unit.
        admitted: int64[P], sample number after which the piece must be reserved, below ``first``; -1 from the start.
        first: int64[P], sample number at which the piece is first needed (``reservoir``: not later than that).
        last: int64[P], sample number of its last use (``reservoir``: not earlier than that).
    """

    entry: NDArray[np.int64]
    unit: NDArray[np.int64]
    frames: NDArray[np.int64]
    bytes: NDArray[np.int64]
    admitted: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.unit)

    def take(self, rows: NDArray[Any]) -> Admission:
        """The given rows (indices or a mask)."""
        return Admission(**{name: getattr(self, name)[rows] for name in self.__slots__})

    def within(self, start: int, stop: int) -> Admission:
        """The pieces that samples ``start..stop`` may use."""
        return self.take((self.last >= start) & (self.first < stop))

    def peak_bytes(self) -> int:
        """Most bytes reserved at one time when every piece is held from its admission to its last use."""
        return self._peak(self.bytes)

    def peak_open(self) -> int:
        """Most pieces held at one time."""
        return self._peak(np.ones(len(self), dtype=np.int64))

    def peak_frames(self) -> int:
        """Most frames of pieces held at one time, each counted whole until its last use."""
        return self._peak(self.frames)

    def _peak(self, weight: NDArray[np.int64]) -> int:
        if not len(self):
            return 0
        # A drained piece leaves before its replacement enters in the same step.
        time = np.concatenate((self.admitted * 2 + 1, self.last * 2))
        change = np.concatenate((weight, -weight))
        return int(np.cumsum(change[np.argsort(time, kind="stable")]).max())


class Order(ABC):
    """The samples of one consumer, every frame of its pieces exactly once, as a pure function of the plan.

    Attributes:
        pieces: what the consumer delivers; spans and admissions name pieces by their row here.
    """

    pieces: Pieces

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def _span(self, start: int, stop: int) -> Span:
        """Samples ``start..stop``, ``0 <= start < stop <= len(self)``."""

    @abstractmethod
    def _admission(self, start: int, stop: int) -> Admission:
        """The pieces that samples ``start..stop`` use, ``0 <= start <= stop <= len(self)``."""

    @abstractmethod
    def leftover(self, samples: int) -> Pieces:
        """What is left to deliver after the first ``samples`` samples."""

    def span(self, start: int, stop: int) -> Span:
        """Samples ``start..stop``, clipped to the length.

        Raises:
            PlanError: when ``start`` is negative.
        """
        if start < 0:
            raise PlanError(f"sample numbers begin at 0, found {start}")
        stop = min(stop, len(self))
        return self._span(start, stop) if start < stop else Span.join([])

    def admission(self, start: int = 0, stop: int | None = None) -> Admission:
        """The pieces that a range of samples uses, in the order in which a reader must fetch them.

        A pool order runs its planner from ``start`` to ``stop``, so that consecutive ranges cost the same as one long
        one. What lies outside the range it does not know: residents at ``start`` count as admitted just before it, a
        piece that the range does not use as first used at ``stop``, and one that outlives it as last used at the end.

        Args:
            start: first sample.
            stop: end (exclusive); default the length of the order, or of the first epoch of one without end.
        """
        end = self.epoch_length if stop is None else min(stop, len(self))
        start = max(start, 0)
        return self._admission(start, max(start, end))

    @property
    def epoch_length(self) -> int:
        """Samples of one epoch."""
        return len(self)

    def at(self, sample: int) -> tuple[int, int]:
        """Unit number and frame of one sample.

        Raises:
            PlanError: when there is no such sample.
        """
        if not 0 <= sample < len(self):
            raise PlanError(f"sample {sample} does not exist in an order of {len(self)} samples")
        one = self.span(sample, sample + 1)
        return int(one.unit[0]), int(one.frame[0])

    def iter_from(self, sample: int, chunk: int = CHUNK) -> Iterator[Span]:
        """Spans that together are all samples from ``sample`` on."""
        for start in range(sample, len(self), chunk):
            yield self.span(start, start + chunk)

    def delivered(self, samples: int) -> NDArray[np.int64]:
        """Frames of each unit (int64[U]) among the first ``samples`` samples."""
        units = len(self.pieces.units)
        left = self.leftover(samples)
        whole = np.bincount(self.pieces.unit, self.pieces.count, minlength=units)
        return (whole - np.bincount(left.unit, left.count, minlength=units)).astype(np.int64)

    def extent(self, entries: NDArray[np.int64]) -> tuple[int, int]:
        """A range of samples outside which the given pieces do not occur."""
        return (0, len(self)) if len(entries) else (0, 0)
