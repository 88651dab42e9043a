"""Byte credits: how much compressed payload a rank may have under way or in memory, granted in plan order.

A `ByteLedger` is the rank's budget, shared by everything that its stream reads. A `UnitCredits` grants it to the units of
one work list, first in, first out: a unit's bytes count from the grant, before its fetch, until it is decoded or
drained. What comes later never takes the room that an earlier one waits for, so the budget cannot change an order, and
a full budget pauses reading ahead instead of failing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ingest.errors import StreamClosedError

DEFAULT_WINDOW = 64
"""Units that may be granted beyond those that have arrived."""


class ByteLedger:
    """Bytes that are granted, and the most that ever were. Thread-safe through ``changed``.

    Args:
        limit_bytes: most bytes granted at a time.
        window: units granted beyond those that have arrived, at most, for lists that say nothing else.
        paused: grant nothing until `resume`.

    Attributes:
        changed: guards and announces every change.
        held_bytes: bytes granted now.
        peak_bytes: most bytes granted at a time so far.
        lists: open work lists, in the order in which they are delivered.
    """

    def __init__(self, limit_bytes: int, *, window: int = DEFAULT_WINDOW, paused: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.window = window
        self.paused = paused
        self.changed = threading.Condition(threading.RLock())
        self.held_bytes = 0
        self.peak_bytes = 0
        self.lists: list[UnitCredits] = []

    @property
    def under_way(self) -> int:
        """Units that may be fetched and have not arrived."""
        with self.changed:
            return sum(credits.under_way for credits in self.lists)

    def take(self, nbytes: int) -> None:
        """Counts bytes as held. The caller holds ``changed``."""
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def resume(self) -> None:
        """Ends a pause."""
        with self.changed:
            self.paused = False
            self.grant()

    def grant(self) -> None:
        """Grants what fits, list after list: a later one gets nothing while an earlier one waits. The caller holds ``changed``."""
        if self.paused:
            return
        for credits in self.lists:
            if not credits.advance():
                break
        self.changed.notify_all()


class UnitCredits:
    """Grants the units of a work list their bytes, in their order. Thread-safe.

    Args:
        ledger: the rank's budget.
        nbytes: int64[N], most bytes of each unit.
        window: units granted beyond those that have arrived, at most; None takes the ledger's.

    Attributes:
        ledger: as given.
    """

    def __init__(self, ledger: ByteLedger, nbytes: NDArray[np.int64], window: int | None = None) -> None:
        self.ledger = ledger
        self._changed = ledger.changed
        self._bytes: list[int] = nbytes.tolist()
        self._window = ledger.window if window is None else window
        self._granted = 0
        self._arrived = 0
        self._held: dict[int, int] = {}
        self._closed = False
        self._listeners: list[Callable[[int], None]] = []
        with self._changed:
            ledger.lists.append(self)
            ledger.grant()

    @property
    def granted(self) -> int:
        """Units granted so far: those numbered below it."""
        with self._changed:
            return self._granted

    @property
    def under_way(self) -> int:
        """Units that may be fetched and have not arrived."""
        with self._changed:
            return max(0, self._granted - self._arrived)

    def listen(self, told: Callable[[int], None]) -> None:
        """Calls ``told`` with the number of granted units now and whenever it grows; with -1 when this is closed."""
        with self._changed:
            self._listeners.append(told)
            told(-1 if self._closed else self._granted)

    def wait(self, number: int) -> None:
        """Waits until a unit may be fetched.

        Raises:
            StreamClosedError: this was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or number < self._granted)
            if self._closed:
                raise StreamClosedError("the stream was closed")

    def arrived(self, number: int, nbytes: int) -> None:
        """Notes that a unit has come.

        Args:
            number: the unit.
            nbytes: what it holds, no more than was reserved for it; what it does not need is given back.
        """
        with self._changed:
            self._arrived = max(self._arrived, number + 1)
            if number in self._held:
                assert nbytes <= self._held[number], f"unit {number} holds {nbytes} bytes, of which {self._held[number]} are reserved"
                self.ledger.held_bytes -= self._held[number] - nbytes
                self._held[number] = nbytes
            self.ledger.grant()

    def release(self, number: int) -> None:
        """Gives a unit's bytes back. May be called again."""
        with self._changed:
            self._give_back(number)
            self.ledger.grant()

    def close(self) -> None:
        """Gives everything back and wakes all who wait. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self.ledger.lists.remove(self)
            for number in list(self._held):
                self._give_back(number)
            for told in self._listeners:
                told(-1)
            self.ledger.grant()

    def _give_back(self, number: int) -> None:
        self.ledger.held_bytes -= self._held.pop(number, 0)

    def advance(self) -> bool:
        """Grants what fits; whether the whole list is granted. The caller holds the ledger's ``changed``."""
        before, ledger = self._granted, self.ledger
        while (
            self._granted < len(self._bytes)
            and self._granted < self._arrived + self._window
            and ledger.held_bytes + self._bytes[self._granted] <= ledger.limit_bytes
        ):
            ledger.take(self._bytes[self._granted])
            self._held[self._granted] = self._bytes[self._granted]
            self._granted += 1
        if self._granted > before:
            for told in self._listeners:
                told(self._granted)
        return self._granted == len(self._bytes)
