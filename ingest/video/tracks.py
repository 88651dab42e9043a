"""One ``trak`` box: header fields and the expansion of its run-length tables into arrays, one element per sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.video.layout import Box, children, fail
from ingest.video.tables import MAX_SAMPLES, constant

_MAX_TRACKS = 64


@dataclass(frozen=True, slots=True)
class TrackHeader:
    """Fields of a video track that do not depend on its samples; boxes are payloads of ``moov``."""

    track_id: int
    width: int
    height: int
    timescale: int
    duration: int
    stsd: bytes
    elst: bytes
    table: dict[bytes, Box]


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """Arrays in decode order; see ``SampleTable``. ``sync`` is None when every sample is declared a key picture.

    ``untimed`` samples at the end have no duration in the file, and go on at the pace of the last one that has.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    durations: NDArray[np.int64]
    composition: NDArray[np.int64]
    descriptions: NDArray[np.int64]
    sync: NDArray[np.int64] | None
    untimed: int = 0


def first_video_track(moov: bytes, path: str) -> tuple[TrackHeader, int, int]:
    """The first track with handler ``vide``, the movie's timescale and its duration.

    Raises:
        VideoFormatError: there is no such track, or a box that it needs is missing or cut short.
    """
    movie_timescale = movie_duration = 0
    handlers: list[str] = []
    found: TrackHeader | None = None
    for box in children(moov, 0, len(moov), path):
        if box.kind == b"mvhd":
            movie_timescale, movie_duration = _times(moov, box)
        elif box.kind == b"trak" and found is None:
            if len(handlers) == _MAX_TRACKS:
                raise fail(path, f"no video track among the first {_MAX_TRACKS}")
            handler, header = _track(moov, box, path)
            handlers.append(handler)
            found = header
    if found is None:
        raise fail(path, f"no video track; the movie has {len(handlers)} tracks with handlers {handlers[:8]}")
    return found, movie_timescale, movie_duration


def _times(moov: bytes, box: Box) -> tuple[int, int]:
    """Timescale and duration from the payload of ``mvhd`` or ``mdhd``; missing bytes read as 0."""
    wide = box.start < box.stop and moov[box.start] == 1
    at, width = (box.start + 20, 8) if wide else (box.start + 12, 4)
    timescale = int.from_bytes(moov[at : min(at + 4, box.stop)], "big")
    duration = int.from_bytes(moov[at + 4 : min(at + 4 + width, box.stop)], "big")
    return timescale, 0 if duration == (1 << 8 * width) - 1 else duration


def _track(moov: bytes, trak: Box, path: str) -> tuple[str, TrackHeader | None]:
    outer = _by_kind(moov, trak, path)
    media = _by_kind(moov, outer[b"mdia"], path) if b"mdia" in outer else {}
    hdlr = media.get(b"hdlr")
    handler = moov[hdlr.start + 8 : hdlr.start + 12].decode("latin-1") if hdlr is not None else ""
    if handler != "vide":
        return handler, None
    for kind, holder in ((b"tkhd", outer), (b"mdhd", media), (b"minf", media)):
        if kind not in holder:
            raise fail(path, f"the video track has no {kind.decode()} box")
    information = _by_kind(moov, media[b"minf"], path)
    if b"stbl" not in information:
        raise fail(path, "the video track has no stbl box")
    table = _by_kind(moov, information[b"stbl"], path)
    if b"stsd" not in table:
        raise fail(path, "the video track has no stsd box")
    _refuse_external(moov, information, path)
    tkhd = outer[b"tkhd"]
    wide = moov[tkhd.start] == 1 if tkhd.start < tkhd.stop else False
    at = tkhd.start + (20 if wide else 12)
    sides = tkhd.start + (88 if wide else 76)
    if sides + 8 > tkhd.stop:
        raise fail(path, f"tkhd holds {tkhd.stop - tkhd.start} bytes, expected {sides + 8 - tkhd.start}")
    timescale, duration = _times(moov, media[b"mdhd"])
    edits = _by_kind(moov, outer[b"edts"], path).get(b"elst") if b"edts" in outer else None
    header = TrackHeader(
        track_id=int.from_bytes(moov[at : at + 4], "big"),
        width=int.from_bytes(moov[sides : sides + 2], "big"),
        height=int.from_bytes(moov[sides + 4 : sides + 6], "big"),
        timescale=timescale,
        duration=duration,
        stsd=moov[table[b"stsd"].start : table[b"stsd"].stop],
        elst=moov[edits.start : edits.stop] if edits is not None else b"",
        table=table,
    )
    return handler, header


