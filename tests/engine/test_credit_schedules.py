"""Thousands of made-up schedules of reading, decoding and training, on a clock of their own, against the byte budget."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingest.datasource import UnitList
from ingest.errors import BudgetError
from train_integration.credits import ByteLedger, UnitCredits
from train_integration.fits import refuse_what_never_fits
from train_integration.worklist import WorkList

SCHEDULES = 1500


class World:
    """A rank with readers, decoders and a training loop, whose every action takes a random time.

    Units arrive in their order. One that is decoded whole gives its bytes back when it is decoded; the others keep theirs
    until the last batch that needs them. The budget is the least that any schedule can do with, or a little more.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        count = rng.randint(1, 40)
        self.sizes = [rng.choice([0, rng.randint(1, 9), rng.randint(1, 90)]) for _ in range(count)]
        self.first = sorted(rng.randint(0, 30) for _ in range(count))
        self.last = [step + rng.choice([0, rng.randint(0, 4), rng.randint(0, 30)]) for step in self.first]
        share = rng.random()
        self.whole = [rng.random() < share for _ in range(count)]
        self.limit = max(1, *map(self.needed, range(count))) + rng.choice([0, 0, rng.randint(0, 60)])
        self.ledger = ByteLedger(self.limit)
        self.credits = UnitCredits(self.ledger, np.array(self.sizes, dtype=np.int64), rng.randint(1, 8))
        self.speeds = [rng.choice([0.01, 1.0, 20.0]) for _ in range(3)]
        self.now, self.tie = 0.0, 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.granted = self.started = self.delivered = self.step = 0
        self.fetched: set[int] = set()
        self.resident: set[int] = set()
        self.training = False
        self.ended = False
        self.dies_at = rng.randrange(count) if rng.random() < 0.2 else None
        self.dead = False
        self.threads = rng.randint(1, 4)
        self.credits.listen(self.told)

    def needed(self, unit: int) -> int:
        """Bytes that must be held for a unit to be read: its own, and those of open units before it."""
        held = [other for other in range(unit) if not self.whole[other] and self.last[other] >= self.first[unit]]
        return self.sizes[unit] + sum(self.sizes[other] for other in held)

    def told(self, granted: int) -> None:
        if granted < 0:
            self.ended = True
            return
        assert granted >= self.granted
        self.granted = granted

    def later(self, speed: float, action: Callable[[], None]) -> None:
        self.tie += 1
        heapq.heappush(self.events, (self.now + self.rng.expovariate(1.0) * speed, self.tie, action))

    def start(self) -> None:
        """Starts whatever can be: fetches that are granted, and the batch whose units are there."""
        while self.started < self.granted and self.started - self.delivered < self.threads:
            unit, self.started = self.started, self.started + 1
            self.later(self.speeds[0], lambda unit=unit: self.arrive(unit))
        wanted = [unit for unit, step in enumerate(self.first) if step <= self.step <= self.last[unit]]
        if not self.training and self.step <= max(self.last) and all(unit in self.resident for unit in wanted):
            self.training = True
            self.later(self.speeds[2], self.trained)

    def arrive(self, unit: int) -> None:
        self.fetched.add(unit)
        while self.delivered in self.fetched:
            unit, self.delivered = self.delivered, self.delivered + 1
            if unit == self.dies_at:
                self.credits.arrived(unit, 0)
                self.dead = True
                return
            self.credits.arrived(unit, self.sizes[unit])
            if self.whole[unit]:
                self.later(self.speeds[1], lambda unit=unit: self.credits.release(unit))
            self.resident.add(unit)

    def trained(self) -> None:
        for unit in [unit for unit in self.resident if self.last[unit] <= self.step]:
            self.credits.release(unit)
        self.step += 1
        self.training = False

    def run(self, *, stop_after: int | None = None) -> None:
        self.start()
        events = 0
        while self.events and not self.dead and events != stop_after:
            self.now, _, action = heapq.heappop(self.events)
            action()
            self.start()
            events += 1
            assert 0 <= self.ledger.held_bytes <= self.ledger.peak_bytes <= self.limit


@pytest.mark.parametrize("part", range(4))
def test_no_schedule_exceeds_the_budget_or_gets_stuck(part: int) -> None:
    for seed in range(part * SCHEDULES // 2, (part + 1) * SCHEDULES // 2):
        world = World(seed)
        world.run()
        if not world.dead:
            assert world.step == max(world.last) + 1, f"seed {seed}: stuck at step {world.step}"
            assert world.ledger.held_bytes == 0
        world.credits.close()
        assert world.ended
        assert world.ledger.held_bytes == 0
        assert not world.ledger.lists


def test_a_stream_that_is_cancelled_anywhere_gives_everything_back() -> None:
    for seed in range(SCHEDULES):
        world = World(seed)
        world.run(stop_after=world.rng.randint(0, 60))
        world.credits.close()
        assert world.ended
        assert world.ledger.held_bytes == 0
        for unit in range(len(world.sizes)):
            # What was under way comes home to a closed budget.
            world.credits.arrived(unit, world.sizes[unit])
            world.credits.release(unit)
        assert world.ledger.held_bytes == 0


def work_of(world: World) -> WorkList:
    """The same units as a work list, with one sample to a batch."""
    count = len(world.sizes)
    numbers = np.arange(count, dtype=np.int64)
    units = UnitList(numbers, numbers.astype(np.int32) * 0, numbers, numbers * 0, numbers * 0 + 1, np.array(world.sizes, dtype=np.int64))
    first, last = np.array(world.first, dtype=np.int64), np.array(world.last, dtype=np.int64)
    nothing: Any = None
    return WorkList(units, first, last, first, last, numbers * 0, {}, 1, 0, 0, 61, nothing, nothing)


def test_a_budget_that_never_suffices_is_refused_before_anything_is_read() -> None:
    """The least budget is sharp: it passes, and with a byte less a schedule would stand still, so it is refused."""
    found = 0
    for seed in range(600):
        world = World(seed)
        least = max(map(world.needed, range(len(world.sizes))))
        if world.dies_at is not None or least <= max(world.sizes) or least < 2:
            continue
        work, once = work_of(world), np.array(world.whole)
        refuse_what_never_fits(work, once, least)
        with pytest.raises(BudgetError, match="byte_budget_gb"):
            refuse_what_never_fits(work, once, least - 1)
        tight = ByteLedger(least - 1)
        world.credits.close()
        world.ledger, world.limit = tight, least - 1
        world.ended = False
        world.credits = UnitCredits(tight, np.array(world.sizes, dtype=np.int64), 4)
        world.granted = 0
        world.credits.listen(world.told)
        world.run()
        assert world.step <= max(world.last)
        assert tight.peak_bytes <= tight.limit_bytes
        found += 1
    assert found > 20
