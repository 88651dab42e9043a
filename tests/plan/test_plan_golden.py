"""Bit equality with LeRobot's planner: the golden cases, and copies of a few that need no shared data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.plan import CoveragePool, balanced_shards, worker_turns


def run_pool(case: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """Admission order (episode ids) and the whole order as [episode, frame] pairs."""
    counts = np.array(sorted(case["counts"]), dtype=np.int64)
    sizes = case["byte_sizes"] and np.array(sorted(case["byte_sizes"]), dtype=np.int64)[:, 1]
    pool = CoveragePool(
        counts[:, 1],
        pool_size=case["pool_size"],
        seed=[case["seed"], case["epoch"]],
        strategy=case["strategy"],
        sizes=sizes,
        byte_budget=case["byte_budget"],
    )
    ids = counts[:, 0]
    slots, frames = pool.take(int(counts[:, 1].sum()))
    return ids[pool.admission_order].tolist(), np.stack([ids[slots], frames], axis=1).tolist()


def check(case: dict[str, Any]) -> None:
    if case["op"] == "pool":
        admission, order = run_pool(case)
        assert admission == case["admission_order"]
        assert len(order) == case["frames"]
        assert order[: len(case["first"])] == case["first"]
        assert order[-len(case["last"]) :] == case["last"]
        digest = hashlib.sha256(json.dumps(order, separators=(",", ":")).encode()).hexdigest()
        assert digest == case["sha256"]
    elif case["op"] == "shards":
        assert balanced_shards([tuple(pair) for pair in case["counts"]], case["num_shards"]) == case["shards"]
    else:
        assert case["op"] == "worker_turns"
        produced, following = worker_turns(case["num_batches"], case["limits"])
        assert (produced, following) == (case["batches_per_worker"], case["next_worker"])


@pytest.mark.shared
def test_every_golden_case_is_exact(shared_dir: Path) -> None:
    cases = json.loads((shared_dir / "data" / "plan" / "golden.json").read_text())["cases"]
    assert len(cases) == 64
    for case in cases:
        check(case)


FROZEN = json.loads((Path(__file__).parent / "frozen_cases.json").read_text())


@pytest.mark.parametrize("number", range(len(FROZEN)))
def test_frozen_case(number: int) -> None:
    check(FROZEN[number])
