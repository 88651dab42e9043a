"""The budget of compressed pictures: never exceeded, never stuck, never the reason for another order, all given back."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import WatchedFeed, delivered, described, indices, no_thread_is_left, opened

from ingest.engine import ReadOptions
from ingest.engine.counters import Counters
from ingest.engine.fetch import UnitRequest
from ingest.errors import BudgetError, StorageError, StreamClosedError
from ingest.plan import plan_epoch
from train_integration.credits import ByteLedger, UnitCredits
from train_integration.feed import LocalFeed

PICTURE_BYTES = 32 * 64 * 3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_is_left():
        yield


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_schedule_keeps_within_the_budget_and_grants_everything_in_order(data: st.DataObject) -> None:
    sizes = [data.draw(st.lists(st.integers(0, 50), min_size=0, max_size=25)) for _ in range(data.draw(st.integers(1, 3)))]
    limit = data.draw(st.integers(max([1, *(size for part in sizes for size in part)]), 120))
    window = data.draw(st.integers(1, 6))
    ledger = ByteLedger(limit)
    lists = [UnitCredits(ledger, np.array(part, dtype=np.int64), window) for part in sizes]
    fetching: list[tuple[int, int]] = []
    residents: list[tuple[int, int]] = []
    seen = [0] * len(lists)
    released = 0
    total = sum(map(len, sizes))
    while released < total:
        for number, one in enumerate(lists):
            assert one.granted >= seen[number]
            fetching += [(number, unit) for unit in range(seen[number], one.granted)]
            seen[number] = one.granted
            # A later list waits until the earlier ones are granted whole.
            assert one.granted == 0 or all(seen[before] == len(sizes[before]) for before in range(number))
        assert ledger.held_bytes <= ledger.peak_bytes <= limit
        assert fetching or residents, "stuck"
        if fetching and (not residents or data.draw(st.booleans())):
            list_number, unit = fetching.pop(0)
            lists[list_number].arrived(unit, data.draw(st.integers(0, sizes[list_number][unit])))
            residents.append((list_number, unit))
        else:
            list_number, unit = residents.pop(data.draw(st.integers(0, len(residents) - 1)))
            lists[list_number].release(unit)
            released += 1
    assert ledger.held_bytes == 0
    assert seen == [len(part) for part in sizes]


def test_waiting_threads_are_served_in_order_and_woken_by_the_end() -> None:
    ledger = ByteLedger(10)
    credits = UnitCredits(ledger, np.full(6, 6, dtype=np.int64))
    passed: list[int] = []

    def fetch(number: int) -> None:
        try:
            credits.wait(number)
            passed.append(number)
        except StreamClosedError:
            passed.append(-number)

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for number in range(3):
        deadline = time.monotonic() + 5
        while number not in passed and time.monotonic() < deadline:
            time.sleep(0.001)
        assert passed == list(range(number + 1))
        if number < 2:
            credits.release(number)
    credits.close()
    for thread in threads:
        thread.join(5)
    assert sorted(passed) == [-5, -4, -3, 0, 1, 2]
    assert ledger.held_bytes == 0


def test_listeners_learn_of_grants_and_of_the_end() -> None:
    told: list[int] = []
    credits = UnitCredits(ByteLedger(10), np.array([4, 4, 4], dtype=np.int64))
    credits.listen(told.append)
    credits.release(0)
    credits.close()
    assert told == [2, 3, -1]


def test_what_a_unit_does_not_need_is_given_back_when_it_comes() -> None:
    ledger = ByteLedger(10)
    credits = UnitCredits(ledger, np.array([6, 6], dtype=np.int64))
    assert credits.granted == 1
    credits.arrived(0, 4)
    assert (credits.granted, ledger.held_bytes) == (2, 10)
    credits.arrived(1, 0)
    credits.release(0)
    credits.close()
    assert (ledger.held_bytes, ledger.peak_bytes) == (0, 10)


@pytest.mark.parametrize("strategy", ["lanes", "remaining", "round_robin", "sequential", "reservoir"])
@pytest.mark.parametrize("room", [1.0, 1.4, 3.0])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_keep_within_tight_budgets(small: Path, strategy: str, room: float, workers: int) -> None:
    description, _ = described(small, strategy=strategy, batch_size=5, workers=workers, lane_frames=None)
    budget = int(int(description.units.bytes.max()) * room) * max(1, workers)
    description, dataset = described(small, budget=budget, strategy=strategy, batch_size=5, workers=workers, lane_frames=None)
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    expected = [batch["index"].tolist() for _, batch in dataset.iter_batches(plan)]
    rng = random.Random(strategy)
    feed = WatchedFeed(LocalFeed(description.job), lambda _: time.sleep(rng.random() * 0.004), [])
    with opened(description, feed=feed) as stream:
        assert indices(stream) == expected
        peak = stream.counters.totals()["reelray_compressed_bytes_peak"]
    assert 0 < peak <= budget
    assert all(credits.ledger.held_bytes == 0 for credits in feed.credits)


@pytest.mark.parametrize("window", [None, [-0.4, 0.0, 0.7]])
@pytest.mark.parametrize("lane_frames", [None, 3, 8])
def test_what_a_unit_holds_is_what_was_reserved(small: Path, window: list[float] | None, lane_frames: int | None) -> None:
    read = ReadOptions(delta_timestamps=None if window is None else {"observation.images.cam1": window})
    description, dataset = described(small, strategy="lanes", batch_size=5, lane_frames=lane_frames, read=read)
    units, reader = description.units, dataset.reader()
    for row, reserved in enumerate(description.unit_bytes.tolist()):
        held = reader.read(UnitRequest(0, int(units.episode[row]), int(units.lo[row]), int(units.hi[row]))).payload_bytes
        assert held <= reserved
        if lane_frames is not None and units.frames[row] <= lane_frames:
            assert held == reserved == units.bytes[row]


@pytest.mark.parametrize("room", [1.0, 1.3, 2.5])
@pytest.mark.parametrize("lane_frames", [1, 4, 9])
def test_runs_keep_within_tight_budgets(small: Path, room: float, lane_frames: int) -> None:
    read = ReadOptions(delta_timestamps={"observation.images.cam0": [-0.3, 0.0]})
    options = {"strategy": "lanes", "batch_size": 5, "lanes": 5, "lane_frames": lane_frames, "read": read}
    description, _ = described(small, **options)
    budget = int(int(description.unit_bytes.max()) * room)
    description, dataset = described(small, budget=budget, **options)
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    with opened(description) as stream:
        assert indices(stream) == [batch["index"].tolist() for _, batch in dataset.iter_batches(plan)]
        assert 0 < stream.counters.totals()["reelray_compressed_bytes_peak"] <= budget


def test_pictures_that_times_place_elsewhere_count_against_the_budget(small: Path, tmp_path: Path) -> None:
    """LeRobot's measure goes by time: where times are wrong, it can be less than what an episode's pictures need."""
    root = tmp_path / "late"
    shutil.copytree(small, root)
    for file in sorted((root / "meta/episodes").rglob("*.parquet")):
        table = pq.read_table(file)
        for name in [name for name in table.column_names if name.endswith(("from_timestamp", "to_timestamp"))]:
            column = table[name].to_numpy() * 0.2
            table = table.set_column(table.column_names.index(name), name, pa.array(column, table[name].type))
        pq.write_table(table, file)
    description, dataset = described(root, strategy="sequential", batch_size=4)
    held = [
        dataset.reader().read(UnitRequest(0, int(one), 0, int(hi))).payload_bytes
        for one, hi in zip(description.units.episode, description.units.hi, strict=True)
    ]
    assert any(size > known for size, known in zip(held, description.units.bytes.tolist(), strict=True))
    assert (description.unit_bytes >= held).all()
    budget = int(description.unit_bytes.max())
    tight = replace(description, config=replace(description.config, byte_budget_gb=(budget + 0.5) / 2**30))
    with opened(tight) as stream:
        assert sorted(delivered(stream)) == list(range(dataset.num_frames))
        assert stream.counters.totals()["reelray_compressed_bytes_peak"] <= budget


@pytest.mark.parametrize("strategy", ["remaining", "round_robin"])
@pytest.mark.parametrize("pictures", [14, 30, 60])
def test_pool_orders_hold_their_pool_compressed_within_the_budget(small: Path, strategy: str, pictures: int) -> None:
    """Units that stay compressed are drained and replaced inside one batch, at the very edge of the planner's budget."""
    description, _ = described(small, strategy=strategy, batch_size=7, lane_frames=None)
    sizes = np.sort(description.units.bytes)
    for budget in (int(sizes[-1]), int(sizes[-1] + sizes[0]), int(sizes[-2:].sum())):
        description, dataset = described(small, budget=budget, strategy=strategy, batch_size=7, lane_frames=None)
        plan = plan_epoch(description.units, description.with_topology(world_size=1))
        with opened(description, decoded_bytes=pictures * PICTURE_BYTES) as stream:
            assert indices(stream) == [batch["index"].tolist() for _, batch in dataset.iter_batches(plan)]
            totals = stream.counters.totals()
        assert totals["reelray_compressed_bytes_peak"] <= budget
        assert 0 < totals["reelray_decoded_bytes_peak"] <= pictures * PICTURE_BYTES


