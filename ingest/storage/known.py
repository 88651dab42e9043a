"""What a store has learnt about its objects, so that a change while a job runs is noticed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ingest.errors import ObjectChangedError


@dataclass(frozen=True, slots=True)
class Known:
    """One version of an object as far as it has been seen.

    Attributes:
        size: bytes, or None when not seen yet.
        tag: ETag, Xet hash or version, or None when the server offers none or it has not been seen yet.
    """

    size: int | None = None
    tag: str | None = None

    def __str__(self) -> str:
        size = "unknown size" if self.size is None else f"{self.size} bytes"
        return f"{size}, {self.tag or 'no tag'}"


class KnownObjects:
    """First-seen versions by path; thread-safe, and pickled with its store so that workers compare with what the driver saw."""

    __slots__ = ("_lock", "_seen")

    def __init__(self, seen: dict[str, Known] | None = None) -> None:
        self._seen: dict[str, Known] = dict(seen or {})
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        with self._lock:
            return (KnownObjects, (dict(self._seen),))

    def get(self, path: str) -> Known:
        """What is known of ``path``; an empty ``Known`` for a path not seen."""
        return self._seen.get(path, Known())

    def paths(self) -> list[str]:
        """Every path seen, sorted."""
        with self._lock:
            return sorted(self._seen)

    def see(self, path: str, found: Known, where: str) -> Known:
        """Compares ``found`` with what is known and keeps what is new.

        Raises:
            ObjectChangedError: size or tag differ from what was seen first; the message names both.
        """
        with self._lock:
            known = self._seen.get(path, Known())
            if _differs(known.size, found.size) or _differs(known.tag, found.tag):
                raise ObjectChangedError(
                    f"{where}: changed while it was in use: it was {known}, now it is {found}; start again from the changed "
                    "dataset, and keep the source unchanged during a run"
                )
            merged = Known(known.size if found.size is None else found.size, known.tag if found.tag is None else found.tag)
            self._seen[path] = merged
            return merged

    def see_all(self, found: Iterable[tuple[str, Known]], root: str) -> None:
        """``see`` for every pair of a listing below ``root``."""
        for path, known in found:
            self.see(path, known, f"{root}/{path}")


def _differs(known: int | str | None, found: int | str | None) -> bool:
    return known is not None and found is not None and known != found


def clean_tag(value: str | None) -> str | None:
    """An ETag without its quotes and weakness mark; None for an empty one."""
    if value is None:
        return None
    return value.strip().removeprefix("W/").strip('"') or None
