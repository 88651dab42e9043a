"""Reading tensors: ``preadv`` straight into buffers that are reused, headers cached, damage found while reading.

There is no ``mmap``: a copy into a warm buffer is faster than page faults, stays inside a byte budget, and does not
crash the process when a file is replaced or a network disk stalls.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.errors import DamagedDataError, DatasetError
from ingest.prefeature.tensorfile import Header, TensorEntry, read_header_fd, require_metadata

PIECE = 16 << 20
"""Bytes of one ``preadv``; larger reads only hold the kernel longer."""

ALIGN = 64
_PROBE_STRIDE = 256 << 10
_PROBE = 64
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "9p", "fuse.sshfs", "fuse.s3fs", "fuse.mount-s3"})


class HeaderCache:
    """Parsed headers by file identity, at most ``limit`` of them; safe to share between threads."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, ...], Header] = OrderedDict()

    def get(self, descriptor: int, path: str) -> Header:
        """Header of an open file; read again when size, inode or modification time differ.

        Raises:
            DamagedDataError: the header is damaged or the size does not fit it.
        """
        stat = os.fstat(descriptor)
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        header = read_header_fd(descriptor, path)
        with self._lock:
            self._known[key] = header
            while len(self._known) > self._limit:
                self._known.popitem(last=False)
        return header


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which tensors of one file go where in a buffer.

    Attributes:
        runs: ``(file start, file stop, buffer offset)`` of neighbouring tensors, read together.
        places: buffer offset by tensor.
        nbytes: buffer bytes needed.
    """

    runs: tuple[tuple[int, int, int], ...]
    places: Mapping[str, int]
    nbytes: int


def plan_read(header: Header, names: Iterable[str], path: str) -> ReadPlan:
    """Coalesces neighbouring tensors into runs, each starting at a multiple of 64 bytes in the buffer.

    Raises:
        DamagedDataError: a tensor is not in the file.
    """
    wanted: list[TensorEntry] = []
    for name in names:
        if name not in header.entries:
            raise DamagedDataError(f"{path}: tensor {name!r} is missing; the file holds {sorted(header.entries)}", file=path, tensor=name)
        wanted.append(header.entries[name])
    wanted.sort(key=lambda entry: entry.start)
    runs: list[tuple[int, int, int]] = []
    places: dict[str, int] = {}
    offset = 0
    for entry in wanted:
        if runs and runs[-1][1] == entry.start:
            start, _, at = runs[-1]
            runs[-1] = (start, entry.stop, at)
        else:
            offset += -offset % ALIGN
            runs.append((entry.start, entry.stop, offset))
        places[entry.spec.name] = offset
        offset += entry.stop - entry.start
    return ReadPlan(tuple(runs), places, offset)


def read_exact(descriptor: int, buffer: memoryview, position: int, path: str) -> None:
    """Fills ``buffer`` from a file offset.

    Raises:
        DamagedDataError: the file ends early.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + PIECE]], position + done)
        if count == 0:
            raise DamagedDataError(
                f"{path}: ends at byte {position + done}, expected {position + len(buffer)}; it was truncated while being read",
                file=path,
                byte_range=(position, position + len(buffer)),
            )
        done += count


def first_hollow(raw: NDArray[np.uint8]) -> int | None:
    """Offset of the first probed 64-byte piece that is all zero, or None.

    Probes every 256 KiB and the very end: data of the transformer is never zero 32 values in a row, a hole always is.
    """
    size = len(raw)
    if size < _PROBE:
        return 0 if size and not raw.any() else None
    for start in [*range(0, size - _PROBE, _PROBE_STRIDE), size - _PROBE]:
        if not raw[start : start + _PROBE].any():
            return start
    return None


