"""How the payload of a remote dataset is transferred, and whether it is kept: settings that travel with its store."""

from __future__ import annotations

import logging
import math
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
        connections: range reads at once in each process; None for 8, or as many as units are fetched at once where those are more.
        subranges: most parts of one range of 16 MiB or more that are read at once; 1 reads every range as it is.
        cache_gb: GiB of payload kept on each node's disk, at most; None keeps none.
        cache_dir: where; None is ``streaming-payload`` in the node's ``HF_LEROBOT_HOME``.
        fetch_threads: units that the process fetches at once, which connections that are not set follow.

    Raises:
        SettingsError: a value that is not positive, or a place for a cache that is not asked for.
    """

    connections: int | None = None
    subranges: int = 1
    cache_gb: float | None = None
    cache_dir: Path | None = None
    fetch_threads: int = 1

    def __post_init__(self) -> None:
        for name in ("connections", "subranges", "cache_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value * 2**30 < math.inf:
                raise SettingsError(f"{_SPELLED[name]} must be positive, found {value}")
        if self.cache_dir is not None and self.cache_gb is None:
            raise SettingsError("payload_cache_dir has no meaning without payload_cache_gb: say how much may be kept there")

    def limited(self, store: Store) -> Store:
        """The store with the limits of its connections."""
        if isinstance(unwrapped(store), LocalStore):
            if self.connections is not None or self.subranges != 1:
                _LOG.info("%s is a local directory: limits of connections have no effect", store.url)
            return store
        limits = TransferLimits(connections=self.connections or max(CONNECTIONS, self.fetch_threads), subranges=self.subranges)
        # What every process has unasked need not be said, unless it was asked for.
        return store if self.connections is None and limits == TransferLimits() else LimitedStore(store, limits)

    def cached(self, store: Store) -> Store:
        """The store with what is read from it kept on disk."""
        if self.cache_gb is None:
            return store
        if isinstance(unwrapped(store), LocalStore):
            _LOG.info("%s is a local directory: its payload is not kept a second time", store.url)
            return store
        return CachedStore(store, PayloadCache(self.cache_dir, int(self.cache_gb * 2**30)))


_SPELLED = {"connections": "native_http_connections", "subranges": "native_http_subranges", "cache_gb": "payload_cache_gb"}
