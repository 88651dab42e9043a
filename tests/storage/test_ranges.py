from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import StorageError
from ingest.storage.ranges import plan_ranges

DATA = bytes(range(256)) * 8
RANGES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)).map(lambda pair: (pair[0], min(2048, sum(pair)))), max_size=12)


@settings(max_examples=150)
@given(RANGES, st.integers(0, 64), st.none() | st.integers(1, 500), st.none() | st.integers(1, 200))
def test_replies_hold_exactly_the_wanted_bytes(ranges: list[tuple[int, int]], gap: int, maximum: int | None, split: int | None) -> None:
    plan = plan_ranges(ranges, gap, maximum, split)
    assert plan.assemble([DATA[start:stop] for start, stop in plan.requests]) == [DATA[start:stop] for start, stop in ranges]
    ordered = sorted(plan.requests)
    assert all(first[1] <= second[0] for first, second in pairwise(ordered)), "requests are disjoint"
    wanted = set().union(*(range(start, stop) for start, stop in ranges)) if ranges else set()
    fetched = set().union(*(range(start, stop) for start, stop in plan.requests)) if plan.requests else set()
    assert wanted <= fetched
    if gap == 0:
        assert wanted == fetched
    if split is not None:
        assert all(stop - start < 2 * split for start, stop in plan.requests)


def test_neighbours_join_within_gap_and_maximum() -> None:
    assert plan_ranges([(0, 10), (10, 20), (25, 30)]).requests == ((0, 20), (25, 30))
    assert plan_ranges([(0, 10), (15, 20)], gap=5).requests == ((0, 20),)
    assert plan_ranges([(0, 10), (15, 20)], gap=4).requests == ((0, 10), (15, 20))
    assert plan_ranges([(0, 10), (10, 20)], maximum=15).requests == ((0, 10), (10, 20))
    assert plan_ranges([(0, 100)], maximum=15).requests == ((0, 100),)


def test_large_ranges_are_split_evenly() -> None:
    assert plan_ranges([(0, 19)], split=10).requests == ((0, 19),)
    assert plan_ranges([(0, 25)], split=10).requests == ((0, 12), (12, 25))


def test_order_is_by_need() -> None:
    plan = plan_ranges([(500, 510), (0, 10), (100, 110)])
    assert plan.requests == ((500, 510), (0, 10), (100, 110))


def test_bytes_wanted_twice_are_fetched_once() -> None:
    plan = plan_ranges([(0, 10), (0, 10), (5, 8)])
    assert (plan.requests, plan.wanted_bytes, plan.fetched_bytes) == (((0, 10),), 23, 10)


@pytest.mark.parametrize("bad", [[(-1, 5)], [(5, 4)]])
def test_impossible_ranges(bad: list[tuple[int, int]]) -> None:
    with pytest.raises(StorageError):
        plan_ranges(bad)


def test_impossible_limits_and_replies() -> None:
    with pytest.raises(StorageError):
        plan_ranges([(0, 1)], gap=-1)
    with pytest.raises(StorageError):
        plan_ranges([(0, 1)], split=0)
    with pytest.raises(StorageError, match="do not fit"):
        plan_ranges([(0, 4)]).assemble([b"abc"])
