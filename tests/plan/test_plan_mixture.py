"""Weighted mixtures: exact blocks, whole passes, constant-time resume, any topology."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_ledger import batch_key, every_frame

from ingest.errors import PlanError, SettingsError
from ingest.plan import Cursor, EpochPlan, PlanSettings, Units, plan_epoch
from ingest.plan.mixture import block_quotas, mixture_ends

NATIVE = ("lanes", "reservoir", "sequential", "episode_sequential")


def three() -> Units:
    rng = np.random.default_rng(4)
    return Units.concatenate([Units.from_lengths(rng.integers(3, 30, count), dataset=number) for number, count in enumerate((20, 9, 4))])


def mixed(units: Units, strategy: str, world: int, cursor: Cursor | None = None, *, epoch: int = 0, **more: object) -> EpochPlan:
    options = {"weights": (0.5, 0.25, 0.25), "mixture_block": 16, "workers": 2, "batch_size": 8, "seed": 3, **more}
    return plan_epoch(units, PlanSettings(strategy=strategy, world_size=world, **options), cursor, epoch=epoch)  # pyright: ignore[reportArgumentType]


def rows(plan: EpochPlan, max_steps: int | None = None) -> list[tuple[int, int, int, int]]:
    table = plan.order_table(max_steps=max_steps)
    real = ~table.is_pad
    columns = (table.dataset, table.episode_index, table.frame_index, table.cycle)
    return list(zip(*(column[real].tolist() for column in columns), strict=True))


@pytest.mark.parametrize("strategy", NATIVE)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_block_of_every_consumer_is_exact(strategy: str, world: int) -> None:
    units = three()
    plan = mixed(units, strategy, world)
    for number in range(world):
        for order in plan.rank(number).orders:
            span = order.span(0, len(order))
            assert len(order) % 16 == 0
            for start in range(0, len(order), 16):
                assert np.bincount(units.dataset[span.unit[start : start + 16]]).tolist() == [8, 4, 4]
            for start in (0, 5, 16, 33, len(order) - 2):
                part = order.span(start, start + 20)
                for name in ("entry", "unit", "frame", "cycle"):
                    assert getattr(part, name).tolist() == getattr(span, name)[start : start + 20].tolist()


def test_datasets_are_delivered_in_whole_passes_over_epochs_and_topologies() -> None:
    units = three()
    seen: Counter[tuple[int, int, int, int]] = Counter()
    for epoch in range(8):
        seen.update(rows(mixed(units, "lanes", 1 + epoch % 3, epoch=epoch)))
    assert set(seen.values()) == {1}
    frames = np.bincount(units.dataset, units.frames).astype(int).tolist()
    passes = Counter((dataset, cycle) for dataset, _, _, cycle in seen)
    for dataset, length in enumerate(frames):
        last = max(cycle for other, cycle in passes if other == dataset)
        assert last >= 1
        assert all(passes[dataset, cycle] == length for cycle in range(last))
    orders = {tuple(row[:3] for row in rows(mixed(units, "lanes", 1, epoch=epoch))) for epoch in (0, 1)}
    assert len(orders) == 2


def test_weights_by_frames_deliver_every_frame_once_in_even_blocks() -> None:
    units = three()
    plan = mixed(units, "lanes", 2, weights="frames")
    found = [row[:3] for row in rows(plan)]
    assert sorted(found) == every_frame(units)
    share = np.bincount(units.dataset, units.frames) / units.frames.sum() * 16
    for number in range(2):
        for order in plan.rank(number).orders:
            span = order.span(0, len(order))
            for start in range(0, len(order) - 15, 16):
                counts = np.bincount(units.dataset[span.unit[start : start + 16]], minlength=3)
                assert (np.abs(counts - share) < 2).all()


@pytest.mark.parametrize("strategy", NATIVE)
def test_mixtures_resume_and_change_their_topology(strategy: str) -> None:
    units = three()
    plan = mixed(units, strategy, 2)
    whole = [[batch_key(one) for one in plan.rank(number).batches()] for number in range(2)]
    for step in (0, 1, 4, plan.steps - 1):
        again = mixed(units, strategy, 2, plan.cursor_at(step))
        assert [[batch_key(one) for one in again.rank(number).batches()] for number in range(2)] == [part[step:] for part in whole]
    expected = Counter(rows(plan))
    found = Counter(rows(plan, 3))
    cursor = plan.cursor_at(3)
    for world, steps in ((3, 2), (1, 5), (5, 1)):
        plan = mixed(units, strategy, world, cursor, batch_size=5)
        found.update(rows(plan, steps))
        cursor = plan.cursor_at(steps)
    found.update(rows(mixed(units, strategy, 2, cursor)))
    assert found == expected


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 4), st.data())
@settings(max_examples=40)
def test_any_mixture_is_exact(lengths: list[list[int]], world: int, data: st.DataObject) -> None:
    units = Units.concatenate([Units.from_lengths(counts, dataset=number) for number, counts in enumerate(lengths)])
    weights = tuple(data.draw(st.integers(1, 5)) for _ in lengths)
    block = sum(weights)
    options = PlanSettings(strategy="lanes", weights=weights, mixture_block=block, batch_size=2)
    blocks = max(1, round(int(units.frames.sum()) / block))
    plan = plan_epoch(units, options)
    order = plan.rank(0).orders[0]
    assert len(order) == blocks * block
    counts = units.dataset[order.span(0, len(order)).unit].reshape(blocks, block)
    assert all(np.bincount(row, minlength=len(weights)).tolist() == list(weights) for row in counts)
    done = data.draw(st.integers(0, plan.steps - 1))
    cursor = plan.cursor_at(done)
    wide = PlanSettings(strategy="lanes", weights=weights, mixture_block=block, batch_size=3, world_size=world)
    assert Counter(rows(plan, done)) + Counter(rows(plan_epoch(units, wide, cursor))) == Counter(rows(plan))
    bounds = order.admission()
    entries = order.span(0, len(order)).entry
    for place, entry in enumerate(bounds.entry.tolist()):
        uses = np.flatnonzero(entries == entry)
        assert bounds.frames[place] == len(uses)
        assert bounds.admitted[place] < bounds.first[place] <= uses[0]
        assert uses[-1] <= bounds.last[place] < len(order)


def test_parts_get_whole_blocks() -> None:
    ends = mixture_ends(np.array([70, 30]), np.array([7, 3]), 3)
    assert ends.tolist() == [[28, 49, 70], [12, 21, 30]]
    assert mixture_ends(np.array([5, 0]), np.array([7, 3]), 2).tolist() == [[3, 5], [0, 0]]


def test_weights_that_cannot_work_are_named() -> None:
    units = three()
    with pytest.raises(PlanError, match=r"one number for each of the 3 datasets, found 2"):
        mixed(units, "lanes", 1, weights=(1.0, 2.0))
    with pytest.raises(PlanError, match=r"weights\[2\]=0\.001 gives no sample in a block of 16: raise mixture_block"):
        mixed(units, "lanes", 1, weights=(1.0, 1.0, 0.001))
    empty = Units.concatenate([units, Units.from_lengths([0], dataset=3)])
    with pytest.raises(PlanError, match=r"weights\[3\]=1\.0 but dataset 3 has no frames"):
        mixed(empty, "lanes", 1, weights=(1.0, 1.0, 1.0, 1.0))
    assert not {row[0] for row in rows(mixed(units, "lanes", 1, weights=(1.0, 0.0, 1.0)))} - {0, 2}
    for weights in ((), (-1.0, 2.0), (0.0, 0.0), (float("nan"), 1.0), (10**400, 1), (1e308, 1e308), "bytes"):
        with pytest.raises(SettingsError, match="weights must be 'frames' or numbers"):
            PlanSettings(strategy="lanes", weights=weights)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingsError, match=r"weights need strategy lanes.* found 'remaining'"):
        PlanSettings(weights=(1.0,))
    with pytest.raises(SettingsError, match="exclude each other"):
        PlanSettings(strategy="lanes", tail="loop", weights=(1.0,))
    quotas = block_quotas(units, PlanSettings(strategy="lanes", weights=(1.0, 1.0, 1.0), mixture_block=10))
    assert quotas.tolist() == [4, 3, 3]
