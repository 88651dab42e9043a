"""The derived index: one read-only file that every process of a node maps and shares.

Layout (generation 1): array blocks, each starting at a multiple of 8; one JSON record per source file; the directory (JSON);
directory length (8 bytes, little endian); xxh3-64 of the directory (8 bytes); magic (8 bytes). Integers are native little
endian in the smallest exact type. Constant arrays are stored once and shown with stride 0; an array that is a prefix of one
stored before is a view of it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from ingest.errors import SidecarError
from ingest.video.files import open_regular, replacing
from ingest.video.sidecar.records import extra_record, mp4_record
from ingest.video.sidecar.spec import SidecarSpec, as_count, as_list, as_object, as_text, checked_path, spec_from_json, spec_to_json
from ingest.video.tables import MAX_SAMPLES, SampleTable, Timeline, read_only

GENERATION = 1
MAGIC = b"REELIX01"
_FOOTER_BYTES = 24
_ARRAYS = (
    "offsets",
    "sizes",
    "durations",
    "composition",
    "dts",
    "sync",
    "starts",
    "descriptions",
    "presented",
    "presented_pts",
    "sample_pts",
    "gop_xxh3",
)
_TYPES = ("u1", "u2", "u4", "i1", "i2", "i4", "i8", "f8", "u8")
_PREFIXES_KEPT = 64


def write_mapped_index(path: Path, spec: SidecarSpec, tables: Iterable[SampleTable], *, source: str = "") -> None:
    """Writes an index and installs it whole.

    Args:
        path: file to create or replace; processes that have the old one mapped keep it.
        spec: of the sidecar that the tables come from.
        tables: one per source file.
        source: path of that sidecar, for tidying up.

    Raises:
        SidecarError: the tables are not those of the source.
        StorageError: the file cannot be written.
    """
    with replacing(path, "cannot write the mapped MP4 index") as stream:
        blocks, records = _Blocks(stream), _Records(stream)
        files: list[list[Any]] = []
        checksums = True
        for table in tables:
            files.append([table.path, *records.add(blocks, table)])
            checksums = checksums and table.gop_xxh3 is not None
        if [row[0] for row in files] != spec.paths:
            raise SidecarError(f"{path}: {len(files)} tables for {len(spec.sizes)} source files")
        directory = json.dumps(
            {"generation": GENERATION, "source": source, "checksums": checksums, "sidecar": spec_to_json(spec), "files": files},
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()
        stream.write(directory)
        stream.write(len(directory).to_bytes(8, "little") + xxhash.xxh3_64_intdigest(directory).to_bytes(8, "little") + MAGIC)


class _Blocks:
    """Array blocks of an index under construction."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._prefixes: dict[tuple[str, int, float, float], tuple[int, NDArray[Any]]] = {}

    def add(self, array: NDArray[Any]) -> list[Any]:
        """[offset, count, type, constant] of an array, stored or found."""
        count = len(array)
        if array.dtype.kind != "f":
            array = _smallest(array)
        constant = count > 1 and bool(array[0] == array[-1]) and bool(np.all(array == array[0]))
        stored = array[:1] if constant else array
        code = array.dtype.str[1:]
        offset = self._find(code, stored)
        if offset is None:
            offset = self._append(stored)
            if len(stored) > 1:
                self._remember(code, offset, stored)
        return [offset, count, code, constant]

    def _key(self, code: str, array: NDArray[Any]) -> tuple[str, int, float, float]:
        return code, min(len(array), 2), float(array[0]), float(array[1]) if len(array) > 1 else 0.0

    def _find(self, code: str, array: NDArray[Any]) -> int | None:
        known = self._prefixes.get(self._key(code, array)) if len(array) > 1 else None
        if known is None or len(known[1]) < len(array) or not np.array_equal(known[1][: len(array)], array):
            return None
        return known[0]

    def _remember(self, code: str, offset: int, array: NDArray[Any]) -> None:
        key = self._key(code, array)
        known = self._prefixes.pop(key, None)
        # Ramps (numbers of samples, evenly spaced times) recur in every file and differ in length alone: keep the longest.
        self._prefixes[key] = known if known is not None and len(known[1]) > len(array) else (offset, array)
        if len(self._prefixes) > _PREFIXES_KEPT:
            self._prefixes.pop(next(iter(self._prefixes)))

    def _append(self, array: NDArray[Any]) -> int:
        offset = _align(self._stream)
        self._stream.write(np.ascontiguousarray(array).data)
        return offset


