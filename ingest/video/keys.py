"""Looking into a sample's first bytes: can a decoder begin with it?"""

from __future__ import annotations

from collections.abc import Iterator

from ingest.video.entries import SampleEntry

HEAD_BYTES = 4096
"""Enough of a sample to find its first coded picture, parameter sets and messages included."""


def can_start(entry: SampleEntry, head: bytes) -> bool | None:
    """Whether decoding may begin with the sample whose first bytes are ``head``.

    Args:
        entry: how the sample is coded.
        head: its first bytes (``HEAD_BYTES`` are plenty).

    Returns:
        True or False, or None when the codec or the bytes do not tell.
    """
    if entry.intra_only:
        return True
    match entry.decoder:
        case "h264":
            return _h264(head, length_size(entry) or 4)
        case "hevc":
            return _hevc(head, length_size(entry) or 4)
        case "av1":
            return _av1(head)
        case "vp9":
            return _vp9(head)
        case "mpeg4":
            after = _after_start_code(head, 0xB6)
            return None if after is None else after[0] >> 6 == 0
        case "mpeg2video" | "mpeg1video":
            after = _after_start_code(head, 0x00)
            return None if after is None else after[1] >> 3 & 7 == 1
        case _:
            return None


def is_complete(entry: SampleEntry, head: bytes) -> bool | None:
    """Whether a decoder that begins with a sample shows that sample's picture, and every picture after it.

    Args:
        entry: how the sample is coded.
        head: its first bytes.

    Returns:
        False where it is no entry point at all; None for H.264 entry points that may need a lead-in (intra refresh), or whose
        bytes do not tell; True otherwise.
    """
    entered = can_start(entry, head)
    if entered is False or entry.decoder != "h264":
        return entered is not False
    return True if entered and _h264_recovers_at_once(head, length_size(entry) or 4) else None


def length_size(entry: SampleEntry) -> int | None:
    """Bytes of the length before every coded unit of a sample; None for codecs without such lengths."""
    at = {"h264": 4, "hevc": 21}.get(entry.decoder)
    if at is None or len(entry.extradata) <= at or entry.extradata[0] != 1:
        return None
    return (entry.extradata[at] & 3) + 1


def _units(head: bytes, length_size: int) -> Iterator[bytes]:
    position = 0
    while position + length_size < len(head):
        size = int.from_bytes(head[position : position + length_size], "big")
        position += length_size
        if size == 0:
            return
        yield head[position : position + size]
        position += size


def _h264(head: bytes, length_size: int) -> bool | None:
    for unit in _units(head, length_size):
        kind = unit[0] & 31
        if kind == 5:
            return True
        if kind == 1:
            bits = _Bits(unit[1:16])
            bits.exp_golomb()
            slice_type = bits.exp_golomb()
            # Intra pictures that are not IDR are entry points where the file lists them: open GOPs and recovery points.
            return None if slice_type is None else slice_type % 5 in (2, 4)
        if kind in (2, 3, 4):
            return False
    return None


def _h264_recovers_at_once(head: bytes, length_size: int) -> bool:
    """Whether the picture is IDR, or its recovery point message says that no picture after it is needed for recovery."""
    for unit in _units(head, length_size):
        kind = unit[0] & 31
        if kind in (1, 5):
            return kind == 5
        if kind == 6 and _recovery_frames(unit) == 0:
            return True
    return False


def _recovery_frames(message: bytes) -> int | None:
    """Recovery frame count of an SEI unit; None where it has no recovery point message."""
    position = 1
    while position + 1 < len(message):
        sizes: list[int] = []
        for _ in range(2):
            value = 0
            while position < len(message) and message[position] == 0xFF:
                value, position = value + 255, position + 1
            if position >= len(message):
                return None
            sizes.append(value + message[position])
            position += 1
        if sizes[0] == 6:
            return _Bits(message[position : position + 8]).exp_golomb()
        position += sizes[1]
    return None


def _hevc(head: bytes, length_size: int) -> bool | None:
    for unit in _units(head, length_size):
        kind = unit[0] >> 1 & 63
        if kind < 32:
            return 16 <= kind <= 23
    return None


def _av1(head: bytes) -> bool | None:
    position = 0
    while position < len(head):
        header = head[position]
        kind = header >> 3 & 15
        position += 2 if header & 4 else 1
        size = len(head) - position
        if header & 2:
            size, shift = 0, 0
            while position < len(head) and shift < 35:
                byte = head[position]
                position += 1
                size |= (byte & 127) << shift
                shift += 7
                if not byte & 128:
                    break
        if kind in (3, 6) and position < len(head):
            shown_again, frame_type = head[position] >> 7, head[position] >> 5 & 3
            return not shown_again and frame_type == 0
        position += size
    return None


def _vp9(head: bytes) -> bool | None:
    bits = _Bits(head[:4])
    if bits.take(2) != 2:
        return None
    profile = bits.take(1) | bits.take(1) << 1
    if profile == 3:
        bits.take(1)
    return bits.take(1) == 0 and bits.take(1) == 0


def _after_start_code(head: bytes, code: int) -> bytes | None:
    at = head.find(bytes((0, 0, 1, code)))
    after = head[at + 4 : at + 6]
    return None if at < 0 or len(after) < 2 else after


class _Bits:
    """Most significant bit first; reading past the end gives zeros."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        self._left -= count
        return self._value >> self._left & (1 << count) - 1 if self._left >= 0 else 0

    def exp_golomb(self) -> int | None:
        zeros = 0
        while self._left > 0 and not self.take(1):
            zeros += 1
            if zeros > 31:
                return None
        return (1 << zeros) - 1 + self.take(zeros) if self._left >= zeros else None
