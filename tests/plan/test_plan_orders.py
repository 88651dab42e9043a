"""Every order of one consumer: entered anywhere, complete, and honest about what is left and when pieces are used."""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_ledger import STRATEGIES, assert_once, every_frame, lengths, planned, strategies

from ingest.errors import PlanError
from ingest.plan import Order, Pieces, PlanSettings, Units, cut_units, report_plan
from ingest.plan.hashing import permute, shuffled_rows
from ingest.plan.looping import LoopOrder
from ingest.plan.pool_order import PoolOrder
from ingest.plan.sharing import make_order


def order_of(units: Units, strategy: str, *, batch: int = 4, segment: int = 0, seed: int = 5, epoch: int = 1, **more: object) -> Order:
    options = PlanSettings(strategy=strategy, seed=seed, **more)
    return make_order(Pieces.whole(units), options, workers=1, batch_size=batch, epoch=epoch, segment=segment)


def triples(order: Order, start: int, stop: int) -> list[tuple[int, int, int]]:
    span, units = order.span(start, stop), order.pieces.units
    return list(zip(units.dataset[span.unit].tolist(), units.episode[span.unit].tolist(), span.frame.tolist(), strict=True))


def frames_of(pieces: Pieces, keys: np.ndarray | None) -> list[tuple[int, int, int]]:
    row = np.repeat(np.arange(len(pieces)), pieces.count)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(pieces.count) - pieces.count, pieces.count)
    frame = pieces.frames(row, offset, keys)
    return list(zip(pieces.dataset[row].tolist(), pieces.episode[row].tolist(), frame.tolist(), strict=True))


def runs(units: Units, size: int) -> Units:
    return cut_units(units, {row: range(0, int(units.hi[row]), size) for row in range(len(units))}, max_frames=size)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(lengths, st.integers(1, 12), st.integers(0, 2**40), st.booleans())