def _align(stream: BinaryIO) -> int:
    position = stream.tell()
    padding = -position % 8
    stream.write(bytes(padding))
    return position + padding


def _smallest(array: NDArray[Any]) -> NDArray[Any]:
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    for code in ("u1", "u2", "u4") if low >= 0 else ("i1", "i2", "i4"):
        limits = np.iinfo(code)
        if limits.min <= low and high <= limits.max:
            return array.astype(f"<{code}")
    return array.astype("<i8" if array.dtype.kind == "i" else "<u8")


class _Records:
    """File records of an index under construction."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def add(self, blocks: _Blocks, table: SampleTable) -> tuple[int, int, int]:
        """(offset, length, xxh3-64) of the record of one file; its arrays are stored first."""
        arrays: dict[str, list[Any]] = {}
        hashed = xxhash.xxh3_64()
        for name in _ARRAYS:
            array = getattr(table, name)
            if array is None:
                continue
            arrays[name] = blocks.add(np.asarray(array))
            hashed.update(_bytes_of(np.asarray(array), arrays[name]))
        record = {"mp4": mp4_record(table), "extra": extra_record(table), "arrays": arrays, "xxh3": hashed.intdigest()}
        raw = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()
        offset = _align(self._stream)
        self._stream.write(raw)
        return offset, len(raw), xxhash.xxh3_64_intdigest(raw)


def _bytes_of(array: NDArray[Any], stored: list[Any]) -> bytes:
    kept = array[:1] if stored[3] else array
    return kept.astype(f"<{stored[2]}").tobytes()


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    length: int
    digest: int


class MappedIndex:
    """An index opened read-only. Records are made for the files that are asked for; arrays are views of the mapping.

    ``spec`` describes the source, ``has_checksums`` says whether every file has payload checksums, ``source`` is the sidecar that
    the index was derived from. Views stay valid when the index is closed, replaced or deleted, for as long as they live.

    Args:
        path: of the index.

    Raises:
        SidecarError: it is no index of this generation, or damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            if size < _FOOTER_BYTES:
                raise SidecarError(f"{path}: {size} bytes are no mapped index")
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        footer = self._map[size - _FOOTER_BYTES :]
        if footer[16:] != MAGIC:
            raise SidecarError(f"{path}: ends with {footer[16:]!r}, expected {MAGIC!r}: another file, or another generation")
        length, digest = int.from_bytes(footer[:8], "little"), int.from_bytes(footer[8:16], "little")
        start = size - _FOOTER_BYTES - length
        if start < 0 or xxhash.xxh3_64_intdigest(self._view[start : start + length]) != digest:
            raise SidecarError(f"{path}: the directory of {length} bytes is damaged")
        self._data_end = start
        directory = as_object(_json(self._map[start : start + length], str(path)), str(path))
        if directory.get("generation") != GENERATION:
            raise SidecarError(f"{path}: generation {directory.get('generation')!r}, expected {GENERATION}")
        self.source = as_text(directory.get("source"), f"{path}: source")
        self.has_checksums = directory.get("checksums") is True
        self.spec = spec_from_json(directory.get("sidecar"), str(path))
        self._places: dict[str, _Place] = {}
        for row in as_list(directory.get("files"), f"{path}: files"):
            entry = as_list(row, f"{path}: files")
            if len(entry) != 4:
                raise SidecarError(f"{path}: a directory entry has {len(entry)} fields")
            offset, span = as_count(entry[1], f"{path}: offset"), as_count(entry[2], f"{path}: length")
            if offset + span > start or not isinstance(entry[3], int):
                raise SidecarError(f"{path}: a record lies outside the index")
            self._places[checked_path(entry[0], str(path))] = _Place(offset, span, entry[3])
        if self._places.keys() != self.spec.sizes.keys():
            raise SidecarError(f"{path}: {len(self._places)} records for {len(self.spec.sizes)} source files")

    @property
    def nbytes(self) -> int:
        """Size of the index file."""
        return len(self._map)

    def __contains__(self, path: str) -> bool:
        return path in self._places

    def table(self, path: str) -> SampleTable:
        """The sample table of one file; its arrays are read-only views of the mapping.

        Raises:
            SidecarError: the file is not in the index, or its record or arrays are damaged.
        """
        place = self._places.get(path)
        if place is None:
            raise SidecarError(f"{self.path}: {path} is not among its {len(self._places)} files")
        where = f"{self.path}: {path}"
        raw = self._view[place.offset : place.offset + place.length]
        if xxhash.xxh3_64_intdigest(raw) != place.digest:
            raise SidecarError(f"{where}: the record is damaged")
        record = as_object(_json(bytes(raw), where), where)
        described = as_object(record.get("arrays"), where)
        hashed = xxhash.xxh3_64()
        arrays: dict[str, NDArray[Any]] = {}
        for name in _ARRAYS:
            if name in described:
                arrays[name] = self._array(as_list(described[name], where), f"{where}: {name}", hashed)
        if hashed.intdigest() != record.get("xxh3"):
            raise SidecarError(f"{where}: the arrays are damaged")
        return _table(as_object(record.get("mp4"), where), as_object(record.get("extra"), where), arrays, where)

    def _array(self, described: list[Any], where: str, hashed: xxhash.xxh3_64) -> NDArray[Any]:
        if len(described) != 4 or described[2] not in _TYPES:
            raise SidecarError(f"{where}: described as {described!r}")
        offset, count = as_count(described[0], where), as_count(described[1], where)
        dtype = np.dtype(f"<{described[2]}")
        stored = min(count, 1) if described[3] else count
        if count > MAX_SAMPLES + 1 or offset % 8 or offset + stored * dtype.itemsize > self._data_end:
            raise SidecarError(f"{where}: {count} elements at byte {offset} lie outside the index")
        hashed.update(self._view[offset : offset + stored * dtype.itemsize])
        array = np.frombuffer(self._map, dtype, stored, offset)
        return np.broadcast_to(array, (count,)) if described[3] else array


