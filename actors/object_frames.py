"""Frame slots in Ray's object store: each decode call's pictures are one object, mapped by the rank and never copied to a slot.

The rank owns the objects, so they go when it dies, however it dies. What it holds is bounded by the slots, which are
reserved before a call starts. A decoder writes to memory of its own and Ray copies that into the store, so a picture costs
one copy and fresh pages more than with `actors.slab.FrameSlab`; in return decoders may be on any node.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingest.engine.frames import AllocatedSlots
from ingest.errors import StreamClosedError


@dataclass(slots=True, eq=False)
class _Landed:
    """The pictures of one call, and the slots of theirs that are still held."""

    pictures: NDArray[np.generic]
    held: set[int]
    left: list[int] = field(default_factory=list[int])


class ObjectFrames(AllocatedSlots):
    """Slots whose pictures arrive as arrays that Ray mapped. Implements `ingest.engine.frames.FrameStore`.

    The memory of a call can only be given back as a whole: its slots come free together, with the last that is released.

    Args:
        slot_bytes: bytes of the largest picture.
        slots: pictures that may be held at a time.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        super().__init__(slot_bytes, slots)
        self._lock = threading.Lock()
        self._at: dict[int, tuple[_Landed, int]] = {}
        self._closed = False

    def warm(self, count: int) -> None:
        """Nothing to do: the memory is the object store's, which `RAY_preallocate_plasma_memory` touches when Ray starts."""

    def land(self, slots: Sequence[int] | NDArray[np.int32], pictures: NDArray[np.generic]) -> None:
        """Puts pictures where they were expected; they are dropped if the store was closed meanwhile.

        Args:
            slots: reserved slots, [N].
            pictures: [N, ...], as Ray handed them over.

        Raises:
            ValueError: the number or the size of the pictures is not what was reserved.
        """
        numbers = [int(slot) for slot in slots]
        if len(pictures) != len(numbers) or pictures.nbytes > len(numbers) * self.slot_bytes:
            raise ValueError(
                f"{len(pictures)} pictures of {pictures.nbytes} bytes arrived for {len(numbers)} slots of {self.slot_bytes} bytes"
            )
        landed = _Landed(pictures, set(numbers))
        with self._lock:
            if not self._closed:
                self._at.update((slot, (landed, place)) for place, slot in enumerate(numbers))

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        with self._lock:
            if self._closed:
                raise StreamClosedError("the frame store is closed")
            landed, place = self._at[int(slot)]
        return landed.pictures[place].view(dtype).reshape(tuple(shape))

    def release(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        free: list[int] = []
        with self._lock:
            for slot in (int(slot) for slot in slots):
                found = self._at.pop(slot, None)
                if found is None:  # its call failed, so that nothing landed
                    free.append(slot)
                    continue
                landed = found[0]
                landed.held.discard(slot)
                landed.left.append(slot)
                if not landed.held:
                    free += landed.left
        self._allocator.release(free)

    def close(self) -> None:
        self._allocator.close()
        with self._lock:
            self._closed = True
            self._at.clear()
