from __future__ import annotations

import threading
import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import BudgetError, StorageError, StreamClosedError
from ingest.storage.budget import ByteBudget


def _wait_until(condition: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_reserve_counts_before_the_fetch_and_resident_after() -> None:
    budget = ByteBudget(100)
    assert budget.reserve("a", 60)
    assert (budget.reserved_bytes, budget.resident_bytes, budget.peak_bytes) == (60, 0, 60)
    budget.start("a")
    assert not budget.reserve("b", 50), "a fetch under way cannot be dropped"
    budget.finish("a", 60)
    assert budget.resident_bytes == 60
    assert budget.reserve("b", 50), "a finished, unleased one can"
    assert not budget.holds("a")
    assert budget.peak_bytes == 60


def test_oversize_is_refused_before_anything_else() -> None:
    budget = ByteBudget(100, setting="streaming_byte_budget_gb")
    with pytest.raises(BudgetError, match=r"101 > 100 bytes.*streaming_byte_budget_gb") as caught:
        budget.retain("e", 101, wait=True)
    assert isinstance(caught.value, MemoryError)
    for size in (0, -5):
        with pytest.raises(BudgetError):
            ByteBudget(size)


def test_leased_stay_and_the_least_recently_used_goes_first() -> None:
    dropped: list[object] = []
    budget = ByteBudget(30, on_evict=dropped.append)
    for key in "abc":
        budget.retain(key, 10)
    with pytest.raises(BudgetError, match="does not fit the available byte budget"):
        budget.retain("d", 10)
    for key in "abc":
        budget.release(key)
    assert budget.reserve("a", 10), "asking again refreshes"
    budget.retain("d", 20)
    assert dropped == ["b", "c"]
    with pytest.raises(StorageError, match="not retained"):
        budget.release("zzz")


def test_more_than_reserved_is_an_error_and_a_failed_fetch_frees_its_room() -> None:
    budget = ByteBudget(10)
    budget.reserve("a", 5)
    budget.start("a")
    with pytest.raises(StorageError, match="reserved 5 bytes, 6 arrived"):
        budget.finish("a", 6)
    budget.start("a")
    budget.finish("a", 0)
    assert budget.reserve("b", 10)


def test_waiters_are_served_in_ticket_order_whatever_their_size() -> None:
    budget = ByteBudget(10)
    budget.retain("held", 10)
    early, late = budget.ticket(), budget.ticket()
    served: list[str] = []

    def wait(name: str, nbytes: int, ticket: int) -> None:
        budget.retain(name, nbytes, wait=True, ticket=ticket)
        served.append(name)

    small = threading.Thread(target=wait, args=("small", 1, late))
    small.start()
    time.sleep(0.02)
    large = threading.Thread(target=wait, args=("large", 10, early))
    large.start()
    time.sleep(0.02)
    assert not budget.reserve("tiny", 0 + 1), "what is not in the queue cannot overtake it"
    budget.release("held", drop=True)
    large.join(5)
    assert served == ["large"]
    budget.release("large", drop=True)
    small.join(5)
    assert served == ["large", "small"]


def test_a_key_that_is_there_need_not_queue() -> None:
    budget = ByteBudget(10)
    budget.retain("a", 10)
    waiter = threading.Thread(target=lambda: budget.retain("b", 10, wait=True))
    waiter.start()
    time.sleep(0.02)
    budget.retain("a", 10, wait=True, timeout_s=1)
    budget.release("a")
    budget.release("a")
    waiter.join(5)
    assert budget.holds("b")


def test_close_wakes_every_waiter() -> None:
    budget = ByteBudget(10)
    budget.retain("a", 10)
    errors: list[BaseException] = []

    def wait(key: int) -> None:
        try:
            budget.retain(key, 5, wait=True)
        except StreamClosedError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(key,)) for key in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    budget.close()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 4
    assert (budget.reserved_bytes, budget.resident_bytes) == (0, 0)
    with pytest.raises(StreamClosedError):
        budget.reserve("b", 1)
    budget.release("a")
    budget.finish("a", 3)
    budget.close()


def test_a_wait_that_times_out_leaves_the_queue() -> None:
    budget = ByteBudget(10)
    budget.retain("a", 10)
    with pytest.raises(BudgetError):
        budget.retain("b", 5, wait=True, timeout_s=0.02)
    budget.release("a")
    assert budget.reserve("c", 5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(10, 60))
def test_random_schedules_never_exceed_and_never_stick(seed: int, threads: int, limit: int) -> None:
    random = Random(seed)
    budget = ByteBudget(limit)
    sizes = [random.randint(0, limit) for _ in range(24)]
    numbers = iter(range(len(sizes)))
    lock = threading.Lock()
    over: list[int] = []

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                # The ticket is drawn where the order is decided.
                ticket = budget.ticket()
            if number is None:
                return
            budget.retain(number, sizes[number], wait=True, ticket=ticket, timeout_s=20)
            if budget.reserved_bytes > limit:
                over.append(number)
            budget.start(number)
            budget.finish(number, sizes[number])
            budget.release(number, drop=sizes[number] % 2 == 0)

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join(30)
        assert not thread.is_alive()
    assert over == []
    assert budget.peak_bytes <= limit
