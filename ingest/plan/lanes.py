"""The native orders ``lanes`` and ``reservoir``: parallel lanes of pieces, every sample a function of its number.

The episodes, in an order keyed by (seed, epoch), are laid end to end and cut into L lanes of (nearly) equal length. All
runs of an episode stay together, so that the L pieces that are open at a time belong to L episodes. Round r takes
position r of every lane that is long enough. ``lanes`` permutes the lanes of each round; ``reservoir`` permutes the
samples of a block of several rounds, which mixes in time as well.

Only an undivided episode is ever cut: runs end where a clean decode can begin, so lanes end at theirs. The first
episode of a lane is cut at a phase that differs from lane to lane and its rest comes last: the first batch does not
wait for L whole episodes, and lanes change their episode at different times.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ingest.plan.hashing import hash_key, shuffled_rows
from ingest.plan.order import Admission, Order, Span
from ingest.plan.pieces import Pieces
from ingest.plan.shards import even_bounds
from ingest.plan.turns import Turns

_EPISODE_SALT, _PIECE_SALT, _FRAME_SALT, _ROUND_SALT = 1, 2, 3, 4
_ROWS = 1 << 14


class LaneOrder(Order):
    """L lanes of nearly equal length, visited round by round.

    Args:
        pieces: the consumer's share.
        lanes: number of lanes; fewer are used when there are fewer pieces.
        rounds: rounds whose samples are permuted together, 1 for ``lanes``.
        seed: seed of the plan.
        epoch: epoch number.
    """

    def __init__(self, pieces: Pieces, *, lanes: int, rounds: int, seed: int, epoch: int) -> None:
        self._rounds = rounds
        self.pieces: Pieces
        self._lane: NDArray[np.int64]
        self.pieces, self._lane, lengths = _dealt(pieces, lanes, (seed, epoch))
        self._turns = Turns(tuple(lengths.tolist()))
        self._lanes = len(lengths)
        self._begin: NDArray[np.int64] = np.cumsum(self.pieces.count) - self.pieces.count
        self._lane_start: NDArray[np.int64] = np.cumsum(lengths) - lengths
        self._keys: NDArray[np.uint64] = hash_key(
            seed, epoch, _FRAME_SALT, self.pieces.dataset, self.pieces.episode, self.pieces.lo, self.pieces.hi, self.pieces.copy
        )[: len(self.pieces)]
        self._round_key = int(hash_key(seed, epoch, _ROUND_SALT)[0])
        # Blocks that every lane takes part in have one width; the samples before each later one are listed.
        self._full = int(lengths.min()) // rounds
        later = np.arange(self._full, -(-int(lengths.max()) // rounds) + 1) * rounds
        self._edges: NDArray[np.int64] = np.minimum(lengths[:, None], later[None, :]).sum(axis=0)

    def __len__(self) -> int:
        return self._turns.total

    @property
    def lanes(self) -> int:
        """Lanes in use."""
        return self._lanes

    @property
    def _width(self) -> int:
        return self._lanes * self._rounds

    def _block_of(self, sample: int) -> int:
        if sample < self._full * self._width:
            return sample // self._width
        return self._full + int(np.searchsorted(self._edges, sample, side="right")) - 1

    def _block_start(self, block: int) -> int:
        return block * self._width if block <= self._full else int(self._edges[min(block - self._full, len(self._edges) - 1)])

    def _slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """For each sample ``start..stop``, its number before the samples of a block were permuted, int64."""
        first, last = self._block_of(start), self._block_of(stop - 1) + 1
        parts: list[NDArray[np.int64]] = []
        if first < self._full:
            rows = np.arange(first, min(last, self._full))
            parts.append((shuffled_rows(rows, self._width, self._round_key) + rows[:, None] * self._width).reshape(-1))
        for block in range(max(first, self._full), last):
            begin, end = self._block_start(block), self._block_start(block + 1)
            parts.append(shuffled_rows(np.array([block]), end - begin, self._round_key)[0] + begin)
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        begin = self._block_start(first)
        return slots[start - begin : stop - begin]

    def _places(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places along the line of pieces."""
        if len(slots) and int(slots.max()) < self._full * self._width:
            turn, lane = np.divmod(slots, self._lanes)
        else:
            lane, turn = self._turns.workers_at(slots)
        return self._lane_start[lane] + turn

    def _span(self, start: int, stop: int) -> Span:
        place = self._places(self._slots(start, stop))
        entry = np.searchsorted(self._begin, place, side="right") - 1
        frame = self.pieces.frames(entry, place - self._begin[entry], self._keys)
        return Span(entry, self.pieces.unit[entry], frame, self.pieces.copy[entry])

    def _sample_of(self, turn: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample number of a round of a lane, for single-round blocks, int64 like ``turn``."""
        samples = np.empty_like(turn)
        full = np.flatnonzero(turn < self._full)
        for start in range(0, len(full), _ROWS):
            rows = full[start : start + _ROWS]
            visited = shuffled_rows(turn[rows], self._lanes, self._round_key)
            samples[rows] = turn[rows] * self._lanes + np.argmax(visited == lane[rows][:, None], axis=1)
        late: list[int] = np.flatnonzero(turn >= self._full).tolist()
        for row in late:
            begin, end = self._block_start(int(turn[row])), self._block_start(int(turn[row]) + 1)
            lanes, _ = self._turns.workers_at(self._slots(begin, end))
            samples[row] = begin + int(np.argmax(lanes == lane[row]))
        return samples

    def _turns_of(self, entries: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First and last round of pieces."""
        first = self._begin[entries] - self._lane_start[self._lane[entries]]
        return first, first + self.pieces.count[entries] - 1

    def _admission(self, start: int, stop: int) -> Admission:
        return self._uses.within(start, stop)

    @cached_property
    def _uses(self) -> Admission:
        """The pieces by first use; first in, first out."""
        begin, end = self._turns_of(np.arange(len(self.pieces)))
        if self._rounds == 1:
            first, last = self._sample_of(begin, self._lane), self._sample_of(end, self._lane)
        else:
            first = np.array([self._block_start(block) for block in (begin // self._rounds).tolist()], dtype=np.int64)
            last = np.array([self._block_start(block + 1) - 1 for block in (end // self._rounds).tolist()], dtype=np.int64)
        entry = np.lexsort((self._lane, begin, first))
        first, last = first[entry], last[entry]
        return Admission(entry, self.pieces.unit[entry], self.pieces.count[entry], self.pieces.bytes[entry], first - 1, first, last)

    def extent(self, entries: NDArray[np.int64]) -> tuple[int, int]:
        """From the first block that holds one of the pieces to the last."""
        if not len(entries):
            return 0, 0
        begin, end = self._turns_of(entries)
        return self._block_start(int(begin.min()) // self._rounds), self._block_start(int(end.max()) // self._rounds + 1)

    def leftover(self, samples: int) -> Pieces:
        """Arithmetic on the lanes; only the block that is open is looked at sample by sample."""
        samples = min(max(samples, 0), len(self))
        if samples == len(self):
            return self.pieces.take(np.zeros(0, dtype=np.int64))
        block = self._block_of(samples)
        floor = self._lane_start[self._lane] + block * self._rounds
        taken = np.clip(floor - self._begin, 0, self.pieces.count)
        begin = self._block_start(block)
        if samples == begin:
            return self.pieces.drop_before(taken)
        places = np.sort(self._places(self._slots(begin, samples)))
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


def _dealt(pieces: Pieces, lanes: int, key: tuple[int, int]) -> tuple[Pieces, NDArray[np.int64], NDArray[np.int64]]:
    """Pieces in the order of the lanes, the lane of each, and the length of each lane."""
    if not len(pieces):
        return pieces, np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    pieces = pieces.sorted_by_episode()
    word = np.broadcast_to(hash_key(*key, _EPISODE_SALT, pieces.dataset, pieces.episode, pieces.copy), len(pieces))
    line = pieces.take(np.argsort(word, kind="stable"))
    stop = np.cumsum(line.count)
    begin = stop - line.count
    group = line.groups()
    undivided = (np.bincount(group) == 1)[group]
    ends = _lane_ends(begin, stop, undivided, min(lanes, len(line), int(stop[-1])))
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))
    phases = _phases(begin, stop, undivided, starts, ends)
    cut, _ = line.cut(np.sort(np.concatenate((ends, phases))))
    left = np.cumsum(cut.count) - cut.count
    right = left + cut.count
    lane = np.searchsorted(ends, left, side="right")
    # An episode that two lanes share comes first in the later one and last in the earlier one: not at the same time.
    episode = cut.groups()
    edges = np.flatnonzero(np.diff(episode, prepend=-1, append=-1))
    shared_before = left[edges[:-1]][episode] < starts[lane]
    shared_after = right[edges[1:] - 1][episode] > ends[lane]
    early = _among(left, starts) | (shared_before & ~shared_after)
    late = _among(left, phases) | (shared_after & ~shared_before)
    place = np.where(early, 0, np.where(late, 2, 1))
    word = np.broadcast_to(hash_key(*key, _PIECE_SALT, cut.dataset, cut.episode, cut.lo, cut.start, cut.copy), len(cut))
    by_word = np.argsort(word, kind="stable")
    inner = by_word[np.argsort((lane * 3 + place)[by_word], kind="stable")]
    return cut.take(inner), lane[inner], ends - starts


def _among(values: NDArray[np.int64], points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which values are among ascending points, bool like ``values``."""
    found = np.zeros(len(values), dtype=np.bool_)
    if len(points):
        found = points[np.minimum(np.searchsorted(points, values), len(points) - 1)] == values
    return found


def _lane_ends(begin: NDArray[np.int64], stop: NDArray[np.int64], undivided: NDArray[np.bool_], lanes: int) -> NDArray[np.int64]:
    """Even ends, moved to the nearer end of a run where they would cut one; lanes that become empty vanish."""
    ends = even_bounds(int(stop[-1]), lanes)
    row = np.searchsorted(stop, ends - 1, side="right")
    nearer = np.where(ends - begin[row] < stop[row] - ends, begin[row], stop[row])
    ends = np.unique(np.where(undivided[row], ends, nearer))
    return ends[ends > 0]


def _phases(
    begin: NDArray[np.int64], stop: NDArray[np.int64], undivided: NDArray[np.bool_], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where to cut the first episodes of lanes that begin with a whole one and have more than that."""
    row = np.searchsorted(stop, starts, side="right")
    phase = np.arange(1, len(starts) + 1) / (len(starts) + 1)
    head = np.maximum(np.rint((stop - begin)[row] * phase).astype(np.int64), 1)
    usable = undivided[row] & (begin[row] == starts) & (stop[row] < ends) & (head < (stop - begin)[row])
    return (starts + head)[usable]
