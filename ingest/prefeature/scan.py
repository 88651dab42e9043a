"""Finding bad values at disk speed: NaN and Inf by bit pattern, holes by runs of zeros."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.errors import DamagedDataError
from ingest.prefeature.durable import FileDigest
from ingest.prefeature.reader import open_file, read_exact, view_tensor
from ingest.prefeature.tensorfile import Header, read_header_fd

_BLOCK = 1 << 16
HOLE_BYTES = 512
"""Zeros this long at a multiple of their length cannot come from a transformer: a disk that lost a page leaves them."""

_EXPONENT = {"BF16": (np.uint16, 0x7F80), "F32": (np.uint32, 0x7F800000)}


DENSE = ("img_modulated", "noisy_sample", "frame_condition", "final_hidden", "velocity", "image_condition_latent")
"""Name endings of tensors in which zeros mean a hole."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A bad value or a hole: ``code`` is ``finite`` or ``hole``, ``index`` the flat index of the first bad element."""

    code: str
    tensor: str
    index: int
    message: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A whole file in memory.

    Attributes:
        header: its header.
        tensors: views of the buffer.
        raw: payload bytes by tensor, views of the buffer.
        digest: size and hash of the file.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    raw: Mapping[str, NDArray[np.uint8]]
    digest: FileDigest


class WholeReader:
    """Loads one file at a time into one growing buffer; what it returned before is overwritten by the next call."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def load(self, root: Path, path: str) -> Loaded:
        """Reads and hashes a file.

        Raises:
            DamagedDataError: missing, truncated or malformed.
        """
        descriptor = open_file(root, path)
        try:
            size = os.fstat(descriptor).st_size
            header = read_header_fd(descriptor, path)
            # payload tensors must be aligned for their views, whatever the header's length is
            shift = -header.data_start % 64
            if self._buffer.numel() < size + shift:
                self._buffer = torch.empty(size + shift, dtype=torch.uint8)
            raw: NDArray[np.uint8] = np.asarray(self._buffer.numpy(), np.uint8)[shift : shift + size]
            read_exact(descriptor, raw.data, 0, path)
        except OSError as error:
            raise DamagedDataError(f"{path}: {error.strerror or error}", file=path) from error
        finally:
            os.close(descriptor)
        digest = FileDigest(size, hashlib.sha256(raw.data).hexdigest())
        tensors = {name: view_tensor(self._buffer, shift + entry.start, entry) for name, entry in header.entries.items()}
        return Loaded(header, tensors, {name: raw[entry.start : entry.stop] for name, entry in header.entries.items()}, digest)


def first_nonfinite(raw: NDArray[np.uint8], dtype: str) -> int | None:
    """Flat index of the first NaN or Inf, or None.

    Args:
        raw: bytes of a tensor.
        dtype: ``BF16`` or ``F32``; integers and booleans are always finite.
    """
    if dtype not in _EXPONENT or not len(raw):
        return None
    kind, mask = _EXPONENT[dtype]
    if raw.ctypes.data % np.dtype(kind).itemsize:
        raw = raw.copy()
    words = raw.view(kind)
    limit = kind(mask)
    for start in range(0, len(words), _BLOCK):
        bad = (words[start : start + _BLOCK] & limit) == limit
        if bad.any():
            return start + int(bad.argmax())
    return None


def first_zero_run(raw: NDArray[np.uint8]) -> int | None:
    """Byte offset of the first aligned all-zero block of ``HOLE_BYTES``, or 0 when everything is zero; else None."""
    if not len(raw):
        return None
    whole = len(raw) // HOLE_BYTES * HOLE_BYTES
    step = HOLE_BYTES * 2048
    for start in range(0, whole, step):
        filled = raw[start : min(start + step, whole)].reshape(-1, HOLE_BYTES)
        if filled.ctypes.data % 8:
            filled = filled.copy()
        empty = ~filled.view(np.uint64).any(axis=1)
        if empty.any():
            return start + int(empty.argmax()) * HOLE_BYTES
    tail = raw[whole:]
    if len(tail) >= HOLE_BYTES // 4 and not tail.any():
        return whole
    return None if raw.any() else 0


def flaws(loaded: Loaded) -> Iterator[Flaw]:
    """Every tensor's first bad value, and its first hole where it should be dense."""
    for name, entry in loaded.header.entries.items():
        at = first_nonfinite(loaded.raw[name], entry.spec.dtype)
        if at is not None:
            yield Flaw("finite", name, at, f"value {float(loaded.tensors[name].flatten()[at])}")
        zero = first_zero_run(loaded.raw[name]) if name.endswith(DENSE) else None
        if zero is not None:
            yield Flaw("hole", name, zero // entry.spec.torch_dtype.itemsize, f"zeros from byte {entry.start + zero} of the file")
