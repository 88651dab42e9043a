"""A sidecar built by a cluster of several nodes: every node has it afterwards, and a cache that nodes share has it once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ingest.lerobot.make import MakeOptions, make_dataset

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = 8


@dataclass(frozen=True)
class Nodes:
    """A cluster whose second node has a cache of its own; the third shares that of the head, where drivers run."""

    address: str
    head: Path
    second: Path

    def run(self, *command: str, status: int = 0) -> str:
        environment = os.environ | {"HF_LEROBOT_HOME": str(self.head), "PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": self.address}
        ended = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == status, ended.stderr[-3000:]
        return ended.stdout


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    homes = [tmp_path_factory.mktemp(name) for name in ("head", "second")]
    cluster = Cluster()
    for home in (homes[0], homes[1], homes[0]):
        environment = {"HF_LEROBOT_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        cluster.add_node(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False, env_vars=environment)
    cluster.wait_for_nodes()
    yield Nodes(str(cluster.address), *homes)
    cluster.shutdown()


@pytest.fixture
def filmed(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "ds", MakeOptions(episodes=FILES, frames="4:6", cameras=1, size=(32, 64), gop=2, video_files=FILES))
    return tmp_path / "ds"


def test_a_killed_build_goes_on_and_reaches_every_node_once(nodes: Nodes, filmed: Path) -> None:
    killed = """
        import os, signal, sys
        from pathlib import Path
        import ray
        from actors.sidecar_build import ClusterSettings, build_on_cluster
        from ingest.engine.indexing import IndexedSource
        from ingest.lerobot.source import open_source
        from ingest.storage.locations import parse_location
        from ingest.storage.stores import open_store
        ray.init(log_to_driver=False)
        place = parse_location(sys.argv[1])
        build_on_cluster(
            IndexedSource.of(open_source(open_store(place)), place),
            ClusterSettings(tasks=2, files_per_task=2),
            progress=lambda made: os.kill(os.getpid(), signal.SIGKILL),
        )
    """
    nodes.run("-c", textwrap.dedent(killed), str(filmed), status=-signal.SIGKILL)
    assert not list(nodes.head.rglob("*.npz")) or all(".parts" in str(path) for path in nodes.head.rglob("*.npz"))
    assert not list(nodes.second.rglob("*.npz"))

    build = ("-m", "actors.build_sidecars", str(filmed), "--tasks", "2")
    said = nodes.run(*build)
    assert f"built from {FILES} files" in said
    assert "(2 resumed)" in said
    # The second node's was handed over; the third found what the head had written into the cache that they share.
    assert sorted(re.findall(r"^node \w+: (\w+)$", said, re.MULTILINE)) == ["cache", "published"]
    here, there = (
        {path.relative_to(home) for path in home.rglob("*") if path.suffix in {".npz", ".bin"}} for home in (nodes.head, nodes.second)
    )
    (sidecar,) = (path for path in here if path.suffix == ".npz")
    assert {path for path in there if path.suffix == ".npz"} == {sidecar}
    assert (nodes.head / sidecar).read_bytes() == (nodes.second / sidecar).read_bytes()
    assert [len([path for path in found if path.suffix == ".bin"]) for found in (here, there)] == [1, 1]
    written = {path: path.stat().st_mtime_ns for home in (nodes.head, nodes.second) for path in home.rglob("*.npz")}

    again = nodes.run(*build)
    assert "was there" in again
    assert re.findall(r"^node \w+: (\w+)$", again, re.MULTILINE) == ["cache", "cache"]
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert not list(nodes.head.rglob("*.parts"))


def test_a_node_that_cannot_keep_it_is_named(nodes: Nodes, filmed: Path) -> None:
    blocked = nodes.second / "streaming-indexes"
    if blocked.exists():
        blocked.rename(nodes.second / "moved")
    blocked.write_text("a file where a folder should be")
    said = nodes.run("-m", "actors.build_sidecars", str(filmed), status=1)
    assert "built from" in said
    (line,) = (line for line in said.splitlines() if "failed" in line)
    assert "streaming-indexes" in line
    blocked.unlink()
    assert "failed" not in nodes.run("-m", "actors.build_sidecars", str(filmed))
