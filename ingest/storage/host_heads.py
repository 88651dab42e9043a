"""Versions of objects that one process of a host asked for and the others need not ask for again.

A place that offers no listing with versions is asked for each object by itself. What it answers is kept for a while on the host's
disk, together with the versions of the dataset's metadata: every process reads those itself, so a dataset that was published anew is
seen at once. A single file that was replaced meanwhile is noticed when it is read, which also ends what is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from ingest.storage.hub_cache import key_file, once_per_host
from ingest.storage.known import Known, KnownObjects

_KEPT_S = 600.0
_LIMIT_BYTES = 64 << 20
_METADATA = "meta/"

Ask = Callable[[Sequence[str]], Sequence[Known]]
"""Asks the place for the versions of some objects, and has them compared with what is known."""


def learn(known: KnownObjects, url: str, paths: Sequence[str], ask: Ask) -> None:
    """Makes the versions of objects known: from this process, from the host, or else by asking for those that are left.

    Args:
        known: what this process knows; gains what is learnt.
        url: root of the paths.
        paths: objects whose size and tag are wanted.
        ask: for those that nobody on this host knows.

    Raises:
        StorageError: whatever ``ask`` raises.
        ObjectChangedError: an object is another one than this process has seen.
    """
    missing = [path for path in dict.fromkeys(paths) if not _whole(known.get(path))]
    kept = _file_for(known, url)
    shared = [path for path in missing if kept is not None and not path.startswith(_METADATA)]
    own = [path for path in missing if path not in set(shared)]
    if own:
        ask(own)
    if kept is None or not shared:
        return
    left = _take(known, url, shared, _load(kept))
    if not left:
        return
    with once_per_host(kept):
        left = _take(known, url, left, _load(kept))
        if left:
            _append(kept, dict(zip(left, ask(left), strict=True)))


def forget(known: KnownObjects, url: str) -> None:
    """Ends what the host keeps: an object turned out to be another one."""
    kept = _file_for(known, url)
    if kept is not None:
        with contextlib.suppress(OSError):
            kept.unlink()


def _whole(one: Known) -> bool:
    return one.size is not None and one.tag is not None


def _file_for(known: KnownObjects, url: str) -> Path | None:
    """Where it is kept; None before any version of the metadata is known."""
    seen = {path: known.get(path) for path in known.paths() if path.startswith(_METADATA) and "\0" not in path}
    versions = sorted((path, one.size, one.tag) for path, one in seen.items() if _whole(one))
    return key_file("heads", json.dumps([url, versions])) if versions else None


def _take(known: KnownObjects, url: str, paths: Sequence[str], kept: dict[str, Known]) -> list[str]:
    known.see_all(((path, kept[path]) for path in paths if path in kept), url)
    return [path for path in paths if path not in kept]


def _load(file: Path) -> dict[str, Known]:
    found: dict[str, Known] = {}
    with contextlib.suppress(OSError):
        stat = os.stat(file)
        if stat.st_size > _LIMIT_BYTES or not 0 <= time.time() - _made(file) <= _KEPT_S:
            return {}
        for line in file.read_bytes().splitlines()[1:]:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                path, size, tag = cast("tuple[object, object, object]", json.loads(line))
                if isinstance(path, str) and isinstance(size, int) and size >= 0 and isinstance(tag, str):
                    found[path] = Known(size, tag)
    return found


def _made(file: Path) -> float:
    """When the first version in it was asked for."""
    with contextlib.suppress(OSError, ValueError), file.open("rb") as stream:
        return float(stream.readline(64))
    return 0.0


def _append(file: Path, found: dict[str, Known]) -> None:
    lines = [json.dumps([path, one.size, one.tag]) for path, one in found.items() if _whole(one)]
    if not lines:
        return
    begin = not 0 <= time.time() - _made(file) <= _KEPT_S
    with contextlib.suppress(OSError), file.open("wb" if begin else "ab") as stream:
        # After a line that a killed process left unfinished, a new one begins.
        head = [repr(time.time())] if begin else [""]
        stream.write("".join(f"{line}\n" for line in [*head, *lines]).encode())
