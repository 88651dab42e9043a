"""Units from Ray Data arrive as soon as they are read, however tight the budget is."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from own_processes import workers
from ray.data._internal.stats import get_or_create_stats_actor

from ingest.datasource import UnitList
from ingest.engine.counters import Counters
from ingest.engine.unit import UnitData
from ingest.errors import StorageError
from train_integration.credits import ByteLedger, UnitCredits
from train_integration.feed import Arrival, RayFeed, each_once
from train_integration.options import StreamConfig, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200), pytest.mark.usefixtures("ray_cluster")]

EACH = 1 << 20
AT_ONCE = 3


def test_the_last_unit_that_the_budget_holds_arrives(streamed: Path) -> None:
    """Whoever waits for it gives nothing back before, so nothing more is read."""
    description, _ = open_stream(streamed, StreamConfig())
    units = description.units
    count = len(units.episode)
    assert count == 9
    nbytes = np.full(count, EACH, np.int64)
    wanted = UnitList(np.arange(count), units.dataset, units.episode, units.lo, units.hi, nbytes)
    credits = UnitCredits(ByteLedger(AT_ONCE * EACH), nbytes)
    arrived: list[int] = []
    ended = threading.Event()

    def read() -> None:
        for ordinal, _ in RayFeed(ray.put(description.job), 64 << 20).units(wanted, Counters(), credits):
            arrived.append(ordinal)
            credits.arrived(ordinal, EACH)
            if len(arrived) % AT_ONCE == 0:
                for number in arrived[-AT_ONCE:]:
                    credits.release(number)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(120), f"only {arrived} arrived"
    assert arrived == list(range(count))


def test_reading_again_and_again_leaves_no_thread_behind(streamed: Path) -> None:
    description, _ = open_stream(streamed, StreamConfig())
    units = description.units
    nbytes = np.full(len(units.episode), EACH, np.int64)
    wanted = UnitList(np.arange(len(nbytes)), units.dataset, units.episode, units.lo, units.hi, nbytes)
    feed = RayFeed(ray.put(description.job), 64 << 20)
    threads: list[set[int | None]] = []
    for _ in range(4):
        credits = UnitCredits(ByteLedger(len(nbytes) * EACH), nbytes)
        assert len(list(feed.units(wanted, Counters(), credits))) == len(nbytes)
        threads.append({thread.ident for thread in threading.enumerate() if thread.name == "Prefetcher"})
    assert threads == [set()] * 4


OF_RAY = 150
"""Objects that Ray keeps in this process for each execution, and some: a remote function, and a class of an actor with its methods."""


def test_reading_again_and_again_keeps_nothing(streamed: Path, request: pytest.FixtureRequest) -> None:
    """As a stream does, which reads anew for every epoch."""
    # Whoever runs tests keeps what is logged. Loggers remember whether they are enabled, so setting the level alone does not do.
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    request.addfinalizer(lambda: logging.disable(level))
    description, _ = open_stream(streamed, StreamConfig())
    units = description.units
    nbytes = np.full(len(units.episode), EACH, np.int64)
    wanted = UnitList(np.arange(len(nbytes)), units.dataset, units.episode, units.lo, units.hi, nbytes)
    feed = RayFeed(ray.put(description.job), 64 << 20)
    ledger = ByteLedger(len(nbytes) * EACH)

    def read(times: int) -> Counter[str]:
        for _ in range(times):
            credits = UnitCredits(ledger, nbytes)
            assert len(list(feed.units(wanted, Counters(), credits))) == len(nbytes)
            credits.close()
        gc.collect()
        return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())

    stats = get_or_create_stats_actor()
    before, known = read(3), len(ray.get(stats.get_datasets.remote()))
    after = read(6)
    grown = after - before
    ours = {name: count for name, count in grown.items() if name.split(".")[0] in {"actors", "ingest", "train_integration"}}
    assert ours == {}
    assert sum(grown.values()) / 6 < OF_RAY, grown.most_common(12)
    assert ray.get(feed.gate.kept.remote()) == 0
    assert ledger.lists == []
    assert len(ray.get(stats.get_datasets.remote())) == known


def numbered(count: int) -> UnitList:
    zeros = np.zeros(count, np.int64)
    return UnitList(np.arange(count), zeros.astype(np.int32), zeros, zeros, zeros, zeros)


@pytest.mark.parametrize(
    "readings",
    [
        [[0, 1, 2, 3, 4, 5]],
        [[0, 1, 2, 1, 2, 3, 4, 5]],  # run again, with more rows for the same units
        [[0, 1, 4, 5], [2, 3, 4, 5]],  # run again, with fewer rows for the same units
        [[0, 1], [2, 2, 5], [3, 4, 5]],  # and with fewer rows in all than had come
        [[0, 1, 2, 3, 4, 5, 3, 4, 5]],
    ],
)
def test_units_that_come_again_or_not_at_all(readings: list[list[int]]) -> None:
    asked: list[int] = []
    unit: Any = StorageError("any")

    def read(rest: UnitList) -> Generator[Arrival]:
        asked.append(int(rest.ordinal[0]))
        for ordinal in readings[len(asked) - 1]:
            yield ordinal, unit

    assert [ordinal for ordinal, _ in each_once(numbered(6), read)] == list(range(6))
    assert asked == [reading[0] for reading in readings]


def test_readers_that_end_without_the_next_unit_are_an_error() -> None:
    def read(rest: UnitList) -> Generator[Arrival]:
        yield from ()

    with pytest.raises(StorageError, match="unit 0 of 3"):
        list(each_once(numbered(3), read))


def test_killed_readers_leave_no_unit_out_and_bring_none_twice(streamed: Path) -> None:
    """Rows are taken one by one, so that several are ahead when a reader is killed; their tasks run again."""
    description, _ = open_stream(streamed, StreamConfig())
    units = description.units
    rows = np.tile(np.arange(len(units.episode)), 8)
    nbytes = np.full(len(rows), EACH, np.int64)
    wanted = UnitList(np.arange(len(rows)), units.dataset[rows], units.episode[rows], units.lo[rows], units.hi[rows], nbytes)
    feed = RayFeed(ray.put(description.job), 64 << 20)
    credits = UnitCredits(ByteLedger(40 * EACH), nbytes)
    arrived: list[int] = []
    for ordinal, unit in feed.units(wanted, Counters(), credits):
        assert isinstance(unit, UnitData)
        assert unit.episode == units.episode[rows[ordinal]]
        arrived.append(ordinal)
        credits.arrived(ordinal, EACH)
        credits.release(ordinal)
        if len(arrived) in {3, 20, 41}:
            for pid in workers("ReadReelrayEpisodes"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    credits.close()
    assert arrived == list(range(len(rows)))
