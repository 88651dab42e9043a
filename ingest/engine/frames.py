"""Where decoded pictures live between decoder and batch: the frame lease.

A slot is reserved, written by a decoder, viewed while batches gather from it, and released after its last use in the
plan. Slots are numbers, so they travel between processes; what a number means is the store's matter. The heap store
below serves one process; `actors.slab.FrameSlab` serves a node.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingest.errors import BudgetError, StreamClosedError


class FrameStore(Protocol):
    """A bounded set of equal slots. Implementations are thread-safe."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        ...

    @property
    def slots(self) -> int:
        """How many slots there are."""
        ...

    @property
    def free(self) -> int:
        """Slots that may be reserved without waiting."""
        ...

    @property
    def peak_used(self) -> int:
        """The most slots that were ever taken at once."""
        ...

    def reserve(self, count: int, timeout_s: float | None = None) -> NDArray[np.int32]:
        """Takes ``count`` slots, waiting until that many are free.

        Raises:
            BudgetError: ``count`` exceeds the number of slots, so that waiting could never help.
            TimeoutError: not enough slots came free in ``timeout_s`` seconds.
            StreamClosedError: the store was closed.
        """
        ...

    def warm(self, count: int) -> None:
        """Touches the memory of the slots that are handed out first, before any is, so that no decoder meets fresh pages."""
        ...

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        """The slot's memory as an array of ``shape``; valid until the slot is released."""
        ...

    def release(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        """Gives slots back. Their memory may be overwritten at once."""
        ...

    def close(self) -> None:
        """Wakes every waiter with `StreamClosedError` and frees the memory. Idempotent."""
        ...


class SlotAllocator:
    """Hands out slot numbers, from 0 on, and last released first, so that warm pages are used again."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._slots = slots
        self._changed = threading.Condition()
        self._closed = False
        self.peak_used = 0

    @property
    def free(self) -> int:
        """Slots that may be reserved without waiting."""
        with self._changed:
            return len(self._free)

    def reserve(self, count: int, timeout_s: float | None = None) -> NDArray[np.int32]:
        """See `FrameStore.reserve`."""
        with self._changed:
            if count > self._slots:
                raise BudgetError(
                    f"{count} decoded pictures are needed at once, but the frame store holds {self._slots}; "
                    "raise decoded_budget_gb, or lower the batch size, the window or the picture size"
                )
            if not self._changed.wait_for(lambda: self._closed or len(self._free) >= count, timeout_s):
                raise TimeoutError(f"{count} frame slots wanted, {len(self._free)} of {self._slots} free after {timeout_s} s")
            if self._closed:
                raise StreamClosedError("the frame store was closed while a decoder waited for slots")
            taken = [self._free.pop() for _ in range(count)]
            self.peak_used = max(self.peak_used, self._slots - len(self._free))
        return np.asarray(taken, dtype=np.int32)

    def release(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        """See `FrameStore.release`."""
        with self._changed:
            self._free.extend(int(slot) for slot in slots)
            self._changed.notify_all()

    def grow(self, count: int) -> NDArray[np.int32]:
        """Adds new slots behind the present ones and takes them: whoever waits for slots does not get them."""
        with self._changed:
            fresh = np.arange(self._slots, self._slots + count, dtype=np.int32)
            self._slots += count
            self.peak_used = max(self.peak_used, self._slots - len(self._free))
        return fresh

    def close(self) -> None:
        """See `FrameStore.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class AllocatedSlots:
    """What frame stores have in common, whatever memory their slots are in: which of them are taken.

    Args:
        slot_bytes: bytes of one slot.
        slots: number of slots.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._allocator = SlotAllocator(slots)

    @property
    def free(self) -> int:
        """Slots that may be reserved without waiting."""
        return self._allocator.free

    @property
    def peak_used(self) -> int:
        """The most slots that were ever taken at once."""
        return self._allocator.peak_used

    def reserve(self, count: int, timeout_s: float | None = None) -> NDArray[np.int32]:
        return self._allocator.reserve(count, timeout_s)


class HeapFrames(AllocatedSlots):
    """A frame store in this process's own memory."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        super().__init__(slot_bytes, slots)
        self._memory: NDArray[np.uint8] | None = np.empty((slots, slot_bytes), dtype=np.uint8)

    def warm(self, count: int) -> None:
        if self._memory is not None:
            self._memory[:count].fill(0)

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        if self._memory is None:
            raise StreamClosedError("the frame store is closed")
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._memory[slot, :nbytes].view(dtype).reshape(tuple(shape))

    def release(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        self._allocator.release(slots)

    def close(self) -> None:
        self._allocator.close()
        self._memory = None
