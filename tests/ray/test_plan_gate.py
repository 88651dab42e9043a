"""The gate between read tasks and byte credits, without a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.gate import PlanGate


def test_grants_only_grow_and_the_end_tells_everyone() -> None:
    async def run() -> list[Any]:
        gate = PlanGate()
        waiting = [asyncio.create_task(gate.wait("a", number)) for number in (0, 1, 2)]
        other = asyncio.create_task(gate.wait("b", 0))
        await gate.grant("a", 2)
        await gate.grant("a", 1)
        found: list[Any] = [await waiting[0], await waiting[1], await gate.wait("a", 1)]
        await asyncio.sleep(0)
        found.append(waiting[2].done())
        await gate.grant("a", -1)
        found += [await waiting[2], await gate.wait("a", 0), await gate.wait("a", 99)]
        await gate.grant("a", 5)
        found += [other.done()]
        other.cancel()
        return found

    assert asyncio.run(run()) == [2, 2, 2, False, -1, -1, -1, False]
