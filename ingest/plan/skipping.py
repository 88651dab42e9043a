"""An order without the rest of some episodes, as the damage policy ``skip_episode`` asks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ingest.plan.cursor import EVERY_EPOCH, SkippedRange
from ingest.plan.order import CHUNK, Admission, Order, Span
from ingest.plan.pieces import Pieces


def covers(skip: SkippedRange, dataset: NDArray[np.int32], episode: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of some episodes are among the skipped ones, bool like ``episode``."""
    return (dataset == skip.dataset) & (episode >= skip.first) & (episode <= skip.last)


def without_skipped(pieces: Pieces, skips: Sequence[SkippedRange]) -> Pieces:
    """The pieces that belong to none of the skipped episodes."""
    gone = np.zeros(len(pieces), dtype=np.bool_)
    for skip in skips:
        gone |= covers(skip, pieces.dataset, pieces.episode)
    return pieces.take(~gone) if gone.any() else pieces


def left_out(skips: Sequence[SkippedRange]) -> list[SkippedRange]:
    """The episodes that are left out of the whole epoch."""
    return [skip for skip in skips if skip.segment == EVERY_EPOCH]


class SkippingOrder(Order):
    """Another order without the samples of some episodes from a sample number on; the earlier ones keep theirs.

    Args:
        inner: the order to filter.
        skip: the episodes.
        begin: first sample number of ``inner`` from which they are taken out.
        removed: int64[R], ascending sample numbers of ``inner`` that are taken out.
        entries: int64[R], the piece of each of them.
    """

    def __init__(self, inner: Order, skip: SkippedRange, begin: int, removed: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
        self.pieces: Pieces = inner.pieces
        self._inner = inner
        self._skip = skip
        self._begin = begin
        self._removed = removed
        self._entries = entries
        # A sample of the filtered order lies as far behind as removed samples precede it.
        self._before = removed - np.arange(len(removed))

    @classmethod
    def without(cls, order: Order, skip: SkippedRange, begin: int) -> Order:
        """The order without the samples of the skipped episodes from sample ``begin`` on."""
        gone = covers(skip, order.pieces.dataset, order.pieces.episode)
        first, last = order.extent(np.flatnonzero(gone))
        removed: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        entries: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        for start in range(max(first, begin), last, CHUNK):
            entry = order.span(start, min(start + CHUNK, last)).entry
            inside = np.flatnonzero(gone[entry])
            removed.append(start + inside)
            entries.append(entry[inside])
        numbers = np.concatenate(removed)
        return cls(order, skip, begin, numbers, np.concatenate(entries)) if len(numbers) else order

    def __len__(self) -> int:
        return len(self._inner) - len(self._removed)

    def _inner_numbers(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples + np.searchsorted(self._before, samples, side="right")

    def _inner_count(self, samples: int) -> int:
        return int(self._inner_numbers(np.array([samples - 1]))[0]) + 1 if samples > 0 else 0

    def _span(self, start: int, stop: int) -> Span:
        numbers = self._inner_numbers(np.arange(start, stop))
        first = int(numbers[0])
        return self._inner.span(first, int(numbers[-1]) + 1).take(numbers - first)

    def _admission(self, start: int, stop: int) -> Admission:
        inner = self._inner.admission(self._inner_count(start + 1) - 1 if start < len(self) else len(self._inner), self._inner_count(stop))
        frames = inner.frames - np.bincount(self._entries, minlength=len(self.pieces))[inner.entry]
        shortened = frames < inner.frames
        last = np.where(shortened, np.minimum(inner.last, self._begin - 1), inner.last)
        keep = frames > 0

        # The first sample kept from ``first`` on, and the last one kept up to ``admitted`` and ``last``.
        first = inner.first - np.searchsorted(self._removed, inner.first, side="left")
        admitted = inner.admitted - np.searchsorted(self._removed, inner.admitted, side="right")
        last = last - np.searchsorted(self._removed, last, side="right")
        return Admission(inner.entry[keep], inner.unit[keep], frames[keep], inner.bytes[keep], admitted[keep], first[keep], last[keep])

    def leftover(self, samples: int) -> Pieces:
        """The inner leftover without the skipped episodes."""
        return without_skipped(self._inner.leftover(self._inner_count(samples)), [self._skip])

    def delivered(self, samples: int) -> NDArray[np.int64]:
        """Frames of each unit among the first samples; what was taken out is not delivered."""
        done = self._inner_count(samples)
        units = self.pieces.unit[self._entries[self._removed < done]]
        return self._inner.delivered(done) - np.bincount(units, minlength=len(self.pieces.units))

    def extent(self, entries: NDArray[np.int64]) -> tuple[int, int]:
        """The inner extent, on the filtered numbers."""
        first, last = self._inner.extent(entries)
        return first - int(np.searchsorted(self._removed, first)), last - int(np.searchsorted(self._removed, last))
