"""Byte credits: how much compressed payload may be in memory or under way, granted in plan order."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush

from ingest.errors import BudgetError, StorageError, StreamClosedError


@dataclass(slots=True)
class _Reservation:
    nbytes: int
    leases: int = 0
    resident: int = 0
    busy: bool = False


class ByteBudget:
    """Reservations of bytes by key, with leases, last-recently-used eviction and waiting in order of tickets.

    A reservation covers its bytes from before the fetch until it is dropped. While it is leased, or its fetch is under way (``busy``), it
    stays; otherwise it is dropped when the bytes are needed by another. All methods are thread-safe.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        setting: str = "the byte budget",
        on_evict: Callable[[Hashable], None] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        """
        Args:
            limit_bytes: most bytes reserved at any time.
            setting: name of the setting that raises the limit, for messages.
            on_evict: called with the key of each dropped reservation while the lock is held; must not call back.
            lock: lock to use, so that an owner can change its own state together with the budget's.

        Raises:
            BudgetError: the limit is not positive.
        """
        if limit_bytes <= 0:
            raise BudgetError(f"{setting} is {limit_bytes} bytes, expected a positive number")
        self.limit_bytes = limit_bytes
        self._setting = setting
        self._on_evict = on_evict
        self._entries: OrderedDict[Hashable, _Reservation] = OrderedDict()
        self._condition = threading.Condition(lock or threading.RLock())
        self._waiting: list[tuple[int, int]] = []
        self._gone: set[tuple[int, int]] = set()
        self._arrivals = 0
        self._tickets = 0
        self._reserved = 0
        self._peak = 0
        self._closed = False

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations: pending, complete and leased."""
        return self._reserved

    @property
    def resident_bytes(self) -> int:
        """Bytes of payload that has arrived."""
        with self._condition:
            return sum(entry.resident for entry in self._entries.values())

    @property
    def peak_bytes(self) -> int:
        """Largest ``reserved_bytes`` so far."""
        return self._peak

    def ticket(self) -> int:
        """The next place in the queue; whoever waits with a lower ticket is served first."""
        with self._condition:
            self._tickets += 1
            return self._tickets

    def holds(self, key: Hashable) -> bool:
        """Whether ``key`` has a reservation."""
        with self._condition:
            return key in self._entries

    def reserve(self, key: Hashable, nbytes: int) -> bool:
        """Reserves without waiting; False when there is no room, or when someone with a ticket is already waiting for it.

        Raises:
            StreamClosedError: the budget is closed.
            BudgetError: ``nbytes`` exceeds the whole budget.
        """
        with self._condition:
            return self._reserve(key, nbytes, patient=False)

    def retain(self, key: Hashable, nbytes: int, *, wait: bool = False, ticket: int | None = None, timeout_s: float | None = None) -> None:
        """Reserves and takes a lease; every ``retain`` needs one ``release``.

        Args:
            key: what the bytes are for.
            nbytes: size of the reservation; a key that already has one keeps it.
            wait: wait for room instead of raising.
            ticket: place in the queue; None takes the next one.
            timeout_s: longest wait; None waits until there is room or the budget is closed.

        Raises:
            StreamClosedError: the budget is closed, before or during the wait.
            BudgetError: ``nbytes`` exceeds the whole budget, or there is no room and ``wait`` is false or has timed out.
        """
        with self._condition:
            if not wait:
                if not self._reserve(key, nbytes, patient=False):
                    raise self._no_room(key, nbytes)
            else:
                self._wait_for_room(key, nbytes, ticket, timeout_s)
            self._entries[key].leases += 1

    def release(self, key: Hashable, *, drop: bool = False) -> None:
        """Gives one lease back.

        Args:
            key: as retained.
            drop: also drop the reservation once nothing holds it, rather than keeping its bytes for a later use.

        Raises:
            StorageError: ``key`` has no lease.
        """
        with self._condition:
            entry = self._entries.get(key)
            if entry is None or entry.leases == 0:
                if self._closed:
                    return
                raise StorageError(f"{key!r} is released but not retained")
            entry.leases -= 1
            if drop and entry.leases == 0 and not entry.busy:
                self._drop(key)
            self._condition.notify_all()

    def start(self, key: Hashable) -> None:
        """Marks a fetch as under way: the reservation cannot be dropped until ``finish``."""
        with self._condition:
            self._require(key).busy = True

    def finish(self, key: Hashable, arrived_bytes: int) -> None:
        """Ends a fetch; ``arrived_bytes`` is 0 for a failed one, whose reservation can then be reclaimed.

        Raises:
            StorageError: more bytes arrived than were reserved.
        """
        with self._condition:
            entry = self._entries.get(key)
            if entry is None:
                # Closing drops everything while fetches are still on their way home.
                return
            entry.busy = False
            self._condition.notify_all()
            if arrived_bytes > entry.nbytes:
                raise StorageError(f"{key!r} reserved {entry.nbytes} bytes, {arrived_bytes} arrived")
            entry.resident = arrived_bytes

    def discard(self, key: Hashable) -> bool:
        """Drops the reservation unless it is leased or its fetch is under way; whether it is gone."""
        with self._condition:
            entry = self._entries.get(key)
            if entry is None:
                return True
            if entry.leases or entry.busy:
                return False
            self._drop(key)
            self._condition.notify_all()
            return True

    def close(self) -> None:
        """Wakes every waiter, which raise ``StreamClosedError``, and drops all reservations. May be called twice."""
        with self._condition:
            self._closed = True
            for key in list(self._entries):
                self._drop(key)
            self._condition.notify_all()

    def _require(self, key: Hashable) -> _Reservation:
        entry = self._entries.get(key)
        if entry is None:
            if self._closed:
                raise StreamClosedError(f"{self._setting} is closed")
            raise StorageError(f"{key!r} has no reservation")
        return entry

    def _no_room(self, key: Hashable, nbytes: int) -> BudgetError:
        return BudgetError(
            f"{key!r} does not fit the available byte budget: {nbytes} bytes asked for, "
            f"{self._reserved} of {self.limit_bytes} are reserved; raise {self._setting} or hold fewer at a time"
        )

    def _reserve(self, key: Hashable, nbytes: int, *, patient: bool) -> bool:
        if self._closed:
            raise StreamClosedError(f"{self._setting} is closed")
        if nbytes < 0:
            raise BudgetError(f"{key!r} asks for {nbytes} bytes, expected a number that is not negative")
        if key in self._entries:
            self._entries.move_to_end(key)
            return True
        if nbytes > self.limit_bytes:
            raise BudgetError(f"{key!r} exceeds the byte budget ({nbytes} > {self.limit_bytes} bytes); raise {self._setting}")
        # Credits follow the plan: what comes later must not take the room that an earlier one waits for.
        if not patient and self._first_waiting() is not None:
            return False
        free = self.limit_bytes - self._reserved
        victims: list[Hashable] = []
        for other, entry in self._entries.items():
            if free >= nbytes:
                break
            if entry.leases == 0 and not entry.busy:
                victims.append(other)
                free += entry.nbytes
        if free < nbytes:
            return False
        for other in victims:
            self._drop(other)
        self._entries[key] = _Reservation(nbytes)
        self._reserved += nbytes
        self._peak = max(self._peak, self._reserved)
        return True

    def _drop(self, key: Hashable) -> None:
        self._reserved -= self._entries.pop(key).nbytes
        if self._on_evict is not None:
            self._on_evict(key)

    def _first_waiting(self) -> tuple[int, int] | None:
        while self._waiting and self._waiting[0] in self._gone:
            self._gone.discard(heappop(self._waiting))
        return self._waiting[0] if self._waiting else None

    def _wait_for_room(self, key: Hashable, nbytes: int, ticket: int | None, timeout_s: float | None) -> None:
        if ticket is None:
            self._tickets += 1
            ticket = self._tickets
        self._arrivals += 1
        place = (ticket, self._arrivals)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        heappush(self._waiting, place)
        try:
            # A key that is there already takes no room, so it need not queue.
            while not ((key in self._entries or self._first_waiting() == place) and self._reserve(key, nbytes, patient=True)):
                if self._closed:
                    raise StreamClosedError(f"{self._setting} was closed while {key!r} waited for {nbytes} bytes")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._no_room(key, nbytes)
                self._condition.wait(left)
        finally:
            self._gone.add(place)
            # The next in line may find room at once.
            self._condition.notify_all()
