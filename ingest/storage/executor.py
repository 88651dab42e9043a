"""One pool of connections per process: bounds how many ranges, and how many bytes, are in flight at once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

from ingest.errors import SettingsError, StreamClosedError
from ingest.storage.base import ByteRange
from ingest.storage.ranges import RangePlan, plan_ranges

CONNECTIONS = 8
"""Default of concurrent range reads per process; those that fetch more units at once have as many."""

INFLIGHT_BYTES = 256 * 1024 * 1024
"""Default of bytes being transferred at once."""

SPLIT_BYTES = 8 * 1024 * 1024
"""A range of at least twice this many bytes is read over several connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """How one process reads ranges.

    Attributes:
        connections: concurrent reads.
        subranges: most parts of one large range that are read at once; 1 splits none, None gives as many as have ``split_bytes`` each.
        inflight_bytes: bytes of all reads under way; a single larger read goes alone.
        split_bytes: least part of a range; one of at least twice this many bytes is read over several connections.

    Raises:
        SettingsError: a limit that is not positive.
    """

    connections: int = CONNECTIONS
    subranges: int | None = 1
    inflight_bytes: int = INFLIGHT_BYTES
    split_bytes: int = SPLIT_BYTES

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise SettingsError(f"{field.name} must be positive, found {value}")


ReadRange = Callable[[int, int], bytes]
"""Reads exactly bytes ``[start, stop)`` of one object; blocking, thread-safe."""

_inside = threading.local()


class _ByteGate:
    """Lets reads through in the order they arrive while their bytes fit; one that is larger than the limit goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._queue: deque[object] = deque()
        self._condition = threading.Condition()
        self.peak = 0

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Generator[None]:
        place = object()
        with self._condition:
            self._queue.append(place)
            while self._queue[0] is not place or (self._held and self._held + nbytes > self._limit):
                self._condition.wait()
            self._queue.popleft()
            self._held += nbytes
            self.peak = max(self.peak, self._held)
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._held -= nbytes
                self._condition.notify_all()


class RangeExecutor:
    """Reads the requests of range plans on a bounded number of threads, first come, first served."""

    def __init__(self, limits: TransferLimits | None = None) -> None:
        self.limits = limits or TransferLimits()
        self._gate = _ByteGate(self.limits.inflight_bytes)
        self._threads = ThreadPoolExecutor(self.limits.connections, thread_name_prefix="reelray-range")
        self._closed = self._retired = False
        self._queueing = threading.Lock()

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were in flight at once."""
        return self._gate.peak

    def plan(self, ranges: Sequence[ByteRange]) -> RangePlan:
        """The exact plan of some ranges of one object, large ones split for several connections."""
        return plan_ranges(ranges, split=self.limits.split_bytes, parts=self.limits.subranges)

    def submit(self, plan: RangePlan, read: ReadRange) -> Future[list[bytes]]:
        """Starts the requests of ``plan`` in order of need; the future holds the wanted ranges, or the first error.

        The first error cancels the requests that have not started. Called from inside a read, it reads in place: a thread that waited for
        its own pool could wait for ever.

        Raises:
            StreamClosedError: the executor is closed, or was replaced by one with other limits.
        """
        done: Future[list[bytes]] = Future()
        if self._closed:
            raise StreamClosedError("the range executor is closed")
        if getattr(_inside, "reading", False) or not plan.requests:
            try:
                done.set_result(plan.assemble([read(start, stop) for start, stop in plan.requests]))
            except BaseException as error:
                done.set_exception(error)
            return done
        try:
            with self._queueing:
                if self._retired:
                    raise _ReplacedError("the range executor was replaced by one with other limits")
                parts = [self._threads.submit(self._read, read, start, stop) for start, stop in plan.requests]
        except RuntimeError as error:
            if isinstance(error, StreamClosedError):
                raise
            raise StreamClosedError("the range executor was closed while requests were being queued") from error
        left = [len(parts)]
        lock = threading.Lock()

        def finished(part: Future[bytes]) -> None:
            failed = None if part.cancelled() else part.exception()
            if failed is not None or part.cancelled():
                for other in parts:
                    other.cancel()
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            # The last one home reports: no request of this plan is under way any more.
            try:
                done.set_result(plan.assemble(_results(parts)))
            except BaseException as error:
                done.set_exception(error)

        for part in parts:
            part.add_done_callback(finished)
        return done

    def read(self, plan: RangePlan, read: ReadRange) -> list[bytes]:
        """``submit`` and wait.

        Raises:
            StreamClosedError: the executor is closed.
            StorageError: as raised by ``read``.
        """
        return self.submit(plan, read).result()

    def retire(self) -> None:
        """Takes no further plans; those that it has are read to their end, for which this does not wait."""
        with self._queueing:
            self._retired = True
        self._threads.shutdown(wait=False)

    def close(self) -> None:
        """Cancels what has not started and waits for what has."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, read: ReadRange, start: int, stop: int) -> bytes:
        _inside.reading = True
        try:
            with self._gate.hold(stop - start):
                return read(start, stop)
        finally:
            _inside.reading = False


def _results(parts: Sequence[Future[bytes]]) -> list[bytes]:
    """The bodies, or the first error; a part that was cancelled has no say while another has failed."""
    for part in parts:
        if not part.cancelled() and (error := part.exception()) is not None:
            raise error
    if any(part.cancelled() for part in parts):
        raise StreamClosedError("the range executor was closed before the reads were done")
    return [part.result() for part in parts]


class _ReplacedError(StreamClosedError):
    """The executor took no more plans when one arrived; its successor does."""


_lock = threading.Lock()
_shared: RangeExecutor | None = None
_shared_pid = 0
_limits = TransferLimits()


def shared_executor() -> RangeExecutor:
    """The process' executor; made on first use, and anew in a forked child, whose parent's threads do not exist."""
    global _shared, _shared_pid
    with _lock:
        if _shared is None or _shared_pid != os.getpid():
            _shared, _shared_pid = RangeExecutor(_limits), os.getpid()
        return _shared


def configure_executor(limits: TransferLimits | None = None) -> RangeExecutor:
    """Sets this process' limits, None for the defaults. An executor with other limits is replaced; what it is reading goes on."""
    global _limits, _shared
    wanted = limits or TransferLimits()
    with _lock:
        replaced = _shared if _shared_pid == os.getpid() and wanted != _limits else None
        if replaced is not None:
            _shared = None
        _limits = wanted
    if replaced is not None:
        replaced.retire()
    return shared_executor()


def close_executor() -> None:
    """Closes this process' executor; the next use makes a new one."""
    global _shared
    with _lock:
        executor, _shared = (_shared if _shared_pid == os.getpid() else None), None
    if executor is not None:
        executor.close()


def fetch_ranges(ranges: Sequence[ByteRange], read: ReadRange) -> list[bytes]:
    """The ranges of one object through the process' executor: exact, concurrent, in the order asked."""
    while True:
        executor = shared_executor()
        try:
            return executor.read(executor.plan(ranges), read)
        except _ReplacedError:
            continue
