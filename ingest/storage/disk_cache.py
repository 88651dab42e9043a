"""Compressed payload on local disk: bounded, keyed by content, shared by the processes of a node, safe to delete at any time."""

from __future__ import annotations

import builtins
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import filelock
import xxhash

from ingest import settings
from ingest.errors import SettingsError
from ingest.storage.atomic import write_atomic
from ingest.storage.base import ByteRange, Store
from ingest.storage.reader import open_ranges
from ingest.storage.wrapped import WrappedStore

_MAGIC = b"RRPC0001"
_HEADER = len(_MAGIC) + 16
_LOCK_WAIT_S = 10.0
_KEEP = 0.9


class PayloadCache:
    """Byte strings by key below one directory.

    Several processes may use one directory: the bound holds over all of them. A file that is cut or damaged counts as absent. A
    directory that cannot be written, or that somebody deletes, only costs the saving.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, limit_bytes: int) -> None:
        """
        Args:
            directory: of this cache alone; made when missing. None is ``streaming-payload`` in the ``HF_LEROBOT_HOME`` of every
                process that uses it.
            limit_bytes: most bytes on disk, headers included.

        Raises:
            SettingsError: the limit is not positive.
        """
        if limit_bytes <= 0:
            raise SettingsError(f"the payload cache's limit is {limit_bytes} bytes, expected a positive number")
        self._given = directory
        self.directory = settings.lerobot_home() / "streaming-payload" if directory is None else Path(directory).expanduser()
        self.limit_bytes = limit_bytes
        self.hits = self.misses = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (PayloadCache, (self._given, self.limit_bytes))

    def get(self, key: str) -> bytes | None:
        """The bytes stored under ``key``, or None."""
        path = self._path(key)
        data: bytes | None = None
        with contextlib.suppress(OSError):
            stored = path.read_bytes()
            if stored[: len(_MAGIC)] == _MAGIC and xxhash.xxh3_128_digest(stored[_HEADER:]) == stored[len(_MAGIC) : _HEADER]:
                data = stored[_HEADER:]
                os.utime(path)
            else:
                path.unlink()
        with self._lock:
            self.hits += data is not None
            self.misses += data is None
        return data

    def put(self, key: str, data: bytes) -> bool:
        """Stores ``data`` under ``key``, dropping what was used longest ago; whether it is stored."""
        size = _HEADER + len(data)
        if size > self.limit_bytes:
            return False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(str(self.directory / "lock"), timeout=_LOCK_WAIT_S, thread_local=False):
                path = self._path(key)
                if path.exists():
                    return True
                total = self._total()
                if total + size > self.limit_bytes:
                    total = self._evict(self.limit_bytes * _KEEP - size)
                if total + size > self.limit_bytes:
                    return False
                # Counted before it is written: a crash in between errs on the safe side, and the next eviction counts anew.
                write_atomic(self.directory / "total", str(total + size).encode())
                write_atomic(path, _MAGIC + xxhash.xxh3_128_digest(data) + data)
        except (OSError, filelock.Timeout):
            return False
        return True

    def _path(self, key: str) -> Path:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        return self.directory / name[:2] / name

    def _total(self) -> int:
        try:
            return max(0, int((self.directory / "total").read_bytes()))
        except (OSError, ValueError):
            return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        found: list[tuple[float, int, Path]] = []
        for path in self.directory.glob("??/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found

    def _evict(self, goal: float) -> int:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        return total


class CachedStore(WrappedStore):
    """A store whose ranges are kept on disk; a second epoch that fits needs no network. Unstable objects are never kept."""

    def __init__(self, store: Store, cache: PayloadCache) -> None:
        """
        Args:
            store: remote store.
            cache: where ranges are kept; may be shared by stores.
        """
        super().__init__(store)
        self.cache = cache

    def __reduce__(self) -> tuple[object, ...]:
        return (CachedStore, (self.store, self.cache))

    def __repr__(self) -> str:
        return f"CachedStore({self.store!r}, {str(self.cache.directory)!r})"

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        identity = self.store.identity(path)
        if not identity.stable:
            return self.store.read_ranges(path, ranges)
        version = f"{self.store.url}\0{path}\0{identity.size}\0{identity.fingerprint}"
        found = [self._kept(version, start, stop) for start, stop in ranges]
        missing = [number for number, data in enumerate(found) if data is None]
        if missing:
            fetched = self.store.read_ranges(path, [ranges[number] for number in missing])
            for number, data in zip(missing, fetched, strict=True):
                found[number] = data
                self.cache.put(f"{version}\0{ranges[number][0]}\0{ranges[number][1]}", data)
        return [data for data in found if data is not None]

    def _kept(self, version: str, start: int, stop: int) -> bytes | None:
        if stop <= start:
            return b""
        data = self.cache.get(f"{version}\0{start}\0{stop}")
        return data if data is not None and len(data) == stop - start else None

    def open(self, path: str) -> BinaryIO:
        return self.store.open(path) if path.startswith("meta/") else open_ranges(self, path)
