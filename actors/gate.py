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
    """

    def __init__(self) -> None:
        self._granted: dict[str, int] = {}
        self._asked = False
        self._changed = asyncio.Condition()

    async def grant(self, key: str, granted: int) -> None:
        """Units of a list that may be fetched; -1 says that nobody wants the list any more."""
        async with self._changed:
            self._granted[key] = max(granted, self._granted.get(key, 0)) if granted >= 0 else _CLOSED
            self._changed.notify_all()

    async def wait(self, key: str, number: int) -> int:
        """Waits until a unit of a list may be fetched; returns the number below which all may be, or -1 when nobody wants any more."""
        async with self._changed:
            self._asked = True
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._granted.get(key, 0) > number)
            return -1 if self._granted[key] == _CLOSED else self._granted[key]

    async def asked(self) -> None:
        """Returns once a read task has asked for its first unit: readers are up."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._asked)


def start_gate() -> Any:
    """A gate actor that ends with the calling process; it reserves no CPU and answers any number of waiting tasks."""
    return ray.remote(PlanGate).options(max_concurrency=1000, **beside_caller("gate")).remote()
