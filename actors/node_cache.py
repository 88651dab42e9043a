"""One cache per node: makes sure that the mapped index of a dataset exists there once, and that payload is fetched there once.

Ranks and read tasks open the index as a memory map, so all of them share its pages; only its place travels through Ray. Payload
lies in files that all of them read; what travels is who fetches which bytes, so that no two do.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.causes import raise_typed
from ingest import __version__
from ingest.errors import ResourceUnavailableError
from ingest.storage.base import ByteRange, Store
from ingest.storage.disk_cache import CachedStore
from ingest.storage.turns import FetchTurns, Turn
from ingest.video.index import VideoIndex
from ingest.video.sidecar.lookup import IndexRequest, SidecarIndex
from ingest.video.tables import SampleTable

_LOG = logging.getLogger("reelray.actors")
_ATTEMPTS = 7
_LONGEST_PAUSE_S = 3.0
_TURN_TIMEOUT_S = 30.0
"""Longest wait for a turn; a node's cache that builds many indexes at once may answer late."""


@dataclass(frozen=True, slots=True)
class IndexPlace:
    """Where the index of a dataset lies on one node.

    Attributes:
        sidecar: the sidecar file.
        cache_home: cache folder of the node.
        origin: how it came there: ``cache``, ``published`` (or handed over by the driver), ``built``.
        has_checksums: whether payload can be verified.
    """

    sidecar: Path
    cache_home: Path
    origin: str
    has_checksums: bool


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A finished sidecar in Ray's object store, as a shelf to look for one.

    Attributes:
        content: the bytes of the file.
    """

    content: ray.ObjectRef[bytes]

    def open(self, path: str) -> BinaryIO:  # noqa: ARG002 - there is one file
        return io.BytesIO(ray.get(self.content))


class NodeCache:
    """Serves the processes of one node; the class behind `NodeCacheActor`."""

    def __init__(self) -> None:
        self._places: dict[str, IndexPlace] = {}
        self._making: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._turns = FetchTurns()

    def ping(self) -> str:
        """Answers once the actor is up; the version that it runs."""
        return __version__

    def index(self, request: IndexRequest, shelf: HandedOver | None) -> IndexPlace:
        """Where the index of a dataset is; found, taken over or built at the first request.

        Args:
            request: how to find or build it.
            shelf: the driver's own sidecar.

        Raises:
            ReelrayError: it can neither be found nor built here.
        """
        key = request.key()
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._places:
                found = request.open(published=shelf)
                assert found.sidecar is not None  # requests name at least one file
                self._places[key] = IndexPlace(found.sidecar, found.cache_home, found.origin, found.has_checksums)
                _LOG.info("the index of %s is at %s (%s)", request.repo_id, found.mapped.path, found.origin)
            return self._places[key]

    def take_turn(self, version: str, wanted: Sequence[ByteRange], pid: int) -> Turn:
        """Divides wanted payload between the process that asks and those that are fetching some of it; see `FetchTurns`."""
        return self._turns.take(version, wanted, pid)

    def end_turn(self, version: str, turn: Turn) -> None:
        """Ends a turn: what was fetched is on the disk, or will not come."""
        self._turns.done(version, turn)

    def is_fetched(self, version: str, wanted: Sequence[ByteRange]) -> bool:
        """Whether somebody is fetching some of this now."""
        return self._turns.busy(version, wanted)

    def places(self) -> dict[str, IndexPlace]:
        """What is known on this node, by request key."""
        with self._lock:
            return dict(self._places)


NodeCacheActor = ray.remote(num_cpus=0)(NodeCache)
"""`NodeCache` as an actor; made by `actors.manager`, one per node."""


@dataclass(slots=True)
class NodeIndex:
    """A `VideoIndex` that asks the cache of the node where it is used. Thread-safe; pickles without what it has opened.

    Attributes:
        manager: the job's manager, which knows the nodes' caches.
        request: which index.
        shelf: the driver's sidecar, for nodes that have none.
    """

    manager: ActorHandle
    request: IndexRequest
    shelf: HandedOver | None = None
    _index: SidecarIndex | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def table(self, path: str) -> SampleTable:
        """The sample table of one video file.

        Raises:
            SidecarError: the file is not in the sidecar, or it is damaged.
            ResourceUnavailableError: the node's cache does not answer.
        """
        return self.opened().table(path)

    def check_unchanged(self, store: Store, path: str) -> None:
        """Compares a file with the one that was indexed; see `SidecarIndex`."""
        self.opened().check_unchanged(store, path)

    def opened(self) -> SidecarIndex:
        """The node's index, opened at the first call."""
        with self._lock:
            if self._index is None:
                place = self._ask()
                lock_timeout_s = self.request.lock_timeout_s
                self._index = SidecarIndex(place.sidecar, place.cache_home, place.origin, place.has_checksums, lock_timeout_s, self.request)
            return self._index

    def _ask(self) -> IndexPlace:
        node_id = ray.get_runtime_context().get_node_id()
        lost: RayActorError | None = None
        for attempt in range(_ATTEMPTS):
            try:
                cache = _cache_of(self.manager, node_id)
                return ray.get(cache.index.remote(self.request, self.shelf))
            except RayActorError as error:
                # Ray restarts the cache in a second or two, and refuses calls meanwhile; what it had built is on the disk.
                lost = error
                time.sleep(min(0.2 * 2**attempt, _LONGEST_PAUSE_S))
            except RayTaskError as error:
                raise_typed(error)
        raise ResourceUnavailableError(f"the cache of node {node_id[:8]} was lost {_ATTEMPTS} times in a row: {lost}") from lost

    def __reduce__(self) -> tuple[object, ...]:
        return (NodeIndex, (self.manager, self.request, self.shelf))


