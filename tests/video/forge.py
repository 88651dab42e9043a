"""Makes MP4 bytes for tests: box by box from sample tables, and with an encoder."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import av
import numpy as np


def box(kind: bytes, *parts: bytes, wide: bool = False) -> bytes:
    """One box around its parts; ``wide`` uses a 64-bit size."""
    body = b"".join(parts)
    if wide:
        return struct.pack(">I4sQ", 1, kind, len(body) + 16) + body
    return struct.pack(">I4s", len(body) + 8, kind) + body


def full(kind: bytes, *parts: bytes, version: int = 0, flags: int = 0) -> bytes:
    """One box with version and flags."""
    return box(kind, struct.pack(">I", version << 24 | flags), *parts)


def runs(values: Sequence[int], *, merged: bool = True) -> list[tuple[int, int]]:
    """(count, value) runs, or one run per value."""
    found: list[tuple[int, int]] = []
    for value in values:
        if merged and found and found[-1][1] == value:
            found[-1] = (found[-1][0] + 1, value)
        else:
            found.append((1, value))
    return found


def visual_entry(fourcc: bytes = b"avc1", width: int = 64, height: int = 48, *children: bytes) -> bytes:
    """A visual sample entry."""
    head = b"\0" * 6 + struct.pack(">H", 1) + b"\0" * 16 + struct.pack(">HH", width, height)
    head += struct.pack(">III", 0x480000, 0x480000, 0) + struct.pack(">H", 1) + b"\0" * 32 + struct.pack(">Hh", 24, -1)
    return box(fourcc, head, *children)


@dataclass
class Movie:
    """A one-track movie whose every table can be set; sizes, durations and the rest are per sample in decode order."""

    sizes: list[int]
    durations: list[int]
    composition: list[int] | None = None
    sync: list[int] | None = None
    per_chunk: list[int] | None = None
    descriptions: list[int] | None = None
    chunk_gap: int = 0
    chunk_order: list[int] | None = None
    timescale: int = 15360
    movie_timescale: int = 1000
    edits: list[tuple[int, int, int]] | None = None
    wide_edits: bool = False
    ctts_version: int = 0
    merged_runs: bool = True
    untimed: int = 0
    use_co64: bool = False
    size_bits: int = 32
    faststart: bool = True
    wide_moov: bool = False
    padding: int = 0
    base_offset: int | None = None
    entries: list[bytes] = field(default_factory=lambda: [visual_entry()])
    payload: Callable[[int, int], bytes] = lambda number, size: bytes((number * 31 + k) & 255 for k in range(size))

    def chunks(self) -> list[list[int]]:
        """Sample numbers of each chunk."""
        left, found = list(range(len(self.sizes))), []
        for count in self.per_chunk or [len(self.sizes)] * bool(self.sizes):
            found.append(left[:count])
            left = left[count:]
        if left:
            found.append(left)
        return [chunk for chunk in found if chunk]

    def build(self) -> tuple[bytes, list[int]]:
        """File bytes (without the payload when ``base_offset`` is set) and the offset of every sample."""
        chunks = self.chunks()
        order = self.chunk_order or list(range(len(chunks)))
        ftyp = box(b"ftyp", b"isom\0\0\2\0isomiso2")
        padding = box(b"free", b"\0" * self.padding) if self.padding else b""
        moov_size = len(self._moov([0] * len(chunks), chunks))
        start = self.base_offset if self.base_offset is not None else len(ftyp) + len(padding) + 8 + (moov_size if self.faststart else 0)
        position, offsets, chunk_offsets = start, [0] * len(self.sizes), [0] * len(chunks)
        body: list[bytes] = []
        for index in order:
            position += self.chunk_gap
            body.append(b"\xee" * self.chunk_gap)
            chunk_offsets[index] = position
            for number in chunks[index]:
                offsets[number] = position
                position += self.sizes[number]
                if self.base_offset is None:
                    body.append(self.payload(number, self.sizes[number]))
        moov = self._moov(chunk_offsets, chunks)
        assert len(moov) == moov_size
        mdat = box(b"mdat", *body) if self.base_offset is None else b""
        parts = (ftyp, padding, moov, mdat) if self.faststart else (ftyp, padding, mdat, moov)
        return b"".join(parts), offsets

    def _moov(self, chunk_offsets: list[int], chunks: list[list[int]]) -> bytes:
        duration = sum(self.durations)
        width, height = 64, 48
        mvhd = full(b"mvhd", struct.pack(">IIII", 0, 0, self.movie_timescale, duration & 0xFFFFFFFF), b"\0" * 80)
        tkhd = full(
            b"tkhd",
            struct.pack(">IIIII", 0, 0, 7, 0, duration & 0xFFFFFFFF),
            b"\0" * 52,
            struct.pack(">II", width << 16, height << 16),
            flags=7,
        )
        mdhd = full(b"mdhd", struct.pack(">IIIII", 0, 0, self.timescale, duration & 0xFFFFFFFF, 0))
        hdlr = full(b"hdlr", b"\0\0\0\0vide", b"\0" * 13)
        dinf = box(b"dinf", full(b"dref", struct.pack(">I", 1), full(b"url ", flags=1)))
        minf = box(b"minf", full(b"vmhd", b"\0" * 8, flags=1), dinf, box(b"stbl", *self._tables(chunk_offsets, chunks)))
        edts = [] if self.edits is None else [box(b"edts", self._elst())]
        return box(b"moov", mvhd, box(b"trak", tkhd, *edts, box(b"mdia", mdhd, hdlr, minf)), wide=self.wide_moov)

    def _elst(self) -> bytes:
        rows = b"".join(struct.pack(">Qqi" if self.wide_edits else ">Iii", *edit) for edit in self.edits or [])
        return full(b"elst", struct.pack(">I", len(self.edits or [])), rows, version=int(self.wide_edits))

    def _tables(self, chunk_offsets: list[int], chunks: list[list[int]]) -> list[bytes]:
        tables = [full(b"stsd", struct.pack(">I", len(self.entries)), *self.entries)]
        stts = runs(self.durations[: len(self.durations) - self.untimed], merged=self.merged_runs)
        tables.append(full(b"stts", struct.pack(">I", len(stts)), *(struct.pack(">II", *run) for run in stts)))
        if self.composition is not None:
            ctts = runs(self.composition, merged=self.merged_runs)
            tables.append(
                full(b"ctts", struct.pack(">I", len(ctts)), *(struct.pack(">Ii", *run) for run in ctts), version=self.ctts_version)
            )
        described = self.descriptions or [0] * len(self.sizes)
        stsc, previous = [], None
        for index, chunk in enumerate(chunks):
            now = (len(chunk), described[chunk[0]] + 1)
            if now != previous:
                stsc.append((index + 1, *now))
            previous = now
        tables.append(full(b"stsc", struct.pack(">I", len(stsc)), *(struct.pack(">III", *row) for row in stsc)))
        tables.append(self._sizes())
        kind, code = (b"co64", ">Q") if self.use_co64 else (b"stco", ">I")
        tables.append(full(kind, struct.pack(">I", len(chunk_offsets)), *(struct.pack(code, at) for at in chunk_offsets)))
        if self.sync is not None:
            tables.append(full(b"stss", struct.pack(">I", len(self.sync)), *(struct.pack(">I", n + 1) for n in self.sync)))
        return tables

    def _sizes(self) -> bytes:
        count = struct.pack(">I", len(self.sizes))
        if self.size_bits == 32 and self.sizes and len(set(self.sizes)) == 1 and self.sizes[0]:
            return full(b"stsz", struct.pack(">I", self.sizes[0]), count)
        if self.size_bits == 32:
            return full(b"stsz", struct.pack(">I", 0), count, *(struct.pack(">I", size) for size in self.sizes))
        if self.size_bits == 4:
            padded = [*self.sizes, 0]
            packed = bytes(padded[n] << 4 | padded[n + 1] for n in range(0, len(self.sizes), 2))
        else:
            packed = b"".join(size.to_bytes(self.size_bits // 8, "big") for size in self.sizes)
        return full(b"stz2", struct.pack(">I", self.size_bits), count, packed)


def pictures(count: int, height: int = 48, width: int = 64, seed: int = 0) -> list[np.ndarray]:
    """Distinct textured RGB pictures."""
    base = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    base = np.repeat(np.repeat(base[::4, ::4], 4, axis=0), 4, axis=1)[:height, :width]
    return [np.roll(base, 3 * n, axis=1) // 2 + np.uint8((n * 5) % 128) for n in range(count)]


def encode(
    images: Sequence[np.ndarray],
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    *,
    pix_fmt: str = "yuv420p",
    fmt: str = "mp4",
    mux_options: dict[str, str] | None = None,
) -> bytes:
    """Encodes RGB pictures at 30 per second with PyAV; the file as bytes."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=fmt, options=mux_options or {}) as container:
        stream = container.add_stream(codec, rate=30, options=options or {})
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = pix_fmt
        stream.thread_count = 1
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def linear(data: bytes) -> list[np.ndarray]:
    """Every picture of a file as a plain linear PyAV decode gives it."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24").copy() for frame in container.decode(video=0)]


@dataclass
class MemoryStore:
    """Files in memory behind the part of the store interface that video reading uses; counts reads."""

    files: dict[str, bytes]
    reads: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return "memory"

    def size(self, path: str) -> int:
        return len(self.files[path])

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads.extend((path, start, stop) for start, stop in ranges)
        return [self.files[path][start:stop] for start, stop in ranges]
