"""What a plan says about itself, and its run on imagined hardware."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_ledger import STRATEGIES, lengths, planned, trial_units

from ingest.errors import BudgetError, SettingsError
from ingest.plan import Hardware, RankPlan, RankRun, Units, cut_units, measure_mixing, report_plan, simulate, simulate_rank
from ingest.plan.mixing import mixing_of


def test_report_adds_up() -> None:
    units = Units.from_lengths([30, 20, 10, 40], nbytes=[300, 200, 100, 400], cost=[3, 2, 1, 4])
    for strategy in STRATEGIES:
        report = report_plan(planned(units, strategy, (2, 2, 8), tail="pad"))
        assert report.frames.sum() == 100
        assert report.bytes.sum() == 1000
        assert report.cost.sum() == pytest.approx(10)
        assert report.frame_balance == pytest.approx(1.0)
        assert report.cost_balance == pytest.approx(1.0)
        assert report.episodes.tolist() == [1, 1, 1, 1]
        assert (report.rank_peak_bytes >= 500).all()
        assert report.padded == int(report.steps.sum()) * 8 - 100
        assert report.dropped == 0
        assert json.loads(json.dumps(report.to_dict()))["consumers"]["frames"] == report.frames.tolist()
    dropped = report_plan(planned(units, "lanes", (2, 2, 8), tail="drop_tail"))
    assert dropped.dropped == 100 - int(dropped.steps.sum()) * 8
    assert report_plan(planned(units, "remaining", (2, 0, 8)), peaks=False).peak_bytes.tolist() == [-1, -1]


def test_peaks_stay_within_the_pools_budget() -> None:
    rng = np.random.default_rng(5)
    units = Units.from_lengths(rng.integers(5, 40, 60), nbytes=rng.integers(1, 100, 60))
    report = report_plan(planned(units, "remaining", (2, 2, 4), byte_budget=400))
    assert report.peak_bytes.max() <= 200


def test_mixing_measures_on_known_orders() -> None:
    in_order = np.arange(1600)
    episode, frame = in_order // 100, in_order % 100
    measured = mixing_of(episode, frame, 16, place=in_order, total=1600)
    assert measured.neighbour_frames == 1
    assert measured.distinct_episodes == pytest.approx(1 + 15 / 100, abs=0.05)
    assert measured.uniform_distance == pytest.approx(1 - 1 / 16)
    even = np.arange(1600).reshape(16, 100).T.reshape(-1)
    measured = mixing_of(episode[even], frame[even], 16, place=even, total=1600)
    assert measured.distinct_episodes == 16
    assert measured.neighbour_frames is None
    random = np.random.default_rng(0).permutation(160_000)
    assert mixing_of(random // 100, random % 100, 16, place=random, total=160_000).uniform_distance < 0.02
    assert mixing_of(random[:0], random[:0], 16, place=random[:0], total=0).samples == 0


@pytest.mark.parametrize("tail", ["drop_tail", "loop", "pad"])
def test_an_order_is_measured_whatever_becomes_of_its_tail(tail: str) -> None:
    units = Units.from_lengths([97, 3, 40, 1])
    for topology in ((1, 0, 7), (1, 2, 9), (2, 0, 16), (1, 0, 1000)):
        measured = measure_mixing(planned(units, "sequential", topology, tail=tail).rank(0))
        assert 0 <= measured.uniform_distance <= 1


def test_reservoir_and_lanes_mix_better_than_the_pool_at_equal_decoded_frames() -> None:
    rng = np.random.default_rng(6)
    counts = rng.integers(150, 380, 55)
    units = Units.from_lengths(counts)
    runs = cut_units(units, {row: range(0, int(count), 10) for row, count in enumerate(counts)}, max_frames=60)
    ours = planned(runs, "reservoir", (1, 0, 16))
    held = report_plan(ours).peak_frames[0]
    pool = 1
    while report_plan(planned(units, "remaining", (1, 0, 16), pool_size=pool)).peak_frames[0] < held:
        pool += 1
    theirs = measure_mixing(planned(units, "remaining", (1, 0, 16), pool_size=pool).rank(0))
    mine = measure_mixing(ours.rank(0))
    assert mine.distinct_episodes >= 1.2 * theirs.distinct_episodes
    # No run is cut again: every picture is decoded once.
    pieces = ours.rank(0).orders[0].pieces
    assert int((pieces.hi - pieces.lo).sum()) == int(counts.sum())
    assert measure_mixing(planned(runs, "lanes", (1, 0, 16)).rank(0)).distinct_episodes > mine.distinct_episodes


def slow_simulation(plan: RankPlan, hardware: Hardware) -> tuple[float, float]:
    """Step by step, without budgets: total seconds and seconds of stall."""
    ready: dict[tuple[int, int], float] = {}
    network = decoder = 0.0
    wanted = []
    for worker, order in enumerate(plan.orders):
        own, pieces = plan.admission(worker), order.pieces
        first = plan.step_of(worker, own.first)
        wanted += [(int(first[place]), worker, place, int(entry), pieces) for place, entry in enumerate(own.entry.tolist())]
    wanted.sort(key=lambda one: one[:3])
    for step, worker, _, entry, pieces in wanted:
        part = pieces.count[entry] / pieces.units.frames[pieces.unit[entry]]
        network += float(np.ceil(pieces.bytes[entry] * part)) / hardware.bandwidth_bytes_s
        decoder = max(decoder, network + hardware.latency_s) + float(pieces.cost[entry]) / hardware.decode_cost_s
        ready[step, worker] = decoder
    clock = stall = 0.0
    for step in range(plan.steps):
        late = max([until for (first, _), until in ready.items() if first == step], default=0.0) - clock
        if late > 0:
            clock += late
            stall += late if step else 0.0
        clock += hardware.step_s
    return clock, stall


@given(lengths, st.sampled_from(STRATEGIES), st.integers(0, 3), st.integers(1, 8))
@settings(max_examples=60)
def test_simulation_equals_a_step_by_step_run(counts: list[int], strategy: str, workers: int, batch: int) -> None:
    units = Units.from_lengths(counts, nbytes=[count * 7 for count in counts])
    rank = planned(units, strategy, (1, workers, batch), pool_size=2, lanes=3).rank(0)
    hardware = Hardware(bandwidth_bytes_s=70.0, decode_cost_s=15.0, step_s=0.2, latency_s=0.3)
    run = simulate_rank(rank, hardware)
    total, stall = slow_simulation(rank, hardware)
    assert run.total_s == pytest.approx(total)
    assert run.stall_s == pytest.approx(stall)
    assert run.total_s == pytest.approx(run.first_batch_s + run.stall_s + rank.steps * 0.2)
    assert 0 <= run.stall_share < 1
    tight = Hardware(bandwidth_bytes_s=70.0, decode_cost_s=15.0, step_s=0.2, latency_s=0.3, byte_budget=max(counts) * 7)
    bounded = simulate_rank(rank, tight)
    assert bounded.peak_bytes <= max(counts) * 7
    assert bounded.total_s >= run.total_s - 1e-9
    roomy = Hardware(bandwidth_bytes_s=70.0, decode_cost_s=15.0, step_s=0.2, decoded_frames=sum(counts))
    assert simulate_rank(rank, roomy).peak_frames <= sum(counts)


def test_simulated_stalls_follow_the_hardware() -> None:
    units = Units.from_lengths([100] * 40, nbytes=[10_000] * 40)
    plan = planned(units, "lanes", (2, 0, 16))
    fast = simulate(plan, Hardware(bandwidth_bytes_s=1e9, decode_cost_s=1e6, step_s=0.1))
    assert [run.rank for run in fast] == [0, 1]
    assert all(run.stall_share < 0.01 for run in fast)
    starved = simulate(plan, Hardware(bandwidth_bytes_s=1e4, decode_cost_s=1e6, step_s=0.001), ranks=[1])[0]
    assert isinstance(starved, RankRun)
    assert starved.stall_share > 0.8
    assert starved.total_s == pytest.approx(starved.fetched_bytes / 1e4, rel=0.05)


def test_budgets_that_can_never_suffice_are_errors() -> None:
    plan = planned(trial_units(), "lanes", (1, 0, 4), lanes=4).rank(0)
    with pytest.raises(BudgetError, match=r"more than decoded_frames=3: raise it, or cut units"):
        simulate_rank(plan, Hardware(bandwidth_bytes_s=1, decode_cost_s=1, step_s=1, decoded_frames=3))
    with pytest.raises(BudgetError, match="the pieces open at a time have more than decoded_frames=24 frames"):
        simulate_rank(plan, Hardware(bandwidth_bytes_s=1, decode_cost_s=1, step_s=1, decoded_frames=24))
    with pytest.raises(SettingsError, match="step_s must be positive, found 0"):
        Hardware(bandwidth_bytes_s=1, decode_cost_s=1, step_s=0)
    with pytest.raises(SettingsError, match="latency_s must be non-negative"):
        Hardware(bandwidth_bytes_s=1, decode_cost_s=1, step_s=1, latency_s=-1)
