"""What every store offers: identities and exact byte ranges.

A store is rooted at one dataset (or one prefix); paths are relative to that root, with ``/`` between parts.
Stores are picklable, hold no open connection while pickled, and never hold a credential.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable

ByteRange = tuple[int, int]
"""Half-open ``[start, stop)`` in bytes."""


@dataclass(frozen=True, slots=True)
class ObjectIdentity:
    """What tells one version of an object from another.

    Attributes:
        path: relative to the store's root.
        size: bytes, or None when the root itself pins the content (a Hub commit).
        fingerprint: changes whenever the content may have changed; None when the root pins the content.
        stable: False when the store has no identity to offer, so that anything derived must be rebuilt.
    """

    path: str
    size: int | None
    fingerprint: str | None
    stable: bool = True


@runtime_checkable
class Store(Protocol):
    """Read access to the objects below one root."""

    @property
    def url(self) -> str:
        """Location of the root as a person would write it; never holds a credential."""
        ...

    def identity(self, path: str) -> ObjectIdentity:
        """Size and fingerprint of one object.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...

    def size(self, path: str) -> int:
        """Size of one object in bytes, also where ``identity`` leaves it out."""
        ...

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Exactly the bytes asked for, one ``bytes`` per range, in the order asked.

        Raises:
            ShortReadError: fewer bytes came back than the range holds.
            StorageError: anything else that kept the bytes from arriving.
        """
        ...

    def read_all(self, path: str) -> bytes:
        """The whole object. For metadata only: never used for video payload."""
        ...

    def list(self, prefix: str = "") -> list[ObjectIdentity]:
        """Every object below ``prefix``, recursively, sorted by path; empty when there is none."""
        ...

    def open(self, path: str) -> BinaryIO:
        """A seekable binary reader that fetches only what is read (used for parquet)."""
        ...
