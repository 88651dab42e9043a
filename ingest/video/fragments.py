"""Movie fragments: the samples of ``moof`` boxes, appended to those of ``moov``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.video.layout import Box, FileLayout, Fragment, children, fail
from ingest.video.tables import MAX_SAMPLES
from ingest.video.tracks import SampleArrays

_NOT_SYNC = 0x0001_0000
_DEPENDS_ON_OTHERS = 0x0100_0000
_MAX_TRACK_RUNS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Defaults:
    description: int
    duration: int
    size: int
    flags: int


@dataclass(slots=True)
class _Collected:
    """Pieces of the arrays, one per track run, and where the next sample falls when a run does not say."""

    offsets: list[NDArray[np.int64]]
    sizes: list[NDArray[np.int64]]
    durations: list[NDArray[np.int64]]
    composition: list[NDArray[np.int64]]
    descriptions: list[NDArray[np.int64]]
    dts: list[NDArray[np.int64]]
    sync: list[NDArray[np.int64]]
    count: int
    next_dts: int


def append_fragments(
    moov: bytes, layout: FileLayout, track_id: int, base: SampleArrays, path: str
) -> tuple[SampleArrays, NDArray[np.int64], int]:
    """Samples of ``moov`` followed by those of every fragment.

    Args:
        moov: payload of the ``moov`` box (for ``trex`` defaults).
        layout: with the fragments.
        track_id: the video track.
        base: samples that ``moov`` itself lists.
        path: for messages.

    Returns:
        the arrays, decode times [S] in ticks, and the shift that libavformat adds to presentation times when composition
        offsets are negative.

    Raises:
        VideoFormatError: a box is cut short or the counts exceed the limits.
    """
    if base.untimed:
        raise fail(path, f"stts leaves out the last {base.untimed} samples before the first fragment: their times are unknown")
    durations = base.durations
    dts = np.cumsum(durations) - durations
    sync = np.arange(len(durations), dtype=np.int64) if base.sync is None else base.sync
    pieces = _Collected(
        offsets=[base.offsets],
        sizes=[base.sizes],
        durations=[durations],
        composition=[base.composition],
        descriptions=[base.descriptions],
        dts=[dts],
        sync=[sync],
        count=len(durations),
        next_dts=int(durations.sum()),
    )
    defaults = _track_defaults(moov, track_id, path)
    runs = 0
    for fragment in layout.fragments:
        data_end = fragment.offset
        for box in children(fragment.payload, 0, len(fragment.payload), path):
            if box.kind != b"traf":
                continue
            runs += 1
            if runs > _MAX_TRACK_RUNS:
                raise fail(path, f"more than {_MAX_TRACK_RUNS} track fragments")
            data_end = _track_fragment(fragment, box, track_id, defaults, data_end, pieces, path)
    arrays = SampleArrays(
        offsets=np.concatenate(pieces.offsets),
        sizes=np.concatenate(pieces.sizes),
        durations=np.concatenate(pieces.durations),
        composition=np.concatenate(pieces.composition),
        descriptions=np.concatenate(pieces.descriptions),
        sync=np.concatenate(pieces.sync),
    )
    shift = max(0, -int(arrays.composition.min())) if len(arrays.composition) else 0
    return arrays, np.concatenate(pieces.dts), shift


def _track_defaults(moov: bytes, track_id: int, path: str) -> _Defaults:
    for extends in (box for box in children(moov, 0, len(moov), path) if box.kind == b"mvex"):
        for box in children(moov, extends.start, extends.stop, path):
            if box.kind == b"trex" and box.stop - box.start >= 24:
                found, description, duration, size, flags = np.frombuffer(moov, ">u4", 5, box.start + 4).tolist()
                if found == track_id:
                    return _Defaults(description, duration, size, flags)
    return _Defaults(1, 0, 0, 0)


def _track_fragment(fragment: Fragment, traf: Box, track_id: int, defaults: _Defaults, data_end: int, pieces: _Collected, path: str) -> int:
    """Collects one ``traf``; returns the file position behind its data, where the next one begins by default."""
    data = fragment.payload
    boxes = list(children(data, traf.start, traf.stop, path))
    header = next((box for box in boxes if box.kind == b"tfhd"), None)
    if header is None or header.stop - header.start < 8:
        raise fail(path, f"the fragment at byte {fragment.offset} has no complete tfhd box")
    flags = int.from_bytes(data[header.start + 1 : header.start + 4], "big")
    values: dict[int, int] = {}
    at = header.start + 8
    for bit, width in ((0x1, 8), (0x2, 4), (0x8, 4), (0x10, 4), (0x20, 4)):
        if flags & bit:
            if at + width > header.stop:
                raise fail(path, f"tfhd of the fragment at byte {fragment.offset} is cut short")
            values[bit] = int.from_bytes(data[at : at + width], "big")
            at += width
    base = values.get(0x1, fragment.offset if flags & 0x20000 else data_end)
    local = _Defaults(
        values.get(0x2, defaults.description),
        values.get(0x8, defaults.duration),
        values.get(0x10, defaults.size),
        values.get(0x20, defaults.flags),
    )
    mine = int.from_bytes(data[header.start + 4 : header.start + 8], "big") == track_id
    position = base
    for box in boxes:
        if box.kind == b"tfdt" and mine and box.stop - box.start >= 8:
            width = 8 if data[box.start] == 1 else 4
            pieces.next_dts = int.from_bytes(data[box.start + 4 : min(box.start + 4 + width, box.stop)], "big")
        elif box.kind == b"trun":
            position = _track_run(data, box, base, position, local, pieces if mine else None, path)
    return position


def _track_run(data: bytes, box: Box, base: int, position: int, local: _Defaults, pieces: _Collected | None, path: str) -> int:
    if box.stop - box.start < 8:
        raise fail(path, "trun is cut short")
    flags = int.from_bytes(data[box.start + 1 : box.start + 4], "big")
    count = int.from_bytes(data[box.start + 4 : box.start + 8], "big")
    at = box.start + 8
    first_flags: int | None = None
    head = (4 if flags & 0x1 else 0) + (4 if flags & 0x4 else 0)
    fields = [name for bit, name in ((0x100, "duration"), (0x200, "size"), (0x400, "flags"), (0x800, "composition")) if flags & bit]
    if at + head + 4 * len(fields) * count > box.stop:
        raise fail(path, f"trun declares {count} samples and has room for {max(0, box.stop - at - head) // max(4, 4 * len(fields))}")
    if count + (pieces.count if pieces is not None else 0) > MAX_SAMPLES:
        raise fail(path, f"more samples than the limit of {MAX_SAMPLES} in one file")
    if flags & 0x1:
        position = base + int.from_bytes(data[at : at + 4], "big", signed=True)
        at += 4
    if flags & 0x4:
        first_flags = int.from_bytes(data[at : at + 4], "big")
        at += 4
    columns = np.frombuffer(data, ">u4", len(fields) * count, at).reshape(count, len(fields)).astype(np.int64)
    rows = {name: columns[:, index] for index, name in enumerate(fields)}
    sizes = rows.get("size", np.full(count, local.size, np.int64))
    end = position + int(sizes.sum())
    if position < 0 or end > 1 << 62:
        raise fail(path, f"a track run places samples at bytes {position}..{end}")
    if pieces is None or count == 0:
        return end
    durations = rows.get("duration", np.full(count, local.duration, np.int64))
    sample_flags = rows.get("flags", np.full(count, local.flags, np.int64))
    if first_flags is not None:
        sample_flags = sample_flags.copy()
        sample_flags[0] = first_flags
    ends = np.cumsum(durations)
    if pieces.next_dts + int(ends[-1]) > 1 << 62:
        raise fail(path, f"a track run starts at tick {pieces.next_dts}, beyond any timeline")
    pieces.offsets.append(position + np.cumsum(sizes) - sizes)
    pieces.sizes.append(sizes)
    pieces.durations.append(durations)
    # Signed whatever the version, for the reason given for ctts.
    pieces.composition.append(rows.get("composition", np.zeros(count, np.int64)).astype(np.uint32).astype(np.int32).astype(np.int64))
    pieces.descriptions.append(np.full(count, max(0, local.description - 1), np.int64))
    pieces.dts.append(pieces.next_dts + ends - durations)
    pieces.sync.append(pieces.count + np.flatnonzero((sample_flags & (_NOT_SYNC | _DEPENDS_ON_OTHERS)) == 0))
    pieces.count += count
    pieces.next_dts += int(ends[-1])
    return end
