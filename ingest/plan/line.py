"""Orders without mixing: units one after another, frames in order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ingest.plan.hashing import hash_key
from ingest.plan.order import Admission, Order, Span
from ingest.plan.pieces import Pieces

_EPISODE_SALT = 11


class LineOrder(Order):
    """Pieces laid end to end: in selection order (``sequential``), or episodes shuffled (``episode_sequential``).

    Args:
        pieces: the consumer's share.
        shuffle_key: (seed, epoch) to shuffle the episodes by, or None for the selection order.
    """

    def __init__(self, pieces: Pieces, shuffle_key: tuple[int, int] | None) -> None:
        if shuffle_key is None:
            line = np.lexsort((pieces.start, pieces.lo, pieces.unit, pieces.copy))
        else:
            words = hash_key(*shuffle_key, _EPISODE_SALT, pieces.dataset, pieces.episode, pieces.copy)
            line = np.lexsort((pieces.start, pieces.lo, pieces.episode, pieces.dataset, words[: len(pieces)]))
        self.pieces: Pieces = pieces.take(line)
        self._end: NDArray[np.int64] = np.cumsum(self.pieces.count)
        self._begin: NDArray[np.int64] = self._end - self.pieces.count

    def __len__(self) -> int:
        return int(self._end[-1]) if len(self._end) else 0

    def _span(self, start: int, stop: int) -> Span:
        place = np.arange(start, stop)
        entry = np.searchsorted(self._end, place, side="right")
        frame = self.pieces.frames(entry, place - self._begin[entry], None)
        return Span(entry, self.pieces.unit[entry], frame, self.pieces.copy[entry])

    def _admission(self, start: int, stop: int) -> Admission:
        entry = np.arange(len(self.pieces))
        admission = Admission(entry, self.pieces.unit, self.pieces.count, self.pieces.bytes, self._begin - 1, self._begin, self._end - 1)
        return admission.within(start, stop)

    def leftover(self, samples: int) -> Pieces:
        """The rest of the piece that is open, and all later ones; begun frame ranges become shorter ranges."""
        taken = np.clip(samples - self._begin, 0, self.pieces.count)
        rest = self.pieces.drop_before(taken)
        plain = ~rest.listed
        lo = np.where(plain, rest.lo + rest.start, rest.lo)
        hi = np.where(plain, lo + rest.count, rest.hi)
        start = np.where(plain, 0, rest.start)
        return Pieces(rest.units, rest.unit, lo, hi, start, start + rest.count, rest.copy, rest.listed, rest.table)

    def extent(self, entries: NDArray[np.int64]) -> tuple[int, int]:
        """From the first to the last of the pieces."""
        if not len(entries):
            return 0, 0
        return int(self._begin[entries].min()), int(self._end[entries].max())
