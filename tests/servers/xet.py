"""As much of a Xet content store as an upload by the real client takes: it keeps chunks and puts files together from them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator

from servers.ranges import Reply, Request

_CHUNK_HEADER = 8
_ENTRY = 48
_VERIFIED, _EXTENDED = 0x80000000, 0x40000000
_FRAME_MAGIC = 0x184D2204


def hash_text(raw: bytes) -> str:
    """A 32-byte hash as Xet writes it: four little-endian words in hex."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


class XetStore:
    """Answers a client's upload requests; finished files land in ``files`` by both their hashes."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self._xorbs: dict[str, list[bytes]] = {}

    def answer(self, request: Request) -> Reply | None:
        """The reply to a request of the content store's interface; None for any other."""
        parts = request.path.strip("/").split("/")
        if parts[:1] not in (["v1"], ["v2"]):
            return None
        if parts[1] == "xorbs":
            self._xorbs[parts[-1]] = list(_chunks(request.body))
            return _json({"was_inserted": True})
        if parts[1] == "shards":
            self._read_shard(request.body)
            # The second version answers with progress lines and a last one that ends them.
            return Reply(200, {"content-type": "application/x-ndjson"}, b'{"type": "result", "result": 1}\n')
        if parts[1] == "telemetry":
            return _json({})
        return Reply(404)

    def _read_shard(self, shard: bytes) -> None:
        position = _ENTRY
        while shard[position : position + 32] != b"\xff" * 32:
            file_hash, flags, count = struct.unpack_from("<32sII", shard, position)
            position += _ENTRY
            parts: list[bytes] = []
            for _ in range(count):
                xorb_hash, _, _, first, last = struct.unpack_from("<32sIIII", shard, position)
                parts.extend(self._xorbs[hash_text(xorb_hash)][first:last])
                position += _ENTRY
            position += _ENTRY * (count * bool(flags & _VERIFIED) + bool(flags & _EXTENDED))
            data = b"".join(parts)
            # Buckets name a file by its Xet hash, commits of a repository by its SHA-256.
            self.files[hash_text(file_hash)] = self.files[hashlib.sha256(data).hexdigest()] = data


def _json(value: object) -> Reply:
    return Reply(200, {"content-type": "application/json"}, json.dumps(value).encode())


def _chunks(xorb: bytes) -> Iterator[bytes]:
    position = 0
    while position + _CHUNK_HEADER <= len(xorb) and xorb[position] == 0:
        packed = int.from_bytes(xorb[position + 1 : position + 4], "little")
        scheme = xorb[position + 4]
        size = int.from_bytes(xorb[position + 5 : position + 8], "little")
        position += _CHUNK_HEADER
        yield _unpack(xorb[position : position + packed], scheme, size)
        position += packed


def _unpack(data: bytes, scheme: int, size: int) -> bytes:
    if scheme == 0:
        return data
    plain = _lz4_frame(data)
    assert len(plain) == size
    if scheme == 1:
        return plain
    # Scheme 2 stores every fourth byte together before compressing.
    out = bytearray(size)
    start = 0
    for group in range(4):
        length = len(range(group, size, 4))
        out[group::4] = plain[start : start + length]
        start += length
    return bytes(out)


def _lz4_frame(data: bytes) -> bytes:
    magic, flags = struct.unpack_from("<IB", data)
    assert magic == _FRAME_MAGIC
    position = 7 + 8 * bool(flags & 0x08) + 4 * bool(flags & 0x01)
    out = bytearray()
    while (length := struct.unpack_from("<I", data, position)[0]) != 0:
        position += 4
        size = length & 0x7FFFFFFF
        block = data[position : position + size]
        if length & 0x80000000:
            out += block
        else:
            _lz4_block(block, out)
        position += size + 4 * bool(flags & 0x10)
    return bytes(out)


def _lz4_block(block: bytes, out: bytearray) -> None:
    position = 0

    def extended(base: int) -> int:
        nonlocal position
        length = base
        if base == 15:
            while True:
                more = block[position]
                position += 1
                length += more
                if more != 255:
                    break
        return length

    while position < len(block):
        token = block[position]
        position += 1
        literals = extended(token >> 4)
        out += block[position : position + literals]
        position += literals
        if position >= len(block):
            return
        offset = block[position] | block[position + 1] << 8
        position += 2
        length = extended(token & 15) + 4
        start = len(out) - offset
        for index in range(start, start + length):
            out.append(out[index])
