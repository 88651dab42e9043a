"""Atomic, durable files: temporary name in the same folder, data, fsync, mode, rename, fsync of the folder.

A crash leaves either the old file, the new file, or a temporary file that the janitor removes; never a half file under a
final name. Existing files are always replaced by new inodes, so readers that map the old one are safe.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from ingest.errors import DatasetError, StorageError
from ingest.prefeature.schedule import tensor_bytes
from ingest.prefeature.tensorfile import TensorSpec, in_file_order, make_header
from ingest.storage.processes import is_alive

_PIECE = 8 << 20
_TEMP = re.compile(r"\.(?P<final>.+)\.(?P<host>[^.]+)\.(?P<pid>[0-9]+)\.[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size in bytes and hex SHA-256 of a file as written."""

    size: int
    sha256: str


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"


def temporary_name(final: Path) -> Path:
    """A unique temporary path beside ``final``."""
    return final.with_name(f".{final.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex}.tmp")


_mask_lock = threading.Lock()


def file_mode() -> int:
    """Permission bits that ``open`` would give a new file under the present umask."""
    with _mask_lock:
        mask = os.umask(0)
        os.umask(mask)
    return 0o666 & ~mask


def fsync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: OSError, path: Path) -> StorageError:
    """What a failure of the file system means for the user."""
    where = f"{path}: {error.strerror or error}"
    if error.errno == errno.ENOSPC:
        return StorageError(f"{where}; the disk is full: free space and run the build again, finished records are kept")
    if error.errno in {errno.ENOSYS, errno.ENOTSUP, errno.EXDEV}:
        return StorageError(f"{where}; this file system cannot replace files atomically: write to a local disk, then sync to the bucket")
    return StorageError(where)


def write_atomic(path: Path, fill: Callable[[BinaryIO], object], *, verify: Callable[[Path], object] | None = None) -> None:
    """Writes a file through ``fill`` and puts it in place at once.

    Args:
        path: final path; its folder is made when missing.
        fill: writes the content to the open temporary file.
        verify: called with the temporary path before the rename; raising keeps the old file.

    Raises:
        StorageError: the file system failed; the old file, if any, is untouched and no temporary file remains.
    """
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as handle:
            fill(handle)
            handle.flush()
            os.fchmod(handle.fileno(), file_mode())
            os.fsync(handle.fileno())
        if verify is not None:
            verify(temporary)
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        raise error if isinstance(error, StorageError) else storage_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_file(path: Path) -> None:
    """Removes a file durably; nothing happens when it is not there.

    Raises:
        StorageError: the file system failed.
    """
    try:
        path.unlink()
        fsync_folder(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, path) from error


def write_bytes(path: Path, data: bytes) -> FileDigest:
    """Writes small content atomically."""
    write_atomic(path, lambda handle: handle.write(data))
    return digest_of(data)


def digest_of(data: bytes) -> FileDigest:
    """Digest of bytes in memory."""
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def write_tensors(path: Path, specs: list[TensorSpec], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileDigest:
    """Writes a safetensors file and hashes it in the same pass.

    Args:
        path: final path.
        specs: the schema; tensors must match it exactly.
        tensors: by name, on any device.
        metadata: strings for ``__metadata__``.

    Raises:
        DatasetError: a tensor is missing, extra, or of another shape or dtype.
        StorageError: the file system failed.
    """
    _require_schema(path.name, specs, tensors)
    header = make_header(specs, metadata)
    digest = hashlib.sha256(header)
    total = len(header) + sum(spec.nbytes for spec in specs)

    def fill(handle: BinaryIO) -> None:
        handle.write(header)
        # hashing releases the interpreter lock, so it overlaps with writing and with waiting for the disk
        with ThreadPoolExecutor(1, thread_name_prefix="sha256") as hasher:
            for piece in _pieces(specs, tensors):
                hasher.submit(digest.update, piece)
                handle.write(piece)
            handle.flush()
            os.fsync(handle.fileno())

    write_atomic(path, fill)
    return FileDigest(total, digest.hexdigest())


def tensors_digest(specs: list[TensorSpec], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileDigest:
    """What ``write_tensors`` would return, without writing anything."""
    header = make_header(specs, metadata)
    digest = hashlib.sha256(header)
    for piece in _pieces(specs, tensors):
        digest.update(piece)
    return FileDigest(len(header) + sum(spec.nbytes for spec in specs), digest.hexdigest())


def _pieces(specs: list[TensorSpec], tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The payload in file order."""
    for spec in in_file_order(specs):
        view = tensor_bytes(tensors[spec.name].cpu())
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]


def _require_schema(name: str, specs: list[TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    by_name = {spec.name: spec for spec in specs}
    if set(by_name) != set(tensors):
        raise DatasetError(f"{name}: missing {sorted(set(by_name) - set(tensors))}, unexpected {sorted(set(tensors) - set(by_name))}")
    for tensor_name, tensor in tensors.items():
        spec = by_name[tensor_name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.torch_dtype:
            found, wanted = f"{tensor.dtype}{list(tensor.shape)}", f"{spec.torch_dtype}{list(spec.shape)}"
            raise DatasetError(f"{name}: {tensor_name} is {found}, expected {wanted}")


def hash_file(path: Path) -> FileDigest:
    """Size and SHA-256 of an existing file.

    Raises:
        StorageError: it cannot be read.
    """
    digest = hashlib.sha256()
    size = 0
    buffer = bytearray(1 << 20)
    try:
        with open(path, "rb", buffering=0) as handle:
            while count := handle.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                size += count
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    return FileDigest(size, digest.hexdigest())


def remove_orphans(root: Path, *, older_s: float) -> list[str]:
    """Removes temporary files that this host's dead processes left below ``root``.

    Args:
        root: dataset root.
        older_s: only files last written this long ago.

    Returns:
        The removed paths relative to ``root``.
    """
    removed: list[str] = []
    limit = time.time() - older_s
    for folder, _, names in os.walk(root):
        for name in names:
            match = _TEMP.fullmatch(name)
            if match is None or match["host"] != _host() or is_alive(int(match["pid"])):
                continue
            path = Path(folder, name)
            try:
                if path.stat().st_mtime <= limit:
                    path.unlink()
                    removed.append(str(path.relative_to(root)))
            except FileNotFoundError:
                continue
    return sorted(removed)


def require_space(root: Path, needed: int, what: str) -> None:
    """Refuses to start when the disk cannot hold what is still to be written.

    Raises:
        StorageError: free space is below ``needed`` plus 2 percent; the message gives both.
    """
    free = shutil.disk_usage(root).free
    wanted = needed + needed // 50
    if free < wanted:
        raise StorageError(
            f"{root}: {what} needs {wanted / 1e9:.2f} GB, only {free / 1e9:.2f} GB are free; free space or choose another disk"
        )
