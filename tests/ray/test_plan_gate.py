"""The gate between read tasks and byte credits, without a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.gate import PlanGate


def test_grants_only_grow_and_the_end_tells_everyone() -> None:
    async def run() -> list[Any]:
        gate = PlanGate()
        waiting = [asyncio.create_task(gate.wait(0, number)) for number in (0, 1, 2)]
        other = asyncio.create_task(gate.wait(1, 0))
        await gate.grant(0, 2)
        await gate.grant(0, 1)
        found: list[Any] = [await waiting[0], await waiting[1], await gate.wait(0, 1)]
        await asyncio.sleep(0)
        found.append(waiting[2].done())
        await gate.grant(0, -1)
        found += [await waiting[2], await gate.wait(0, 0), await gate.wait(0, 99)]
        await gate.grant(0, 5)
        found += [other.done()]
        other.cancel()
        return found

    assert asyncio.run(run()) == [2, 2, 2, False, -1, -1, -1, False]


def test_nothing_is_kept_of_lists_that_have_ended() -> None:
    async def run() -> list[int]:
        gate = PlanGate()
        kept: list[int] = []
        for epoch in range(100):
            await gate.grant(epoch, 9)
            # The next list begins before this one has ended.
            await gate.grant(epoch + 1, 3)
            await gate.grant(epoch, -1)
            kept.append(await gate.kept())
        late = [await gate.wait(0, 0), await gate.wait(99, 8), await gate.wait(100, 2)]
        await gate.grant(102, -1)
        await gate.grant(101, -1)
        out_of_turn = await gate.kept()
        await gate.grant(100, -1)
        return [*sorted(set(kept)), *late, out_of_turn, await gate.kept(), await gate.wait(102, 0)]

    assert asyncio.run(run()) == [1, -1, -1, 3, 3, 0, -1]
