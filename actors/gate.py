"""Lets read tasks wait for byte credits that the rank grants in plan order."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from actors.resources import beside_caller

_CLOSED = 1 << 62


class PlanGate:
    """One growing number for each list of units: those numbered below it may be fetched.

    The rank grants, read tasks wait. Grants only grow, so a read task that runs again after a loss does not wait twice.
    Lists are numbered from 0 on in the order in which they begin, so that of all that have ended one number is kept: a
    stream has a new list for every epoch.
    """

    def __init__(self) -> None:
        self._granted: dict[int, int] = {}
        self._ended = 0
        self._asked = False
        self._changed = asyncio.Condition()

    async def grant(self, of: int, granted: int) -> None:
        """Units of a list that may be fetched; -1 says that nobody wants the list any more."""
        async with self._changed:
            if of >= self._ended:
                self._granted[of] = max(granted, self._granted.get(of, 0)) if granted >= 0 else _CLOSED
            while self._granted.get(self._ended) == _CLOSED:
                del self._granted[self._ended]
                self._ended += 1
            self._changed.notify_all()

    async def wait(self, of: int, number: int) -> int:
        """Waits until a unit of a list may be fetched; returns the number below which all may be, or -1 when nobody wants any more."""
        async with self._changed:
            self._asked = True
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._grant(of) > number)
            granted = self._grant(of)
            return -1 if granted == _CLOSED else granted

    def _grant(self, of: int) -> int:
        return _CLOSED if of < self._ended else self._granted.get(of, 0)

    async def kept(self) -> int:
        """Lists of which something is kept: those that are open, and those that ended before an earlier one did."""
        return len(self._granted)

    async def asked(self) -> None:
        """Returns once a read task has asked for its first unit: readers are up."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._asked)


def start_gate() -> Any:
    """A gate actor that ends with the calling process; it reserves no CPU and answers any number of waiting tasks."""
    return ray.remote(PlanGate).options(max_concurrency=1000, **beside_caller("gate")).remote()
