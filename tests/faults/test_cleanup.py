"""Nothing of a run is left on the cluster: no actor, no process, no file, no shared memory, however its driver ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray

from benchmarks.faults import Work
from benchmarks.nodes import Nodes, nodes
from train_integration.ledger import start_ledger

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

RAYS = ("PlacementGroupCleaner", "_AutoscalingCoordinatorActor", "_UsageCollectionActor", "DataUsageCollectionActor", "_StatsActor")
"""Actors that Ray keeps for a whole cluster once a job has trained or read data; they outlive every job by design."""

SERVICES = {"_Manager", "Decoder", "NodeCache", "PlanGate"}
"""What a run has beside Train's own actors."""

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where every process of the cluster and of the drivers keeps temporary files."""
    folder = tmp_path_factory.mktemp("scratch")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    yield folder
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


@pytest.fixture(scope="module")
def cluster(scratch: Path) -> Iterator[Nodes]:
    """A cluster whose temporary files are looked at."""
    with nodes() as made:
        yield made


@dataclass(frozen=True)
class Left:
    """What is there."""

    actors: frozenset[str]
    processes: frozenset[int]
    files: frozenset[str]
    shared: frozenset[str]

    @classmethod
    def look(cls, cluster: Nodes, scratch: Path) -> Left:
        # Ray's object stores and its logs belong to the cluster, not to a job.
        shared = {name for name in os.listdir("/dev/shm") if not name.startswith(("plasma", "sem."))}
        shared |= {f"{pid} {path}" for pid in _all(cluster) for path in _memory_of(pid)}
        return cls(
            frozenset(_living_actors()),
            frozenset(pid for pid in _all(cluster) if _busy(pid)),
            # PyTorch keeps its compiler's cache for the next process.
            frozenset(path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")),
            frozenset(shared),
        )

    @property
    def kinds(self) -> set[str]:
        """Classes of the actors."""
        return {actor.split()[0] for actor in self.actors}

    def beyond(self, before: Left) -> dict[str, list[str]]:
        found = {name: getattr(self, name) - getattr(before, name) for name in ("actors", "processes", "files", "shared")}
        return {name: sorted(map(str, more)) for name, more in found.items() if more}


def _living_actors() -> list[str]:
    from ray._private.state import actors

    return [
        f"{info['ActorClassName']} {actor}"
        for actor, info in actors().items()
        if info["State"] != "DEAD" and info["ActorClassName"] not in RAYS
    ]


def _all(cluster: Nodes) -> list[int]:
    return cluster.processes("ray::")


def _busy(pid: int) -> bool:
    try:
        title = " ".join(psutil.Process(pid).cmdline())
        return not title.startswith(("ray::IDLE", *(f"ray::{name}" for name in RAYS)))
    except psutil.NoSuchProcess:
        return False


def _memory_of(pid: int) -> list[str]:
    """Anonymous shared memory that a process holds."""
    found: list[str] = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith(("/memfd:", "/dev/shm/")) and "plasma" not in target:
                found.append(target)
    except OSError:
        return []
    return found


def _driver(cluster: Nodes, work: Work, folder: Path, ledger: str) -> subprocess.Popen[bytes]:
    arguments = [cluster.cluster.address, work.root, 7, 2, folder / "train", ledger, 0]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults", "--driver", *map(str, arguments)], cwd=ROOT, stdout=log, stderr=log
        )


@contextmanager
def _killed_at_last(driver: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A driver that a failing test does not leave to the next one."""
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait(timeout=20)


def _until(reached: Callable[[], bool], driver: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 300
    while not reached():
        assert driver.poll() is None, (folder / "log").read_text()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _nothing_left(cluster: Nodes, scratch: Path, before: Left, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while (more := Left.look(cluster, scratch).beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not more


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_nothing_is_left_of_a_training_run(cluster: Nodes, work: Work, scratch: Path, tmp_path: Path, ending: str) -> None:
    name = f"ledger-{ending}"
    ledger = start_ledger(name)
    ray.get(ledger.progress.remote())
    before = Left.look(cluster, scratch)
    with _killed_at_last(_driver(cluster, work, tmp_path, name)) as driver:
        _until(lambda: ray.get(ledger.progress.remote())["rows"] >= 60, driver, tmp_path)
        # What is there while it runs is what must be gone afterwards.
        during = Left.look(cluster, scratch)
        assert {"actors", "processes", "shared"} <= set(during.beyond(before))
        assert during.kinds >= SERVICES
        driver.send_signal(getattr(signal, ending))
        driver.wait(timeout=240)
    _nothing_left(cluster, scratch, before)
    ray.kill(ledger)
    if ending == "SIGTERM":
        assert driver.returncode == 0  # the benchmark's driver; `reelray train` turns this end into status 143
        assert list((tmp_path / "train" / "run").glob("checkpoint_*"))


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_is_left_of_a_delivery(cluster: Nodes, work: Work, scratch: Path, tmp_path: Path, killed: bool) -> None:
    before = Left.look(cluster, scratch)
    order = tmp_path / "order.parquet"
    options = ["--world-size", 2, "--batch-size", 4, "--strategy", "lanes", "--decode", "pool", "--order", order]
    command = [sys.executable, "-m", "reelray.cli", "stream", work.root, *options]
    environment = os.environ | {"RAY_ADDRESS": str(cluster.cluster.address)}
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen([*map(str, command)], cwd=ROOT, env=environment, stdout=log, stderr=log)
    with _killed_at_last(started) as driver:
        if killed:
            _until(lambda: Left.look(cluster, scratch).kinds >= {"_Manager", "Decoder"}, driver, tmp_path)
        else:
            assert driver.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-2000:]
    _nothing_left(cluster, scratch, before)