@settings(max_examples=25)
def test_orders_are_complete_and_the_same_from_anywhere(strategy: str, counts: list[int], lanes: int, seed: int, in_runs: bool) -> None:
    units = Units.from_lengths(counts)
    units = runs(units, 5) if in_runs else units
    order = order_of(units, strategy, seed=seed, lanes=lanes)
    whole = triples(order, 0, len(order))
    assert_once(whole, every_frame(units))
    again = order_of(units, strategy, seed=seed, lanes=lanes)
    for start in sorted({0, len(order) // 3, len(order) - 1}, reverse=True):
        assert triples(again, start, start + 7) == whole[start : start + 7]
        unit, frame = again.at(start)
        assert (int(units.episode[unit]), frame) == whole[start][1:]
    chunks = [len(span) for span in again.iter_from(1, chunk=10)]
    assert sum(chunks) == len(order) - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(lengths, st.data())
@settings(max_examples=25)
def test_what_is_left_is_what_follows(strategy: str, counts: list[int], data: st.DataObject) -> None:
    units = Units.from_lengths(counts)
    order = order_of(units, strategy, lanes=data.draw(st.integers(1, 9)))
    done = data.draw(st.integers(0, len(order)))
    left = order.leftover(done)
    # The next segment's order of the leftover delivers exactly the rest, and so does the one after it.
    rest = make_order(left, PlanSettings(strategy=strategy, seed=5, lanes=3), workers=1, batch_size=4, epoch=1, segment=1)
    assert_once(triples(rest, 0, len(rest)), triples(order, done, len(order)))
    delivered = np.bincount(order.span(0, done).unit, minlength=len(units))
    assert order.delivered(done).tolist() == delivered.tolist()
    more = data.draw(st.integers(0, len(rest)))
    last = make_order(rest.leftover(more), PlanSettings(strategy=strategy, seed=5), workers=1, batch_size=4, epoch=1, segment=2)
    assert_once(triples(last, 0, len(last)), triples(rest, more, len(rest)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(lengths, st.integers(1, 12))
@settings(max_examples=20)
def test_admissions_cover_the_uses_of_every_piece(strategy: str, counts: list[int], lanes: int) -> None:
    units = Units.from_lengths(counts, nbytes=[count * 10 for count in counts])
    order = order_of(units, strategy, lanes=lanes, pool_size=3)
    admission = order.admission()
    entries = order.span(0, len(order)).entry
    assert sorted(admission.entry.tolist()) == list(range(len(order.pieces)))
    assert (np.diff(admission.admitted) >= 0).all()
    open_at = np.zeros(len(order), dtype=np.int64)
    bytes_at = np.zeros(len(order), dtype=np.int64)
    for place, entry in enumerate(admission.entry.tolist()):
        uses = np.flatnonzero(entries == entry)
        first, last, admitted = (int(column[place]) for column in (admission.first, admission.last, admission.admitted))
        assert admission.frames[place] == len(uses)
        assert admitted < first <= uses[0]
        assert last >= uses[-1]
        if strategy != "reservoir":
            assert (first, last) == (uses[0], uses[-1])
        open_at[admitted + 1 : last + 1] += 1
        bytes_at[admitted + 1 : last + 1] += int(admission.bytes[place])
    assert admission.peak_open() == open_at.max()
    assert admission.peak_bytes() == bytes_at.max()
    limit = {"lanes": lanes, "remaining": 3, "round_robin": 3, "sequential": 1, "episode_sequential": 1}.get(strategy)
    assert limit is None or open_at.max() <= limit
    first_entry, last_entry = order.extent(np.array([0]))
    inside = np.flatnonzero(entries == 0)
    assert first_entry <= inside[0]
    assert inside[-1] < last_entry
    assert order.extent(np.zeros(0, dtype=np.int64)) == (0, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("looping", [False, True])
@given(lengths, st.lists(st.integers(0, 40), min_size=1, max_size=5))
@settings(max_examples=15)
def test_admissions_of_ranges_name_what_the_ranges_use(strategy: str, looping: bool, counts: list[int], widths: list[int]) -> None:
    units = Units.from_lengths(counts)

    def fresh() -> Order:
        make = partial(order_of, units, strategy, pool_size=3, lanes=3)
        return LoopOrder(lambda epoch: make(epoch=epoch), 0) if looping else make()

    order, reader = fresh(), fresh()
    end = 3 * sum(counts) if looping else sum(counts)
    start = 0
    for width in widths:
        stop = min(start + width, end)
        admission = order.admission(start, stop)
        span = reader.span(start, stop)
        assert (admission.admitted < admission.first).all()
        for place, (unit, sample) in enumerate(zip(span.unit.tolist(), range(start, stop), strict=True)):
            serving = (admission.unit == unit) & (admission.first <= sample) & (admission.last >= sample)
            assert serving.any()
            if not looping:
                assert span.entry[place] in admission.entry[serving]
        start = stop
    if not looping and strategy in ("remaining", "round_robin"):
        middle = sum(counts) // 2
        whole, again = fresh().admission(), fresh()
        early, late = again.admission(0, middle), again.admission(middle)
        new = [entry for entry in late.entry.tolist() if entry not in early.entry.tolist()]
        assert early.entry.tolist() + new == whole.entry.tolist()


def test_pool_orders_follow_the_budget_of_the_planner() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 100, 40)
    units = Units.from_lengths(rng.integers(1, 20, 40), nbytes=sizes)
    for strategy in ("remaining", "round_robin"):
        order = order_of(units, strategy, byte_budget=150)
        assert order.admission().peak_bytes() <= 150


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_permutations_are_bijections(size: int, key: int) -> None:
    index = np.arange(size)
    image = permute(index, np.full(size, size), np.full(size, key, dtype=np.uint64))
    assert sorted(image.tolist()) == list(range(size))


def test_permutations_spread_evenly() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 40_000, dtype=np.uint64)
    for size in (2, 3, 7, 16, 100):
        for index in (0, size - 1):
            image = permute(np.full(len(keys), index), np.full(len(keys), size), keys)
            counts = np.bincount(image, minlength=size)
            assert counts.min() > 0.8 * len(keys) / size
            assert counts.max() < 1.2 * len(keys) / size


def test_rows_are_shuffled_independently() -> None:
    rows = shuffled_rows(np.arange(2000), 5, 9)
    assert (np.sort(rows, axis=1) == np.arange(5)).all()
    assert len({tuple(row) for row in rows.tolist()}) == 120


def test_lanes_put_distinct_episodes_into_a_batch() -> None:
    units = Units.from_lengths(np.random.default_rng(3).integers(50, 250, 200))
    for batch in (4, 7, 16, 32):
        plan = planned(units, "lanes", (2, 0, batch))
        assert report_plan(plan).mixing.distinct_episodes > 0.995 * batch
    mixed = planned(runs(units, 20), "lanes", (1, 0, 16))
    assert report_plan(mixed).mixing.distinct_episodes > 15.5


def test_lanes_start_staggered_and_change_pieces_at_different_times() -> None:
    order = order_of(Units.from_lengths([100] * 160), "lanes", lanes=16)
    admission = order.admission()
    first_pieces = admission.frames[:16]
    assert first_pieces.sum() < 0.7 * 16 * 100
    steps = np.bincount(admission.first[16:] // 16)
    assert steps.max() <= 3


def test_frames_beyond_the_order_do_not_exist() -> None:
    order = order_of(Units.from_lengths([3]), "lanes")
    with pytest.raises(PlanError, match="sample 3 does not exist in an order of 3 samples"):
        order.at(3)
    with pytest.raises(PlanError, match="found -1"):
        order.span(-1, 2)
    assert len(order.span(3, 9)) == 0


@given(strategies, st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=30)
def test_loops_are_the_epochs_one_after_another(strategy: str, counts: list[int]) -> None:
    units = Units.from_lengths(counts)
    loop = LoopOrder(lambda epoch: order_of(units, strategy, epoch=epoch), 2)
    size = sum(counts)
    expected = [triple for epoch in (2, 3, 4) for triple in triples(order_of(units, strategy, epoch=epoch), 0, size)]
    assert triples(loop, 0, 3 * size) == expected
    assert triples(loop, size + 1, 2 * size + 1) == expected[size + 1 : 2 * size + 1]
    assert loop.span(size - 1, size + 1).cycle.tolist() == [0, 1]
    assert loop.epoch_length == size


def test_pool_orders_restore_their_state_and_still_go_back() -> None:
    units = Units.from_lengths([30, 20, 25, 9])
    for strategy in ("remaining", "round_robin"):
        order = order_of(units, strategy, pool_size=2)
        assert isinstance(order, PoolOrder)
        whole = triples(order, 0, 84)
        for done in range(0, 85, 7):
            fresh = order_of(units, strategy, pool_size=2)
            assert isinstance(fresh, PoolOrder)
            state = order.dump_state(done)
            assert state is not None
            fresh.load_state(state)
            assert triples(fresh, done, 84) == whole[done:]
            assert triples(fresh, 0, 84) == whole


FROZEN_ORDERS = {
    "lanes": "d64ae86ea45660a8",
    "remaining": "eb0a71227e3e57bc",
    "round_robin": "f7ab2f38431480d4",
    "sequential": "f6f3ba8981b24d69",
    "episode_sequential": "ab567cc665d196e4",
    "reservoir": "dace73d3681611a7",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_orders_do_not_change_between_versions(strategy: str) -> None:
    units = Units.from_lengths([11, 7, 1, 23, 2, 9, 16, 4])
    order = order_of(units, strategy, pool_size=3, lanes=4, seed=7, epoch=2)
    text = repr([(int(episode), int(frame)) for _, episode, frame in triples(order, 0, 73)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == FROZEN_ORDERS[strategy]
