"""Frame slots shared by the processes of one node, with nothing to clean up.

The rank that trains owns the memory: an anonymous file (``memfd``) that has no name in any file system, so it cannot be
left behind by a crash, and that is not limited by the size of ``/dev/shm``. Decode actors on the same node map it through
``/proc/<pid>/fd/<fd>`` and write pictures straight into slots; Ray only ever carries slot numbers.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingest.engine.blocks import Block, BlockRecycler
from ingest.engine.frames import AllocatedSlots
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

    @property
    def path(self) -> str:
        """Where the node's other processes open it."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"


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

    def touch(self, count: int) -> None:
        """Writes to the first so many slots."""
        self._bytes[_PAGE : _PAGE + count * self._slot_bytes].fill(0)


class _SharedFile:
    """An anonymous file that other processes of the node can map while it is open: one page with a token, then the slots."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self._slot_bytes = slot_bytes
        self._token = secrets.token_bytes(16)
        self._descriptor = os.memfd_create("reelray-frames", os.MFD_CLOEXEC)
        try:
            self.memory = self.resized(slots)
        except OSError as error:
            os.close(self._descriptor)
            raise ResourceUnavailableError(
                f"cannot map {slots} frame slots of {slot_bytes} bytes ({slots * slot_bytes / 2**30:.2f} GiB): "
                f"{error.strerror}; lower decoded_budget_gb"
            ) from error
        self.memory[:16] = self._token

    def resized(self, slots: int) -> mmap.mmap:
        """Makes room for that many slots; a mapping of all of them. Older mappings show the same memory."""
        self.slots = slots
        os.ftruncate(self._descriptor, _PAGE + slots * self._slot_bytes)
        self.memory = mmap.mmap(self._descriptor, _PAGE + slots * self._slot_bytes)
        return self.memory

    @property
    def handle(self) -> SlabHandle:
        return SlabHandle(os.getpid(), self._descriptor, self._token, self._slot_bytes, self.slots)

    def close(self) -> None:
        """Lets go of the memory, which stays as long as a view of it does."""
        os.close(self._descriptor)
        del self.memory


class FrameSlab(AllocatedSlots):
    """The owner's side: allocates slots and reads pictures from them. Implements `ingest.engine.frames.FrameStore`.

    Args:
        slot_bytes: bytes of the largest picture; rounded up to whole pages.
        slots: number of slots; memory is taken by the kernel only as slots are first written.
    """

    def __init__(self, slot_bytes: int, slots: int) -> None:
        super().__init__(-(-slot_bytes // _PAGE) * _PAGE, slots)
        self._file = _SharedFile(self.slot_bytes, slots)
        self._slots: _Slots | None = _Slots(self._file.memory, self.slot_bytes)
        self._resizing = threading.Lock()

    @property
    def handle(self) -> SlabHandle:
        """What decode actors on this node need to write into the slab."""
        return self._file.handle

    def warm(self, count: int) -> None:
        if self._slots is not None:
            self._slots.touch(count)

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        if self._slots is None:
            raise StreamClosedError("the frame slab is closed")
        return self._slots.view(slot, shape, dtype)

    def release(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        self._allocator.release(slots)

    def replace_lost(self, slots: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Gives up slots that a lost decoder may still write to, adds as many new ones, and reserves those.

        A decoder that is unreachable may be alive. Its slots must never be used again, or it could paint an old picture
        over a new one; so the slab grows by what was lost.

        Raises:
            StreamClosedError: the slab was closed.
        """
        count = len(slots)
        with self._resizing:
            if self._slots is None:
                raise StreamClosedError("the frame slab was closed while a lost decode call was to be sent again")
            self._slots = _Slots(self._file.resized(self.slots + count), self.slot_bytes)
            self.slots += count
            return self._allocator.grow(count)

    def close(self) -> None:
        self._allocator.close()
        # The descriptor's number may belong to another file afterwards: nothing may be resized then.
        with self._resizing:
            if self._slots is not None:
                self._slots = None
                self._file.close()


