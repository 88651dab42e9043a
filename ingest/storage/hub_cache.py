"""The caches of Hub content on disk: snapshots as the Hub's own tools lay them out, and listings.

Everything is keyed by commit or content, so nothing ever goes stale, every process of a host shares it, and all of it may be deleted at any
time. A cache that cannot be written is left alone: it saves requests, it is never needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import filelock

from ingest import settings
from ingest.storage.atomic import write_atomic
from ingest.storage.hub_api import TreeEntry
from ingest.storage.locations import is_commit

_LOCK_WAIT_S = 60.0
_LISTING_FORMAT = 1


def _repository_folder(repo_id: str) -> str:
    return "datasets--" + repo_id.replace("/", "--")


def _hub_roots() -> list[Path]:
    """Where snapshots may be, the folder that is written first."""
    return [settings.lerobot_home() / "hub", settings.hub_cache()]


def snapshot_file(repo_id: str, commit: str, path: str) -> Path | None:
    """The cached file of a dataset at a commit, or None."""
    for root in _hub_roots():
        found = root / _repository_folder(repo_id) / "snapshots" / commit / path
        if found.is_file():
            return found
    return None


def snapshot_listing(repo_id: str, commit: str, folder: str) -> list[TreeEntry]:
    """What the snapshots hold below ``folder``; may be less than the dataset has."""
    found: dict[str, TreeEntry] = {}
    for root in _hub_roots():
        snapshot = root / _repository_folder(repo_id) / "snapshots" / commit
        for file in sorted((snapshot / folder).rglob("*")):
            if file.is_file():
                path = file.relative_to(snapshot).as_posix()
                found.setdefault(path, TreeEntry(path, file.stat().st_size, None))
    return [found[path] for path in sorted(found)]


def store_snapshot_file(repo_id: str, commit: str, path: str, data: bytes) -> None:
    """Keeps one file of a dataset at a commit where the Hub's own tools find it as well."""
    with contextlib.suppress(OSError):
        write_atomic(_hub_roots()[0] / _repository_folder(repo_id) / "snapshots" / commit / path, data)


def store_reference(repo_id: str, revision: str, commit: str) -> None:
    """Remembers what a revision pointed at, for offline use only."""
    if not is_commit(revision):
        with contextlib.suppress(OSError):
            write_atomic(_hub_roots()[0] / _repository_folder(repo_id) / "refs" / revision, commit.encode())


def cached_reference(repo_id: str, revision: str) -> str | None:
    """The commit that ``revision`` last pointed at as far as the caches know."""
    for root in _hub_roots():
        with contextlib.suppress(OSError):
            commit = (root / _repository_folder(repo_id) / "refs" / revision).read_text(encoding="ascii", errors="replace").strip()
            if is_commit(commit):
                return commit
    return None


def key_file(folder: str, key: str) -> Path:
    """Where what belongs to a key of any length is kept on this host."""
    return settings.lerobot_home() / "streaming-metadata" / folder / hashlib.sha256(key.encode()).hexdigest()[:32]


def cached_content(key: str) -> bytes | None:
    """Content stored under a key that names it, such as a bucket object's Xet hash; None when absent or damaged."""
    try:
        stored = key_file("content", key).read_bytes()
    except OSError:
        return None
    digest, data = stored[:32], stored[32:]
    return data if hashlib.sha256(data).digest() == digest else None


def store_content(key: str, data: bytes) -> None:
    """Stores content under a key that names it."""
    with contextlib.suppress(OSError):
        write_atomic(key_file("content", key), hashlib.sha256(data).digest() + data)


def load_listing(key: str) -> list[TreeEntry] | None:
    """A stored listing, or None when absent or unreadable."""
    try:
        record = json.loads(key_file("listings", key).read_bytes())
        if not isinstance(record, dict):
            return None
        fields = cast("dict[str, object]", record)
        if fields.get("format") != _LISTING_FORMAT or fields.get("key") != key:
            return None
        rows = cast("list[tuple[str, int, str | None]]", fields["files"])
        return [TreeEntry(str(path), int(size), None if content is None else str(content)) for path, size, content in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_listing(key: str, entries: list[TreeEntry]) -> None:
    """Stores a listing under ``key``."""
    rows = [(entry.path, entry.size, entry.content) for entry in entries]
    record = {"format": _LISTING_FORMAT, "key": key, "files": rows}
    with contextlib.suppress(OSError):
        write_atomic(key_file("listings", key), json.dumps(record, separators=(",", ":")).encode())


def shared_listing(key: str, fetch: Callable[[], list[TreeEntry]]) -> list[TreeEntry]:
    """A listing that one process of the host fetches and all read. ``key`` must name fixed content, a commit for example."""
    found = load_listing(key)
    if found is not None:
        return found
    with once_per_host(key_file("listings", key)):
        found = load_listing(key)
        if found is None:
            found = fetch()
            store_listing(key, found)
    return found


_in_process = threading.Lock()


@contextmanager
def once_per_host(target: Path) -> Generator[None]:
    """Lets one process at a time make ``target``; a lock that cannot be had in time is only a lost saving."""
    lock: filelock.BaseFileLock | None = None
    with contextlib.suppress(OSError, filelock.Timeout):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{target}.lock", timeout=_LOCK_WAIT_S, thread_local=False)
        lock.acquire()
    try:
        with _in_process:
            yield
    finally:
        if lock is not None:
            lock.release()
