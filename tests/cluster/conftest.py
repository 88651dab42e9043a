"""Where the manifests are, and a local cluster for the few tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def manifests() -> Path:
    """The folder of manifests."""
    return Path(__file__).resolve().parents[2] / "cluster"


@pytest.fixture(scope="module")
def metrics_cluster() -> Iterator[str]:
    """A small local cluster; the address of its node's metrics."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    if ray.is_initialized():
        pytest.skip("another suite of this session holds a Ray cluster")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
        _system_config={"metrics_report_interval_ms": 1000},
    )
    node = ray.nodes()[0]
    yield f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    ray.shutdown()
