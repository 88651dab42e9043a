"""Memory of whole batches: a picture that is used once is decoded straight to its place in the batch that delivers it.

That saves the copy from slot to batch and the slot's memory. A block is one camera's part of one batch: as many slots as the
batch has samples, without gaps, so that the block is the array that the training loop gets. It returns to the store when nobody
refers to that array any more, and the most recent one is used again first, because its pages are warm.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ingest.errors import StreamClosedError


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One camera's pictures of one batch.

    Attributes:
        first: slot number of the first picture; the others follow.
        memory: uint8[batch * slot_bytes]; the block returns to its store when neither this nor a view of it is left.
    """

    first: int
    memory: NDArray[np.uint8]


class BlockStore(Protocol):
    """Blocks of equal size, as many as are asked for. Implementations are thread-safe."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one picture."""
        ...

    def take(self) -> Block:
        """A block with undefined content that nobody else has."""
        ...

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        """The memory of one slot as an array of ``shape``."""
        ...

    def close(self) -> None:
        """Frees what is not in use. Blocks that were handed out stay valid. Idempotent."""
        ...


class BlockRecycler:
    """Numbers of free blocks; knows from the garbage collector when one is free again."""

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self._retired: set[int] = set()
        self._made = 0

    def take(self) -> tuple[int, bool]:
        """The number of a free block, and whether it never was in use before."""
        try:
            return self._free.pop(), False
        except IndexError:
            self._made += 1
            return self._made - 1, True

    def watch(self, number: int, memory: NDArray[np.uint8]) -> None:
        """Frees a block when ``memory``, on which every view of it is based, is gone."""
        weakref.finalize(memory, _give_back, self._free, self._retired, number).atexit = False

    def retire(self, number: int) -> None:
        """Keeps a block from being used again: somebody that is out of reach may still write to it."""
        self._retired.add(number)


def _give_back(free: deque[int], retired: set[int], number: int) -> None:
    if number not in retired:
        free.append(number)


class HeapBlocks:
    """Blocks in this process's own memory. Implements `BlockStore`.

    Args:
        slot_bytes: bytes of one picture.
        batch: pictures of one block.
    """

    def __init__(self, slot_bytes: int, batch: int) -> None:
        self.slot_bytes = slot_bytes
        self._batch = batch
        self._recycler = BlockRecycler()
        self._chunks: dict[int, NDArray[np.uint8]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> Block:
        with self._lock:
            if self._closed:
                raise StreamClosedError("the batch memory is closed")
            number, fresh = self._recycler.take()
            if fresh:
                self._chunks[number] = np.empty(self._batch * self.slot_bytes, np.uint8)
            # An array of its own: views of it refer to it, and not to the chunk, so its end is the end of the last view.
            memory = np.frombuffer(self._chunks[number].data, np.uint8)
            self._recycler.watch(number, memory)
        return Block(number * self._batch, memory)

    def view(self, slot: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        chunk = self._chunks.get(slot // self._batch)
        if chunk is None:
            raise StreamClosedError("the batch memory is closed")
        start = slot % self._batch * self.slot_bytes
        return chunk[start : start + self.slot_bytes].view(dtype).reshape(tuple(shape))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._chunks = {}


class OpenBatches:
    """How many batches may be open, that is: have memory and are not handed on yet. Thread-safe.

    Args:
        limit: most open batches.

    Attributes:
        peak: most that were open at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._open = 0
        self._changed = threading.Condition()
        self._closed = False

    @property
    def count(self) -> int:
        """Batches that are open."""
        with self._changed:
            return self._open

    def allow(self, limit: int) -> None:
        """Raises the limit."""
        with self._changed:
            self.limit = max(self.limit, limit)
            self._changed.notify_all()

    def open(self, given_up: Callable[[], bool]) -> None:
        """Counts one more, waiting for room.

        Raises:
            StreamClosedError: this was closed, or ``given_up`` said so.
        """
        with self._changed:
            self._await(lambda: self._open < self.limit, given_up)
            self._open += 1
            self.peak = max(self.peak, self._open)

    def drained(self, given_up: Callable[[], bool]) -> None:
        """Waits until none is open.

        Raises:
            StreamClosedError: this was closed, or ``given_up`` said so.
        """
        with self._changed:
            self._await(lambda: self._open == 0, given_up)

    def _await(self, ready: Callable[[], bool], given_up: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or given_up() or ready())
        if self._closed or given_up():
            raise StreamClosedError("the stream was closed while a decoder waited for batch memory")

    def shut(self, count: int = 1) -> None:
        """Counts batches that were handed on."""
        with self._changed:
            self._open -= count
            self._changed.notify_all()

    def wake(self) -> None:
        """Lets whoever waits ask again whether to give up."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes every waiter with `StreamClosedError`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
