"""How the payload of a remote dataset is transferred, and whether it is kept: settings that travel with its store."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ingest.errors import SettingsError
from ingest.storage.base import Store
from ingest.storage.disk_cache import CachedStore, PayloadCache
from ingest.storage.executor import CONNECTIONS, TransferLimits, configure_executor
from ingest.storage.local import LocalStore
from ingest.storage.wrapped import WrappedStore, unwrapped

_LOG = logging.getLogger("reelray.storage")


class LimitedStore(WrappedStore):
    """A store that brings its limits to every process that it is sent to."""

    def __init__(self, store: Store, limits: TransferLimits) -> None:
        super().__init__(store)
        self._limits = limits
        configure_executor(limits)

    def __reduce__(self) -> tuple[object, ...]:
        return (LimitedStore, (self.store, self._limits))

    def __repr__(self) -> str:
        return f"LimitedStore({self.store!r}, {self._limits!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How payload is transferred and kept; without meaning for local directories.

    Attributes:
        connections: range reads at once in each process; None is the default of 16.
        subranges: most parts of one large range that are read at once; None for as many as have 8 MiB each.
        cache_gb: GiB of payload kept on each node's disk, at most; None keeps none.
        cache_dir: where; None is ``streaming-payload`` in the node's ``HF_LEROBOT_HOME``.

    Raises:
        SettingsError: a value that is not positive, or a place for a cache that is not asked for.
    """

    connections: int | None = None
    subranges: int | None = None
    cache_gb: float | None = None
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        for name in ("connections", "subranges", "cache_gb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SettingsError(f"{_SPELLED[name]} must be positive, found {value}")
        if self.cache_dir is not None and self.cache_gb is None:
            raise SettingsError("payload_cache_dir has no meaning without payload_cache_gb: say how much may be kept there")

    def limited(self, store: Store) -> Store:
        """The store with the limits of its connections."""
        if self.connections is None and self.subranges is None:
            return store
        if isinstance(unwrapped(store), LocalStore):
            _LOG.info("%s is a local directory: limits of connections have no effect", store.url)
            return store
        return LimitedStore(store, TransferLimits(connections=self.connections or CONNECTIONS, subranges=self.subranges))

    def cached(self, store: Store) -> Store:
        """The store with what is read from it kept on disk."""
        if self.cache_gb is None:
            return store
        if isinstance(unwrapped(store), LocalStore):
            _LOG.info("%s is a local directory: its payload is not kept a second time", store.url)
            return store
        return CachedStore(store, PayloadCache(self.cache_dir, int(self.cache_gb * 2**30)))


_SPELLED = {"connections": "native_http_connections", "subranges": "native_http_subranges", "cache_gb": "payload_cache_gb"}
