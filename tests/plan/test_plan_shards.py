from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.errors import PlanError
from ingest.plan import balanced_shards
from ingest.plan.shards import assign_balanced, descending_order, even_bounds, quantised_costs


def one_by_one(counts: list[int], shards: int) -> list[int]:
    loads = [0] * shards
    chosen: list[int] = []
    for count in counts:
        shard = loads.index(min(loads))
        chosen.append(shard)
        loads[shard] += count
    return chosen


def test_longest_first_to_the_least_loaded() -> None:
    shards = balanced_shards([(0, 100), (1, 90), (2, 20), (3, 10), (4, 5)], 2)
    assert shards == [[0, 3, 4], [1, 2]]
    assert balanced_shards([], 2) == [[], []]
    assert balanced_shards([(5, 3), (1, 3)], 1) == [[1, 5]]
    with pytest.raises(PlanError, match="number of shards must be positive, found 0"):
        balanced_shards([(0, 1)], 0)
    with pytest.raises(PlanError, match="episode 3 has a negative frame count: -2"):
        balanced_shards([(0, 1), (3, -2)], 1)


@given(st.lists(st.integers(0, 12), max_size=400), st.integers(1, 40))
def test_groups_of_equal_lengths_are_assigned_as_one_by_one(counts: list[int], shards: int) -> None:
    ordered = np.sort(np.array(counts, dtype=np.int64))[::-1].copy()
    # Repeating every count makes the table large enough for the grouped path.
    many = np.repeat(ordered, 60)
    assert assign_balanced(many, shards).tolist() == one_by_one(many.tolist(), shards)


def test_grouped_and_single_assignments_agree_on_a_large_table() -> None:
    counts = np.sort(np.random.default_rng(1).integers(1, 700, 30_000))[::-1].copy()
    assert assign_balanced(counts, 37).tolist() == one_by_one(counts.tolist(), 37)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50))
def test_descending_order_is_stable(counts: list[int]) -> None:
    order = descending_order(np.array(counts, dtype=np.int64)).tolist()
    assert order == sorted(range(len(counts)), key=lambda row: (-counts[row], row))


@given(st.integers(0, 1000), st.integers(1, 50))
def test_even_bounds_differ_by_one(total: int, parts: int) -> None:
    sizes = np.diff(np.concatenate(([0], even_bounds(total, parts))))
    assert sizes.sum() == total
    assert sizes.max() - sizes.min() <= 1


def test_costs_are_compared_to_a_4096th_of_the_largest() -> None:
    assert quantised_costs([0.0, 1e-9, 0.5, 1.0]).tolist() == [0, 1, 2048, 4096]
    assert quantised_costs([0.0]).tolist() == [0]
    assert quantised_costs([]).tolist() == []
