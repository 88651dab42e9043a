"""A file object over exact range reads, for parsers such as parquet's that seek to what they need."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from ingest.storage.base import Store


_WHOLE_BYTES = 64 * 1024 * 1024


class RangeReader(io.RawIOBase):
    """Reads one object of a store; every read fetches exactly its bytes, nothing ahead.

    Not thread-safe: one reader has one position.
    """

    def __init__(self, store: Store, path: str) -> None:
        super().__init__()
        self._store = store
        self._path = path
        self._size = store.size(path)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset} in {self._path}")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._size, self._position + size)
        if stop <= self._position:
            return b""
        data = self._store.read_ranges(self._path, [(self._position, stop)])[0]
        self._position = stop
        return data

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - every buffer acts as one
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def open_ranges(store: Store, path: str) -> BinaryIO:
    """A seekable reader of ``path`` that fetches only what is read; metadata, which is read to the end anyway, is fetched in one go."""
    if path.startswith("meta/") and store.size(path) <= _WHOLE_BYTES:
        return io.BytesIO(store.read_all(path))
    return cast("BinaryIO", RangeReader(store, path))