def _json(raw: bytes, where: str) -> object:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise SidecarError(f"{where}: damaged ({error})") from error


def _table(record: dict[str, Any], extra: dict[str, Any], arrays: dict[str, NDArray[Any]], where: str) -> SampleTable:
    # The checksums matched: these are the very values of a checked table, so they are taken as they are.
    try:
        offset_ticks, empty_ticks, first_tick, stop_tick = extra["timeline"]
        return SampleTable(
            path=record["file_path"],
            file_size=record["file_size"],
            codec=record["codec"],
            width=record["width"],
            height=record["height"],
            timescale=record["timescale"],
            movie_timescale=extra["movie_timescale"],
            duration=record["duration"],
            track_id=record["track_id"],
            ftyp=bytes.fromhex(record["ftyp"]),
            stsd=bytes.fromhex(record["stsd_body"]),
            moov_offset=record["moov_offset"],
            mdat_offset=record["mdat_offset"],
            mdat_payload_offset=record["mdat_payload_offset"],
            mdat_payload_size=record["mdat_payload_size"],
            faststart=record["faststart"],
            fragmented=extra["fragmented"],
            edit_offset_ticks=extra["edit_offset_ticks"],
            timeline=Timeline(offset_ticks, empty_ticks, first_tick, stop_tick),
            untimed=extra.get("untimed", 0),
            gop_xxh3=cast("NDArray[np.uint64] | None", arrays.pop("gop_xxh3", None)),
            **cast("dict[str, Any]", {name: read_only(array) for name, array in arrays.items()}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SidecarError(f"{where}: incomplete record ({error})") from error
