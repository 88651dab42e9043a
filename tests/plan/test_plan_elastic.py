"""Changes of topology in mid-epoch, and episodes that are skipped: the ledger stays exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_ledger import (
    STRATEGIES,
    Sample,
    all_ranks,
    assert_once,
    batch_key,
    every_frame,
    lengths,
    planned,
    samples_of,
    strategies,
    topologies,
    trial_units,
)
from plan_ledger import settings as plan_settings

from ingest.errors import PlanError
from ingest.plan import Batch, Cursor, Units, plan_epoch

steps = st.integers(0, 12)


def real_key(batch: Batch) -> tuple[object, ...]:
    """Everything but what pads: a repeat may not come from an episode that turns out to be damaged."""
    real = ~batch.is_pad
    return (batch.step, *(tuple(column[real].tolist()) for column in (batch.unit, batch.frame, batch.position, batch.entry)))


def chain(
    units: Units, strategy: str, hops: list[tuple[tuple[int, int, int], int]], last: tuple[int, int, int], **more: object
) -> tuple[list[Sample], Cursor | None]:
    """Deliver some batches with each topology, then the rest with the last one."""
    cursor: Cursor | None = None
    found: list[Sample] = []
    for topology, batches in hops:
        plan = planned(units, strategy, topology, cursor, **more)
        found += all_ranks(plan, batches=batches)
        left = plan.steps - plan.cursor.batches
        cursor = Cursor.from_json(plan.cursor.advance(min(batches, left)).to_json())
    found += all_ranks(planned(units, strategy, last, cursor, **more))
    return found, cursor


@given(lengths, strategies, st.lists(st.tuples(topologies, steps), min_size=1, max_size=4), topologies, st.sampled_from(["exact", "pad"]))
@settings(max_examples=150)
def test_any_chain_of_topologies_delivers_every_frame_once(
    counts: list[int], strategy: str, hops: list[tuple[tuple[int, int, int], int]], last: tuple[int, int, int], tail: str
) -> None:
    units = Units.from_lengths(counts)
    # A run starts with an episode for every rank.
    (world, workers, batch), batches = hops[0]
    hops[0] = ((min(world, len(counts)), workers, batch), batches)
    found, _ = chain(units, strategy, hops, last, tail=tail)
    assert_once(found, every_frame(units))


@given(lengths, strategies, st.lists(st.tuples(topologies, steps), min_size=1, max_size=3), topologies)
@settings(max_examples=60)
def test_dropped_tails_are_shared_again(
    counts: list[int], strategy: str, hops: list[tuple[tuple[int, int, int], int]], last: tuple[int, int, int]
) -> None:
    units = Units.from_lengths(counts)
    (world, workers, batch), batches = hops[0]
    hops[0] = ((min(world, len(counts)), workers, batch), batches)
    found, cursor = chain(units, strategy, hops, last, tail="drop_tail")
    assert len(set(found)) == len(found)
    rest = plan_epoch(units, plan_settings(strategy, last, tail="drop_tail"), cursor).segment.pieces
    assert int(rest.count.sum()) <= sum(counts)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("share", ["episodes", "frame_exact", "cost"])
def test_one_two_three_one(strategy: str, share: str) -> None:
    units = trial_units()
    hops = [((1, 0, 4), 3), ((2, 2, 2), 4), ((3, 1, 1), 5)]
    found, _ = chain(units, strategy, hops, (1, 3, 7), share=share)
    assert_once(found, every_frame(units))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_chain_resumed_at_every_step_is_the_same(strategy: str) -> None:
    units = trial_units()
    cursor = planned(units, strategy, (3, 0, 4)).cursor_at(2)
    plan = planned(units, strategy, (2, 2, 3), cursor)
    whole = [[batch_key(one) for one in plan.rank(number).batches()] for number in range(2)]
    for step in range(plan.steps):
        again = planned(units, strategy, (2, 2, 3), plan.cursor_at(step))
        assert [[batch_key(one) for one in again.rank(number).batches()] for number in range(2)] == [rows[step:] for rows in whole]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_ranks_than_frames_are_left(strategy: str) -> None:
    units = Units.from_lengths([5, 4])
    plan = planned(units, strategy, (1, 0, 1), tail="pad")
    for done in range(1, 9):
        cursor = plan.cursor_at(done)
        wide = planned(units, strategy, (8, 3, 4), cursor, tail="pad")
        assert wide.steps == 1 if done >= 1 else wide.steps
        batches = [next(wide.rank(number).batches()) for number in range(8)]
        assert all(len(one) == 4 for one in batches)
        assert_once(samples_of(units, batches), set(every_frame(units)) - set(all_ranks(plan, batches=done)))
        for one in batches:
            assert ((one.frame >= 0) & (one.frame < units.hi[one.unit])).all()


def test_leftovers_fewer_than_ranks_are_cut_by_frame() -> None:
    units = Units.from_lengths([100, 100])
    for strategy in STRATEGIES:
        cursor = planned(units, strategy, (2, 0, 10)).cursor_at(3)
        plan = planned(units, strategy, (5, 0, 1), cursor)
        frames = [plan.rank(number).frames for number in range(5)]
        assert sum(frames) == 140
        assert max(frames) - min(frames) <= 1


def test_lanes_leave_ranges_and_pools_leave_lists() -> None:
    units = Units.from_lengths([50] * 40)
    cursor = planned(units, "lanes", (2, 0, 16)).cursor_at(9)
    pieces = planned(units, "lanes", (3, 0, 16), cursor).segment.pieces
    assert not pieces.listed.any()
    assert len(pieces.table) == 0
    cursor = planned(units, "remaining", (2, 0, 16), pool_size=4).cursor_at(9)
    pieces = planned(units, "remaining", (3, 0, 16), cursor, pool_size=4).segment.pieces
    assert pieces.listed.sum() <= 8


def test_a_loop_has_no_epoch_to_share_again() -> None:
    units = trial_units()
    cursor = planned(units, "lanes", (2, 0, 4), tail="loop").cursor_at(5)
    planned(units, "lanes", (2, 0, 4), cursor, tail="loop")
    with pytest.raises(PlanError, match="no common epoch to re-share"):
        planned(units, "lanes", (3, 0, 4), cursor, tail="loop")


@given(
    lengths,
    strategies,
    st.tuples(st.integers(1, 3), st.integers(0, 2), st.sampled_from([1, 4])),
    st.data(),
    st.sampled_from(["exact", "pad", "drop_tail"]),
)
@settings(max_examples=120)
def test_a_skipped_episode_ends_at_its_step_and_nothing_else_is_lost(
    counts: list[int], strategy: str, topology: tuple[int, int, int], data: st.DataObject, tail: str
) -> None:
    units = Units.from_lengths(counts)
    topology = (min(topology[0], len(counts)), *topology[1:])
    before = planned(units, strategy, topology, tail=tail)
    skips = data.draw(st.lists(st.tuples(st.integers(0, len(counts) - 1), st.integers(0, before.steps)), min_size=1, max_size=3))
    cursor = before.cursor
    for episode, step in skips:
        cursor = cursor.skip(0, episode, step)
    first = {episode: next(step for other, step in skips if other == episode) for episode, _ in skips}
    plan = planned(units, strategy, topology, cursor, tail=tail)
    for number in range(topology[0]):
        earlier = min(first.values())
        old, new = list(before.rank(number).batches(0)), list(plan.rank(number).batches(0))
        assert [real_key(one) for one in new[:earlier]] == [real_key(one) for one in old[:earlier]]
        for one in new:
            late = {episode for episode, step in first.items() if one.step >= step}
            assert not late & set(units.episode[one.unit[~one.is_pad]].tolist())
        if tail != "exact":
            assert len(new) == len(old)
        # Every piece that is still used is admitted, with bounds that hold.
        for worker, order in enumerate(plan.rank(number).orders):
            admission = plan.rank(number).admission(worker)
            entries = order.span(0, len(order)).entry
            assert sorted(admission.entry.tolist()) == sorted(set(entries.tolist()))
            for place, entry in enumerate(admission.entry.tolist()):
                uses = np.flatnonzero(entries == entry)
                assert admission.frames[place] == len(uses)
                assert admission.admitted[place] < admission.first[place] <= uses[0]
                assert uses[-1] <= admission.last[place]
    found = all_ranks(plan)
    kept = [sample for sample in every_frame(units) if sample[1] not in first]
    delivered = [sample for sample in found if sample[1] not in first]
    assert len(set(found)) == len(found)
    if tail != "drop_tail":
        assert_once(delivered, kept)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_skips_survive_a_change_of_topology_and_the_end_of_the_epoch(strategy: str) -> None:
    units = trial_units()
    first = planned(units, strategy, (2, 0, 4))
    cursor = first.cursor_at(2).skip(0, 3, 3)
    plan = planned(units, strategy, (2, 0, 4), cursor)
    found = all_ranks(first, batches=2)
    found += [sample for number in range(2) for sample in samples_of(units, plan.rank(number).batches(2, 4))]
    cursor = plan.cursor_at(4)
    for topology in ((3, 2, 2), (1, 0, 7)):
        plan = planned(units, strategy, topology, cursor)
        found += all_ranks(plan, batches=1)
        cursor = Cursor.from_json(plan.cursor_at(1).to_json())
    found += all_ranks(planned(units, strategy, (4, 0, 1), cursor))
    kept = [sample for sample in every_frame(units) if sample[1] != 3]
    assert_once([sample for sample in found if sample[1] != 3], kept)
    following = planned(units, strategy, (2, 0, 4), cursor.next_epoch())
    assert_once(all_ranks(following), kept)
    assert planned(units, strategy, (2, 0, 4), following.cursor_at(3)).epoch == 1


def test_an_exact_epoch_with_a_skip_ends_when_its_ranks_do() -> None:
    units = Units.from_lengths([20, 4])
    plan = planned(units, "sequential", (2, 0, 4))
    cut = planned(units, "sequential", (2, 0, 4), plan.cursor_at(1).skip(0, 0, 2))
    assert cut.steps == 2
    assert cut.cursor_at(2).epoch == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clamp", [False, True])
def test_a_run_that_has_begun_is_never_refused(strategy: str, clamp: bool) -> None:
    units = Units.from_lengths([5, 9, 2])
    first = planned(units, strategy, (1, 0, 4), tail="pad", clamp_workers=clamp)
    with pytest.raises(PlanError, match="owns no streaming episodes"):
        planned(units, strategy, (5, 3, 2), tail="pad", clamp_workers=clamp)
    for cursor, kept in ((first.cursor, 16), (first.cursor.next_epoch(), 16), (first.cursor.skip(0, 1, 0).next_epoch(), 7)):
        wide = planned(units, strategy, (5, 3, 2), cursor, tail="pad", clamp_workers=clamp)
        found = all_ranks(wide)
        assert len(found) == len(set(found)) == kept
        step = wide.steps - 1
        rest = planned(units, strategy, (5, 3, 2), wide.cursor_at(step), tail="pad", clamp_workers=clamp)
        for number in range(5):
            assert [batch_key(one) for one in rest.rank(number).batches()] == [batch_key(one) for one in wide.rank(number).batches(step)]


def test_fillers_avoid_damaged_episodes() -> None:
    units = Units.from_lengths([3, 30, 2])
    plan = planned(units, "sequential", (2, 0, 2), tail="pad")
    owner = next(number for number in range(2) if 1 not in plan.rank(number).orders[0].pieces.episode)
    worker, sample = plan.rank(owner).filler
    assert (worker, units.episode[sample.unit].tolist(), sample.frame.tolist()) == (0, [2], [1])
    damaged = planned(units, "sequential", (2, 0, 2), plan.cursor_at(1).skip(0, 2, 1), tail="pad").rank(owner)
    assert units.episode[damaged.filler[1].unit].tolist() == [0]
    damaged = planned(units, "sequential", (2, 0, 2), plan.cursor_at(1).skip(0, 2, 1).skip(0, 0, 1), tail="pad").rank(owner)
    assert damaged.filler[1].entry.tolist() == [-1]
    assert units.episode[damaged.filler[1].unit].tolist() == [1]
    last = list(damaged.batches())[-1]
    assert last.is_pad.all()
    assert set(last.unit.tolist()) == {1}
