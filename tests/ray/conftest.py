"""One local cluster for the whole session, and small datasets to stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.lerobot.make import MakeOptions, make_dataset

CPUS = 6


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster with more logical CPUs than the machine may have: ranks and decoders mostly wait for each other."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    import ray

    ray.init(
        address="local",
        num_cpus=CPUS,
        object_store_memory=300_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine episodes, two cameras, uneven lengths, several files."""
    root = tmp_path_factory.mktemp("streamed") / "ds"
    make_dataset(root, MakeOptions(episodes=9, frames="9:31", cameras=2, size=(48, 64), gop=6, data_files=2, video_files=3, seed=3))
    return root
