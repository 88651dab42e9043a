"""The conformance trial about coverage over ranks, workers and restarts, in the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_ledger import STRATEGIES, TRIAL_LENGTHS, all_ranks, assert_once, planned

from ingest.plan import Units


@pytest.mark.shared
def test_trial_11(shared_dir: Path) -> None:
    expected = json.loads((shared_dir / "data" / "trials" / "11_exact_coverage_ranks_resume" / "EXPECT.json").read_text())
    units = Units.from_lengths(expected["lengths"])
    rows = list(range(expected["rows"]))
    begin = (units.frames.cumsum() - units.frames).tolist()
    assert expected["lengths"] == list(TRIAL_LENGTHS)
    for strategy in STRATEGIES:
        for world in (1, 2, 3, 4, 5, 8):
            for workers in (0, 1, 3):
                for batch in (1, 4, 7):
                    plan = planned(units, strategy, (world, workers, batch))
                    assert_once([begin[episode] + frame for _, episode, frame in all_ranks(plan)], rows)
        plan = planned(units, strategy, (2, 0, 4))
        for step in (0, 1, 5, plan.steps - 1):
            before = all_ranks(plan, batches=step)
            for world in (1, 2, 3, 8):
                after = all_ranks(planned(units, strategy, (world, 0, 4), plan.cursor_at(step)))
                assert_once([begin[episode] + frame for _, episode, frame in before + after], rows)
