"""Compressed payload in memory under a byte budget: fetched ahead, leased while in use, evicted when the room is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from ingest.errors import StorageError, StreamClosedError
from ingest.storage.budget import ByteBudget

K = TypeVar("K", bound=Hashable)


class PayloadPool(Generic[K]):
    """Payloads by key (an episode) and part (a camera).

    A key's reservation covers all its parts from before the first fetch. Each part is fetched once however many ask for it; a
    failed part is reported to all who wait for it, and fetched again by the next who asks. All methods are thread-safe.
    """

    def __init__(
        self,
        limit_bytes: int,
        parts: Callable[[K], Mapping[str, int]],
        fetch: Callable[[K, str], bytes],
        *,
        threads: int = 8,
        setting: str = "streaming_byte_budget_gb",
    ) -> None:
        """
        Args:
            limit_bytes: most bytes reserved at any time.
            parts: exact size in bytes of each part of a key, known without fetching.
            fetch: reads one part; blocking, called on one of ``threads`` threads.
            threads: concurrent fetches.
            setting: name of the setting that raises the limit, for messages.

        Raises:
            BudgetError: the limit is not positive.
        """
        self._lock = threading.RLock()
        # One lock for both: a reservation and its payload come and go together.
        self._budget = ByteBudget(limit_bytes, setting=setting, on_evict=self._forget, lock=self._lock)
        self._parts, self._fetch = parts, fetch
        self._futures: dict[Hashable, dict[str, Future[bytes]]] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reelray-payload")

    @property
    def budget(self) -> ByteBudget:
        """The budget, for its counters and tickets."""
        return self._budget

    def submit_prefetch(self, key: K) -> bool:
        """Reserves ``key`` and starts fetching it; False, without waiting, when there is no room now.

        Raises:
            StreamClosedError: the pool is closed.
            BudgetError: the key is larger than the whole budget.
        """
        sizes = self._parts(key)
        with self._lock:
            if not self._budget.reserve(key, sum(sizes.values())):
                return False
            self._schedule(key, sizes)
            return True

    def retain(self, key: K, *, wait: bool = False, ticket: int | None = None, timeout_s: float | None = None) -> None:
        """Takes a lease on ``key`` and starts fetching it; every lease needs one ``release``.

        Arguments and errors are those of ``ByteBudget.retain``.
        """
        sizes = self._parts(key)
        with self._lock:
            self._budget.retain(key, sum(sizes.values()), wait=wait, ticket=ticket, timeout_s=timeout_s)
            self._schedule(key, sizes)

    def release(self, key: K, *, drop: bool = False) -> None:
        """Gives one lease back; the payload stays cached until its room is needed, unless ``drop``."""
        self._budget.release(key, drop=drop)

    def get(self, key: K, part: str) -> bytes:
        """The payload of one part, waiting for its fetch.

        Raises:
            StreamClosedError: the pool is closed, before or during the wait.
            BudgetError: ``key`` has no reservation and there is no room for one.
            StorageError: the fetch failed, or ``key`` has no such part.
        """
        with self._lock:
            self.retain(key)
            # Taken before the lock is let go: a fetch that fails at once is forgotten at once.
            future = self._futures[key].get(part)
        try:
            if future is None:
                raise StorageError(f"{key!r} has no part {part!r}, it has {sorted(self._parts(key))}")
            return future.result()
        except CancelledError:
            raise StreamClosedError("the payload pool was closed while a payload was waited for") from None
        finally:
            self.release(key)

    def close(self) -> None:
        """Wakes all who wait, cancels what has not started, waits for what has, and drops everything."""
        with self._lock:
            futures = [future for parts in self._futures.values() for future in parts.values()]
        self._budget.close()
        for future in futures:
            future.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _schedule(self, key: K, sizes: Mapping[str, int]) -> None:
        futures = self._futures.setdefault(key, {})
        missing = [part for part in sizes if part not in futures]
        if not missing:
            return
        self._budget.start(key)
        for part in missing:
            futures[part] = Future()
        for part in missing:
            try:
                self._threads.submit(self._run, key, part, futures[part])
            except RuntimeError:
                futures[part].set_exception(StreamClosedError("the payload pool is closed"))

    def _run(self, key: K, part: str, future: Future[bytes]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        data: bytes | None = None
        error: BaseException | None = None
        try:
            data = self._fetch(key, part)
        except BaseException as caught:
            error = caught
        with self._lock:
            futures = self._futures.get(key)
            if futures is not None and futures.get(part) is future:
                if error is not None:
                    # Forgotten, so that the next one who asks tries again.
                    del futures[part]
                error = self._account(key, [other for other in futures.values() if other is not future], data) or error
            # Under the lock: of two parts that end together, the second must see the first one done.
            if error is not None:
                future.set_exception(error)
            elif data is not None:
                future.set_result(data)

    def _account(self, key: K, others: list[Future[bytes]], data: bytes | None) -> BaseException | None:
        """Tells the budget once no part of ``key`` is under way; returns its complaint."""
        if any(not other.done() for other in others):
            return None
        arrived = sum(len(other.result()) for other in others if not other.cancelled() and other.exception() is None)
        try:
            self._budget.finish(key, arrived + len(data or b""))
        except StorageError as error:
            return error
        return None

    def _forget(self, key: Hashable) -> None:
        self._futures.pop(key, None)
