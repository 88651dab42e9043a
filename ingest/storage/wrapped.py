"""A store that passes everything on to another one: the base of those that change a little of it."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import BinaryIO

from ingest.storage.base import ByteRange, ObjectIdentity, Store


class WrappedStore:
    """Does what the store inside does."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def url(self) -> str:
        return self.store.url

    def identity(self, path: str) -> ObjectIdentity:
        return self.store.identity(path)

    def identities(self, paths: Sequence[str]) -> builtins.list[ObjectIdentity]:
        """One identity per path, in the order asked."""
        bulk = getattr(self.store, "identities", None)
        return bulk(paths) if bulk is not None else [self.store.identity(path) for path in paths]

    def size(self, path: str) -> int:
        return self.store.size(path)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        return self.store.read_ranges(path, ranges)

    def read_all(self, path: str) -> bytes:
        return self.store.read_all(path)

    def list(self, prefix: str = "") -> builtins.list[ObjectIdentity]:
        return self.store.list(prefix)

    def open(self, path: str) -> BinaryIO:
        return self.store.open(path)


def unwrapped(store: Store) -> Store:
    """The innermost store."""
    while isinstance(store, WrappedStore):
        store = store.store
    return store
