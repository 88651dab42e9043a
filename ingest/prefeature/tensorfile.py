"""The safetensors container: hostile-safe header parsing and canonical headers.

Written here rather than taken from the library because the dataset needs byte-identical files from run to run (the
library writes metadata in hash order), one pass for writing and hashing, and reads into buffers that are reused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ingest.errors import DamagedDataError

MAX_HEADER_BYTES = 1 << 20
"""Headers of this dataset stay below 20 KiB; anything above this is hostile or foreign."""

MAX_ELEMENTS = 1 << 40
_ITEM_BYTES = {"I64": 8, "F32": 4, "BF16": 2, "BOOL": 1, "U8": 1}
_ORDER = {"I64": 0, "F32": 1, "BF16": 2, "U8": 3, "BOOL": 4}
_TORCH = {"I64": torch.int64, "F32": torch.float32, "BF16": torch.bfloat16, "BOOL": torch.bool, "U8": torch.uint8}
DTYPE_OF = {dtype: name for name, dtype in _TORCH.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, safetensors dtype and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return _TORCH[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of an existing file; ``start`` and ``stop`` are byte offsets in the file."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Attributes:
        entries: tensors by name, in file order.
        metadata: the ``__metadata__`` strings.
        data_start: file offset of the payload.
        file_bytes: size that the header promises for the whole file.
    """

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int


def in_file_order(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Widest dtype first, then by name: the order of the format's reference writer."""
    return sorted(specs, key=lambda spec: (_ORDER[spec.dtype], spec.name))


def make_header(specs: list[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The length word and the JSON header, padded with spaces to a multiple of 8; metadata sorted by key."""
    head: dict[str, Any] = {}
    if metadata:
        head["__metadata__"] = dict(sorted(metadata.items()))
    offset = 0
    for spec in in_file_order(specs):
        head[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_bytes(specs: list[TensorSpec], metadata: Mapping[str, str] | None = None) -> int:
    """Size of the file that ``make_header`` and the payload make."""
    return len(make_header(specs, metadata)) + sum(spec.nbytes for spec in specs)


def _damaged(path: str, problem: str) -> DamagedDataError:
    return DamagedDataError(f"{path}: {problem}; rebuild or restore this file", file=path)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return cast("dict[str, Any]", value)


def parse_header(raw: bytes, path: str) -> Header:
    """Parses the JSON header (without its length word).

    Args:
        raw: exactly the header's bytes.
        path: named in errors.

    Raises:
        DamagedDataError: not JSON, unknown dtype, or offsets that do not tile the payload exactly.
    """
    try:
        head = _object(json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates))
        metadata = _object(head.pop("__metadata__", {}))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"header is not valid JSON ({error})") from None
    if not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "__metadata__ is not a mapping of strings")
    entries: list[TensorEntry] = []
    start = 8 + len(raw)
    for name, item in head.items():
        try:
            spec = TensorSpec(str(name), str(item["dtype"]), tuple(item["shape"]))
            first, last = item["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise _damaged(path, f"tensor {name!r} lacks dtype, shape or data_offsets") from None
        whole: list[Any] = [*spec.shape, first, last]
        if not all(type(value) is int and 0 <= value <= MAX_ELEMENTS for value in whole):
            raise _damaged(path, f"tensor {name!r} has a size or offset out of range")
        if spec.dtype not in _ITEM_BYTES:
            raise _damaged(path, f"tensor {name!r} has dtype {spec.dtype!r}, expected one of {sorted(_ITEM_BYTES)}")
        if last - first != spec.nbytes:
            raise _damaged(path, f"tensor {name!r} spans {last - first} bytes, its shape {list(spec.shape)} needs {spec.nbytes}")
        entries.append(TensorEntry(spec, start + first, start + last))
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = start
    for entry in entries:
        if entry.start != position:
            raise _damaged(path, f"tensor {entry.spec.name!r} starts at byte {entry.start}, expected {position} (hole or overlap)")
        position = entry.stop
    return Header({entry.spec.name: entry for entry in entries}, metadata, start, position)


def read_header_fd(descriptor: int, path: str) -> Header:
    """Reads and checks the header of an open file, its size included.

    Raises:
        DamagedDataError: truncated, trailing bytes, or anything ``parse_header`` refuses.
    """
    size = os.fstat(descriptor).st_size
    word = os.pread(descriptor, 8, 0)
    length = int.from_bytes(word, "little")
    if len(word) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
        raise _damaged(path, f"header length {length} does not fit a file of {size} bytes")
    header = parse_header(os.pread(descriptor, length, 8), path)
    if header.file_bytes != size:
        raise _damaged(path, f"expected {header.file_bytes} bytes, found {size} (truncated or trailing bytes)")
    return header


def read_header(root: Path, path: str) -> Header:
    """Header of ``root/path``.

    Raises:
        DamagedDataError: the file is missing or damaged.
    """
    try:
        descriptor = os.open(root / path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _damaged(path, f"cannot be opened: {error.strerror or error}") from error
    try:
        return read_header_fd(descriptor, path)
    finally:
        os.close(descriptor)


def describe_difference(header: Header, specs: list[TensorSpec]) -> tuple[str, str] | None:
    """The first difference between a header and a schema as (tensor name, text), or None when they agree."""
    expected = {spec.name: spec for spec in specs}
    missing = sorted(set(expected) - set(header.entries))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return missing[0], f"tensor {missing[0]!r} is missing{more}"
    extra = sorted(set(header.entries) - set(expected))
    if extra:
        return extra[0], f"tensor {extra[0]!r} is not part of the schema"
    for name, spec in expected.items():
        found = header.entries[name].spec
        if found != spec:
            return name, f"tensor {name!r} is {found.dtype}{list(found.shape)}, expected {spec.dtype}{list(spec.shape)}"
    return None


def require_metadata(header: Header, expected: Mapping[str, str], path: str) -> None:
    """Checks what a file says about itself.

    Raises:
        DamagedDataError: it says something else; the message gives both.
    """
    for name, wanted in expected.items():
        found = header.metadata.get(name)
        if found != wanted:
            raise DamagedDataError(
                f"{path}: __metadata__ {name} is {found!r}, expected {wanted!r}; the file belongs to another record or build", file=path
            )
