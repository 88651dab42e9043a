"""Who decodes: threads of the ranks where a node has few CPUs for each, its actors where it has many or where they are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.manager import PoolSettings
from ingest.engine.counters import Counters
from train_integration import config as under_test
from train_integration.config import RankShard, StreamHandles, node_services
from train_integration.decoding import InlineDecoding
from train_integration.options import Decode, StreamConfig, StreamDescription, open_stream


class Manager:
    """Notes who asks for decode actors."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.decode_pool = SimpleNamespace(remote=lambda node_id, *, shared_memory: self.asked.append((node_id, shared_memory)))


@pytest.fixture
def described(small: Path) -> StreamDescription:
    return open_stream(small, StreamConfig(decode_threads=2))[0]


@pytest.mark.parametrize(
    ("decode", "cpus", "ranks", "threads"),
    [
        ("auto", 2, 2, 1),
        ("auto", 2, 1, 2),
        ("auto", 1, 4, 1),
        ("auto", 16, 8, 2),
        ("auto", 16, 4, None),
        ("auto", 96, 8, None),
        ("pool", 2, 2, None),
        ("inline", 96, 8, 2),
        ("inline", 1, 8, 2),
    ],
)
def test_ranks_decode_where_there_are_few_cpus_for_each(
    described: StreamDescription, monkeypatch: pytest.MonkeyPatch, decode: Decode, cpus: int, ranks: int, threads: int | None
) -> None:
    monkeypatch.setattr(under_test, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(under_test.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    manager: Any = Manager()
    shard = RankShard(StreamHandles(None, None, manager, "set"), 0, ranks, ranks, "attempt")  # type: ignore[arg-type]
    make = shard._backend(replace(described, config=replace(described.config, decode=decode)))
    assert manager.asked == ([] if threads else [("here", True)])
    if threads:
        backend = make(Counters())
        assert isinstance(backend, InlineDecoding)
        assert backend.load().actors == threads
        backend.close()


def test_an_object_store_asks_for_actors_that_need_no_memory_of_the_rank(
    described: StreamDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "usable_cpus", lambda: 1)
    monkeypatch.setattr(under_test.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    manager: Any = Manager()
    shard = RankShard(StreamHandles(None, None, manager, "set"), 0, 4, 4, "attempt")  # type: ignore[arg-type]
    shard._backend(replace(described, config=replace(described.config, frame_store="object_store")))
    assert manager.asked == [("here", False)]


@pytest.mark.parametrize(
    ("decode", "pool", "expected", "services"),
    [
        ("auto", None, "auto", True),
        ("auto", PoolSettings(), "auto", True),
        ("auto", PoolSettings(actors=1), "pool", True),
        ("auto", PoolSettings(cpu_nodes=True), "pool", True),
        ("pool", None, "pool", True),
        ("inline", PoolSettings(actors=3), "inline", False),
    ],
)
def test_actors_that_are_asked_for_decode(
    described: StreamDescription, monkeypatch: pytest.MonkeyPatch, decode: Decode, pool: PoolSettings | None, expected: str, services: bool
) -> None:
    monkeypatch.setattr(under_test, "start_manager", lambda settings: ("manager", settings))
    found, manager = node_services(replace(described, config=replace(described.config, decode=decode)), pool)
    assert found.config.decode == expected
    assert manager == (("manager", pool) if services else None)
