"""A rank with fewer episodes than workers says so."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ingest.plan import PlanSettings, Units, plan_epoch
from train_integration.clamping import log_clamped_workers


def test_ranks_with_too_few_episodes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    units = Units.from_lengths(np.array([10, 10, 10]))
    plan = plan_epoch(units, PlanSettings(world_size=2, workers=2, batch_size=4, clamp_workers=True))
    with caplog.at_level(logging.INFO, "reelray.plan"):
        (clamped,) = log_clamped_workers(plan)
    assert clamped[1] == 1
    assert f"rank {clamped[0]} owns fewer episodes than its 2 workers: it uses 1" in caplog.text


def test_enough_episodes_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_epoch(Units.from_lengths(np.full(8, 5)), PlanSettings(world_size=2, workers=2, batch_size=4))
    with caplog.at_level(logging.INFO, "reelray.plan"):
        assert not log_clamped_workers(plan)
    assert not caplog.text
