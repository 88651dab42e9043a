"""The state of a coverage pool as a few kilobytes, so that a resume need not replay millions of draws.

Shuffled frames are not stored: a resident keeps the generator state before its shuffle, which repeats it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from ingest.errors import CursorError
from ingest.plan.pool import CoveragePool

MAX_STATE_BYTES = 32 * 1024
"""Largest state that is written; a pool that needs more is replayed."""

_MAGIC = b"RRPOOL1\n"
_CHECK_BYTES = 16
_HEADER = struct.Struct("<16sQIIII")
_GENERATOR = struct.Struct("<16s16sBI")
_RESIDENT = struct.Struct("<QQ")


def dump_pool(pool: CoveragePool) -> bytes | None:
    """The state of a pool, or None when it would exceed ``MAX_STATE_BYTES``."""
    pool.settle()
    taken = pool.taken_flags()
    head = int(np.argmin(np.append(taken, [False])))
    reach = int(np.flatnonzero(taken)[-1]) + 1 if taken.any() else 0
    passed = np.packbits(taken[head:reach]).tobytes()
    residents, places = pool.residents, pool.round_places()
    parts = [
        _MAGIC,
        _HEADER.pack(pool.identity(), pool.emitted, head, max(reach - head, 0), len(residents), len(places)),
        _pack_generator(dict(pool.rng.bit_generator.state)),
        *(_RESIDENT.pack(one.slot, one.left) + _pack_generator(one.state) for one in residents),
        np.array(places, dtype="<u4").tobytes(),
        passed,
    ]
    body = b"".join(parts)
    body += hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
    return body if len(body) <= MAX_STATE_BYTES else None


def load_pool(pool: CoveragePool, state: bytes) -> None:
    """Put a freshly made pool into a stored state.

    Raises:
        CursorError: when the bytes are damaged, or belong to another order.
    """
    body, check = state[:-_CHECK_BYTES], state[-_CHECK_BYTES:]
    shortest = len(_MAGIC) + _HEADER.size + _GENERATOR.size
    if len(state) > MAX_STATE_BYTES or len(body) < shortest or not body.startswith(_MAGIC):
        raise CursorError(
            f"not a pool state: expected {shortest + _CHECK_BYTES} to {MAX_STATE_BYTES} bytes of format RRPOOL1, found {len(state)}"
        )
    if hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest() != check:
        raise CursorError("the pool state is damaged (checksum differs); delete it, and the order is recomputed")
    place = len(_MAGIC)
    identity, emitted, head, reach, count, rounds = _HEADER.unpack_from(body, place)
    if identity != pool.identity():
        raise CursorError("the pool state belongs to another share, seed, epoch, pool size, budget or strategy; delete it")
    place += _HEADER.size
    expected = place + _GENERATOR.size * (count + 1) + _RESIDENT.size * count + 4 * rounds + -(-reach // 8)
    if len(body) != expected:
        raise CursorError(f"the pool state should have {expected + _CHECK_BYTES} bytes, found {len(state)}")
    generator = _unpack_generator(body, place)
    place += _GENERATOR.size
    residents: list[tuple[int, int, dict[str, Any]]] = []
    for _ in range(count):
        slot, left = _RESIDENT.unpack_from(body, place)
        residents.append((slot, left, _unpack_generator(body, place + _RESIDENT.size)))
        place += _RESIDENT.size + _GENERATOR.size
    places = np.frombuffer(body, dtype="<u4", count=rounds, offset=place).tolist()
    place += 4 * rounds
    taken = pool.taken_flags()
    taken[:head] = True
    taken[head : head + reach] = np.unpackbits(np.frombuffer(body, dtype=np.uint8, offset=place), count=reach)
    taken[head + reach :] = False
    pool.restore(emitted, taken, residents, places, generator)


def _pack_generator(state: dict[str, Any]) -> bytes:
    inner = state["state"]
    return _GENERATOR.pack(
        inner["state"].to_bytes(16, "little"), inner["inc"].to_bytes(16, "little"), state["has_uint32"], state["uinteger"]
    )


def _unpack_generator(body: bytes, place: int) -> dict[str, Any]:
    value, increment, has_half, half = _GENERATOR.unpack_from(body, place)
    inner = {"state": int.from_bytes(value, "little"), "inc": int.from_bytes(increment, "little")}
    return {"bit_generator": "PCG64", "state": inner, "has_uint32": has_half, "uinteger": half}
