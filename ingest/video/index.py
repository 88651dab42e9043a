"""Where sample tables come from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ingest.storage.base import Store
from ingest.video.boxes import read_sample_table
from ingest.video.layout import MAX_PROBE_BYTES
from ingest.video.tables import SampleTable


@runtime_checkable
class VideoIndex(Protocol):
    """Sample tables by path."""

    def table(self, path: str) -> SampleTable:
        """The sample table of one video file.

        Raises:
            VideoFormatError: the file cannot be indexed.
            StorageError: it cannot be read.
        """
        ...


@runtime_checkable
class WatchingIndex(VideoIndex, Protocol):
    """An index that knows which version of each file it describes."""

    def check_unchanged(self, store: Store, path: str) -> None:
        """Compares a file with the one that was indexed.

        Raises:
            ObjectChangedError: it is another one now.
            ObjectNotFoundError: it is gone.
        """
        ...


def probe_table(store: Store, path: str, *, max_probe_bytes: int = MAX_PROBE_BYTES) -> SampleTable:
    """Reads one file's index from the file itself.

    Raises:
        VideoFormatError: the file cannot be indexed.
        StorageError: it cannot be read.
    """
    return read_sample_table(
        lambda start, stop: store.read_ranges(path, [(start, stop)])[0], store.size(path), path, max_probe_bytes=max_probe_bytes
    )


@dataclass(slots=True)
class ProbingIndex:
    """Reads the heads of files on demand and keeps the tables of the last few.

    Thread-safe. Pickles without its cache.

    Attributes:
        store: rooted at the dataset.
        capacity: most tables kept.
        max_probe_bytes: most metadata bytes read from one file.
    """

    store: Store
    capacity: int = 256
    max_probe_bytes: int = MAX_PROBE_BYTES
    _tables: OrderedDict[str, SampleTable] = field(default_factory=OrderedDict[str, SampleTable], init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def table(self, path: str) -> SampleTable:
        with self._lock:
            found = self._tables.get(path)
            if found is not None:
                self._tables.move_to_end(path)
                return found
        found = probe_table(self.store, path, max_probe_bytes=self.max_probe_bytes)
        with self._lock:
            self._tables[path] = found
            while len(self._tables) > self.capacity:
                self._tables.popitem(last=False)
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return (ProbingIndex, (self.store, self.capacity, self.max_probe_bytes))