def test_an_oversize_episode_is_refused_before_any_fetch(small: Path) -> None:
    description, _ = described(small, strategy="sequential", batch_size=2)
    largest = int(description.units.bytes.max())
    tight = replace(description, config=replace(description.config, byte_budget_gb=(largest - 0.5) / 2**30))
    with opened(tight) as stream, pytest.raises(BudgetError, match=rf"episode \d+ requires {largest} bytes.*byte_budget_gb"):
        next(iter(stream))
    assert stream.counters.totals()["reelray_payload_bytes_read"] == 0
    with pytest.raises(BudgetError, match=r"Episode \d+ .*streaming_byte_budget_gb"):
        plan_epoch(*_with_budget(small, largest - 1))


def _with_budget(root: Path, budget: int) -> Any:
    description, _ = described(root, budget=budget, strategy="remaining")
    return description.units, description.with_topology(world_size=1)


def test_units_that_could_never_be_held_together_are_refused(small: Path) -> None:
    budget = int(described(small)[0].units.bytes.max())
    description, _ = described(small, budget=budget, strategy="lanes", batch_size=7, lane_frames=None)
    with opened(description, decoded_bytes=15 * PICTURE_BYTES) as stream, pytest.raises(BudgetError, match="decoded whole"):
        next(iter(stream))
    assert stream.counters.totals()["reelray_payload_bytes_read"] == 0


