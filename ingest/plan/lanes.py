"""The native orders ``lanes`` and ``reservoir``: parallel lanes of pieces, every sample a function of its number.

The episodes, in an order keyed by (seed, epoch), are laid end to end and cut into L lanes of equal length. All runs
of an episode stay in one lane (but for the cut ends), so that the L pieces that are open at a time belong to
L episodes. Round r takes position r of every lane. ``lanes`` permutes the lanes of each round; ``reservoir``
permutes the samples of a block of several rounds, which mixes in time as well. The cut ends make the first pieces
of unequal size: the first batch does not wait for L whole units, and lanes change their piece at different times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ingest.plan.hashing import hash_key, shuffled_rows
from ingest.plan.order import Admission, Order, Span
from ingest.plan.pieces import Pieces
from ingest.plan.shards import even_bounds

_EPISODE_SALT, _PIECE_SALT, _FRAME_SALT, _ROUND_SALT = 1, 2, 3, 4
_ROWS = 1 << 14


class LaneOrder(Order):
    """L lanes of equal length, visited round by round.

    Args:
        pieces: the consumer's share.
        lanes: number of lanes; fewer are used when there are fewer pieces.
        rounds: rounds whose samples are permuted together, 1 for ``lanes``.
        seed: seed of the plan.
        epoch: epoch number.
    """

    def __init__(self, pieces: Pieces, *, lanes: int, rounds: int, seed: int, epoch: int) -> None:
        episode = hash_key(seed, epoch, _EPISODE_SALT, pieces.dataset, pieces.episode, pieces.copy)[: len(pieces)]
        line = pieces.take(np.lexsort((pieces.start, pieces.lo, pieces.copy, pieces.episode, pieces.dataset, episode)))
        self._total = int(line.count.sum())
        self._lanes = max(1, min(lanes, len(line), self._total))
        self._rounds = rounds
        ends = even_bounds(self._total, self._lanes)
        line_end = np.cumsum(line.count)
        cut, lane = line.cut(ends)
        # The remainder of a piece that a lane boundary cuts comes first in its lane, its beginning last in the one before.
        begin = np.cumsum(cut.count) - cut.count
        uncut = np.concatenate((np.zeros(1, dtype=np.int64), line_end))
        head = ~np.isin(begin, uncut)
        tail = ~np.isin(begin + cut.count, uncut)
        place = np.where(head, 0, np.where(tail, 2, 1))
        word = hash_key(seed, epoch, _PIECE_SALT, cut.dataset, cut.episode, cut.lo, cut.start, cut.copy)[: len(cut)]
        inner = np.lexsort((cut.start, cut.lo, cut.unit, word, place, lane))
        self.pieces: Pieces = cut.take(inner)
        self._lane: NDArray[np.int64] = lane[inner]
        self._begin: NDArray[np.int64] = np.cumsum(self.pieces.count) - self.pieces.count
        self._lane_start: NDArray[np.int64] = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))
        self._keys: NDArray[np.uint64] = hash_key(
            seed, epoch, _FRAME_SALT, self.pieces.dataset, self.pieces.episode, self.pieces.lo, self.pieces.hi, self.pieces.copy
        )[: len(self.pieces)]
        self._round_key = int(hash_key(seed, epoch, _ROUND_SALT)[0])

    def __len__(self) -> int:
        return self._total

    @property
    def lanes(self) -> int:
        """Lanes in use."""
        return self._lanes

    @property
    def _width(self) -> int:
        return self._lanes * self._rounds

    def _block(self, block: int) -> NDArray[np.int64]:
        """Slots of a block, in delivery order; slot s is round s // L, lane s % L of the block."""
        width = min(self._width, self._total - block * self._width)
        return shuffled_rows(np.array([block]), width, self._round_key)[0]

    def _slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Unpermuted slot, counted from the beginning, of each sample ``start..stop``."""
        width = self._width
        first, last = start // width, -(-stop // width)
        full = min(last, self._total // width)
        parts: list[NDArray[np.int64]] = []
        if first < full:
            rows = np.arange(first, full)
            parts.append((shuffled_rows(rows, width, self._round_key) + rows[:, None] * width).reshape(-1))
        if last > full:
            parts.append(self._block(full) + full * width)
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return slots[start - first * width : stop - first * width]

    def _span(self, start: int, stop: int) -> Span:
        turn, lane = np.divmod(self._slots(start, stop), self._lanes)
        place = self._lane_start[lane] + turn
        entry = np.searchsorted(self._begin, place, side="right") - 1
        frame = self.pieces.frames(entry, place - self._begin[entry], self._keys)
        return Span(entry, self.pieces.unit[entry], frame, self.pieces.copy[entry])

    def _sample_of(self, turn: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample number of a round of a lane, for single-round blocks, int64 like ``turn``."""
        samples = np.empty_like(turn)
        full = self._total // self._lanes
        for start in range(0, len(turn), _ROWS):
            rows, wanted = turn[start : start + _ROWS], lane[start : start + _ROWS]
            visited = shuffled_rows(rows, self._lanes, self._round_key)
            samples[start : start + _ROWS] = rows * self._lanes + np.argmax(visited == wanted[:, None], axis=1)
        ragged = np.flatnonzero(turn == full)
        if len(ragged):
            visited = self._block(full)
            samples[ragged] = full * self._lanes + np.argmax(visited[None, :] == lane[ragged][:, None], axis=1)
        return samples

    def admission(self) -> Admission:
        """The pieces by first use; first in, first out."""
        begin = self._begin - self._lane_start[self._lane]
        end = begin + self.pieces.count - 1
        if self._rounds == 1:
            first, last = self._sample_of(begin, self._lane), self._sample_of(end, self._lane)
        else:
            first = begin // self._rounds * self._width
            last = np.minimum((end // self._rounds + 1) * self._width, self._total) - 1
        entry = np.lexsort((self._lane, begin, first))
        first, last = first[entry], last[entry]
        return Admission(entry, self.pieces.unit[entry], self.pieces.count[entry], self.pieces.bytes[entry], first - 1, first, last)

    def extent(self, entries: NDArray[np.int64]) -> tuple[int, int]:
        """From the first block that holds one of the pieces to the last."""
        if not len(entries):
            return 0, 0
        begin = self._begin[entries] - self._lane_start[self._lane[entries]]
        end = begin + self.pieces.count[entries] - 1
        first = int(begin.min()) // self._rounds * self._width
        return first, min((int(end.max()) // self._rounds + 1) * self._width, self._total)

    def leftover(self, samples: int) -> Pieces:
        """Arithmetic on the lanes; only the block that is open is looked at sample by sample."""
        samples = min(max(samples, 0), self._total)
        block, inside = divmod(samples, self._width)
        floor = self._lane_start[self._lane] + block * self._rounds
        taken = np.clip(floor - self._begin, 0, self.pieces.count)
        if not inside:
            return self.pieces.drop_before(taken)
        turn, lane = np.divmod(self._block(block)[:inside], self._lanes)
        places = np.sort(self._lane_start[lane] + block * self._rounds + turn)
        owner = np.searchsorted(self._begin, places, side="right") - 1
        scattered: list[Pieces] = []
        touched: list[int] = np.unique(owner).tolist()
        for row in touched:
            gone = places[owner == row] - self._begin[row]
            count = int(self.pieces.count[row])
            if int(gone[-1]) == int(taken[row]) + len(gone) - 1:
                taken[row] += len(gone)
                continue
            rest = np.setdiff1d(np.arange(int(taken[row]), count), gone, assume_unique=True)
            frames = self.pieces.frames(np.full(len(rest), row), rest, self._keys)
            unit, lo, hi, copy = (int(getattr(self.pieces, name)[row]) for name in ("unit", "lo", "hi", "copy"))
            scattered.append(Pieces.listing(self.pieces.units, unit, frames, lo=lo, hi=hi, copy=copy))
            taken[row] = count
        return Pieces.concatenate(self.pieces.units, [self.pieces.drop_before(taken), *scattered])
