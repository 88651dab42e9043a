"""Which rows of a record count when groups of ranks start again, with the same number of ranks or another."""

from __future__ import annotations

from typing import Any

import numpy as np

from train_integration.ledger import ORDER_SCHEMA, OrderRecord


def rows(rank: int, steps: range, *, epoch: int = 0) -> dict[str, Any]:
    columns = {name: np.zeros(len(steps), dtype) for name, dtype in ORDER_SCHEMA.items()}
    return columns | {"rank": np.full(len(steps), rank), "step": np.array(steps), "epoch": np.full(len(steps), epoch)}


def committed(record: OrderRecord) -> list[tuple[int, int, int]]:
    found = record.columns()
    kept = found["committed"]
    return sorted(zip(*(found[name][kept].tolist() for name in ("epoch", "rank", "step")), strict=True))


def test_what_was_delivered_beyond_a_checkpoint_does_not_count() -> None:
    record = OrderRecord()
    first = record.begin(0, [0])
    for rank in (0, 1):
        record.add(first, 0, rank, rows(rank, range(7)))
    again = record.begin(0, [4])
    for rank in (0, 1):
        record.add(again, 0, rank, rows(rank, range(4, 9)))
    assert committed(record) == [(0, rank, step) for rank in (0, 1) for step in range(9)]


def test_rows_of_a_segment_count_up_to_the_batches_that_the_next_topology_found() -> None:
    record = OrderRecord()
    three = record.begin(0, [0])
    for rank in range(3):
        record.add(three, 0, rank, rows(rank, range(7)))
    two = record.begin(0, [4, 0])
    for rank in range(2):
        record.add(two, 1, rank, rows(rank, range(5)))
    assert [step for _, rank, step in committed(record) if rank == 2] == [0, 1, 2, 3]
    # The group is lost before it saved anything, and another one starts with three ranks in the same place.
    wide = record.begin(0, [4, 0])
    for rank in range(3):
        record.add(wide, 1, rank, rows(rank, range(3)))
    last = record.begin(0, [4, 2, 0])
    record.add(last, 2, 0, rows(0, range(6)))
    found = committed(record)
    assert [step for _, rank, step in found if rank == 1] == [0, 0, 1, 1, 2, 3]
    assert [step for _, rank, step in found if rank == 0] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5]
    after = record.begin(1, [])
    record.add(after, 0, 0, rows(0, range(2), epoch=1))
    assert len(committed(record)) == len(found) + 2


def test_a_later_epoch_begins_anew() -> None:
    record = OrderRecord()
    first = record.begin(0, [0])
    record.add(first, 0, 0, rows(0, range(5)))
    record.add(first, 0, 0, rows(0, range(3), epoch=1))
    again = record.begin(1, [1])
    record.add(again, 0, 0, rows(0, range(1, 4), epoch=1))
    assert committed(record) == [(0, 0, step) for step in range(5)] + [(1, 0, step) for step in range(4)]
