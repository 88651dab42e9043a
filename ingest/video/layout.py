"""ISO base media boxes: finding ``moov`` with as few reads as possible, and walking children safely."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ingest.errors import VideoFormatError

ReadRange = Callable[[int, int], bytes]
"""Returns exactly the bytes ``[start, stop)`` of the file."""

HEAD_BYTES = 512 << 10
"""First read of a file."""

MAX_PROBE_BYTES = 64 << 20
"""Most metadata bytes read from one file unless the caller allows more."""

_JUMP_BYTES = 64 << 10
_MAX_CHILDREN = 1024
_MAX_TOP_BOXES = 200_000
_MAX_FTYP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Box:
    """One box inside a buffer: ``data[start:stop]`` is its payload."""

    kind: bytes
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """One ``moof`` box: its byte position in the file and its payload."""

    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Top-level boxes that matter. Offsets are byte positions in the file; ``moov`` is the payload of the box, ``head`` the
    first bytes of the file as far as they were read in one piece."""

    ftyp: bytes
    moov: bytes
    moov_offset: int
    mdat_offset: int
    mdat_payload_offset: int
    mdat_payload_size: int
    fragments: tuple[Fragment, ...]
    head: bytes


def fail(path: str, what: str) -> VideoFormatError:
    """The error for a file that cannot be indexed."""
    return VideoFormatError(f"{path}: {what}", file=path)


def children(data: bytes, start: int, stop: int, path: str) -> Iterator[Box]:
    """Boxes inside ``data[start:stop]``; a box that overruns its parent ends at the parent's end.

    Raises:
        VideoFormatError: a box declares a size smaller than its own header, or there are too many boxes to be sound.
    """
    position, seen = start, 0
    while position + 8 <= stop:
        seen += 1
        if seen > _MAX_CHILDREN:
            raise fail(path, f"more than {_MAX_CHILDREN} boxes in one container")
        size = int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        header = 8
        if size == 1:
            header = 16
            if position + 16 > stop:
                return
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        elif size == 0:
            size = stop - position
        if size < header:
            if kind == b"\0\0\0\0":  # QuickTime ends some atom lists with a zero word
                return
            raise fail(path, f"box {kind!r} declares {size} bytes, less than its own header of {header}")
        yield Box(kind, position + header, min(position + size, stop))
        position += size


class _Window:
    """A growing piece of the file; every byte is read once while reads stay contiguous."""

    def __init__(self, read: ReadRange, file_size: int, path: str, limit: int) -> None:
        self._read, self._size, self._path, self._limit = read, file_size, path, limit
        self._start, self._data, self._spent = 0, b"", 0

    def _fetch(self, start: int, stop: int) -> bytes:
        self._spent += stop - start
        if self._spent > self._limit:
            raise fail(
                self._path,
                f"no complete index in the first {self._limit} bytes of metadata (moov or moof would end at byte {stop}); "
                "raise --max-probe-mb if the file is sound",
            )
        data = self._read(start, stop)
        if len(data) != stop - start:
            raise fail(self._path, f"empty range read at byte {start + len(data)}: asked for {start}..{stop}, got {len(data)} bytes")
        return data

    def get(self, start: int, stop: int, *, ahead: int = 0) -> bytes:
        """Bytes ``[start, stop)``; a new read fetches ``ahead`` bytes more where the file has them."""
        stop = min(stop, self._size)
        end = self._start + len(self._data)
        if start < self._start or start > end:
            self._start, self._data = start, self._fetch(start, min(self._size, max(stop, start) + ahead))
        elif stop > end:
            self._data += self._fetch(end, min(self._size, stop + max(ahead, 16)))
        return self._data[start - self._start : stop - self._start]


def scan_file(read: ReadRange, file_size: int, path: str, *, max_probe_bytes: int = MAX_PROBE_BYTES) -> FileLayout:
    """Finds ``ftyp``, ``moov``, the first ``mdat`` and every ``moof``.

    Reads 512 KiB of the head, then grows to the exact end of ``moov``; when media data comes first, only the tail behind
    it is read. A second ``moov`` and anything after a complete file are ignored; a last box that overruns the file is cut at
    its end.

    Args:
        read: returns exactly the bytes of a half-open range.
        file_size: bytes.
        path: for messages.
        max_probe_bytes: most bytes read in all.

    Raises:
        VideoFormatError: there is no usable ``moov`` within the limits.
    """
    window = _Window(read, file_size, path, max_probe_bytes)
    head = window.get(0, min(HEAD_BYTES, max_probe_bytes, file_size))
    ftyp, moov, moov_offset = b"", None, -1
    mdat: tuple[int, int, int] | None = None
    fragments: list[Fragment] = []
    fragmented = False
    position, stopped_at = 0, "its end"
    for _ in range(_MAX_TOP_BOXES):
        if position + 8 > file_size or (moov is not None and mdat is not None and not fragmented):
            break
        tail = _tail_bytes(position, file_size, mdat is not None and moov is None, max_probe_bytes)
        header = window.get(position, position + 16, ahead=tail)
        size, kind, length = int.from_bytes(header[:4], "big"), header[4:8], 8
        if size == 1 and len(header) == 16:
            size, length = int.from_bytes(header[8:16], "big"), 16
        elif size == 0:
            size = file_size - position
        if size < length:
            stopped_at = f"byte {position}, where box {kind!r} declares {size} bytes"
            break
        stop = min(position + size, file_size)
        if kind == b"moov" and moov is None:
            _check_probe(path, position + length, stop, max_probe_bytes)
            moov, moov_offset = window.get(position + length, stop, ahead=16), position
            fragmented = any(box.kind == b"mvex" for box in children(moov, 0, len(moov), path))
        elif kind == b"mdat" and mdat is None:
            mdat = (position, position + length, stop - position - length)
        elif kind == b"ftyp" and not ftyp and size <= _MAX_FTYP_BYTES:
            ftyp = window.get(position, stop)
        elif kind == b"moof" and fragmented:
            _check_probe(path, position + length, stop, max_probe_bytes)
            fragments.append(Fragment(position, window.get(position + length, stop)))
        position += size
        if position > file_size:
            stopped_at = f"byte {position - size}, where box {kind!r} declares {size} bytes but the file ends at {file_size}"
    if moov is None:
        raise fail(path, f"no moov box up to {stopped_at}: {file_size} bytes that are cut off, still being written, or not an MP4")
    mdat = mdat or (file_size, file_size, 0)
    return FileLayout(ftyp, moov, moov_offset, *mdat, tuple(fragments), head)


def _tail_bytes(position: int, file_size: int, after_media: bool, limit: int) -> int:
    # Behind the media data there is little but moov: one read takes all of it.
    remaining = file_size - position
    return remaining if after_media and remaining <= limit - HEAD_BYTES else _JUMP_BYTES


def _check_probe(path: str, start: int, stop: int, limit: int) -> None:
    if stop - start > limit:
        raise fail(path, f"the index takes {stop - start} bytes, more than {limit}; raise --max-probe-mb if the file is sound")
