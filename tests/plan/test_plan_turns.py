from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.errors import PlanError
from ingest.plan import Turns, worker_starts, worker_turns
from ingest.plan.turns import UNLIMITED


def replay(limits: list[int]) -> list[tuple[int, int]]:
    left, taken, turns = list(limits), [0] * len(limits), []
    while any(left):
        for worker in range(len(limits)):
            if left[worker]:
                turns.append((worker, taken[worker]))
                left[worker] -= 1
                taken[worker] += 1
    return turns


@pytest.mark.parametrize(
    ("batches", "limits", "produced", "following"),
    [
        (7, [None, None, None], [3, 2, 2], 1),
        (5, [1, None], [1, 4], 1),
        (4, [0, None, 2], [0, 2, 2], 1),
        (3, [2, None, None], [1, 1, 1], 0),
        (10, [2, 3], [2, 3], 0),
    ],
)
def test_known_turns(batches: int, limits: list[int | None], produced: list[int], following: int) -> None:
    assert worker_turns(batches, limits) == (produced, following)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_turns_are_the_replay(limits: list[int]) -> None:
    expected = replay(limits)
    turns = Turns(tuple(limits))
    assert turns.total == len(expected)
    assert [turns.worker_at(step) for step in range(len(expected))] == expected
    workers, numbers = turns.workers_at(np.arange(len(expected)))
    assert list(zip(workers.tolist(), numbers.tolist(), strict=True)) == expected
    for step in range(len(expected) + 2):
        counts = np.bincount([worker for worker, _ in expected[:step]], minlength=len(limits))
        assert turns.counts(step).tolist() == counts.tolist()
    for step, (worker, number) in enumerate(expected):
        assert turns.step_of(worker, number) == step


def test_unlimited_workers_never_leave() -> None:
    turns = Turns((UNLIMITED, 2, UNLIMITED))
    assert turns.worker_at(10**9 + 6) == (0, 500_000_002)
    assert turns.counts(7).tolist() == [3, 2, 2]


def test_bad_numbers() -> None:
    with pytest.raises(PlanError, match=r"found \[\]"):
        Turns(())
    with pytest.raises(PlanError, match=r"found \[3, -1\]"):
        Turns((3, -1))
    with pytest.raises(PlanError, match="found -1"):
        worker_turns(-1, [1])


def test_worker_starts_rotate_shards_and_wrap_epochs() -> None:
    starts = worker_starts(7 * 4, 4, [10, 10, 10], repeat=True)
    assert [(one.logical, one.epoch, one.skip) for one in starts] == [(1, 0, 8), (2, 0, 8), (0, 1, 2)]
    starts = worker_starts(3 * 4, 4, [4, 30], repeat=False)
    assert [(one.logical, one.skip) for one in starts] == [(1, 8), (0, None)]
    assert worker_starts(25, 4, [10], repeat=True)[0].epoch == 2
    assert worker_starts(25, 4, [10], repeat=True, shuffle=False)[0].epoch == 0
    assert worker_starts(25, 4, [10], repeat=True)[0].skip == 5
    assert worker_starts(0, 4, [10, 0])[1].skip is None
    with pytest.raises(PlanError, match=r"offset 5 is not a whole number of batches of 4; resuming with 2 workers needs whole batches"):
        worker_starts(5, 4, [10, 10])
    with pytest.raises(PlanError, match="batch_size 0"):
        worker_starts(5, 0, [10])
