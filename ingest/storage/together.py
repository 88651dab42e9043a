"""Several small reads at a time, where each would otherwise wait for the round trip of the one before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ingest.storage.base import Store
from ingest.storage.local import LocalStore
from ingest.storage.wrapped import unwrapped

T = TypeVar("T")

_THREADS = 8


def together(store: Store, reads: Sequence[Callable[[], T]]) -> list[T]:
    """What some reads of one store return, in the order given; one after another where the store is a local directory.

    Raises:
        ReelrayError: of the first read, in the order given, that failed.
    """
    if len(reads) < 2 or isinstance(unwrapped(store), LocalStore):
        return [read() for read in reads]
    with ThreadPoolExecutor(min(_THREADS, len(reads)), thread_name_prefix="reelray-metadata") as threads:
        futures = [threads.submit(read) for read in reads]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
