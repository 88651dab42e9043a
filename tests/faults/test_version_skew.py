"""Nodes with another version of reelray, or with none, are refused by name, before anything is sent to them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.causes import typed_cause
from actors.manager import PoolSettings, start_manager, stop_services
from ingest import __version__
from ingest.errors import ResourceUnavailableError, VersionSkewError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]


_HIDES = """
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("actors", "ingest", "reelray", "train_integration"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
"""
"""What Python runs at its start (as ``sitecustomize``) on a node that has no reelray."""


@pytest.fixture
def other_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Id of a node whose processes import another version than the driver and the head, or none of it."""
    if request.param == "another version":
        for name in ("actors", "ingest"):
            shutil.copytree(ROOT / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "other" / "ingest" / "__init__.py").write_text('__version__ = "9.9.9"\n')
    else:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "sitecustomize.py").write_text(_HIDES)
    # Ray gives the folder that a driver stands in to the workers of all nodes.
    monkeypatch.chdir(tmp_path)
    sizes: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=sizes)
    node = cluster.add_node(**sizes, env_vars={"PYTHONPATH": str(tmp_path / "other")})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield node.node_id
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("other_node", ["another version"], indirect=True)
def test_another_version_is_refused_by_name(other_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manager: Any = start_manager(PoolSettings(actors=1, cpus=0.5))
    for asked, what in ((manager.decode_pool, "decode pool"), (manager.node_cache, "cache")):
        with pytest.raises(
            VersionSkewError, match=rf"the {what} of node {other_node[:8]} runs reelray 9\.9\.9, and this job {__version__}"
        ):
            ray.get(asked.remote(other_node), timeout=120)
    assert ray.get(manager.pools.remote()) == {}
    # The driver's own node runs the driver's version.
    here = ray.get_runtime_context().get_node_id()
    assert len(ray.get(manager.decode_pool.remote(here), timeout=120)) == 1
    stop_services(manager)

    monkeypatch.setattr("actors.manager.__version__", "9.9.9")
    with pytest.raises(VersionSkewError, match=rf"the service manager runs reelray {__version__}, and this job 9\.9\.9"):
        start_manager()


@pytest.mark.parametrize("other_node", ["none"], indirect=True)
def test_a_node_without_reelray_is_told_by_name(other_node: str) -> None:
    said = r"a process on the node [\w.:]+ cannot import '(actors|ingest)': install reelray"
    manager: Any = start_manager(PoolSettings(actors=1, cpus=0.5))
    for asked in (manager.decode_pool, manager.node_cache):
        with pytest.raises(ResourceUnavailableError, match=said):
            ray.get(asked.remote(other_node), timeout=120)
    stop_services(manager)

    # What read tasks and index tasks get: something of reelray as an argument.
    def seen(settings: object) -> str:
        return repr(settings)

    there: Any = ray.remote(seen).options(scheduling_strategy=NodeAffinitySchedulingStrategy(other_node, soft=False))
    with pytest.raises(RayError) as caught:
        ray.get(there.remote(PoolSettings()), timeout=120)
    with pytest.raises(ResourceUnavailableError, match=said):
        raise typed_cause(caught.value)
