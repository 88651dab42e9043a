"""A cluster of three worker nodes for each module, and a small dataset of which every picture is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.faults import Work
from benchmarks.nodes import Nodes, nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Three worker nodes beside a head that has no CPU."""
    with nodes() as made:
        yield made


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """The dataset, and what one process decodes of it."""
    return Work(tmp_path_factory.mktemp("faults"), seed=5)