def test_a_slow_consumer_pauses_reading_ahead(small: Path) -> None:
    description, _ = described(small, strategy="sequential", batch_size=1, lane_frames=None, prefetch_batches=1)
    budget = int(description.units.bytes.max()) * 2
    description, dataset = described(small, budget=budget, strategy="sequential", batch_size=1, lane_frames=None, prefetch_batches=1)
    feed = WatchedFeed(LocalFeed(description.job), lambda _: None, [])
    with opened(description, feed=feed, decoded_bytes=30 * PICTURE_BYTES) as stream:
        batches = iter(stream)
        next(batches)
        time.sleep(0.3)
        ledger = feed.credits[0].ledger
        assert 0 < ledger.held_bytes <= budget
        assert feed.credits[0].granted < len(description.units)
        rest = [int(batch["index"][0]) for batch in batches]
    assert len(rest) == dataset.num_frames - 1
    assert ledger.peak_bytes <= budget
    assert ledger.held_bytes == 0


def test_a_dead_fetch_and_a_cancelled_stream_give_everything_back(small: Path) -> None:
    description, _ = described(small, strategy="lanes", batch_size=3)

    class Dying:
        credits: list[UnitCredits]

        def units(self, wanted: Any, counters: Counters, credits: UnitCredits) -> Iterator[Any]:
            self.credits = [credits]
            for ordinal, unit in LocalFeed(description.job).units(wanted, counters, credits):
                yield (ordinal, unit) if ordinal < 4 else (ordinal, StorageError("the connection was closed"))

    dying = Dying()
    with opened(description, feed=dying) as stream, pytest.raises(StorageError, match="closed"):
        indices(stream)
    assert dying.credits[0].ledger.held_bytes == 0

    watched = WatchedFeed(LocalFeed(description.job), lambda _: None, [])
    stream = opened(description, feed=watched)
    next(iter(stream))
    stream.close()
    assert watched.credits[0].ledger.held_bytes == 0
    assert len(delivered(stream)) == int(description.units.frames.sum()) - 3
    stream.close()


def test_ten_epochs_are_flat_in_memory_descriptors_and_threads(small: Path) -> None:
    description, dataset = described(small, strategy="lanes", batch_size=6, epochs=10)
    process = psutil.Process(os.getpid())
    figures: list[tuple[int, int, int]] = []
    with opened(description) as stream:
        for _ in range(10):
            assert sorted(delivered(stream)) == list(range(dataset.num_frames))
            figures.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    warm, last = figures[2], figures[-1]
    assert last[0] - warm[0] < 24 << 20
    assert last[1] - warm[1] <= 2
    # The last epoch has no following one, whose threads begin early.
    assert last[2] <= max(threads for *_, threads in figures[1:5])
