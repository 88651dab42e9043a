"""Payload that a node keeps: ranks that want the same bytes at the same time have them fetched once, by way of the node's cache."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from servers.ranges import RangeServer

from ingest.storage.disk_cache import CachedStore, PayloadCache
from ingest.storage.stores import open_store

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

BODY = Random(2).randbytes(600_000)
WISHES = [[(0, 200_000), (300_000, 500_000)], [(100_000, 400_000)], [(0, 600_000)]]


def cached(server: RangeServer, folder: Path, manager: Any) -> CachedStore:
    from actors.node_cache import node_payload

    store = node_payload(CachedStore(open_store(server.url), PayloadCache(folder, 10**8)), manager)
    assert isinstance(store, CachedStore)
    store.identity("v.mp4")
    return store


def test_ranks_of_a_node_fetch_each_byte_once(tmp_path: Path) -> None:
    import ray

    from actors.manager import start_manager

    @ray.remote(num_cpus=0)
    class Rank:
        def __init__(self, store: CachedStore) -> None:
            self._store = store

        def ready(self) -> int:
            return os.getpid()

        def read(self, wish: list[tuple[int, int]]) -> list[bytes]:
            return self._store.read_ranges("v.mp4", wish)

    with RangeServer({"v.mp4": BODY}) as server:
        server.latency_s = 0.2
        manager = start_manager()
        store = cached(server, tmp_path / "kept", manager)
        ranks = [Rank.remote(store) for _ in WISHES]
        assert len(set(ray.get([rank.ready.remote() for rank in ranks]))) == len(ranks)
        server.forget()
        found = ray.get([rank.read.remote(wish) for rank, wish in zip(ranks, WISHES, strict=True)])
        assert found == [[BODY[start:stop] for start, stop in wish] for wish in WISHES]
        assert server.sent_bytes == len(BODY)
        for handle in [*ranks, manager]:
            ray.kill(handle)


def test_a_rank_that_dies_and_a_cache_that_is_lost_hold_nobody_up(tmp_path: Path) -> None:
    import ray

    from actors.manager import start_manager

    @ray.remote(num_cpus=0, max_retries=0)
    def take_and_die(store: CachedStore) -> None:
        store._turns.take(_version(store), [(0, 600_000)])
        os.kill(os.getpid(), signal.SIGKILL)

    def _version(store: CachedStore) -> str:
        identity = store.identity("v.mp4")
        return f"{store.url}\0v.mp4\0{identity.size}\0{identity.fingerprint}"

    with RangeServer({"v.mp4": BODY}) as server:
        manager = start_manager()
        store = cached(server, tmp_path / "kept", manager)
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(take_and_die.remote(store))
        started = time.monotonic()
        assert store.read_ranges("v.mp4", [(0, 1000)]) == [BODY[:1000]]
        cache: Any = ray.get(manager.node_cache.remote(ray.get_runtime_context().get_node_id()))
        ray.kill(cache)
        ray.kill(manager)
        assert store.read_ranges("v.mp4", [(5000, 9000)]) == [BODY[5000:9000]]
        assert time.monotonic() - started < 30
