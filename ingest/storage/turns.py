"""Who fetches what: of those that want the same bytes at the same time, one fetches them and the others wait for what it keeps."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingest.storage.base import ByteRange
from ingest.storage.processes import is_alive


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one who wants bytes of an object.

    Attributes:
        number: names the turn.
        mine: what the asker fetches now; nobody else does until the turn is over.
        theirs: what others are fetching.
    """

    number: int
    mine: tuple[ByteRange, ...]
    theirs: tuple[ByteRange, ...]


class Turns(Protocol):
    """Hands out turns. Thread-safe."""

    def take(self, version: str, wanted: Sequence[ByteRange]) -> Turn:
        """Divides what is wanted of one version of an object; every turn is given back with ``done``, whatever came of it."""
        ...

    def done(self, version: str, turn: Turn) -> None:
        """Ends a turn."""
        ...

    def busy(self, version: str, wanted: Sequence[ByteRange]) -> bool:
        """Whether anybody is fetching some of this."""
        ...


@dataclass(frozen=True, slots=True)
class _Taken:
    start: int
    stop: int
    number: int
    owner: int


class FetchTurns:
    """Turns of the threads of a process, or of the processes of a machine. The turns of a process that died are over."""

    def __init__(self, alive: Callable[[int], bool] | None = None) -> None:
        """
        Args:
            alive: whether a process is there, by its id; asks the system by default.
        """
        self._alive = alive or is_alive
        self._taken: dict[str, list[_Taken]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def take(self, version: str, wanted: Sequence[ByteRange], owner: int | None = None) -> Turn:
        """See `Turns`; ``owner`` is the id of the process that asks, by default this one's."""
        owner = os.getpid() if owner is None else owner
        with self._lock:
            others = self._present(version)
            number = next(self._numbers)
            mine: list[ByteRange] = []
            theirs: list[ByteRange] = []
            for wish in wanted:
                left = without(wish, [(one.start, one.stop) for one in others])
                theirs.extend(without(wish, left))
                for start, stop in (piece for part in left for piece in without(part, mine)):
                    mine.append((start, stop))
            if mine:
                self._taken[version] = others + [_Taken(start, stop, number, owner) for start, stop in mine]
            return Turn(number, tuple(mine), tuple(theirs))

    def done(self, version: str, turn: Turn) -> None:
        """See `Turns`."""
        with self._lock:
            left = [one for one in self._taken.pop(version, []) if one.number != turn.number]
            if left:
                self._taken[version] = left

    def busy(self, version: str, wanted: Sequence[ByteRange]) -> bool:
        """See `Turns`."""
        with self._lock:
            return any(max(one.start, start) < min(one.stop, stop) for one in self._present(version) for start, stop in wanted)

    def _present(self, version: str) -> list[_Taken]:
        taken = self._taken.get(version, [])
        alive = {owner: self._alive(owner) for owner in {one.owner for one in taken}}
        return [one for one in taken if alive[one.owner]]


def without(wish: ByteRange, holes: Sequence[ByteRange]) -> list[ByteRange]:
    """What is left of a range when others are taken out of it, ascending."""
    start, stop = wish
    left: list[ByteRange] = []
    for low, high in sorted(holes):
        if low >= stop:
            break
        if low > start:
            left.append((start, low))
        start = max(start, high)
    if start < stop:
        left.append((start, stop))
    return left