@dataclass(slots=True)
class NodeTurns:
    """`Turns` from the cache of the node where it is used. Where that does not answer, everybody fetches what is missing.

    Attributes:
        manager: the job's manager, which knows the nodes' caches.
    """

    manager: ActorHandle
    _cache: Any = field(default=None, init=False, repr=False)

    def take(self, version: str, wanted: Sequence[ByteRange]) -> Turn:
        """See `Turns`."""
        return self._ask("take_turn", Turn(-1, tuple(wanted), ()), version, list(wanted), os.getpid())

    def done(self, version: str, turn: Turn) -> None:
        """See `Turns`."""
        if turn.number >= 0:
            self._ask("end_turn", None, version, turn)

    def busy(self, version: str, wanted: Sequence[ByteRange]) -> bool:
        """See `Turns`."""
        return self._ask("is_fetched", False, version, list(wanted))

    def _ask(self, method: str, otherwise: Any, *arguments: object) -> Any:
        try:
            if self._cache is None:
                self._cache = _cache_of(self.manager, ray.get_runtime_context().get_node_id())
            return ray.get(getattr(self._cache, method).remote(*arguments), timeout=_TURN_TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            _LOG.debug("payload is fetched without asking the node's cache: %s", error)
            return otherwise

    def __reduce__(self) -> tuple[object, ...]:
        return (NodeTurns, (self.manager,))


def _cache_of(manager: Any, node_id: str) -> Any:
    return ray.get(manager.node_cache.remote(node_id))


def node_payload(store: Store, manager: ActorHandle | None) -> Store:
    """The same store for use on every node of the cluster: what is kept on a node's disk is fetched there once.

    Args:
        store: as opened by the driver; only one that keeps payload is changed.
        manager: the job's manager; without one, processes that want the same at the same time all fetch it.
    """
    return store.taking(NodeTurns(manager)) if manager is not None and isinstance(store, CachedStore) else store


def node_index(index: VideoIndex, manager: ActorHandle | None) -> VideoIndex:
    """The same index for use on every node of the cluster. Call it in the driver.

    Args:
        index: as opened by the driver.
        manager: the job's manager; without one, nodes find or build the index under the lock of their cache.
    """
    if manager is None or not isinstance(index, SidecarIndex) or index.request is None or index.sidecar is None:
        return index
    alone = sum(1 for node in ray.nodes() if node["Alive"]) < 2
    shelf = None if alone else HandedOver(ray.put(index.sidecar.read_bytes()))
    return NodeIndex(manager, replace(index.request, checksums=index.has_checksums), shelf)
