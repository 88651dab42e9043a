"""Frame slots shared by the processes of one node, with nothing to clean up.

The rank that trains owns the memory: an anonymous file (``memfd``) that has no name in any file system, so it cannot be
left behind by a crash, and that is not limited by the size of ``/dev/shm``. Decode actors on the same node map it through
``/proc/<pid>/fd/<fd>`` and write pictures straight into slots; Ray only ever carries slot numbers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingest.engine.frames import SlotAllocator
from ingest.errors import ResourceUnavailableError, StreamClosedError

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class SlabHandle:
    """How another process on the same node finds a slab.

    Attributes:
        pid: the owner's process id.
        descriptor: the owner's file descriptor.
        token: random text written at the start of the slab, so that a recycled process id is not taken for the owner.
        slot_bytes: bytes of one slot.
        slots: slots at the time the handle was made.
    """

    pid: int
    descriptor: int
    token: bytes
    slot_bytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        """Bytes of the mapping: one page that holds the token, then the slots."""
        return _PAGE + self.slots * self.slot_bytes


class _Slots:
    """Numbered, equally long pieces of a mapping."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int) -> None:
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self._slot_bytes = slot_bytes

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        start = _PAGE + int(slot) * self._slot_bytes
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes > self._slot_bytes:
            raise ValueError(f"a picture of {nbytes} bytes does not fit a slot of {self._slot_bytes}")
        return self._bytes[start : start + nbytes].view(dtype).reshape(tuple(shape))


class FrameSlab:
    """The owner's side: allocates slots and reads pictures from them. Implements `ingest.engine.frames.FrameStore`.

    Args:
        slot_bytes: bytes of the largest picture; rounded up to whole pages.
        slots: number of slots; memory is taken by the kernel only as slots are first written.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        self.slots = slots
        self._token = secrets.token_bytes(16)
        self._descriptor = os.memfd_create("reelray-frames", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, _PAGE + slots * self.slot_bytes)
            self._memory = mmap.mmap(self._descriptor, _PAGE + slots * self.slot_bytes)
        except OSError as error:
            os.close(self._descriptor)
            raise ResourceUnavailableError(
                f"cannot map {slots} frame slots of {self.slot_bytes} bytes ({slots * self.slot_bytes / 2**30:.2f} GiB): "
                f"{error.strerror}; lower decoded_budget_gb"
            ) from error
        self._memory[:16] = self._token
        self._slots: _Slots | None = _Slots(self._memory, self.slot_bytes)
        self._allocator = SlotAllocator(slots)

    @property
    def handle(self) -> SlabHandle:
        """What decode actors on this node need to write into the slab."""
        return SlabHandle(os.getpid(), self._descriptor, self._token, self.slot_bytes, self.slots)

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

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        if self._slots is None:
            raise StreamClosedError("the frame slab is closed")
        return self._slots.view(slot, shape, dtype)

    def release(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        self._allocator.release(slots)

    def replace_lost(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        """Gives up slots that a lost decoder may still write to, and adds as many new ones.

        A decoder that is unreachable may be alive. Its slots must never be used again, or it could paint an old picture
        over a new one; so the slab grows by what was lost.
        """
        count = len(slots)
        grown = _PAGE + (self.slots + count) * self.slot_bytes
        os.ftruncate(self._descriptor, grown)
        # The old mapping stays alive as long as views of it do; the new one shows the same memory and more.
        self._memory = mmap.mmap(self._descriptor, grown)
        self._slots = _Slots(self._memory, self.slot_bytes)
        self.slots += count
        self._allocator.grow(count)

    def close(self) -> None:
        if self._slots is None:
            return
        self._allocator.close()
        self._slots = None
        os.close(self._descriptor)


class AttachedSlabs:
    """The decode actor's side: maps slabs by handle and forgets those whose owner is gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, bytes], tuple[int, _Slots]] = {}

    def view(self, handle: SlabHandle, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        """The memory of one slot of the slab behind ``handle``.

        Raises:
            StreamClosedError: the owner is gone or has closed the slab.
        """
        key = (handle.pid, handle.token)
        with self._lock:
            found = self._mapped.get(key)
            if found is None or found[0] < handle.slots:
                self._drop_orphans()
                found = (handle.slots, self._attach(handle))
                self._mapped[key] = found
        return found[1].view(slot, shape, dtype)

    def _attach(self, handle: SlabHandle) -> _Slots:
        gone = StreamClosedError(f"the frame slab of process {handle.pid} is gone: its rank has ended or closed the stream")
        try:
            descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise gone from error
        try:
            if os.pread(descriptor, 16, 0) != handle.token:
                raise gone
            memory = mmap.mmap(descriptor, handle.nbytes)
        except (OSError, ValueError) as error:
            raise gone from error
        finally:
            os.close(descriptor)
        return _Slots(memory, handle.slot_bytes)

    def _drop_orphans(self) -> None:
        for key in list(self._mapped):
            if not os.path.exists(f"/proc/{key[0]}"):
                del self._mapped[key]

    def drop(self, token: bytes) -> None:
        """Unmaps one slab, when its owner says that the stream has ended."""
        with self._lock, contextlib.suppress(StopIteration):
            del self._mapped[next(key for key in self._mapped if key[1] == token)]
