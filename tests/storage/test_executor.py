from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest

from ingest.errors import SettingsError, StorageError, StreamClosedError
from ingest.storage.executor import RangeExecutor, TransferLimits, close_executor, configure_executor, fetch_ranges, shared_executor

DATA = Random(0).randbytes(20_000)


class _Reader:
    """Reads ``DATA``; counts what is under way."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.lock = threading.Lock()
        self.now_reads = self.now_bytes = self.peak_reads = self.peak_bytes = 0
        self.order: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int) -> bytes:
        with self.lock:
            self.order.append((start, stop))
            self.now_reads += 1
            self.now_bytes += stop - start
            self.peak_reads = max(self.peak_reads, self.now_reads)
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        time.sleep(self.delay_s)
        with self.lock:
            self.now_reads -= 1
            self.now_bytes -= stop - start
        return DATA[start:stop]


@pytest.fixture
def executor() -> Iterator[RangeExecutor]:
    made = RangeExecutor(TransferLimits(connections=3, subranges=None, inflight_bytes=2000, split_bytes=1000))
    yield made
    made.close()


def test_connections_and_bytes_are_bounded(executor: RangeExecutor) -> None:
    reader = _Reader(0.002)
    futures = [executor.submit(executor.plan([(at, at + 900), (at + 950, at + 1200)]), reader) for at in range(0, 18_000, 1300)]
    for at, future in zip(range(0, 18_000, 1300), futures, strict=True):
        assert future.result(10) == [DATA[at : at + 900], DATA[at + 950 : at + 1200]]
    assert reader.peak_reads <= 3
    assert reader.peak_bytes <= 2000
    assert executor.peak_bytes <= 2000


def test_a_large_range_is_split_and_one_that_exceeds_the_limit_goes_alone() -> None:
    executor = RangeExecutor(TransferLimits(connections=4, subranges=None, inflight_bytes=500, split_bytes=1000))
    reader = _Reader(0.001)
    assert executor.read(executor.plan([(0, 10_000)]), reader) == [DATA[:10_000]]
    assert len(reader.order) == 10
    assert reader.peak_reads == 1
    executor.close()


def test_requests_start_in_order_of_need() -> None:
    executor = RangeExecutor(TransferLimits(connections=1))
    reader = _Reader()
    executor.read(executor.plan([(500, 510), (0, 10), (100, 110)]), reader)
    assert reader.order == [(500, 510), (0, 10), (100, 110)]
    executor.close()


def test_the_first_error_is_reported_when_nothing_is_under_way_any_more(executor: RangeExecutor) -> None:
    reader = _Reader(0.005)

    def read(start: int, stop: int) -> bytes:
        if start == 2000:
            raise StorageError("broken at 2000")
        return reader(start, stop)

    with pytest.raises(StorageError, match="broken at 2000"):
        executor.read(executor.plan([(at, at + 500) for at in range(0, 16_000, 1000)]), read)
    assert reader.now_reads == 0
    assert len(reader.order) < 15, "what had not started was cancelled"


def test_a_read_inside_a_read_cannot_starve_itself(executor: RangeExecutor) -> None:
    def outer(start: int, stop: int) -> bytes:
        return executor.read(executor.plan([(start, stop)]), _Reader())[0]

    futures = [executor.submit(executor.plan([(at, at + 10)]), outer) for at in range(0, 1000, 20)]
    assert [future.result(10)[0] for future in futures] == [DATA[at : at + 10] for at in range(0, 1000, 20)]


def test_closing_ends_waiters_typed() -> None:
    executor = RangeExecutor(TransferLimits(connections=1))
    started, gate = threading.Event(), threading.Event()

    def read(start: int, stop: int) -> bytes:
        started.set()
        gate.wait(10)
        return DATA[start:stop]

    futures = [executor.submit(executor.plan([(at, at + 10)]), read) for at in (0, 100, 200)]
    assert started.wait(5)
    closer = threading.Thread(target=executor.close)
    closer.start()
    time.sleep(0.02)
    gate.set()
    closer.join(5)
    assert futures[0].result(5) == [DATA[:10]]
    for future in futures[1:]:
        with pytest.raises(StreamClosedError):
            future.result(5)
    with pytest.raises(StreamClosedError):
        executor.submit(executor.plan([(0, 1)]), read)


def test_one_executor_per_process_with_limits_that_can_be_set() -> None:
    assert shared_executor() is shared_executor()
    changed = configure_executor(TransferLimits(connections=2, inflight_bytes=100, split_bytes=10))
    assert (changed.limits.connections, shared_executor() is changed) == (2, True)
    assert configure_executor(changed.limits) is changed
    for name in ("connections", "subranges", "inflight_bytes", "split_bytes"):
        with pytest.raises(SettingsError, match=f"{name} must be positive, found 0"):
            TransferLimits(**{name: 0})
    configure_executor()
    close_executor()


def test_a_large_range_has_at_most_so_many_parts() -> None:
    for subranges, parts in ((None, 10), (1, 1), (3, 3), (99, 10)):
        executor = RangeExecutor(TransferLimits(split_bytes=1000, subranges=subranges))
        reader = _Reader()
        assert executor.read(executor.plan([(0, 10_000), (10_500, 10_600)]), reader) == [DATA[:10_000], DATA[10_500:10_600]]
        assert len(reader.order) == parts + 1
        executor.close()


def test_new_limits_lose_no_read_that_is_under_way() -> None:
    reader, failed = _Reader(0.001), []

    def read(first: int) -> None:
        try:
            for at in range(first, 18_000, 400):
                assert fetch_ranges([(at, at + 300), (at + 350, at + 380)], reader) == [DATA[at : at + 300], DATA[at + 350 : at + 380]]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    changes = 0
    while any(thread.is_alive() for thread in threads):
        configure_executor(TransferLimits(connections=1 + changes % 4))
        changes += 1
    assert (failed, changes > 10) == ([], True)
    configure_executor()
    close_executor()


def _child(queue: multiprocessing.Queue[bytes]) -> None:
    queue.put(fetch_ranges([(3, 9)], _Reader())[0])
    close_executor()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own() -> None:
    assert fetch_ranges([(0, 5)], _Reader()) == [DATA[:5]]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get(timeout=20) == DATA[3:9]
    child.join(10)
    assert child.exitcode == 0
    queue.close()
    queue.join_thread()
