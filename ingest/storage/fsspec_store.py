"""A dataset behind any fsspec file system, read with exact ranges and nothing ahead."""

from __future__ import annotations

import builtins
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs  # pyright: ignore[reportUnknownVariableType, reportMissingTypeStubs]
from fsspec.implementations.memory import MemoryFileSystem  # pyright: ignore[reportMissingTypeStubs]

from ingest.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from ingest.storage.base import ByteRange, ObjectIdentity
from ingest.storage.bodies import refuse_placeholder
from ingest.storage.executor import fetch_ranges
from ingest.storage.failures import log_failure
from ingest.storage.known import Known, KnownObjects, clean_tag
from ingest.storage.locations import Location
from ingest.storage.paths import check_relative
from ingest.storage.reader import open_ranges
from ingest.storage.retry import RetryableError, RetryPolicy
from ingest.storage.secrets import redact
from ingest.storage.traffic import count_request

_url_to_fs = cast("Callable[[str], tuple[Any, Any]]", url_to_fs)
_MEMORY_LIMIT = 1024 * 1024 * 1024
_TAGS = ("ETag", "etag", "version_id", "mtime", "LastModified")
_PASSING = (ConnectionError, TimeoutError)


class FsspecStore:
    """Reads through fsspec with its read-ahead switched off; credentials are the file system's own business (environment, files)."""

    def __init__(self, location: Location, *, policy: RetryPolicy | None = None, known: KnownObjects | None = None) -> None:
        """
        Args:
            location: a URL of an allowed fsspec scheme.
            policy: retries.
            known: versions seen before, by the store that this one continues.
        """
        self._location = location
        self._policy = policy or RetryPolicy()
        self._known = known or KnownObjects()
        self._unstable: dict[str, str] = {}
        self._created: dict[str, str] = {}
        self._opened: tuple[int, Any, str] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        # Another process has a memory of its own, so files that are only in this one travel along.
        files = self._memory_files() if self._location.kind == "memory" else {}
        return (_rebuild, (self._location, self._policy, self._known, files))

    def _memory_files(self) -> dict[str, bytes]:
        file_system, root = self._file_system()
        sizes = {path: int(info["size"]) for path, info in file_system.find(root, detail=True).items()}
        if sum(sizes.values()) > _MEMORY_LIMIT:
            raise StorageError(
                f"{self.url} holds {sum(sizes.values())} bytes, too many to send to other processes (limit {_MEMORY_LIMIT}): "
                "put the dataset in a directory"
            )
        return {path: bytes(file_system.cat_file(path)) for path in sizes}

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._location.url

    def identity(self, path: str) -> ObjectIdentity:
        found = self._info(check_relative(path))
        if found.tag is not None:
            return ObjectIdentity(path, found.size, found.tag)
        # No tag can vouch for the content, so it counts as new at every opening; within one store it stays the same.
        return ObjectIdentity(path, found.size, self._unstable.setdefault(path, uuid.uuid4().hex), stable=False)

    def size(self, path: str) -> int:
        size = self._known.get(check_relative(path)).size
        if size is None:
            size = self._info(path).size
        if size is None:
            raise StorageError(f"{self.url}/{path}: the file system states no size")
        return size

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        check_relative(path)
        # A tag is compared once per call where asking costs no request, else when the object is first read.
        if self._file_system()[0].async_impl is False or self._known.get(path).size is None:
            self._info(path)
        return fetch_ranges(ranges, lambda start, stop: self._read(path, start, stop))

    def read_all(self, path: str) -> bytes:
        return self._read(check_relative(path), 0, None)

    def open(self, path: str) -> BinaryIO:
        return open_ranges(self, check_relative(path))

    def list(self, prefix: str = "") -> builtins.list[ObjectIdentity]:
        folder = check_relative(prefix.rstrip("/")) if prefix.strip("/") else ""
        file_system, root = self._file_system()
        top = f"{root}/{folder}".rstrip("/")

        def find() -> Mapping[str, Mapping[str, Any]]:
            return file_system.find(top, detail=True) if file_system.exists(top) else {}

        found: Mapping[str, Mapping[str, Any]] = self._call(folder or ".", "list", find)
        identities: builtins.list[ObjectIdentity] = []
        for full, info in sorted(found.items()):
            path = full[len(root) :].lstrip("/")
            known = self._known.see(path, _known_of(info), f"{self.url}/{path}")
            tag = known.tag or self._unstable.setdefault(path, uuid.uuid4().hex)
            identities.append(ObjectIdentity(path, known.size, tag, stable=known.tag is not None))
        return identities

    def _file_system(self) -> tuple[Any, str]:
        with self._lock:
            # File systems hold loops and sockets that must not cross a fork.
            if self._opened is None or self._opened[0] != os.getpid():
                try:
                    opened: tuple[Any, Any] = _url_to_fs(self._location.url)
                except ImportError as error:
                    extra = ", or the extra reelray[s3]" if self._location.kind == "object" else ""
                    raise StorageError(f"{self.url}: {redact(str(error))}; install that package{extra}, on every node") from None
                except Exception as error:
                    raise _translate(error, self.url) from None
                self._opened = (os.getpid(), opened[0], str(opened[1]).rstrip("/"))
            return self._opened[1], self._opened[2]

    def _info(self, path: str) -> Known:
        file_system, root = self._file_system()
        info: Mapping[str, Any] = self._call(path, "info", lambda: file_system.info(f"{root}/{path}"))
        if info.get("type") == "directory":
            raise ObjectNotFoundError(f"{self.url}/{path}: is a folder, not a file")
        self._notice(path, info)
        return self._known.see(path, _known_of(info), f"{self.url}/{path}")

    def _notice(self, path: str, info: Mapping[str, Any]) -> None:
        """Notices a file in memory that was replaced. When it was made tells nothing to another process, so this never leaves the store."""
        made = info.get("created")
        if self._location.kind != "memory" or made is None:
            return
        first = self._created.setdefault(path, str(made))
        if first != str(made):
            raise ObjectChangedError(
                f"{self.url}/{path}: changed while it was in use: it was made at {first}, now it is one made at {made}"
            )

    def _read(self, path: str, start: int, stop: int | None) -> bytes:
        file_system, root = self._file_system()
        full = f"{root}/{path}"

        def read() -> bytes:
            if file_system.async_impl:
                data = bytes(file_system.cat_file(full, start=start, end=stop))
            else:
                with file_system.open(full, "rb", cache_type="none") as file:
                    file.seek(start)
                    data = bytes(file.read(-1 if stop is None else stop - start))
            if stop is not None and len(data) != stop - start:
                size = file_system.info(full).get("size")
                if size is not None and size < stop:
                    raise ShortReadError(f"{self.url}/{path}: bytes {start}..{stop} asked for, the object has {size} bytes")
                raise RetryableError(f"bytes {start}..{stop} asked for, {len(data)} bytes arrived", final=ShortReadError)
            return data

        data = self._call(path, "read", read)
        if start == 0:
            refuse_placeholder(data[:256], f"{self.url}/{path}", whole=stop is None and len(data) <= 256)
        return data

    def _call(self, path: str, verb: str, action: Any) -> Any:
        where = f"{self.url}/{path}"

        def once(attempt: int) -> Any:
            started = time.monotonic()
            received = 0
            try:
                result = action()
                received = len(result) if isinstance(result, bytes) else 0
                return result
            except (StorageError, RetryableError) as error:
                if isinstance(error, RetryableError):
                    log_failure(verb, where, attempt=attempt, error=error.reason)
                raise
            except Exception as error:
                if _may_pass(error):
                    reason = f"{type(error).__name__}: {redact(str(error))}"
                    log_failure(verb, where, attempt=attempt, error=reason)
                    raise RetryableError(reason) from None
                raise _translate(error, where) from None
            finally:
                count_request(received, time.monotonic() - started)

        return self._policy.call(where, once)


def _known_of(info: Mapping[str, Any]) -> Known:
    size = info.get("size")
    tag = next((str(info[name]) for name in _TAGS if info.get(name) is not None), None)
    return Known(int(size) if size is not None else None, clean_tag(tag))


def _may_pass(error: Exception) -> bool:
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    # Client libraries have their own trees; their time-outs and connection errors carry these names.
    return isinstance(error, _PASSING) or any(word in type(error).__name__ for word in ("Timeout", "Connection", "Disconnected", "Payload"))


def _translate(error: Exception, where: str) -> StorageError:
    text = f"{where}: {redact(str(error)) or type(error).__name__}"
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return ObjectNotFoundError(f"{where}: there is no such object")
    if isinstance(error, PermissionError) or type(error).__name__ in {"NoCredentialsError", "ClientError"}:
        return AccessDeniedError(f"{text}; check the credentials in this process' environment")
    return StorageError(text)


def _rebuild(location: Location, policy: RetryPolicy, known: KnownObjects, files: Mapping[str, bytes]) -> FsspecStore:
    for path, data in files.items():
        memory = cast("Any", MemoryFileSystem())
        if not memory.exists(path):
            memory.pipe_file(path, data)
    return FsspecStore(location, policy=policy, known=known)
