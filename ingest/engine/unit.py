"""One unit of work as data: the rows and the compressed pictures of a run of frames, and nothing else.

A unit is self-contained, so it can be fetched in one process, decoded in a second and assembled in a third.
"""

# pyarrow has no stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.language.episode import AnnotationRows
from ingest.video.spans import PictureSpan, picture_span
from ingest.video.tables import SampleTable, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Numbers of several features side by side, so that a row of all of them is copied at once.

    Attributes:
        layout: feature, dtype and shape of an item, in the order of their bytes.
        rows: uint8[length, bytes of all items].
    """

    layout: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]
    rows: NDArray[np.uint8]

    @classmethod
    def of(cls, numbers: Mapping[str, NDArray[Any]], length: int) -> Records:
        """Puts arrays (length, *item shape) side by side."""
        layout = tuple((key, values.dtype, values.shape[1:]) for key, values in numbers.items())
        parts = [np.ascontiguousarray(values).view(np.uint8).reshape(length, -1) for values in numbers.values() if values.size]
        return cls(layout, np.concatenate(parts, axis=1) if parts else np.zeros((length, 0), np.uint8))

    @staticmethod
    def apart(layout: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...], rows: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The features of some rows uint8[N, bytes]: arrays (N, *item shape)."""
        out: dict[str, NDArray[Any]] = {}
        at = 0
        for key, dtype, shape in layout:
            size = dtype.itemsize * math.prod(shape)
            out[key] = rows[:, at : at + size].copy().view(dtype).reshape(len(rows), *shape)
            at += size
        return out


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Rows ``first .. first + length - 1`` of one episode.

    Attributes:
        first: episode frame number of row 0.
        length: number of rows.
        numbers: float32, int64 or bool arrays of shape (length, *feature shape), by feature.
        others: every other column (text, stored pictures), ``length`` rows, as a `pyarrow.Table`.
        tasks: task texts by ``task_index``, for the rows at hand.
        language: annotations of the rows, state rows held once; None where no language column is delivered.
    """

    first: int
    length: int
    numbers: Mapping[str, NDArray[Any]]
    others: Any
    tasks: Mapping[int, str]
    language: AnnotationRows | None = None
    _records: Records | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def records(self) -> Records:
        """The same numbers, row by row."""
        if self._records is None:
            object.__setattr__(self, "_records", Records.of(self.numbers, self.length))
        assert self._records is not None  # just made
        return self._records

    @property
    def nbytes(self) -> int:
        """Bytes held, for budgets; annotations, a few kB, do not count."""
        return sum(values.nbytes for values in self.numbers.values()) + int(self.others.nbytes)


@dataclass(frozen=True, slots=True)
class Track:
    """The compressed pictures of one camera in one unit.

    Attributes:
        camera: feature key.
        path: video file, relative to the dataset root.
        first: episode frame number of picture 0 of ``table``.
        numbers: int64[P], picture numbers in the file, for messages.
        origin: int64[S], byte positions of the samples in the file, for messages.
        table: the samples at hand only; ``offsets`` count from the start of ``data``, ``presented`` lists the
            pictures of the unit, so picture k of the table is frame ``first + k``.
        data: the bytes of those samples.
    """

    camera: str
    path: str
    first: int
    numbers: NDArray[np.int64]
    origin: NDArray[np.int64]
    table: SampleTable
    data: bytes | memoryview

    @property
    def pictures(self) -> int:
        """Number of pictures that can be decoded from the track."""
        return self.table.pictures


@dataclass(frozen=True, slots=True)
class UnitData:
    """A fetched unit.

    Attributes:
        dataset: number of the dataset in a mixture, 0 otherwise.
        episode: episode index.
        lo: first anchor frame of the unit.
        hi: one past its last anchor frame.
        episode_length: frames of the whole episode; windows clamp to it, never to the unit.
        rows: rows of the anchors and of what their windows reach.
        tracks: compressed pictures of the anchors and of what their windows reach, by camera.
    """

    dataset: int
    episode: int
    lo: int
    hi: int
    episode_length: int
    rows: UnitRows
    tracks: Mapping[str, Track]

    @property
    def payload_bytes(self) -> int:
        """Compressed bytes held."""
        return sum(len(track.data) for track in self.tracks.values())


def localise(table: SampleTable, span: PictureSpan, data: bytes | memoryview, *, camera: str, first: int) -> Track:
    """Cuts a file's sample table down to one fetched span.

    Args:
        table: of the whole file.
        span: what was fetched; its pictures must be consecutive.
        data: the bytes of ``span.ranges``, joined in order.
        camera: feature key.
        first: episode frame number of the span's first picture.
    """
    return Track(
        camera, table.path, first, span.wanted, table.offsets[span.first : span.stop].astype(np.int64), _cut(table, span, len(data)), data
    )


def excerpt(track: Track, wanted: NDArray[np.int64]) -> Track:
    """A track of only some pictures, numbered from 0, with only the bytes that they need. Its bytes are its own.

    Args:
        track: what to cut.
        wanted: picture numbers of ``track``, ascending.
    """
    span = picture_span(track.table, wanted)
    data = b"".join(memoryview(track.data)[start:stop] for start, stop in span.ranges)
    table = _cut(track.table, span, len(data))
    return Track(track.camera, track.path, track.first, track.numbers[wanted], track.origin[span.first : span.stop], table, data)


def _cut(table: SampleTable, span: PictureSpan, size: int) -> SampleTable:
    lo, hi = span.first, span.stop
    number, within = span.chunks_of(table)
    lengths = np.array([stop - start for start, stop in span.ranges], dtype=np.int64)
    local = within + (np.cumsum(lengths) - lengths)[number]
    pictures = span.wanted
    inside = table.starts[(table.starts >= lo) & (table.starts < hi)]
    keys = table.sync[(table.sync >= lo) & (table.sync < hi)]
    return replace(
        table,
        file_size=size,
        offsets=local,
        sizes=table.sizes[lo:hi].astype(np.int64),
        durations=table.durations[lo:hi].astype(np.int64),
        composition=table.composition[lo:hi].astype(np.int64),
        dts=table.dts[lo:hi].astype(np.int64),
        sync=keys.astype(np.int64) - lo,
        starts=inside.astype(np.int64) - lo,
        descriptions=table.descriptions[lo:hi].astype(np.int64),
        presented=table.presented[pictures].astype(np.int64) - lo,
        presented_pts=table.presented_pts[pictures].astype(np.int64),
        sample_pts=table.sample_pts[lo:hi],
        gop_xxh3=None,
        samples_before=table.samples_before + lo,
    )


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
)
_BYTES = ("ftyp", "stsd")
_SIZES = 24
"""Bytes of the three sizes that a header begins with: description, other columns, annotations."""


def pack_unit(unit: UnitData) -> tuple[bytes, list[bytes | memoryview]]:
    """A unit as ``(header, parts of its payload)``: plain JSON and arrays, no pickles, ready for an Arrow row.

    The parts are the unit's own buffers; joined in order they are the payload that `unpack_unit` takes.
    """
    sink = pa.BufferOutputStream()
    arrays: list[NDArray[Any]] = []
    description: dict[str, Any] = {
        "dataset": unit.dataset,
        "episode": unit.episode,
        "lo": unit.lo,
        "hi": unit.hi,
        "episode_length": unit.episode_length,
        "rows": {"first": unit.rows.first, "length": unit.rows.length, "tasks": {str(key): text for key, text in unit.rows.tasks.items()}},
        "numbers": {},
        "tracks": [],
    }

    def put(array: NDArray[Any]) -> list[Any]:
        arrays.append(np.ascontiguousarray(array))
        return [array.dtype.str, list(array.shape)]

    for key, values in unit.rows.numbers.items():
        description["numbers"][key] = put(values)
    start = 0
    for track in unit.tracks.values():
        table = {name: getattr(track.table, name) for name in (one.name for one in fields(SampleTable))}
        entry: dict[str, Any] = {"camera": track.camera, "first": track.first}
        entry["numbers"], entry["origin"] = put(track.numbers), put(track.origin)
        entry["payload"] = [start, start + len(track.data)]
        entry["arrays"] = {name: put(np.asarray(table[name])) for name in _ARRAYS}
        scalars = {name: value for name, value in table.items() if name not in _ARRAYS}
        entry["table"] = scalars | {name: scalars[name].hex() for name in _BYTES} | {"timeline": asdict(track.table.timeline)}
        description["tracks"].append(entry)
        start += len(track.data)
    text = json.dumps(description, separators=(",", ":")).encode()
    with pa.ipc.new_stream(sink, unit.rows.others.schema) as writer:
        writer.write_table(unit.rows.others)
    others = sink.getvalue().to_pybytes()
    language = b"" if unit.rows.language is None else unit.rows.language.pack()
    sizes = np.array([len(text), len(others), len(language)], dtype="<i8").tobytes()
    header = b"".join([sizes, text, others, language, *(array.tobytes() for array in arrays)])
    return header, [track.data for track in unit.tracks.values()]


def unpack_unit(header: bytes | memoryview, payload: bytes | memoryview) -> UnitData:
    """The inverse of `pack_unit`; the pictures stay views of ``payload``."""
    buffer = memoryview(header)
    sizes = [int(size) for size in np.frombuffer(buffer[:_SIZES], dtype="<i8")]
    text, table, blob = (buffer[stop - size : stop] for size, stop in zip(sizes, np.cumsum(sizes) + _SIZES, strict=True))
    description = json.loads(bytes(text))
    others = pa.ipc.open_stream(pa.py_buffer(table)).read_all()
    language = AnnotationRows.unpack(blob) if len(blob) else None
    position = _SIZES + sum(sizes)

    def take(shape_of: list[Any]) -> NDArray[Any]:
        nonlocal position
        dtype, shape = np.dtype(shape_of[0]), tuple(shape_of[1])
        nbytes = dtype.itemsize * math.prod(shape)
        array = np.frombuffer(buffer[position : position + nbytes], dtype=dtype).reshape(shape)
        position += nbytes
        return array

    numbers = {key: take(shape_of) for key, shape_of in description["numbers"].items()}
    view = memoryview(payload)
    tracks: dict[str, Track] = {}
    for entry in description["tracks"]:
        numbers_of_file, origin = take(entry["numbers"]), take(entry["origin"])
        arrays: dict[str, Any] = {name: take(shape_of) for name, shape_of in entry["arrays"].items()}
        scalars: dict[str, Any] = {name: bytes.fromhex(value) if name in _BYTES else value for name, value in entry["table"].items()}
        scalars["timeline"] = Timeline(**scalars["timeline"])
        table = SampleTable(**scalars, **arrays)
        start, stop = entry["payload"]
        tracks[entry["camera"]] = Track(entry["camera"], table.path, entry["first"], numbers_of_file, origin, table, view[start:stop])
    rows = description["rows"]
    tasks = {int(key): value for key, value in rows["tasks"].items()}
    return UnitData(
        description["dataset"],
        description["episode"],
        description["lo"],
        description["hi"],
        description["episode_length"],
        UnitRows(rows["first"], rows["length"], numbers, others, tasks, language),
        tracks,
    )
