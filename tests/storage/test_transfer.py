"""Connections of remote datasets: what is unset, what is asked for, and that a store brings its limits to other processes."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ingest.errors import SettingsError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.storage.executor import TransferLimits, close_executor, configure_executor, shared_executor
from ingest.storage.local import LocalStore
from ingest.storage.stores import open_store
from ingest.storage.transfer import LimitedStore, TransferOptions
from train_integration.options import StreamConfig, open_stream


@pytest.fixture(autouse=True)
def _fresh_limits() -> Iterator[None]:
    configure_executor()
    yield
    configure_executor()
    close_executor()


def limits(**options: Any) -> TransferLimits:
    """What this process keeps to once a remote store was opened with some options."""
    TransferOptions(**options).limited(open_store("memory://somewhere"))
    return shared_executor().limits


@pytest.mark.parametrize(
    ("options", "connections", "subranges"),
    [
        ({}, 8, 1),
        ({"fetch_threads": 4}, 8, 1),
        ({"fetch_threads": 20}, 20, 1),
        ({"fetch_threads": 20, "connections": 3}, 3, 1),
        ({"subranges": 6}, 8, 6),
        ({"connections": 40, "subranges": 2}, 40, 2),
    ],
)
def test_unset_connections_are_eight_or_the_fetch_threads(options: dict[str, Any], connections: int, subranges: int) -> None:
    found = limits(**options)
    assert (found.connections, found.subranges) == (connections, subranges)


def test_what_was_asked_for_wins_over_what_an_earlier_dataset_set() -> None:
    assert limits(fetch_threads=20).connections == 20
    assert limits().connections == 20, "nothing was asked for: it stays"
    assert limits(connections=8).connections == 8


def test_a_limited_store_brings_its_limits_along() -> None:
    store = pickle.dumps(TransferOptions(connections=5).limited(open_store("memory://somewhere")))
    configure_executor()
    assert isinstance(pickle.loads(store), LimitedStore)
    assert shared_executor().limits.connections == 5


def test_local_directories_have_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reelray.storage")
    store = LocalStore.at(tmp_path)
    assert TransferOptions(fetch_threads=20).limited(store) is store
    assert not caplog.records
    assert TransferOptions(subranges=2).limited(store) is store
    assert "no effect" in caplog.text
    for name in ("connections", "subranges"):
        with pytest.raises(SettingsError, match=f"native_http_{name} must be positive, found 0"):
            TransferOptions(**{name: 0})


def test_a_stream_has_as_many_connections_as_it_fetches_units_at_once(tmp_path: Path) -> None:
    make_dataset(tmp_path / "set", MakeOptions(episodes=2, frames="3:3", cameras=1, size=(32, 64)))
    memory: Any = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "set"), "/transfer", recursive=True)
    try:
        open_stream("memory://transfer", StreamConfig(fetch_threads=4))
        assert shared_executor().limits == TransferLimits()
        open_stream("memory://transfer", StreamConfig(fetch_threads=11), transfer=TransferOptions(subranges=3))
        assert (shared_executor().limits.connections, shared_executor().limits.subranges) == (11, 3)
    finally:
        memory.rm("/transfer", recursive=True)
