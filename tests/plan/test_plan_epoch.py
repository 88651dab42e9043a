"""Whole epochs: coverage over topologies, orders and tails; the shape of batches; resume at every step."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_ledger import (
    STRATEGIES,
    TRIAL_LENGTHS,
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

from ingest.errors import BudgetError, CursorError, PlanError, SettingsError
from ingest.plan import Cursor, PlanSettings, Units, balanced_shards, plan_epoch, worker_starts

TAILS = ("exact", "pad", "drop_tail")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_every_frame_once_on_the_trial_lengths(world: int, workers: int, batch: int) -> None:
    units = trial_units()
    for strategy in STRATEGIES:
        for tail in TAILS:
            plan = planned(units, strategy, (world, workers, batch), tail=tail)
            found = all_ranks(plan)
            if tail == "drop_tail":
                assert len(set(found)) == len(found)
                assert len(found) == world * plan.steps * batch
            else:
                assert_once(found, every_frame(units))


@given(lengths, strategies, topologies, st.sampled_from(TAILS), st.sampled_from(["frame_exact", "episodes", "cost"]))
@settings(max_examples=150)
def test_every_frame_once_over_any_topology(
    counts: list[int], strategy: str, topology: tuple[int, int, int], tail: str, share: str
) -> None:
    world, _, batch = topology
    units = Units.from_lengths(counts)
    if sum(counts) < world or (share != "frame_exact" and len(counts) < world):
        with pytest.raises(PlanError, match="owns no streaming episodes"):
            planned(units, strategy, topology, tail=tail, share=share)
        return
    plan = planned(units, strategy, topology, tail=tail, share=share)
    ranks = [list(plan.rank(number).batches()) for number in range(world)]
    found = [sample for batches in ranks for sample in samples_of(units, batches)]
    if tail == "drop_tail":
        assert len(set(found)) == len(found)
    else:
        assert_once(found, every_frame(units))
    for number, batches in enumerate(ranks):
        assert [one.step for one in batches] == list(range(plan.rank(number).steps))
        positions = [place for one in batches for place in one.position.tolist()]
        assert positions == list(range(len(positions)))
        if tail != "exact":
            assert {len(one) for one in batches} <= {batch}
    if tail != "exact":
        assert {len(batches) for batches in ranks} == {plan.steps}
    else:
        assert max(len(batches) for batches in ranks) == plan.steps
        assert not any(one.is_pad.any() for batches in ranks for one in batches)


@given(lengths, strategies, topologies, st.integers(0, 5))
@settings(max_examples=60)
def test_order_table_holds_what_the_batches_hold(counts: list[int], strategy: str, topology: tuple[int, int, int], epoch: int) -> None:
    units = Units.from_lengths(counts, episodes=[3 * row + 1 for row in range(len(counts))], dataset=2)
    topology = (min(topology[0], len(counts)), *topology[1:])
    plan = planned(units, strategy, topology, tail="pad", epoch=epoch)
    table = plan.order_table(max_steps=3)
    rows = list(
        zip(
            *(getattr(table, name).tolist() for name in ("rank", "worker", "step", "position", "unit", "frame_index", "is_pad")),
            strict=True,
        )
    )
    expected = [
        (number, one.worker, one.step, int(place), int(unit), int(frame), bool(pad))
        for number in range(plan.world_size)
        for one in plan.rank(number).batches(stop=3)
        for place, unit, frame, pad in zip(one.position, one.unit, one.frame, one.is_pad, strict=True)
    ]
    assert rows == expected
    assert set(table.dataset.tolist()) <= {2}
    assert set(table.epoch.tolist()) <= {epoch}
    assert (table.episode_index == units.episode[table.unit]).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tail", ["exact", "pad", "drop_tail", "loop"])
@pytest.mark.parametrize("topology", [(1, 0, 4), (2, 3, 4), (3, 2, 1)])
def test_resume_at_every_step_continues_the_order(strategy: str, tail: str, topology: tuple[int, int, int]) -> None:
    units = trial_units()
    whole = planned(units, strategy, topology, tail=tail)
    ends = [whole.rank(number).steps * (2 if tail == "loop" else 1) for number in range(topology[0])]
    batches = [[batch_key(one) for one in whole.rank(number).batches(0, end)] for number, end in enumerate(ends)]
    for step in range(max(ends)):
        cursor = Cursor.from_json(whole.cursor_at(step).to_json())
        if cursor.epoch > 0:
            assert step >= whole.steps
            continue
        again = planned(units, strategy, topology, cursor, tail=tail)
        for number, end in enumerate(ends):
            rest = [batch_key(one) for one in again.rank(number).batches(stop=end)]
            assert rest == batches[number][step:]


def test_cursor_at_rolls_over_to_the_next_epoch() -> None:
    units = trial_units()
    plan = planned(units, "lanes", (2, 0, 4))
    assert plan.cursor_at(plan.steps - 1).epoch == 0
    following = plan.cursor_at(plan.steps)
    assert (following.epoch, following.segments) == (1, ())
    again = planned(units, "lanes", (3, 0, 4), following)
    assert again.epoch == 1
    assert_once(all_ranks(again), every_frame(units))
    assert all_ranks(again) != all_ranks(planned(units, "lanes", (3, 0, 4)))
    with pytest.raises(CursorError, match="starts at batch 5, found 4"):
        planned(units, "lanes", (2, 0, 4), plan.cursor_at(5)).cursor_at(4)
    loop = planned(units, "lanes", (2, 0, 4), tail="loop")
    assert loop.cursor_at(1000).batches == 1000


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_orders_depend_on_seed_and_epoch_alone(strategy: str) -> None:
    units = trial_units()
    orders = {(seed, epoch): all_ranks(planned(units, strategy, (2, 0, 4), seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert orders[1, 0] == all_ranks(planned(units, strategy, (2, 0, 4), seed=1))
    distinct = {tuple(order) for order in orders.values()}
    assert len(distinct) == (1 if strategy == "sequential" else 4)
    fixed = all_ranks(planned(units, strategy, (2, 0, 4), seed=1, epoch=1, shuffle=False))
    assert fixed == orders[1, 0]


def test_sequential_follows_the_selection() -> None:
    units = Units.from_lengths([3, 2, 4], episodes=[5, 9, 1])
    plan = planned(units, "sequential", (1, 0, 2))
    expected = [(0, 5, 0), (0, 5, 1), (0, 5, 2), (0, 9, 0), (0, 9, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3)]
    assert all_ranks(plan) == expected
    shuffled = all_ranks(planned(units, "episode_sequential", (1, 0, 2), seed=3))
    assert sorted(shuffled) == sorted(expected)
    for episode in (5, 9, 1):
        rows = [place for place, sample in enumerate(shuffled) if sample[1] == episode]
        assert rows == list(range(rows[0], rows[0] + len(rows)))
        assert [shuffled[row][2] for row in rows] == list(range(len(rows)))


def test_whole_episodes_are_shared_by_the_greedy_rule_on_both_levels() -> None:
    units = trial_units()
    plan = planned(units, "remaining", (2, 2, 4))
    shards = balanced_shards(list(enumerate(TRIAL_LENGTHS)), 2)
    for number, shard in enumerate(shards):
        inner = balanced_shards([(episode, TRIAL_LENGTHS[episode]) for episode in shard], 2)
        orders = plan.rank(number).orders
        assert [sorted(order.pieces.episode.tolist()) for order in orders] == [sorted(part) for part in inner]


@given(lengths, st.integers(1, 8))
@settings(max_examples=60)
def test_frame_exact_shares_differ_by_a_frame_and_cut_few_episodes(counts: list[int], world: int) -> None:
    world = min(world, sum(counts))
    plan = planned(Units.from_lengths(counts), "sequential", (world, 0, 1), share="frame_exact")
    frames = [plan.rank(number).frames for number in range(world)]
    assert max(frames) - min(frames) <= 1
    owners = [set(plan.rank(number).orders[0].pieces.unit.tolist()) for number in range(world)]
    extra = sum(len(owner) for owner in owners) - len(counts)
    assert extra <= world - 1


def test_runs_of_an_episode_stay_on_one_rank() -> None:
    base = Units.from_lengths([10, 10, 10])
    runs = Units.concatenate(
        [Units(base.dataset, base.episode, base.lo + start, base.lo + start + 5, base.bytes, base.cost) for start in (0, 5)]
    )
    plan = planned(runs, "lanes", (3, 0, 2))
    owners = [set(plan.rank(number).orders[0].pieces.episode.tolist()) for number in range(3)]
    assert sorted(len(owner) for owner in owners) == [1, 1, 1]
    assert_once(all_ranks(plan), every_frame(runs))


def test_shares_by_cost_balance_cost() -> None:
    units = Units.from_lengths([10] * 6, cost=[50, 10, 10, 10, 10, 10])
    plan = planned(units, "lanes", (2, 0, 1), share="cost")
    costs = [float(plan.rank(number).orders[0].pieces.cost.sum()) for number in range(2)]
    assert costs == [50, 50]


def test_pad_repeats_the_worker_and_is_marked() -> None:
    units = Units.from_lengths([5, 3])
    plan = planned(units, "sequential", (2, 0, 4), tail="pad")
    longer, shorter = (list(plan.rank(number).batches()) for number in (0, 1))
    assert longer[1].is_pad.tolist() == [False, True, True, True]
    assert longer[1].frame.tolist() == [4, 4, 4, 4]
    assert shorter[0].frame.tolist() == [0, 1, 2, 2]
    assert shorter[1].is_pad.all()
    assert shorter[1].frame.tolist() == [2, 2, 2, 2]
    assert shorter[1].unit.tolist() == [1, 1, 1, 1]


def test_loop_goes_on_with_each_workers_next_epoch() -> None:
    units = trial_units()
    options = PlanSettings(world_size=1, workers=3, batch_size=4, tail="loop", pool_size=2, seed=9)
    rank = plan_epoch(units, options).rank(0)
    batches = list(rank.batches(0, 60))
    assert all(len(one) == 4 and not one.is_pad.any() for one in batches)
    assert max(int(one.cycle.max()) for one in batches) >= 3
    # What LeRobot's rule says a restarted loader begins with, worker by worker.
    frames = [order.epoch_length for order in rank.orders]  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(1, 40):
        starts = worker_starts(step * 4, 4, frames, repeat=True)
        for turn, start in enumerate(starts):
            batch = batches[step + turn]
            assert batch.worker == start.logical
            assert batch.cycle[0] == start.epoch
            single = plan_epoch(units, PlanSettings(workers=3, batch_size=1, pool_size=2, seed=9), epoch=start.epoch)
            expected = single.rank(0).orders[start.logical].at(start.skip or 0)
            assert (int(batch.unit[0]), int(batch.frame[0])) == expected


def test_settings_name_the_field_and_the_value() -> None:
    for options, message in [
        ({"strategy": "fifo"}, "strategy must be one of lanes, remaining.* found 'fifo'"),
        ({"share": "x"}, "share must be one of"),
        ({"tail": "x"}, "tail must be one of"),
        ({"world_size": 0}, "world_size must be positive and whole, found 0"),
        ({"workers": -1}, "workers must be non-negative and whole, found -1"),
        ({"batch_size": 1.5}, r"batch_size must be positive and whole, found 1\.5"),
        ({"batch_size": True}, "batch_size must be positive and whole, found True"),
        ({"pool_size": 0}, "pool_size must be positive"),
        ({"byte_budget": 0}, "byte_budget must be positive"),
        ({"lanes": 0}, "lanes must be positive"),
        ({"seed": -1}, "seed must be non-negative"),
    ]:
        with pytest.raises(SettingsError, match=message):
            PlanSettings(**options)  # pyright: ignore[reportArgumentType]


def test_pool_and_budget_are_divided_among_workers() -> None:
    options = PlanSettings(byte_budget=100)
    assert [options.pool_share(count) for count in (1, 2, 3, 5, 64)] == [32, 16, 11, 6, 1]
    assert [options.budget_share(count) for count in (1, 3, 200)] == [100, 33, 1]
    assert PlanSettings(pool_size=7).pool_share(3) == 7
    assert [PlanSettings(strategy="lanes").lane_count(size) for size in (1, 4, 7, 16, 24, 64)] == [16, 16, 21, 16, 24, 32]


def test_what_cannot_be_shared_is_refused() -> None:
    units = Units.from_lengths([4, 5], nbytes=[10, 90])
    with pytest.raises(PlanError, match=r"rank 2 owns no streaming episodes: 2 episodes with 9 frames over world_size 3"):
        planned(units, "lanes", (3, 0, 1))
    with pytest.raises(PlanError, match=r"rank 0 owns 1 streaming episodes, fewer than its 2 workers; reduce num_workers"):
        planned(units, "lanes", (2, 2, 1), clamp_workers=False)
    assert planned(units, "lanes", (2, 2, 1)).rank(0).workers == 1
    for strategy in STRATEGIES:
        with pytest.raises(
            BudgetError, match=r"Episode 1 of dataset 0 requires 90 bytes, exceeding the byte budget 80 .*160 over 2 workers"
        ):
            planned(units, strategy, (1, 2, 1), byte_budget=160)
        with pytest.raises(BudgetError, match=r"Episode 1 .* byte budget 80 "):
            planned(units, strategy, (1, 2, 1), byte_budget=160, clamp_workers=False)
    with pytest.raises(PlanError, match="no frames to deliver: 1 units selected"):
        planned(Units.from_lengths([0]), "lanes", (1, 0, 1))
    plan = planned(units, "lanes", (2, 0, 1))
    with pytest.raises(PlanError, match=r"rank must be in 0\.\.1, found 2"):
        plan.rank(2)
    with pytest.raises(PlanError, match="begin at 0, found -1"):
        next(plan.rank(0).batches(-1))


def test_steps_of_samples() -> None:
    plan = planned(trial_units(), "lanes", (1, 3, 4))
    rank = plan.rank(0)
    for one in rank.batches():
        admission = rank.admission(one.worker)
        first = rank.step_of(one.worker, admission.first)
        last = rank.step_of(one.worker, admission.last)
        for entry in np.unique(one.entry):
            place = int(np.flatnonzero(admission.entry == entry)[0])
            assert first[place] <= one.step <= last[place]
    assert rank.step_of(0, np.array([-1, 0])).tolist() == [-1, 0]
    before = rank.samples_before(5)
    assert sum(before) == sum(len(one) for one in rank.batches(0, 5))


def test_pool_states_spare_the_replay() -> None:
    units = trial_units()
    for strategy in ("remaining", "round_robin"):
        plan = planned(units, strategy, (2, 2, 3), pool_size=2)
        for number in range(2):
            rank = plan.rank(number)
            whole = [batch_key(one) for one in rank.batches()]
            for step in range(rank.steps):
                again = planned(units, strategy, (2, 2, 3), plan.cursor_at(step), pool_size=2).rank(number)
                for worker in range(rank.workers):
                    state = rank.pool_state(worker, step)
                    assert state is not None
                    assert len(state) <= 32 * 1024
                    again.load_pool_state(worker, state)
                assert [batch_key(one) for one in again.batches()] == whole[step:]
    lanes = planned(units, "lanes", (1, 0, 3)).rank(0)
    assert lanes.pool_state(0, 3) is None
    with pytest.raises(CursorError, match="has no coverage pool"):
        lanes.load_pool_state(0, b"")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tail", ["exact", "loop"])
def test_plans_travel_between_processes(strategy: str, tail: str) -> None:
    plan = planned(trial_units(), strategy, (2, 2, 4), tail=tail)
    expected = [batch_key(one) for one in plan.rank(1).batches(0, 6)]
    copied = pickle.loads(pickle.dumps(plan))
    assert [batch_key(one) for one in copied.rank(1).batches(0, 6)] == expected
    rank = pickle.loads(pickle.dumps(plan.rank(1)))
    assert [batch_key(one) for one in rank.batches(0, 6)] == expected
    assert copied.cursor == plan.cursor
