"""Compressed payload on local disk: bounded, keyed by content, shared by the processes of a node, safe to delete at any time."""

from __future__ import annotations

import builtins
import contextlib
import os
import stat
import threading
import time
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
from ingest.storage.turns import FetchTurns, Turn, Turns, without
from ingest.storage.wrapped import WrappedStore

_MAGIC = b"RRPC0001"
_HEADER = len(_MAGIC) + 16
_LOCK_WAIT_S = 10.0
_WAIT_S = 120.0
"""Longest wait for what another process fetches; then it is fetched here as well."""
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
        return self._read(self._path(key))

    def _read(self, path: Path) -> bytes | None:
        data: bytes | None = None
        with contextlib.suppress(OSError):
            stored = _content(path)
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
        return self._write(self._path(key), data)

    def _write(self, path: Path, data: bytes) -> bool:
        size = _HEADER + len(data)
        if size > self.limit_bytes:
            return False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(str(self.directory / "lock"), timeout=_LOCK_WAIT_S, thread_local=False):
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

    def get_range(self, version: str, start: int, stop: int) -> list[tuple[int, bytes]]:
        """What is kept of bytes ``start .. stop`` of an object: pieces by position, ascending, without overlap."""
        extents = self._extents(version)
        pieces: list[tuple[int, bytes]] = []
        at = start
        while at < stop:
            here = [extent for extent in extents if extent[1] > at]
            if not here:
                break
            # The one that reaches farthest of those that hold the position, or else the next one behind it.
            low, high = max(here, key=lambda extent: (extent[0] <= at, extent[1] if extent[0] <= at else -extent[0]))
            if low >= stop:
                break
            data = self._read(self._range_path(version, low, high))
            if data is None or len(data) != high - low:
                extents.remove((low, high))
                continue
            first, last = max(low, at), min(high, stop)
            pieces.append((first, data[first - low : last - low]))
            at = last
        return pieces

    def put_range(self, version: str, start: int, data: bytes) -> bool:
        """Keeps the bytes of an object that begin at ``start``; whether they are kept."""
        return self._write(self._range_path(version, start, start + len(data)), data)

    def _extents(self, version: str) -> list[tuple[int, int]]:
        name = xxhash.xxh3_128_hexdigest(version.encode())
        found: list[tuple[int, int]] = []
        for path in (self.directory / name[:2]).glob(f"{name}-*-*"):
            with contextlib.suppress(ValueError):
                low, high = (int(part) for part in path.name.split("-")[1:])
                found.append((low, high))
        return found

    def _range_path(self, version: str, start: int, stop: int) -> Path:
        name = xxhash.xxh3_128_hexdigest(version.encode())
        return self.directory / name[:2] / f"{name}-{start}-{stop}"

    def _path(self, key: str) -> Path:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        return self.directory / name[:2] / name

    def _total(self) -> int:
        try:
            return max(0, int(_content(self.directory / "total")))
        except (OSError, ValueError):
            return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        found: list[tuple[float, int, Path]] = []
        for path in self.directory.glob("??/*"):
            with contextlib.suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
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


def _content(path: Path) -> bytes:
    # Without blocking: opening a pipe would wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""


class CachedStore(WrappedStore):
    """A store whose ranges are kept on disk; a second epoch that fits needs no network. Unstable objects are never kept."""

    def __init__(self, store: Store, cache: PayloadCache, turns: Turns | None = None) -> None:
        """
        Args:
            store: remote store.
            cache: where ranges are kept; may be shared by stores.
            turns: keeps those that share it from fetching the same bytes at the same time; by default the threads that share this store.
        """
        super().__init__(store)
        self.cache = cache
        self._given = turns
        self._turns: Turns = FetchTurns() if turns is None else turns

    def __reduce__(self) -> tuple[object, ...]:
        return (CachedStore, (self.store, self.cache, self._given))

    def __repr__(self) -> str:
        return f"CachedStore({self.store!r}, {str(self.cache.directory)!r})"

    def taking(self, turns: Turns) -> CachedStore:
        """The same store with other turns."""
        return CachedStore(self.store, self.cache, turns)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        identity = self.store.identity(path)
        if not identity.stable:
            return self.store.read_ranges(path, ranges)
        version = f"{self.store.url}\0{path}\0{identity.size}\0{identity.fingerprint}"
        found = [piece for start, stop in ranges for piece in self.cache.get_range(version, start, stop)]
        patience = _Patience(_WAIT_S)
        while missing := _missing(ranges, found):
            turn = self._turns.take(version, missing) if not patience.over else Turn(-1, tuple(missing), ())
            try:
                found += self._fetch(path, version, turn.mine)
            finally:
                self._turns.done(version, turn)
            while turn.theirs and self._turns.busy(version, turn.theirs) and not patience.over:
                patience.wait()
            found += [piece for start, stop in turn.theirs for piece in self.cache.get_range(version, start, stop)]
        return [_joined(start, stop, found) for start, stop in ranges]

    def _fetch(self, path: str, version: str, mine: Sequence[ByteRange]) -> builtins.list[tuple[int, bytes]]:
        # Between the first look and the turn somebody else may have kept it.
        found = [piece for start, stop in mine for piece in self.cache.get_range(version, start, stop)]
        wanted = _missing(mine, found)
        fetched = self.store.read_ranges(path, wanted) if wanted else []
        for (start, _), data in zip(wanted, fetched, strict=True):
            self.cache.put_range(version, start, data)
            found.append((start, data))
        return found

    def open(self, path: str) -> BinaryIO:
        return self.store.open(path) if path.startswith("meta/") else open_ranges(self, path)


class _Patience:
    """Waits in growing steps, up to a total."""

    def __init__(self, total_s: float) -> None:
        self._step_s, self._end = 0.005, time.monotonic() + total_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def wait(self) -> None:
        time.sleep(self._step_s)
        self._step_s = min(1.5 * self._step_s, 0.2)


def _missing(ranges: Sequence[ByteRange], found: Sequence[tuple[int, bytes]]) -> builtins.list[ByteRange]:
    """What pieces leave out of ranges; without overlap, in the order of the ranges."""
    have = [(start, start + len(data)) for start, data in found]
    left: builtins.list[ByteRange] = []
    for wish in ranges:
        left.extend(without(wish, have + left))
    return left


def _joined(start: int, stop: int, found: Sequence[tuple[int, bytes]]) -> bytes:
    """The bytes of a range out of pieces that cover it."""
    parts: builtins.list[bytes] = []
    at = start
    for first, data in sorted(found, key=lambda piece: piece[0]):
        last = min(stop, first + len(data))
        if first <= at < last:
            parts.append(data if (first, last - first) == (at, len(data)) else data[at - first : last - first])
            at = last
    return b"".join(parts)