def view_tensor(buffer: Tensor, offset: int, entry: TensorEntry) -> Tensor:
    """The tensor at ``offset`` of a uint8 buffer, without a copy unless the offset breaks the dtype's alignment."""
    spec = entry.spec
    raw = buffer[offset : offset + spec.nbytes]
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    if raw.storage_offset() % spec.torch_dtype.itemsize:
        raw = raw.clone()
    return raw.view(spec.torch_dtype).reshape(spec.shape)


def open_file(root: Path, path: str) -> int:
    """Opens a dataset file for reading.

    Raises:
        DamagedDataError: it does not exist or cannot be opened.
    """
    try:
        return os.open(root / path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedDataError(f"{path}: {error.strerror or error}; rebuild or restore this file", file=path) from error


def read_tensors(
    root: Path,
    path: str,
    names: Iterable[str] | None = None,
    *,
    cache: HeaderCache | None = None,
    buffer: Tensor | None = None,
    solid: Iterable[str] = (),
    metadata: Mapping[str, str] | None = None,
    drop_cache: bool = False,
) -> dict[str, Tensor]:
    """Reads some tensors of one file.

    Args:
        root: dataset root.
        path: relative path.
        names: tensors to read; all when None.
        cache: headers to reuse.
        buffer: contiguous uint8 CPU tensor to read into; the result then lives only as long as the caller leaves it alone.
            A fresh one is made when None.
        solid: tensors in which a piece of zeros means a hole in the file.
        metadata: what the file's ``__metadata__`` must say.
        drop_cache: tell the kernel that the pages will not be needed again.

    Returns:
        Tensors by name, views of the buffer.

    Raises:
        DamagedDataError: missing, truncated, hollow, malformed, or of another record or build; names file and tensor.
        DatasetError: ``buffer`` is too small.
    """
    descriptor = open_file(root, path)
    try:
        header = cache.get(descriptor, path) if cache is not None else read_header_fd(descriptor, path)
        require_metadata(header, metadata or {}, path)
        plan = plan_read(header, header.entries if names is None else names, path)
        if buffer is None:
            buffer = torch.empty(plan.nbytes, dtype=torch.uint8)
        elif buffer.numel() < plan.nbytes:
            raise DatasetError(f"{path}: needs a buffer of {plan.nbytes} bytes, got {buffer.numel()}")
        raw: NDArray[np.uint8] = np.asarray(buffer.numpy(), np.uint8)
        for start, stop, at in plan.runs:
            read_exact(descriptor, raw[at : at + stop - start].data, start, path)
        for name in solid:
            at, size = plan.places[name], header.entries[name].spec.nbytes
            hollow = first_hollow(raw[at : at + size])
            if hollow is not None:
                where = header.entries[name].start + hollow
                raise DamagedDataError(
                    f"{path}: {name} is zero at byte {where} of the file (a hole from an interrupted write); rebuild or restore this file",
                    file=path,
                    byte_range=(where, where + _PROBE),
                    tensor=name,
                    element=hollow // header.entries[name].spec.torch_dtype.itemsize,
                )
        if drop_cache:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise DamagedDataError(f"{path}: {error.strerror or error}", file=path) from error
    finally:
        os.close(descriptor)
    return {name: view_tensor(buffer, at, header.entries[name]) for name, at in plan.places.items()}


def filesystem_kind(path: Path) -> str:
    """Type of the file system that holds ``path`` as the kernel names it, or ``unknown``."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    target = str(path.resolve())
    best = ("", "unknown")
    for line in lines:
        parts = line.split()
        if len(parts) < 3:
            continue
        mount = parts[1].replace("\\040", " ")
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best[0]):
            best = (mount, parts[2])
    return best[1]


def network_warning(path: Path) -> str | None:
    """A warning when the dataset lies on a network or FUSE file system, else None."""
    kind = filesystem_kind(path)
    if kind in _NETWORK or kind.startswith("fuse"):
        return f"{path} is on {kind}: reads are many times slower than from a local disk; restore to NVMe with 'reelray prefeature ensure'"
    return None