def _by_kind(moov: bytes, parent: Box, path: str) -> dict[bytes, Box]:
    found: dict[bytes, Box] = {}
    for box in children(moov, parent.start, parent.stop, path):
        found.setdefault(box.kind, box)
    return found


def _refuse_external(moov: bytes, information: dict[bytes, Box], path: str) -> None:
    dinf = information.get(b"dinf")
    dref = _by_kind(moov, dinf, path).get(b"dref") if dinf is not None else None
    if dref is None:
        return
    for entry in children(moov, dref.start + 8, dref.stop, path):
        if entry.stop - entry.start >= 4 and not moov[entry.start + 3] & 1:
            raise fail(path, f"the video track's data lies in another file (data reference {entry.kind!r})")


def expand_samples(moov: bytes, table: dict[bytes, Box], file_size: int, path: str) -> SampleArrays:
    """Expands the tables of ``stbl``. Every count is checked against its box before anything is allocated.

    Args:
        moov: payload that ``table`` points into.
        table: children of ``stbl`` by kind.
        file_size: bytes; bounds the number of samples of constant size.
        path: for messages.

    Raises:
        VideoFormatError: a table is missing, cut short, or disagrees with another.
    """
    sizes = _sizes(moov, table, file_size, path)
    count = len(sizes)
    if count == 0:
        empty = np.zeros(0, np.int64)
        return SampleArrays(empty, empty, empty, empty, empty, empty if b"stss" in table else None)
    chunks = _chunk_offsets(moov, table, path)
    offsets, descriptions = _place(moov, table, sizes, chunks, path)
    if b"stts" not in table:
        raise fail(path, "the video track has no stts box")
    # Players agree on how a time table that ends early goes on only where pictures are shown in decode order.
    durations, untimed = _runs(moov, table[b"stts"], count, ">u4", path, may_end_early=b"ctts" not in table)
    # Version 0 is unsigned by the letter, but writers put negative offsets there too and every player reads them so.
    composition = _runs(moov, table[b"ctts"], count, ">i4", path)[0] if b"ctts" in table else constant(0, count)
    return SampleArrays(
        offsets=offsets,
        sizes=sizes,
        durations=durations,
        composition=composition,
        descriptions=descriptions,
        sync=_sync(moov, table, count, path),
        untimed=untimed,
    )


def _payload(moov: bytes, box: Box, header: int, width: int, path: str) -> tuple[int, int]:
    """Entry count of a full box and the position of its first entry, checked against the box's bytes."""
    name = box.kind.decode("latin-1")
    if box.stop - box.start < header:
        raise fail(path, f"{name} holds {box.stop - box.start} bytes, expected at least {header}")
    count = int.from_bytes(moov[box.start + header - 4 : box.start + header], "big")
    room = (box.stop - box.start - header) * 8 // width if width else count
    if count > room:
        raise fail(path, f"{name} declares {count} entries and has room for {room}")
    return count, box.start + header


def check_count(count: int, path: str) -> None:
    """Raises VideoFormatError when ``count`` samples are more than one file may have."""
    if count > MAX_SAMPLES:
        raise fail(path, f"{count} samples, more than the limit of {MAX_SAMPLES} in one file")


