"""Reading records ahead of training, in plan order, inside a byte budget, into buffers that are reused."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ingest.errors import BudgetError, SettingsError, StreamClosedError
from ingest.prefeature.reader import ALIGN, HeaderCache, read_tensors
from ingest.prefeature.records import RecordRequest

_ROUND = 1 << 20


def buffer_bytes(nbytes: int) -> int:
    """Bytes of the buffer that a request of ``nbytes`` gets: whole mebibytes, so that unequal records can share it."""
    return -(-nbytes // _ROUND) * _ROUND if nbytes >= _ROUND else max(nbytes, 1)


class BufferRing:
    """Reusable byte buffers whose total never exceeds a budget.

    Args:
        budget: bytes of all buffers together, free ones included.
        pinned: page-locked memory, for copies to a GPU that overlap with computing.

    Raises:
        SettingsError: the budget is not positive.
    """

    def __init__(self, budget: int, *, pinned: bool = False) -> None:
        if budget <= 0:
            raise SettingsError(f"byte budget must be positive, found {budget}")
        self.budget = budget
        self._pinned = pinned
        self._changed = threading.Condition()
        self._free: list[Tensor] = []
        self._held = 0
        self._peak = 0
        self._closed = False

    @property
    def held(self) -> int:
        """Bytes of all buffers now."""
        return self._held

    @property
    def peak(self) -> int:
        """Most bytes ever held."""
        return self._peak

    def acquire(self, nbytes: int) -> Tensor:
        """A uint8 buffer of at least ``nbytes``; waits until the budget allows it.

        Raises:
            BudgetError: one buffer alone exceeds the budget.
            StreamClosedError: closed while waiting.
        """
        size = buffer_bytes(nbytes)
        if size > self.budget:
            raise BudgetError(f"one record needs {size} bytes, the budget is {self.budget}; raise the prefetch byte budget")
        with self._changed:
            while True:
                if self._closed:
                    raise StreamClosedError("the record prefetcher was closed")
                found = self._take(size)
                if found is not None:
                    return found
                self._changed.wait()

    def _take(self, size: int) -> Tensor | None:
        fitting = [buffer for buffer in self._free if buffer.numel() >= size]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.numel())
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best
        while self._held + size > self.budget and self._free:
            self._held -= self._free.pop(0).numel()
        if self._held + size > self.budget:
            return None
        made = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self._held += size
        self._peak = max(self._peak, self._held)
        return made

    def release(self, buffer: Tensor) -> None:
        """Gives a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes everyone who waits."""
        with self._changed:
            self._closed = True
            self._free.clear()
            self._changed.notify_all()


class RecordLease:
    """The tensors of one record, valid until ``release``.

    Attributes:
        request: what was asked for.
        tensors: by role and name, views of one buffer.
    """

    def __init__(self, request: RecordRequest, tensors: Mapping[str, Mapping[str, Tensor]], buffer: Tensor, ring: BufferRing) -> None:
        self.request = request
        self.tensors = tensors
        self._buffer: Tensor | None = buffer
        self._ring = ring

    def release(self) -> None:
        """Gives the buffer back; the tensors must not be used afterwards."""
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._ring.release(buffer)

    def __enter__(self) -> RecordLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class RecordPrefetcher:
    """Reads requests in order with several threads and hands out leases in the same order.

    Buffers are taken in request order, so the budget can never be filled by records that are needed later than one that
    waits. A failed read is raised when its turn comes.

    Args:
        root: dataset root.
        requests: what to read, possibly without end.
        budget: bytes of all buffers, at least one record's; two or more records let reading overlap with training.
        threads: concurrent reads.
        pinned: page-locked buffers.
        drop_cache: do not keep the pages in the kernel's cache (an epoch is larger than memory).
    """

    def __init__(
        self,
        root: Path,
        requests: Iterable[RecordRequest],
        *,
        budget: int,
        threads: int = 4,
        pinned: bool = False,
        drop_cache: bool = False,
    ) -> None:
        if threads < 1:
            raise SettingsError(f"prefetch threads must be at least 1, found {threads}")
        self.ring = BufferRing(budget, pinned=pinned)
        self._root = root
        self._headers = HeaderCache()
        self._drop = drop_cache
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="record")
        self._ready: deque[Future[RecordLease] | BaseException] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._requests = iter(requests)
        self._feeder = threading.Thread(target=self._feed, name="record-feeder", daemon=True)
        self._feeder.start()

    def _feed(self) -> None:
        try:
            for request in self._requests:
                buffer = self.ring.acquire(request.nbytes)
                try:
                    future = self._pool.submit(self._read, request, buffer)
                except RuntimeError:
                    return  # closed between the two calls
                with self._changed:
                    self._ready.append(future)
                    self._changed.notify_all()
        except StreamClosedError:
            return
        except BaseException as error:
            with self._changed:
                self._ready.append(error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _read(self, request: RecordRequest, buffer: Tensor) -> RecordLease:
        try:
            tensors: dict[str, dict[str, Tensor]] = {}
            offset = 0
            for read in request.reads:
                found = read_tensors(
                    self._root,
                    read.path,
                    read.names,
                    cache=self._headers,
                    buffer=buffer[offset:],
                    solid=read.solid,
                    metadata=read.metadata,
                    drop_cache=self._drop,
                )
                tensors[read.role] = found
                # every tensor may have started at a multiple of ALIGN
                offset += sum(tensor.nbytes for tensor in found.values()) + (ALIGN - 1) * (len(found) - 1)
                offset += -offset % ALIGN
            return RecordLease(request, tensors, buffer, self.ring)
        except BaseException:
            self.ring.release(buffer)
            raise

    def __iter__(self) -> Iterator[RecordLease]:
        while True:
            with self._changed:
                while not self._ready and not self._ended and not self._closed:
                    self._changed.wait()
                if self._closed:
                    raise StreamClosedError("the record prefetcher was closed")
                if not self._ready:
                    return
                item = self._ready.popleft()
            if isinstance(item, BaseException):
                raise item
            yield item.result()

    def close(self) -> None:
        """Stops reading; leases that were handed out stay valid until released."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.ring.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._feeder.join()

    def __enter__(self) -> RecordPrefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
