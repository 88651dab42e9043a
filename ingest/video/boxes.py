"""MP4 and QuickTime files → ``SampleTable``, safe on hostile input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.video.entries import SampleEntry, encrypted, parse_sample_entries
from ingest.video.fragments import append_fragments
from ingest.video.keys import HEAD_BYTES as KEY_HEAD_BYTES
from ingest.video.keys import can_start
from ingest.video.layout import MAX_PROBE_BYTES, FileLayout, ReadRange, children, fail, scan_file
from ingest.video.tables import SampleTable, read_only
from ingest.video.timeline import parse_edits, present, resolve_edits
from ingest.video.tracks import SampleArrays, TrackHeader, expand_samples, first_video_track

_PROBED_SAMPLES = 8
_SCAN_BYTES = 32 << 20
_SCAN_SAMPLES = 100_000
_MAX_DURATION_TICKS = (1 << 62) - 1


def read_sample_table(read: ReadRange, file_size: int, path: str, *, max_probe_bytes: int = MAX_PROBE_BYTES) -> SampleTable:
    """Reads the index of a video file: its first video track.

    Two reads or fewer for a file with one ``moov`` and a sound list of key pictures.

    Args:
        read: returns exactly the bytes ``[start, stop)``.
        file_size: bytes.
        path: relative to the dataset root; goes into the table and into messages.
        max_probe_bytes: most metadata bytes read.

    Raises:
        VideoFormatError: no index, an inconsistent or hostile one, no video track, or an encrypted one.
        UnsupportedTimelineError: an edit list that cannot be followed exactly.
        StorageError: whatever ``read`` raises.
    """
    layout = scan_file(read, file_size, path, max_probe_bytes=max_probe_bytes)
    header, movie_timescale, movie_duration = first_video_track(layout.moov, path)
    entries = parse_sample_entries(header.stsd, path)
    fragmented = any(box.kind == b"mvex" for box in children(layout.moov, 0, len(layout.moov), path))
    samples = _samples(layout, header, file_size, path, fragmented=fragmented)
    if len(samples.arrays.sizes) and int(samples.arrays.descriptions.max()) >= len(entries):
        raise fail(path, f"samples name entry {int(samples.arrays.descriptions.max()) + 1} of stsd, which has {len(entries)}")
    edits = parse_edits(header.elst, path) if header.elst else ()
    timescale = header.timescale or movie_timescale or 1
    timeline, offset_s = resolve_edits(edits, timescale, movie_timescale, fragmented=fragmented, path=path)
    sync = np.arange(len(samples.arrays.sizes), dtype=np.int64) if samples.arrays.sync is None else samples.arrays.sync
    starts = _verified_starts(_Peek(read, layout.head, file_size), samples.arrays, sync, entries)
    pts = samples.dts + samples.arrays.composition
    presented, presented_pts = present(pts, timeline)
    offset = timeline.offset_ticks + samples.shift
    return SampleTable(
        path=path,
        file_size=file_size,
        codec=entries[0].fourcc,
        width=header.width,
        height=header.height,
        timescale=header.timescale,
        movie_timescale=movie_timescale,
        duration=min(header.duration or movie_duration, _MAX_DURATION_TICKS),
        track_id=header.track_id,
        ftyp=layout.ftyp,
        stsd=header.stsd,
        moov_offset=layout.moov_offset,
        mdat_offset=layout.mdat_offset,
        mdat_payload_offset=layout.mdat_payload_offset,
        mdat_payload_size=layout.mdat_payload_size,
        faststart=layout.moov_offset < layout.mdat_offset,
        fragmented=fragmented,
        edit_offset_ticks=offset,
        offsets=read_only(samples.arrays.offsets),
        sizes=read_only(samples.arrays.sizes),
        durations=read_only(samples.arrays.durations),
        composition=read_only(samples.arrays.composition),
        dts=read_only(samples.dts),
        sync=read_only(sync),
        starts=read_only(starts),
        descriptions=read_only(samples.arrays.descriptions),
        presented=read_only(presented),
        presented_pts=read_only(presented_pts + samples.shift),
        sample_pts=read_only(pts / timescale + (offset_s + samples.shift / timescale)),
        timeline=timeline,
        untimed=samples.arrays.untimed,
    )


@dataclass(frozen=True, slots=True)
class _Samples:
    arrays: SampleArrays
    dts: NDArray[np.int64]
    shift: int


def _samples(layout: FileLayout, header: TrackHeader, file_size: int, path: str, *, fragmented: bool) -> _Samples:
    if any(box.kind == b"pssh" for box in children(layout.moov, 0, len(layout.moov), path)) and b"sinf" in header.table:
        raise encrypted(path, "sinf")
    arrays = expand_samples(layout.moov, header.table, file_size, path)
    if fragmented:
        arrays, dts, shift = append_fragments(layout.moov, layout, header.track_id, arrays, path)
        return _Samples(arrays, dts, shift)
    return _Samples(arrays, np.cumsum(arrays.durations) - arrays.durations, 0)


@dataclass(frozen=True, slots=True)
class _Peek:
    """Reads the beginnings of samples, from the head that was fetched anyway where it reaches that far."""

    read: ReadRange
    head: bytes
    file_size: int

    def at(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.file_size)
        if start >= stop:
            return b""
        return self.head[start:stop] if stop <= len(self.head) else self.read(start, stop)


def _verified_starts(peek: _Peek, arrays: SampleArrays, sync: NDArray[np.int64], entries: tuple[SampleEntry, ...]) -> NDArray[np.int64]:
    """Sample numbers where decoding may begin.

    A list of key pictures is believed unless it looks like none was written: empty, or naming every sample of a codec that
    predicts. Then the payload is looked into.
    """
    count = len(arrays.sizes)
    if 0 < len(sync) < count or count <= 1 or all(entry.intra_only for entry in entries):
        return sync
    if len(sync) == count and not _contradicted(peek, arrays, entries):
        return sync
    first = int(arrays.offsets.min())
    if count > _SCAN_SAMPLES or int((arrays.offsets + arrays.sizes).max()) - first > _SCAN_BYTES:
        return np.zeros(1, np.int64)  # decoding from the first sample is always right, and reading it all costs too much
    heads = [
        peek.at(offset, offset + size)
        for offset, size in zip(arrays.offsets.tolist(), np.minimum(arrays.sizes, KEY_HEAD_BYTES).tolist(), strict=True)
    ]
    keys = [n for n, head in enumerate(heads) if n == 0 or can_start(entries[int(arrays.descriptions[n])], head)]
    return np.array(keys, np.int64)


def _contradicted(peek: _Peek, arrays: SampleArrays, entries: tuple[SampleEntry, ...]) -> bool:
    looked = 0
    for number in range(1, min(len(arrays.sizes), 64)):
        start = int(arrays.offsets[number])
        stop = start + min(int(arrays.sizes[number]), KEY_HEAD_BYTES)
        if looked and stop > len(peek.head):
            continue
        if can_start(entries[int(arrays.descriptions[number])], peek.at(start, stop)) is False:
            return True
        looked += 1
        if looked == _PROBED_SAMPLES:
            break
    return False
