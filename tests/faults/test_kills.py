"""Random kill plans, lost nodes and killed drivers: every frame exactly once, as planned, with the right pictures."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.faults import KINDS, Blow, Verdict, Work, kill_processes, lose_nodes, resume_elsewhere, run_under
from benchmarks.nodes import Nodes

pytestmark = pytest.mark.ray


def sized(quick: int, long: int) -> Any:
    """A number for every change, and one that takes hours to a day."""
    soak = (pytest.mark.soak, pytest.mark.timeout(24 * 3600))
    return pytest.mark.parametrize(
        "number", [pytest.param(quick, marks=(pytest.mark.slow, pytest.mark.timeout(900))), pytest.param(long, marks=soak)]
    )


def check(verdict: Verdict) -> None:
    assert verdict.selected > 0
    assert verdict.exact, verdict.to_json()


@sized(20, 500)
def test_killed_processes(cluster: Nodes, work: Work, number: int) -> None:
    verdict = kill_processes(cluster, work, number, seed=11)
    check(verdict)
    assert verdict.faults.total() == number
    assert set(verdict.faults) == set(KINDS)
    assert verdict.worker_groups > verdict.runs


@sized(2, 30)
def test_lost_nodes(cluster: Nodes, work: Work, number: int) -> None:
    verdict = lose_nodes(cluster, work, number, seed=12)
    check(verdict)
    assert verdict.faults["node"] == number
    assert verdict.worker_groups > verdict.runs


@sized(6, 100)
def test_restarts_at_another_world_size(cluster: Nodes, work: Work, number: int) -> None:
    verdict = resume_elsewhere(cluster, work, number, seed=13)
    check(verdict)
    assert verdict.faults["driver"] == number


@pytest.mark.slow
def test_a_slow_node_changes_nothing(cluster: Nodes, work: Work) -> None:
    """Everything on one node stands still for some seconds, twice; nothing is restarted for that."""
    frozen: list[int] = []

    def strike(blow: Blow, pids: dict[int, int]) -> bool:
        home = cluster.node_of(pids[min(pids)]) if pids else None
        if home is None:
            return False
        title = "ray::"
        here = [pid for pid in cluster.processes(title) if cluster.node_of(pid) is home]
        frozen.append(len(here))
        for pid in here:
            _signal(pid, signal.SIGSTOP)
        threading.Timer(4.0, lambda: [_signal(pid, signal.SIGCONT) for pid in here]).start()
        return True

    verdict = Verdict()
    run_under(work, 31, [Blow(20, "node", 0.0), Blow(160, "node", 0.0)], strike, verdict)
    check(verdict)
    assert len(frozen) == 2
    assert min(frozen) > 0
    assert verdict.worker_groups == 1


def _signal(pid: int, number: signal.Signals) -> None:
    if psutil.pid_exists(pid):
        psutil.Process(pid).send_signal(number)


@pytest.mark.slow
def test_a_full_object_store_changes_nothing(cluster: Nodes, work: Work, tmp_path: Path) -> None:
    """Others hold all memory of every node's object store; Ray spills, the stream goes on."""
    import numpy as np
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    class Hog:
        def fill(self, nbytes: int) -> int:
            self.held = [ray.put(np.ones(8_000_000, np.uint8)) for _ in range(nbytes // 8_000_000)]
            # What is looked at is pinned, so it cannot be spilled either.
            self.looked_at = [ray.get(ref) for ref in self.held[: nbytes // 16_000_000]]
            return sum(len(one) for one in self.looked_at)

    hogs = [
        Hog.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()  # type: ignore[attr-defined]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    ]
    held = ray.get([hog.fill.remote(170_000_000) for hog in hogs], timeout=120)
    assert min(held) > 60_000_000
    verdict = Verdict()
    run_under(work, 32, [], lambda *_: True, verdict)
    check(verdict)
    assert verdict.worker_groups == 1
    for hog in hogs:
        ray.kill(hog)
