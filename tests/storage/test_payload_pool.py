from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from random import Random

import pytest

from ingest.errors import BudgetError, StorageError, StreamClosedError
from ingest.storage.payloads import PayloadPool


class _Source:
    """Episodes of two cameras; fetches can be held back, counted and failed."""

    def __init__(self, sizes: Mapping[int, int], *, hold: bool = False) -> None:
        self.sizes = sizes
        self.gate = threading.Event()
        if not hold:
            self.gate.set()
        self.fetched: list[tuple[int, str]] = []
        self.fail: set[tuple[int, str]] = set()

    def parts(self, key: int) -> dict[str, int]:
        return {"front": self.sizes[key], "wrist": self.sizes[key]}

    def fetch(self, key: int, part: str) -> bytes:
        assert self.gate.wait(10)
        self.fetched.append((key, part))
        if (key, part) in self.fail:
            raise StorageError(f"no {part} of {key}")
        return bytes([key]) * self.sizes[key]

    def pool(self, limit: int) -> PayloadPool[int]:
        return PayloadPool(limit, self.parts, self.fetch, threads=4)


def _settled(pool: PayloadPool[int], resident: int) -> None:
    deadline = time.monotonic() + 5
    while pool.budget.resident_bytes != resident:
        assert time.monotonic() < deadline, (pool.budget.resident_bytes, resident)
        time.sleep(0.002)


def test_prefetch_reserves_all_cameras_before_it_fetches() -> None:
    source = _Source({1: 10, 2: 10}, hold=True)
    pool = source.pool(30)
    assert pool.submit_prefetch(1)
    assert (pool.budget.reserved_bytes, pool.budget.resident_bytes, source.fetched) == (20, 0, [])
    assert not pool.submit_prefetch(2), "never waits, and never drops a fetch under way"
    source.gate.set()
    _settled(pool, 20)
    assert pool.submit_prefetch(2), "what was prefetched but not leased makes room"
    assert pool.get(2, "wrist") == bytes([2]) * 10
    pool.close()
    assert (pool.budget.reserved_bytes, pool.budget.resident_bytes) == (0, 0)


def test_concurrent_readers_share_one_reservation_and_one_fetch() -> None:
    source = _Source({1: 10}, hold=True)
    pool = source.pool(20)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda part=part: found.append(pool.get(1, part))) for part in ("front", "wrist") * 3]
    for thread in threads:
        thread.start()
    source.gate.set()
    for thread in threads:
        thread.join(5)
    assert found == [bytes([1]) * 10] * 6
    assert sorted(source.fetched) == [(1, "front"), (1, "wrist")]
    assert pool.budget.peak_bytes == 20
    pool.close()


def test_a_fetch_error_reaches_who_waits_and_the_reservation_is_usable_again() -> None:
    source = _Source({1: 10, 2: 10})
    source.fail = {(1, "front")}
    pool = source.pool(20)
    with pytest.raises(StorageError, match="no front of 1"):
        pool.get(1, "front")
    # Whoever asks for one part next starts all that are missing.
    source.fail = set()
    assert pool.get(1, "wrist") == bytes([1]) * 10
    assert pool.get(1, "front") == bytes([1]) * 10, "asked again, fetched again"
    with pytest.raises(StorageError, match=r"no part 'rear', it has \['front', 'wrist'\]"):
        pool.get(1, "rear")
    assert pool.get(2, "front") == bytes([2]) * 10, "the room of the first can be reclaimed"
    pool.close()


def test_a_leased_episode_is_not_evicted_and_a_waiting_one_gets_its_room() -> None:
    source = _Source({1: 10, 2: 10})
    pool = source.pool(20)
    pool.retain(1)
    with pytest.raises(BudgetError):
        pool.retain(2)
    admitted = threading.Event()

    def admit() -> None:
        pool.retain(2, wait=True)
        admitted.set()

    thread = threading.Thread(target=admit)
    thread.start()
    assert not admitted.wait(0.03)
    assert pool.get(1, "front") == bytes([1]) * 10
    _settled(pool, 20)
    pool.release(1)
    assert admitted.wait(5)
    assert not pool.budget.holds(1)
    thread.join()
    pool.close()


def test_more_than_promised_is_an_error() -> None:
    pool = PayloadPool[int](20, lambda _: {"front": 5}, lambda *_: b"x" * 6)
    with pytest.raises(StorageError, match="reserved 5 bytes, 6 arrived"):
        pool.get(1, "front")
    pool.close()


def test_close_wakes_everyone() -> None:
    source = _Source({1: 10, 2: 10, 3: 10}, hold=True)
    pool = PayloadPool(40, source.parts, source.fetch, threads=1)
    errors: list[str] = []

    def read(key: int) -> None:
        try:
            pool.get(key, "wrist")
        except StreamClosedError:
            errors.append("closed")

    def admit() -> None:
        try:
            pool.retain(3, wait=True)
        except StreamClosedError:
            errors.append("closed")

    pool.submit_prefetch(1)
    pool.submit_prefetch(2)
    threads = [threading.Thread(target=read, args=(2,)), threading.Thread(target=admit)]
    for thread in threads:
        thread.start()
    time.sleep(0.03)
    closer = threading.Thread(target=pool.close)
    closer.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    source.gate.set()
    closer.join(5)
    assert errors == ["closed", "closed"]
    with pytest.raises(StreamClosedError):
        pool.submit_prefetch(1)


def test_random_use_stays_within_the_budget_and_leaves_nothing() -> None:
    random = Random(5)
    sizes = {key: random.randint(0, 20) for key in range(40)}
    source = _Source(sizes)
    pool = source.pool(60)
    before = threading.active_count()

    def consume(seed: int) -> None:
        order = Random(seed).sample(range(40), 40)
        for key in order:
            pool.retain(key, wait=True, timeout_s=20)
            assert pool.get(key, "front") == bytes([key]) * sizes[key]
            pool.release(key, drop=seed % 2 == 0)

    threads = [threading.Thread(target=consume, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert pool.budget.peak_bytes <= 60
    pool.close()
    assert threading.active_count() <= before