class BlockSlab:
    """Memory of whole batches that decode actors write to. Implements `ingest.engine.blocks.BlockStore`.

    Args:
        slot_bytes: bytes of one picture; slots follow each other without gaps.
        batch: pictures of one block.
        blocks: blocks to map at first; more are mapped when they are needed. Memory is taken as blocks are first written.
    """

    def __init__(self, slot_bytes: int, batch: int, blocks: int) -> None:
        self.slot_bytes = slot_bytes
        self._batch = batch
        self._file = _SharedFile(slot_bytes, blocks * batch)
        self._slots: _Slots | None = _Slots(self._file.memory, slot_bytes)
        self._recycler = BlockRecycler()
        self._lock = threading.Lock()

    @property
    def handle(self) -> SlabHandle:
        """What decode actors on this node need to write into the blocks."""
        return self._file.handle

    def take(self) -> Block:
        with self._lock:
            if self._slots is None:
                raise StreamClosedError("the batch memory is closed")
            number, _ = self._recycler.take()
            mapped = self._file.slots // self._batch
            if number >= mapped:
                # Every resize is a new mapping, whose pages are cold in all processes: few and large ones.
                self._slots = _Slots(self._file.resized((mapped + max(1, mapped // 2)) * self._batch), self.slot_bytes)
            size = self._batch * self.slot_bytes
            memory = np.frombuffer(self._file.memory, np.uint8, size, _PAGE + number * size)
            self._recycler.watch(number, memory)
        return Block(number * self._batch, memory)

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        if self._slots is None:
            raise StreamClosedError("the batch memory is closed")
        return self._slots.view(slot, shape, dtype)

    def replace_lost(self, slots: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
        """The same slots: a lost decoder that still runs writes the same pictures. Their blocks are not used for others."""
        for number in {int(slot) // self._batch for slot in slots}:
            self._recycler.retire(number)
        return np.asarray(slots, np.int32)

    def close(self) -> None:
        with self._lock:
            if self._slots is not None:
                self._slots = None
                self._file.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Attached:
    """A mapped slab, and what tells its file from another that got the same descriptor later."""

    handle: SlabHandle
    device: int
    inode: int
    slots: _Slots

    def closed(self) -> bool:
        """Whether its owner has closed it, or is gone."""
        try:
            found = os.stat(self.handle.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != (self.device, self.inode)


class AttachedSlabs:
    """The decode actor's side: maps slabs by handle and forgets those that their owner has closed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[bytes, _Attached] = {}

    def view(self, handle: SlabHandle, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        """The memory of one slot of the slab behind ``handle``.

        Raises:
            StreamClosedError: the owner is gone or has closed the slab.
        """
        with self._lock:
            found = self._mapped.get(handle.token)
            if found is None or found.handle.slots < handle.slots:
                found = self._attach(handle)
        return found.slots.view(slot, shape, dtype)

    def warm(self, handle: SlabHandle) -> None:
        """Maps a slab with all its pages, so that no page is met for the first time while pictures are being decoded.

        Raises:
            StreamClosedError: the owner is gone or has closed the slab.
        """
        with self._lock:
            self._attach(handle, populate=True)

    def _attach(self, handle: SlabHandle, *, populate: bool = False) -> _Attached:
        # A stream that goes on without a damaged episode closes its memory and makes new: nobody says so to the decoders.
        for token in [token for token, one in self._mapped.items() if one.closed()]:
            del self._mapped[token]
        gone = StreamClosedError(
            f"the frame slab of process {handle.pid} is gone: its rank has ended or closed the stream; if it has not, it runs in another "
            "container or as another user than this decoder, and needs --frame-store object_store"
        )
        try:
            descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise gone from error
        try:
            if os.pread(descriptor, 16, 0) != handle.token:
                raise gone
            memory = mmap.mmap(descriptor, handle.nbytes, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0))
            found = os.fstat(descriptor)
        except (OSError, ValueError) as error:
            raise gone from error
        finally:
            os.close(descriptor)
        attached = _Attached(handle, found.st_dev, found.st_ino, _Slots(memory, handle.slot_bytes))
        self._mapped[handle.token] = attached
        return attached

    def drop(self, token: bytes) -> None:
        """Unmaps one slab, when its owner says that the stream has ended."""
        with self._lock:
            self._mapped.pop(token, None)
