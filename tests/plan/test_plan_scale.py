"""Cost limits, by CPU seconds so that a busy machine does not turn them red."""

from __future__ import annotations

import time

import numpy as np
import pytest
from plan_ledger import batch_key

from ingest.plan import PlanSettings, Units, plan_epoch

OFFSET = 10_000_000


@pytest.mark.parametrize("strategy", ["lanes", "reservoir", "sequential", "episode_sequential"])
def test_ten_million_samples_into_an_epoch_take_two_seconds(strategy: str) -> None:
    units = Units.from_lengths(np.random.default_rng(1).integers(50, 600, 40_000))
    settings = PlanSettings(strategy=strategy, batch_size=16)  # pyright: ignore[reportArgumentType]
    plan = plan_epoch(units, settings)
    cursor = plan.cursor_at(OFFSET // 16)
    start = time.process_time()
    batch = next(plan_epoch(units, settings, cursor).rank(0).batches())
    assert time.process_time() - start < 2
    assert batch_key(batch) == batch_key(next(plan.rank(0).batches(OFFSET // 16)))


def test_a_stored_state_spares_millions_of_draws() -> None:
    units = Units.from_lengths(np.full(10_000, 100))
    settings = PlanSettings(batch_size=100)
    plan = plan_epoch(units, settings)
    rank = plan.rank(0)
    expected = next(rank.batches(5_000))
    state = rank.pool_state(0, 5_000)
    assert state is not None
    start = time.process_time()
    fresh = plan_epoch(units, settings, plan.cursor_at(5_000)).rank(0)
    fresh.load_pool_state(0, state)
    batch = next(fresh.batches())
    admission = fresh.admission(0, 500_000, 500_100)
    assert time.process_time() - start < 0.5
    assert batch_key(batch) == batch_key(expected)
    assert set(batch.entry.tolist()) <= set(admission.entry.tolist())


@pytest.mark.slow
def test_ten_million_episodes_over_a_thousand_ranks() -> None:
    units = Units.from_lengths(np.random.default_rng(0).integers(50, 600, 10_000_000))
    settings = PlanSettings(strategy="lanes", world_size=1024, batch_size=16, tail="pad")
    start = time.process_time()
    plan = plan_epoch(units, settings)
    assert plan.steps > 0
    assert time.process_time() - start < 5
    cursor = plan.cursor_at(plan.steps // 2)
    wider = PlanSettings(strategy="lanes", world_size=960, batch_size=16, tail="pad")
    left = int(plan_epoch(units, wider, cursor).segment.pieces.count.sum())
    done = sum(sum(plan.rank(rank).samples_before(plan.steps // 2)) for rank in range(0, 1024, 128))
    assert left == int(units.frames.sum()) - done * 128
