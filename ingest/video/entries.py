"""Sample entries of an ``stsd`` box: which decoder they need and with what configuration."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ingest.errors import VideoFormatError
from ingest.video.layout import children, fail

MAX_SIDE = 16_384
MAX_PIXELS = 1 << 25
_VISUAL_ENTRY_BYTES = 78
_MAX_COLOUR_CODE = 22
_MAX_STSD_BYTES = 1 << 18
_UNSPECIFIED = 2

_DECODERS = {
    "avc1": "h264",
    "avc3": "h264",
    "hvc1": "hevc",
    "hev1": "hevc",
    "av01": "av1",
    "vp08": "vp8",
    "vp09": "vp9",
    "apco": "prores",
    "apcs": "prores",
    "apcn": "prores",
    "apch": "prores",
    "ap4h": "prores",
    "ap4x": "prores",
    "png ": "png",
    "jpeg": "mjpeg",
    "mjpa": "mjpeg",
    "FFV1": "ffv1",
    "vvc1": "vvc",
}
_CONFIGURATION_BOXES = (b"avcC", b"hvcC", b"av1C", b"vvcC", b"glbl")
_MP4_OBJECT_TYPES = {
    0x20: "mpeg4",
    0x21: "h264",
    0x23: "hevc",
    0x60: "mpeg2video",
    0x61: "mpeg2video",
    0x62: "mpeg2video",
    0x63: "mpeg2video",
    0x64: "mpeg2video",
    0x65: "mpeg2video",
    0x6A: "mpeg1video",
    0x6C: "mjpeg",
    0x6D: "png",
}
_INTRA_ONLY = frozenset({"prores", "png", "mjpeg"})


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """One way in which samples of a track are coded.

    Attributes:
        fourcc: four-character code as written.
        decoder: decoder name as libavcodec knows it; empty when the code is not a video codec that can be read.
        width: coded width in pixels, as declared.
        height: coded height in pixels, as declared.
        depth: bits per pixel, as declared.
        extradata: decoder configuration.
        colour: (primaries, transfer, matrix, full range or None when not said) from a ``colr`` box, or None.
    """

    fourcc: str
    decoder: str
    width: int
    height: int
    depth: int
    extradata: bytes
    colour: tuple[int, int, int, bool | None] | None

    @property
    def intra_only(self) -> bool:
        """Whether every picture of this codec stands alone."""
        return self.decoder in _INTRA_ONLY


@functools.lru_cache(maxsize=256)
def parse_sample_entries(stsd: bytes, path: str) -> tuple[SampleEntry, ...]:
    """Parses the payload of an ``stsd`` box.

    Raises:
        VideoFormatError: the box is cut short, holds no entry, or an entry is encrypted.
    """
    if not 8 <= len(stsd) <= _MAX_STSD_BYTES:
        raise fail(path, f"stsd holds {len(stsd)} bytes, expected 8..{_MAX_STSD_BYTES}")
    count = int.from_bytes(stsd[4:8], "big")
    if not 1 <= count <= (len(stsd) - 8) // 16:
        raise fail(path, f"stsd declares {count} sample entries in {len(stsd)} bytes")
    found = [_entry(stsd, box.kind, box.start, box.stop, path) for box in children(stsd, 8, len(stsd), path)]
    if len(found) < count:
        raise fail(path, f"stsd declares {count} sample entries and holds {len(found)}")
    return tuple(found[:count])


def _entry(stsd: bytes, kind: bytes, start: int, stop: int, path: str) -> SampleEntry:
    fourcc = kind.decode("latin-1")
    if kind in (b"encv", b"drmi"):
        raise encrypted(path, fourcc)
    if stop - start < _VISUAL_ENTRY_BYTES:
        raise fail(path, f"sample entry {fourcc!r} holds {stop - start} bytes, expected at least {_VISUAL_ENTRY_BYTES}")
    width = int.from_bytes(stsd[start + 24 : start + 26], "big")
    height = int.from_bytes(stsd[start + 26 : start + 28], "big")
    if width > MAX_SIDE or height > MAX_SIDE or width * height > MAX_PIXELS:
        raise fail(path, f"sample entry {fourcc!r} declares {width}x{height} pixels, more than {MAX_SIDE} a side or {MAX_PIXELS} in all")
    depth = int.from_bytes(stsd[start + 74 : start + 76], "big")
    decoder, extradata, colour = _DECODERS.get(fourcc, ""), b"", None
    for box in children(stsd, start + _VISUAL_ENTRY_BYTES, stop, path):
        payload = stsd[box.start : box.stop]
        if box.kind in _CONFIGURATION_BOXES:
            extradata = payload
        elif box.kind == b"esds":
            decoder, extradata = _elementary_stream(payload)
        elif box.kind == b"colr":
            colour = _colour(payload)
        elif box.kind == b"sinf":
            raise encrypted(path, fourcc)
    return SampleEntry(fourcc, decoder, width, height, depth, extradata, colour)


def encrypted(path: str, fourcc: str) -> VideoFormatError:
    return fail(path, f"the video track is encrypted (sample entry {fourcc!r}); decrypt the file first")


def _colour(payload: bytes) -> tuple[int, int, int, bool | None] | None:
    if payload[:4] not in (b"nclx", b"nclc") or len(payload) < 10:
        return None
    codes = [int.from_bytes(payload[at : at + 2], "big") for at in (4, 6, 8)]
    primaries, transfer, matrix = (code if code <= _MAX_COLOUR_CODE else _UNSPECIFIED for code in codes)
    if payload[:4] == b"nclc" or len(payload) == 10:
        return primaries, transfer, matrix, None
    return primaries, transfer, matrix, bool(payload[10] >> 7)


def _elementary_stream(payload: bytes) -> tuple[str, bytes]:
    """Decoder name and decoder-specific configuration from an ``esds`` payload; unknown ones give an empty name."""
    decoder, position, stop = "", 4, len(payload)
    while position + 2 <= stop:
        tag, position = payload[position], position + 1
        size = 0
        for _ in range(4):
            if position >= stop:
                return decoder, b""
            size = size << 7 | payload[position] & 0x7F
            position += 1
            if not payload[position - 1] & 0x80:
                break
        if tag == 0x03:  # ES descriptor: id and flags, then nested descriptors
            flags = payload[position + 2] if position + 2 < stop else 0
            position += 3 + (2 if flags & 0x80 else 0) + (2 if flags & 0x20 else 0)
            if flags & 0x40 and position < stop:
                position += 1 + payload[position]
        elif tag == 0x04:  # decoder configuration: object type and rates, then nested descriptors
            decoder = _MP4_OBJECT_TYPES.get(payload[position], "") if position < stop else ""
            position += 13
        elif tag == 0x05:
            return decoder, payload[position : position + size]
        else:
            position += size
    return decoder, b""