def _sizes(moov: bytes, table: dict[bytes, Box], file_size: int, path: str) -> NDArray[np.int64]:
    if b"stsz" in table:
        box = table[b"stsz"]
        size = int.from_bytes(moov[box.start + 4 : box.start + 8], "big") if box.stop - box.start >= 8 else 0
        count, at = _payload(moov, box, 12, 0 if size else 32, path)
        check_count(count, path)
        if not size:
            return np.frombuffer(moov, ">u4", count, at).astype(np.int64)
        if count * size > file_size:
            raise fail(path, f"stsz declares {count} samples of {size} bytes in a file of {file_size} bytes")
        return constant(size, count)
    if b"stz2" not in table:
        raise fail(path, "the video track has no stsz or stz2 box")
    box = table[b"stz2"]
    width = moov[box.start + 7] if box.stop - box.start >= 8 else 0
    if width not in (4, 8, 16):
        raise fail(path, f"stz2 declares fields of {width} bits, expected 4, 8 or 16")
    count, at = _payload(moov, box, 12, width, path)
    check_count(count, path)
    if width == 16:
        return np.frombuffer(moov, ">u2", count, at).astype(np.int64)
    packed = np.frombuffer(moov, np.uint8, count if width == 8 else (count + 1) // 2, at)
    if width == 8:
        return packed.astype(np.int64)
    return np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[:count].astype(np.int64)


def _chunk_offsets(moov: bytes, table: dict[bytes, Box], path: str) -> NDArray[np.int64]:
    kind, dtype, width = (b"stco", ">u4", 32) if b"stco" in table else (b"co64", ">u8", 64)
    if kind not in table:
        raise fail(path, "the video track has no stco or co64 box")
    count, at = _payload(moov, table[kind], 8, width, path)
    check_count(count, path)
    found = np.frombuffer(moov, dtype, count, at)
    if count and int(found.max()) > 1 << 62:
        raise fail(path, f"{kind.decode()} places a chunk at byte {int(found.max())}, beyond any file")
    return found.astype(np.int64)


def _place(
    moov: bytes, table: dict[bytes, Box], sizes: NDArray[np.int64], chunks: NDArray[np.int64], path: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if b"stsc" not in table:
        raise fail(path, "the video track has no stsc box")
    count, at = _payload(moov, table[b"stsc"], 8, 96, path)
    if count == 0:
        raise fail(path, f"stsc is empty, but there are {len(sizes)} samples")
    first, per_chunk, description = np.frombuffer(moov, ">u4", 3 * count, at).reshape(count, 3).astype(np.int64).T
    if first[0] != 1 or bool(np.any(np.diff(first) <= 0)) or int(first[-1]) > len(chunks) or int(description.min()) < 1:
        raise fail(path, f"stsc runs do not ascend from chunk 1 within {len(chunks)} chunks, or name sample entry 0")
    chunks_per_run = np.diff(first, append=len(chunks) + 1)
    total = int(chunks_per_run @ per_chunk)  # below 2**54: the chunk count is bounded
    if total != len(sizes):
        raise fail(path, f"stsc and the chunk table place {total} samples, the size table has {len(sizes)}")
    samples_per_chunk = np.repeat(per_chunk, chunks_per_run)
    ends = np.cumsum(sizes)
    first_sample = np.cumsum(samples_per_chunk) - samples_per_chunk
    # Position inside its chunk: bytes of the samples before it, less those before the chunk's first one.
    before = np.concatenate([np.zeros(1, np.int64), ends])
    offsets = np.repeat(chunks - before[first_sample], samples_per_chunk) + before[:-1]
    if count == 1 or bool(np.all(description == description[0])):
        return offsets, constant(int(description[0]) - 1, len(sizes))
    return offsets, np.repeat(np.repeat(description - 1, chunks_per_run), samples_per_chunk)


def _runs(moov: bytes, box: Box, count: int, value: str, path: str, *, may_end_early: bool = False) -> tuple[NDArray[np.int64], int]:
    """Expands a box of (count, value) runs to ``count`` values; also how many of them continue the last run beyond its end."""
    name = box.kind.decode()
    version = moov[box.start] if box.start < box.stop else 0
    if version > 1:
        raise fail(path, f"{name} has version {version}, expected 0 or 1")
    entries, at = _payload(moov, box, 8, 64, path)
    runs = np.frombuffer(moov, np.dtype([("count", ">u4"), ("value", value)]), entries, at)
    lengths = runs["count"].astype(np.int64)
    used = lengths > 0
    lengths, values = lengths[used], runs["value"][used].astype(np.int64)
    missing = count - int(lengths.sum())
    if missing and not (may_end_early and 0 < missing < count):
        rest = "the times of the rest are unknown" if missing > 0 else "the two do not belong together"
        raise fail(path, f"{name} covers {count - missing} samples, the size table has {count}: {rest}; write the file again")
    lengths[-1] += missing
    if bool(np.all(values == values[0])):
        return constant(int(values[0]), count), missing
    return np.repeat(values, lengths), missing


def _sync(moov: bytes, table: dict[bytes, Box], count: int, path: str) -> NDArray[np.int64] | None:
    box = table.get(b"stss")
    if box is None:
        return None
    entries, at = _payload(moov, box, 8, 32, path)
    numbers = np.unique(np.frombuffer(moov, ">u4", entries, at).astype(np.int64))
    if len(numbers) and not (numbers[0] >= 1 and numbers[-1] <= count):
        raise fail(path, f"stss names samples {int(numbers[0])}..{int(numbers[-1])}, the size table has {count}")
    return numbers - 1
