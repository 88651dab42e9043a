"""The coverage pool: a bounded set of resident episodes that samples are drawn from, bit-equal to LeRobot's.

The random draws are, in this order: one shuffle of the sorted episode ids (the admission order), one shuffle of
``arange(n)`` for each episode at its admission (consumed from the end), and per sample either one
``integers(total remaining)`` (``remaining``) or one shuffle of the residents per round (``round_robin``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingest.errors import BudgetError, PlanError

PoolStrategy = Literal["remaining", "round_robin"]
_SPECULATION = 128
_SCAN = 512


@dataclass(slots=True)
class Resident:
    """An admitted episode: its slot, its frames still to come (taken from the end), and how they were drawn.

    Attributes:
        slot: row in the pool's inputs.
        frames: int64[n], the shuffled frame numbers.
        left: how many of ``frames``, from the start, are still to come.
        state: generator state just before the shuffle, from which it can be repeated.
    """

    slot: int
    frames: NDArray[np.int64]
    left: int
    state: dict[str, Any]


class CoveragePool:
    """Yields every (slot, frame) of its episodes exactly once, mixing at most ``pool_size`` episodes.

    A slot is a row number of the inputs, which are in ascending order of episode id; slots without frames are
    dropped. Pure: nothing is fetched.

    Args:
        counts: frames of each slot, int64[E].
        pool_size: most residents at a time, at least 1.
        seed: whole numbers that seed the generator, LeRobot's being ``[seed, epoch]``.
        strategy: ``remaining`` or ``round_robin``.
        sizes: bytes of each slot, needed with a budget.
        byte_budget: most bytes of all residents together, or None.
        names: what to call each slot in errors (episode ids); default the slot numbers.

    Raises:
        PlanError: when an argument is out of range.
        BudgetError: when one slot alone exceeds the budget; nothing was admitted then.
    """

    def __init__(
        self,
        counts: NDArray[np.int64],
        *,
        pool_size: int,
        seed: Sequence[int],
        strategy: PoolStrategy = "remaining",
        sizes: NDArray[np.int64] | None = None,
        byte_budget: int | None = None,
        names: NDArray[np.int64] | None = None,
    ) -> None:
        if strategy not in ("remaining", "round_robin"):
            raise PlanError(f"strategy must be 'remaining' or 'round_robin', found {strategy!r}")
        if pool_size < 1:
            raise PlanError(f"pool_size must be positive, found {pool_size}")
        self._counts: list[int] = np.asarray(counts, dtype=np.int64).tolist()
        self._total = sum(self._counts)
        names = np.arange(len(self._counts)) if names is None else names
        self._sizes = _checked_sizes(sizes, byte_budget, names, len(self._counts))
        self._budget = byte_budget
        self._pool_size = pool_size
        self._round_robin = strategy == "round_robin"
        self._seed = tuple(seed)
        self.rng: np.random.Generator = np.random.default_rng(list(seed))
        order = np.flatnonzero(np.asarray(counts) > 0).astype(np.int64)
        self.rng.shuffle(order)
        self._pending: NDArray[np.int64] = order
        self._pending_sizes = None if self._sizes is None or byte_budget is None else self._sizes[order]
        self._taken = np.zeros(len(order), dtype=np.bool_)
        self._head = 0
        self._residents: list[Resident] = []
        self._left: list[int] = []
        self._round: list[Resident] = []
        self._draws: list[int] = []
        self._draw_state: dict[str, Any] | None = None
        self._highs: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._drawn = 0
        self.resident_bytes: int = 0
        self.remaining_total: int = 0
        self.emitted: int = -1
        self.admitted: list[int] = []
        self.admitted_at: list[int] = []
        self.newly_admitted: list[int] = []
        self.evicted: list[int] = []
        self._admit()
        self.emitted = 0

    @property
    def residents(self) -> tuple[Resident, ...]:
        """What is in the pool now, in the order of admission."""
        return tuple(self._residents)

    @property
    def resident(self) -> list[int]:
        """Slots in the pool now, in the order of admission."""
        return [one.slot for one in self._residents]

    @property
    def admission_order(self) -> list[int]:
        """All slots in the order in which they wait; a tight budget lets later ones pass, see ``admitted``."""
        return self._pending.tolist()

    @property
    def admitted_count(self) -> int:
        """Episodes admitted so far; ``admitted`` lists them in order."""
        return int(self._taken.sum())

    def prefetch_candidates(self, count: int) -> list[int]:
        """The next ``count`` pending slots in pending order; they are not admitted."""
        rest = self._pending[self._head :]
        return rest[~self._taken[self._head :]][:count].tolist()

    def take(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next samples, fewer at the end: slots int64[K] and frames int64[K], K <= count."""
        step = self._next_by_round if self._round_robin else self._next_by_remaining
        count = min(count, self._total - self.emitted)
        slots, frames = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for row in range(count):
            slots[row], frames[row] = step()
        return slots, frames

    def _next_by_remaining(self) -> tuple[int, int]:
        draw = self._draw()
        left = self._left
        place = 0
        for place, count in enumerate(left):  # noqa: B007 - the loop variable is the result
            if draw < count:
                break
            draw -= count
        return self._emit(place)

    def _next_by_round(self) -> tuple[int, int]:
        if not self._round:
            self._round = list(self._residents)
            self.rng.shuffle(self._round)  # pyright: ignore[reportArgumentType] - a list is a legal sequence here
        one = self._round.pop()
        return self._emit(next(place for place, resident in enumerate(self._residents) if resident is one))

    def _draw(self) -> int:
        """``integers(remaining_total)``, drawn ahead in bulk: an array of bounds gives the values of single calls."""
        if self._drawn == len(self._draws):
            self._draw_state = dict(self.rng.bit_generator.state)
            count = min(_SPECULATION, self.remaining_total)
            self._highs = np.arange(self.remaining_total, self.remaining_total - count, -1)
            self._draws = self.rng.integers(0, self._highs).tolist()
            self._drawn = 0
        self._drawn += 1
        return self._draws[self._drawn - 1]

    def identity(self) -> bytes:
        """A digest of everything that decides the order, 16 bytes."""
        digest = hashlib.blake2b(digest_size=16)
        sizes = np.zeros(0) if self._pending_sizes is None else self._pending_sizes
        settings = (self._seed, self._pool_size, self._budget, self._round_robin)
        for part in (repr(settings).encode(), np.array(self._counts, dtype="<i8"), np.asarray(sizes, dtype="<i8")):
            digest.update(bytes(part))
        return digest.digest()

    def round_places(self) -> list[int]:
        """Places, among the residents, of those that the present round still visits."""
        places = {id(one): place for place, one in enumerate(self._residents)}
        return [places[id(one)] for one in self._round]

    def taken_flags(self) -> NDArray[np.bool_]:
        """For each slot of ``admission_order``, whether it was admitted, bool[E]."""
        return self._taken.copy()

    def restore(
        self,
        emitted: int,
        taken: NDArray[np.bool_],
        residents: Sequence[tuple[int, int, dict[str, Any]]],
        places: Sequence[int],
        state: dict[str, Any],
    ) -> None:
        """Put the pool into a later state of the same order; the lists of past events stay empty.

        Args:
            emitted: samples delivered before.
            taken: as ``taken_flags``.
            residents: slot, frames left and generator state before the shuffle of each resident, by admission.
            places: as ``round_places``.
            state: state of the generator.
        """
        self._residents, self._left, self._round = [], [], []
        self.remaining_total = self.resident_bytes = 0
        self._taken = taken
        self._head = int(np.argmin(np.append(taken, False)))
        for slot, left, before in residents:
            self.rng.bit_generator.state = before
            self._add(Resident(slot, self._shuffled(slot), left, before))
        self._round = [self._residents[place] for place in places]
        self.rng.bit_generator.state = state
        self.emitted = emitted
        self._draws, self._drawn = [], 0
        for events in (self.admitted, self.admitted_at, self.newly_admitted, self.evicted):
            events.clear()

    def settle(self) -> None:
        """Rewind the generator to the draws that were used, so that the next use of it comes at its place."""
        if self._drawn < len(self._draws) and self._draw_state is not None:
            self.rng.bit_generator.state = self._draw_state
            self.rng.integers(0, self._highs[: self._drawn])
        self._draws = []
        self._drawn = 0

    def _emit(self, place: int) -> tuple[int, int]:
        one = self._residents[place]
        one.left -= 1
        self._left[place] -= 1
        self.remaining_total -= 1
        frame = int(one.frames[one.left])
        if not one.left:
            del self._residents[place], self._left[place]
            if self._sizes is not None:
                self.resident_bytes -= int(self._sizes[one.slot])
            self.evicted.append(one.slot)
            self._admit()
        self.emitted += 1
        return one.slot, frame

    def _admit(self) -> None:
        self.settle()
        while len(self._residents) < self._pool_size:
            place = self._first_fitting()
            if place is None:
                return
            self._taken[place] = True
            while self._head < len(self._taken) and self._taken[self._head]:
                self._head += 1
            slot = int(self._pending[place])
            state = dict(self.rng.bit_generator.state)
            self._add(Resident(slot, self._shuffled(slot), self._counts[slot], state))
            self.admitted.append(slot)
            self.admitted_at.append(self.emitted)
            self.newly_admitted.append(slot)

    def _shuffled(self, slot: int) -> NDArray[np.int64]:
        frames = np.arange(self._counts[slot], dtype=np.int64)
        self.rng.shuffle(frames)
        return frames

    def _add(self, one: Resident) -> None:
        self._residents.append(one)
        self._left.append(one.left)
        self.remaining_total += one.left
        if self._sizes is not None:
            self.resident_bytes += int(self._sizes[one.slot])

    def _first_fitting(self) -> int | None:
        if self._pending_sizes is None or self._budget is None:
            return self._head if self._head < len(self._pending) else None
        free = self._budget - self.resident_bytes
        for start in range(self._head, len(self._pending), _SCAN):
            stop = start + _SCAN
            fits = np.flatnonzero(~self._taken[start:stop] & (self._pending_sizes[start:stop] <= free))
            if len(fits):
                return start + int(fits[0])
        return None


def _checked_sizes(sizes: NDArray[np.int64] | None, budget: int | None, names: NDArray[np.int64], count: int) -> NDArray[np.int64] | None:
    if budget is not None and budget <= 0:
        raise PlanError(f"byte_budget must be positive, found {budget}")
    if sizes is None:
        if budget is not None:
            raise PlanError("byte_budget needs the byte size of every episode, found none")
        return None
    array = np.asarray(sizes, dtype=np.int64)
    if array.shape != (count,):
        raise PlanError(f"expected {count} byte sizes, found shape {array.shape}")
    if (array < 0).any():
        slot = int(np.flatnonzero(array < 0)[0])
        raise PlanError(f"episode {names[slot]} has a negative byte size: {array[slot]}")
    if budget is not None and (array > budget).any():
        slot = int(np.flatnonzero(array > budget)[0])
        raise BudgetError(f"Episode {names[slot]} requires {array[slot]} bytes, exceeding the byte budget {budget}")
    return array
