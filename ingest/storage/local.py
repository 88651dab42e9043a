"""A dataset in a local directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ingest.errors import AccessDeniedError, ObjectNotFoundError, ShortReadError, StorageError
from ingest.storage.base import ByteRange, ObjectIdentity
from ingest.storage.bodies import check_whole, refuse_placeholder
from ingest.storage.paths import check_relative


@dataclass(frozen=True, slots=True)
class LocalStore:
    """Reads below a directory with ``pread``; nothing stays open between calls.

    Attributes:
        root: the directory as given, with ``~`` expanded.
    """

    root: Path

    @classmethod
    def at(cls, root: str | os.PathLike[str]) -> LocalStore:
        """A store at ``root``.

        Raises:
            ObjectNotFoundError: ``root`` is not a directory.
        """
        path = Path(root).expanduser()
        if not path.is_dir():
            raise ObjectNotFoundError(f"{path} is not a directory: give the folder that holds meta/, data/ and videos/")
        return cls(path)

    @property
    def url(self) -> str:
        return str(self.root)

    def _path(self, path: str) -> Path:
        return self.root / check_relative(path)

    def _fail(self, path: str, error: OSError) -> StorageError:
        where = f"{self.root / path}: {error.strerror or error}"
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            return ObjectNotFoundError(where)
        if isinstance(error, PermissionError):
            return AccessDeniedError(where)
        return StorageError(where)

    def identity(self, path: str) -> ObjectIdentity:
        try:
            found = os.stat(self._path(path))
        except OSError as error:
            raise self._fail(path, error) from error
        return ObjectIdentity(path, found.st_size, f"{found.st_mtime_ns}:{found.st_ctime_ns}")

    def size(self, path: str) -> int:
        size = self.identity(path).size
        assert size is not None  # local files always have one
        return size

    def _descriptor(self, path: str) -> int:
        try:
            # Without blocking: opening a pipe would wait for a writer, and reading a device might never end.
            descriptor = os.open(self._path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._fail(path, error) from error
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise ObjectNotFoundError(f"{self.root / path}: {os.strerror(errno.EISDIR)}")
        raise StorageError(f"{self.root / path}: is no regular file; put the file itself there")

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        descriptor = self._descriptor(path)
        try:
            return [self._read(descriptor, path, start, stop) for start, stop in ranges]
        except OSError as error:
            raise error if isinstance(error, StorageError) else self._fail(path, error) from error
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, path: str, start: int, stop: int) -> bytes:
        parts: list[bytes] = []
        position = start
        # pread may return less than asked (it never moves more than 2 GiB at once).
        while position < stop:
            part = os.pread(descriptor, stop - position, position)
            if not part:
                raise ShortReadError(
                    f"{self.root / path}: bytes {start}..{stop} asked for, the file ends at {position}; "
                    "it was truncated or replaced after it was indexed"
                )
            parts.append(part)
            position += len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if start == 0:
            refuse_placeholder(data[:256], str(self.root / path))
        return data

    def read_all(self, path: str) -> bytes:
        with self.open(path) as file:
            check_whole(os.fstat(file.fileno()).st_size, str(self.root / path))
            try:
                data = file.read()
            except OSError as error:
                raise self._fail(path, error) from error
        refuse_placeholder(data[:256], str(self.root / path), whole=len(data) <= 256)
        return data

    def list(self, prefix: str = "") -> list[ObjectIdentity]:
        base = self._path(prefix) if prefix else self.root
        found: list[str] = []
        for folder, folders, names in os.walk(base):
            folders.sort()
            found.extend(os.path.relpath(os.path.join(folder, name), self.root) for name in names)
        return [self.identity(path.replace(os.sep, "/")) for path in sorted(found)]

    def open(self, path: str) -> BinaryIO:
        return os.fdopen(self._descriptor(path), "rb")
