"""Mini-MP4s: one episode of a file as a file of its own, and its exact size without building it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingest.errors import ShortReadError, VideoFormatError
from ingest.storage.base import Store
from ingest.video.checksums import verify_payload
from ingest.video.files import replacing
from ingest.video.span_table import EpisodeSpans, reduce_runs
from ingest.video.spans import picture_span
from ingest.video.tables import SampleTable

MAX_32 = (1 << 32) - 1
_HANDLER_NAME = b"VideoHandler\0"
# Boxes whose size never changes: mvhd, tkhd, mdhd, hdlr, vmhd, dinf.
_FIXED_BYTES = 108 + 92 + 32 + (32 + len(_HANDLER_NAME)) + 20 + 36
_CONTAINERS = 5  # moov, trak, mdia, minf, stbl
_EDTS_BYTES = 44


def _changes(values: NDArray[np.integer]) -> NDArray[np.int64]:
    """Running count of changes: element i minus element j is the number of changes in (j, i]."""
    return np.concatenate([[0], np.cumsum(values[1:] != values[:-1])]).astype(np.int64)


def _kept_keys(table: SampleTable) -> NDArray[np.int64]:
    """Key pictures that may be listed: no later picture of their group is shown before them."""
    sync = table.sync.astype(np.int64)
    if not len(sync) or not bool(np.any(table.composition)):
        return sync
    ticks = table.dts.astype(np.int64) + table.composition
    least = np.minimum.reduceat(ticks, sync)
    return sync[least >= ticks[sync]]


def mini_mp4_sizes(table: SampleTable, spans: EpisodeSpans) -> NDArray[np.int64]:
    """Exact bytes of the mini-MP4 of every span, from the index alone.

    Args:
        table: of the file.
        spans: of episodes in it.

    Returns:
        [E] bytes, equal to ``len(build_mini_mp4(...))``.
    """
    low, high = spans.sample_lo, spans.sample_hi
    count = high - low + 1
    composition = table.composition
    nonzero = np.concatenate([[0], np.cumsum(composition != 0)])
    has_ctts = nonzero[high + 1] > nonzero[low]
    times, shifts, kinds = _changes(table.durations), _changes(composition), _changes(table.descriptions)
    kept = _kept_keys(table)
    # The first sample is listed whenever it is a key picture: what precedes it is not in the file.
    keys = np.searchsorted(kept, high, side="right") - np.searchsorted(kept, low, side="right")
    keys = keys + np.isin(low, table.sync)
    fixed = len(table.ftyp) + 8 * _CONTAINERS + _FIXED_BYTES + 8 + len(table.stsd)
    size = fixed + np.where(composition[low] != 0, _EDTS_BYTES, 0)
    size = size + 16 + 8 * (1 + times[high] - times[low])
    size = size + np.where(has_ctts, 16 + 8 * (1 + shifts[high] - shifts[low]), 0)
    size = size + 16 + 12 * (1 + kinds[high] - kinds[low]) + 20 + 4 * count + 16 + 4 * keys
    header = np.where(spans.mdat_length + 8 > MAX_32, 16, 8)
    furthest = reduce_runs(np.maximum, table.offsets.astype(np.int64), low, high) - spans.mdat_offset
    wide = size + 16 + 4 * count + header + furthest > MAX_32
    return size + 16 + np.where(wide, 8, 4) * count + header + spans.mdat_length


def build_mini_mp4(table: SampleTable, spans: EpisodeSpans, episode: int, payload: bytes) -> bytes:
    """Builds the mini-MP4 of one span.

    Args:
        table: of the file.
        spans: of episodes in it.
        episode: which of them.
        payload: bytes ``[mdat_offset, mdat_offset + mdat_length)`` of the source file.

    Raises:
        ShortReadError: the payload is not as long as the span.
    """
    low, high = int(spans.sample_lo[episode]), int(spans.sample_hi[episode])
    if len(payload) != int(spans.mdat_length[episode]):
        raise ShortReadError(f"{table.path}: payload of {len(payload)} bytes, expected {int(spans.mdat_length[episode])}")
    relative = table.offsets[low : high + 1].astype(np.int64) - int(spans.mdat_offset[episode])
    lead = int(table.composition[low])
    edit = (max(lead, 0), int(table.durations[low : high + 1].sum())) if lead else None
    # An edit cannot begin before media time 0, so offsets that begin below it are moved up instead.
    shift = max(0, -lead)
    return mini_header(table, low, high + 1, relative, len(payload), edit=edit, shift=shift) + payload


def mini_header(
    table: SampleTable,
    first: int,
    stop: int,
    relative: NDArray[np.int64],
    payload_bytes: int,
    *,
    edit: tuple[int, int] | None,
    shift: int = 0,
) -> bytes:
    """Everything of a mini-MP4 before its payload: ``ftyp``, ``moov`` and the header of ``mdat``.

    Args:
        table: of the source file.
        first: first sample.
        stop: sample behind the last one.
        relative: position of each sample in the payload.
        payload_bytes: length of the payload.
        edit: (media time, duration) of an edit list in media ticks, or None for no edit list.
        shift: added to every composition offset.

    Raises:
        VideoFormatError: a composition offset does not fit 32 bits.
    """
    mdat = (
        struct.pack(">I4sQ", 1, b"mdat", payload_bytes + 16)
        if payload_bytes + 8 > MAX_32
        else struct.pack(">I4s", payload_bytes + 8, b"mdat")
    )
    narrow = _moov(table, first, stop, np.zeros(stop - first, ">u4"), edit, shift)
    start = len(table.ftyp) + len(narrow) + len(mdat)
    furthest = int(relative.max())
    if start + furthest <= MAX_32:
        moov = _moov(table, first, stop, (relative + start).astype(">u4"), edit, shift)
    else:
        start += 4 * (stop - first)
        moov = _moov(table, first, stop, (relative + start).astype(">u8"), edit, shift)
    return table.ftyp + moov + mdat


def _box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", len(body) + 8, kind) + body


def _full(kind: bytes, *parts: bytes, version: int = 0, flags: int = 0) -> bytes:
    return _box(kind, struct.pack(">I", version << 24 | flags), *parts)


def _run_table(kind: bytes, values: NDArray[np.int64], code: str, version: int = 0) -> bytes:
    edges = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1, [len(values)]])
    rows = np.zeros(len(edges) - 1, np.dtype([("count", ">u4"), ("value", code)]))
    rows["count"], rows["value"] = np.diff(edges), values[edges[:-1]]
    return _full(kind, struct.pack(">I", len(rows)), rows.tobytes(), version=version)


def _moov(table: SampleTable, first: int, stop: int, offsets: NDArray[np.integer], edit: tuple[int, int] | None, shift: int) -> bytes:
    durations = table.durations[first:stop].astype(np.int64)
    composition = table.composition[first:stop].astype(np.int64)
    total = min(int(durations.sum()), MAX_32)
    scale = table.ticks_per_second
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    mvhd = _full(b"mvhd", struct.pack(">4IIH10x", 0, 0, scale, total, 0x10000, 0x100), matrix, bytes(24), struct.pack(">I", 2))
    tkhd = _full(
        b"tkhd",
        struct.pack(">5I8x4H", 0, 0, 1, 0, total, 0, 0, 0, 0),
        matrix,
        struct.pack(">2I", table.width << 16, table.height << 16),
        flags=7,
    )
    edts = b"" if edit is None else _box(b"edts", _full(b"elst", struct.pack(">IQqI", 1, edit[1], edit[0], 0x10000), version=1))
    mdhd = _full(b"mdhd", struct.pack(">4IHH", 0, 0, scale, total, 0x55C4, 0))
    hdlr = _full(b"hdlr", struct.pack(">I4s12x", 0, b"vide"), _HANDLER_NAME)
    vmhd = _full(b"vmhd", bytes(8), flags=1)
    dinf = _box(b"dinf", _full(b"dref", struct.pack(">I", 1), _full(b"url ", flags=1)))
    tables = [_box(b"stsd", table.stsd), _run_table(b"stts", durations, ">u4")]
    if bool(np.any(composition)):
        shifted = composition + shift
        if int(shifted.min()) < -(1 << 31) or int(shifted.max()) > MAX_32 >> 1:
            raise VideoFormatError(f"{table.path}: composition offsets do not fit 32 bits", file=table.path)
        tables.append(_run_table(b"ctts", shifted, ">i4", version=int(bool(np.any(shifted < 0)))))
    tables += [_chunks(table.descriptions[first:stop].astype(np.int64)), _sample_sizes(table, first, stop)]
    kind = b"co64" if offsets.dtype.itemsize == 8 else b"stco"
    tables.append(_full(kind, struct.pack(">I", len(offsets)), offsets.tobytes()))
    kept = _kept_keys(table)
    keys = kept[slice(*np.searchsorted(kept, (first + 1, stop)))] - first
    if first in table.sync:
        keys = np.concatenate([[0], keys])
    tables.append(_full(b"stss", struct.pack(">I", len(keys)), (keys + 1).astype(">u4").tobytes()))
    return _box(b"moov", mvhd, _box(b"trak", tkhd, edts, _box(b"mdia", mdhd, hdlr, _box(b"minf", vmhd, dinf, _box(b"stbl", *tables)))))


def _chunks(descriptions: NDArray[np.int64]) -> bytes:
    edges = np.concatenate([[0], np.flatnonzero(descriptions[1:] != descriptions[:-1]) + 1])
    rows = np.stack([edges + 1, np.ones(len(edges), np.int64), descriptions[edges] + 1], axis=1).astype(">u4")
    return _full(b"stsc", struct.pack(">I", len(rows)), rows.tobytes())


def _sample_sizes(table: SampleTable, first: int, stop: int) -> bytes:
    return _full(b"stsz", struct.pack(">II", 0, stop - first), table.sizes[first:stop].astype(">u4").tobytes())


def export_episode(store: Store, table: SampleTable, first_picture: int, count: int, output: Path | str) -> int:
    """Writes pictures ``first_picture .. first_picture + count`` of a file as an MP4 of their own, without re-encoding.

    What must be decoded before the first picture is in the file too; an edit list hides it, so that players show exactly the
    pictures asked for, the first one at time 0.

    Args:
        store: rooted at the dataset.
        table: of the file.
        first_picture: picture number of the file.
        count: how many pictures.
        output: file to create or replace.

    Returns:
        bytes written.

    Raises:
        SelectionError: pictures that the file does not present.
        ChecksumError: the payload differs from the index, where it has checksums.
        StorageError: the source cannot be read, or the file cannot be written.
    """
    span = picture_span(table, range(first_picture, first_picture + count))
    buffers = [memoryview(part) for part in store.read_ranges(table.path, span.ranges)]
    verify_payload(table, span, buffers)
    chunk, at = span.chunks_of(table)
    sizes = table.sizes[span.first : span.stop].astype(np.int64)
    pieces: zip[tuple[int, int, int]] = zip(chunk.tolist(), at.tolist(), sizes.tolist(), strict=True)
    payload = b"".join(buffers[index][start : start + size] for index, start, size in pieces)
    shift = max(0, -int(table.composition[span.first : span.stop].min()))
    ticks = (
        table.dts[span.first : span.stop].astype(np.int64) + table.composition[span.first : span.stop] + shift - int(table.dts[span.first])
    )
    shown = ticks[table.presented[span.wanted].astype(np.int64) - span.first]
    last = int(table.presented[span.wanted[-1]])
    edit = (int(shown[0]), int(shown[-1] - shown[0]) + max(1, int(table.durations[last])))
    header = mini_header(table, span.first, span.stop, np.cumsum(sizes) - sizes, len(payload), edit=edit, shift=shift)
    with replacing(Path(output), "cannot write the episode") as stream:
        stream.write(header)
        stream.write(payload)
    return len(header) + len(payload)
