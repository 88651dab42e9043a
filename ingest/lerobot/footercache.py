"""Keeps the footers of the last data files read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from ingest.errors import DatasetError, RowsError
from ingest.lerobot.parquet import Footer, ParquetSource
from ingest.storage.base import Store


class FooterCache:
    """Footers of the last data files read. Thread-safe; holds no open file.

    Args:
        store: the dataset.
        limit: footers kept.
    """

    def __init__(self, store: Store, limit: int = 64) -> None:
        self._store = store
        self._limit = max(1, limit)
        self._footers: OrderedDict[str, Footer] = OrderedDict()
        self._reading: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, path: str, make_error: Callable[[str], DatasetError] | None = None) -> Footer:
        """The footer of a data file.

        Args:
            path: relative to the store's root.
            make_error: builds the error; by default a ``RowsError`` that names the file.

        Raises:
            RowsError: the file is missing, or has no readable footer.
        """
        found = self._known(path)
        if found is not None:
            return found
        with self._lock:
            reading = self._reading.setdefault(path, threading.Lock())
        # Threads that begin together need the same few footers: one of them reads, the others wait for it.
        with reading:
            return self._known(path) or self._read(path, make_error)

    def _known(self, path: str) -> Footer | None:
        with self._lock:
            if path in self._footers:
                self._footers.move_to_end(path)
            return self._footers.get(path)

    def _read(self, path: str, make_error: Callable[[str], DatasetError] | None) -> Footer:
        def fail(message: str) -> RowsError:
            return RowsError(message, dataset=self._store.url, file=path)

        footer = ParquetSource(self._store, path, make_error or fail).footer()
        with self._lock:
            self._footers[path] = footer
            while len(self._footers) > self._limit:
                self._reading.pop(self._footers.popitem(last=False)[0], None)
        return footer
