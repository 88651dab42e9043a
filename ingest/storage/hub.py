"""Datasets at one commit and buckets on the Hugging Face Hub."""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from ingest import settings
from ingest.errors import LocationError, ObjectNotFoundError, ShortReadError, StorageError
from ingest.storage import hub_api, hub_cache
from ingest.storage.base import ByteRange, ObjectIdentity
from ingest.storage.bodies import check_whole, refuse_placeholder
from ingest.storage.executor import fetch_ranges
from ingest.storage.http_objects import HttpObjects
from ingest.storage.hub_api import TreeEntry
from ingest.storage.known import Known, KnownObjects, clean_tag
from ingest.storage.locations import Location
from ingest.storage.paths import check_relative
from ingest.storage.reader import open_ranges
from ingest.storage.retry import RetryPolicy

_UNREACHABLE_ATTEMPTS = 2


def pin(location: Location, policy: RetryPolicy | None = None) -> Location:
    """The same dataset at the commit that its revision points at now; one request, none for a commit or offline.

    Raises:
        ObjectNotFoundError, AccessDeniedError, StorageError: as ``hub_api.resolve_commit``.
    """
    if location.pinned:
        return location
    if location.kind != "hub" or location.repo_id is None:
        raise LocationError(f"{location.url} is not a Hub dataset, so there is no commit to pin it to")
    try:
        return _pinned(location, location.repo_id, policy or RetryPolicy())
    except StorageError as error:
        if not location.bare:
            raise
        raise type(error)(
            f"{error}. {location.repo_id} was taken for a dataset on the Hub, as there is no directory {Path(location.repo_id).absolute()}"
        ) from None


def _pinned(location: Location, repo_id: str, policy: RetryPolicy) -> Location:
    if settings.hub_offline():
        names = [location.revision] if location.revision else [hub_api.CODEBASE_TAG, "main"]
        for name in names:
            commit = hub_cache.cached_reference(repo_id, name)
            if commit is not None:
                return location.at(commit)
        hub_api.refuse_offline(f"the commit of {location.url}")
    if location.bare:
        # It may be a mistyped path, on a machine that never reaches the Hub: the answer should not take half a minute.
        policy = replace(policy, unreachable_attempts=_UNREACHABLE_ATTEMPTS)
    name, commit = hub_api.resolve_commit(repo_id, location.revision, policy)
    hub_cache.store_reference(repo_id, name, commit)
    return location.at(commit)


class HubDatasetStore:
    """A dataset repository at one commit: a branch or tag that moves later is invisible.

    Listings and whole files (metadata) are kept on disk by commit and shared by the processes of the host; payload found in a
    snapshot of the Hub's own cache is read from there.
    """

    def __init__(self, location: Location, *, policy: RetryPolicy | None = None, known: KnownObjects | None = None) -> None:
        """
        Args:
            location: a pinned Hub dataset.
            policy: retries.
            known: versions seen before, by the store that this one continues.

        Raises:
            LocationError: the location is not pinned to a commit.
        """
        if not location.pinned or location.repo_id is None or location.revision is None:
            raise LocationError(f"{location.url} is not pinned to a commit: pass it through pin() or open_store() first")
        self._location = location
        self._repo_id, self._commit = location.repo_id, location.revision
        self._prefix = f"{location.path}/" if location.path else ""
        self._policy = policy or RetryPolicy()
        self._known = known or KnownObjects()
        self._listings: dict[str, dict[str, int]] = {}
        self._folders: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._objects = HttpObjects(
            home=lambda path: hub_api.dataset_address(self._repo_id, self._commit, self._prefix + path),
            where=lambda path: f"{location.url}/{path}",
            headers=hub_api.auth_headers,
            tag=_linked_tag,
            known=self._known,
            policy=self._policy,
            hint=hub_api.refusal_hint("datasets", self._repo_id),
            redirects=True,
        )

    def __reduce__(self) -> tuple[object, ...]:
        # A commit fixes the content, so what was seen need not travel.
        return (_rebuild_dataset, (self._location, self._policy))

    def __repr__(self) -> str:
        return f"HubDatasetStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def location(self) -> Location:
        """The pinned location."""
        return self._location

    def identity(self, path: str) -> ObjectIdentity:
        self.size(path)
        return ObjectIdentity(path, None, None)

    def size(self, path: str) -> int:
        check_relative(path)
        local = hub_cache.snapshot_file(self._repo_id, self._commit, self._prefix + path)
        if local is not None:
            return local.stat().st_size
        listing = self._covering(path)
        if listing is None:
            parent = path.rpartition("/")[0]
            with self._lock:
                listing = self._folders.get(parent)
            if listing is None:
                listing = self._list(parent, recursive=False)
        if path not in listing:
            raise ObjectNotFoundError(f"{self.url}/{path}: there is no such file at this commit")
        return listing[path]

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        check_relative(path)
        local = hub_cache.snapshot_file(self._repo_id, self._commit, self._prefix + path)
        if local is None:
            hub_api.refuse_offline(f"{self.url}/{path}")
            return fetch_ranges(ranges, lambda start, stop: self._objects.read(path, start, stop))
        payloads: builtins.list[bytes] = []
        with local.open("rb") as file:
            for start, stop in ranges:
                file.seek(start)
                payloads.append(file.read(stop - start))
                if len(payloads[-1]) != stop - start:
                    raise ShortReadError(
                        f"{local}: bytes {start}..{stop} asked for, the cached file is shorter; delete it to fetch it again"
                    )
        return payloads

    def read_all(self, path: str) -> bytes:
        check_relative(path)
        local = hub_cache.snapshot_file(self._repo_id, self._commit, self._prefix + path)
        if local is not None:
            data = local.read_bytes()
            refuse_placeholder(data[:256], str(local), whole=len(data) <= 256)
            return data
        hub_api.refuse_offline(f"{self.url}/{path}")
        if path.startswith("meta/") and self._covering(path) is None:
            # Metadata is read file by file: one listing serves them all.
            self._list("meta", recursive=True)
        # With the size known, a body cut short by an honest-looking proxy is noticed.
        size = self.size(path)
        check_whole(size, f"{self.url}/{path}")
        data = self.read_ranges(path, [(0, size)])[0]
        hub_cache.store_snapshot_file(self._repo_id, self._commit, self._prefix + path, data)
        return data

    def open(self, path: str) -> BinaryIO:
        check_relative(path)
        if path.startswith("meta/"):
            # Metadata is read by every process of the host: whole, once, through the cache.
            return io.BytesIO(self.read_all(path))
        local = hub_cache.snapshot_file(self._repo_id, self._commit, self._prefix + path)
        return local.open("rb") if local is not None else open_ranges(self, path)

    def list(self, prefix: str = "") -> builtins.list[ObjectIdentity]:
        folder = check_relative(prefix.rstrip("/")) if prefix.strip("/") else ""
        inside = f"{folder}/" if folder else ""
        listing = self._covering(inside + "x")
        if listing is None:
            listing = self._list(folder, recursive=True)
        return [ObjectIdentity(path, None, None) for path in sorted(listing) if path.startswith(inside)]

    def _covering(self, path: str) -> dict[str, int] | None:
        """A complete listing that would hold ``path``."""
        with self._lock:
            for folder, listing in self._listings.items():
                if not folder or path.startswith(f"{folder}/"):
                    return listing
        return None

    def _list(self, folder: str, *, recursive: bool) -> dict[str, int]:
        key = f"{self._repo_id}@{self._commit}/{self._prefix}{folder}?recursive={recursive}"
        full = (self._prefix + folder).rstrip("/")
        if settings.hub_offline():
            entries = hub_cache.load_listing(key)
            if entries is None:
                entries = hub_cache.snapshot_listing(self._repo_id, self._commit, full)
            if not entries:
                hub_api.refuse_offline(f"the listing of {self.url}/{folder}")
        else:
            entries = hub_cache.shared_listing(
                key, lambda: hub_api.dataset_tree(self._repo_id, self._commit, full, recursive=recursive, policy=self._policy)
            )
        listing = _relative(entries, self._prefix)
        with self._lock:
            (self._listings if recursive else self._folders)[folder] = listing
        return listing


class HubBucketStore:
    """A bucket, or a folder in one. Buckets change in place, so every object is compared with the first listing by Xet hash and size."""

    def __init__(self, location: Location, *, policy: RetryPolicy | None = None, known: KnownObjects | None = None) -> None:
        """
        Args:
            location: of kind ``bucket``.
            policy: retries.
            known: versions seen before, by the store that this one continues.
        """
        if location.kind != "bucket" or location.repo_id is None:
            raise LocationError(f"{location.url} is not a bucket")
        self._location = location
        self._bucket_id = location.repo_id
        self._prefix = f"{location.path}/" if location.path else ""
        self._policy = policy or RetryPolicy()
        self._known = known or KnownObjects()
        self._listed: set[str] = set()
        self._lock = threading.Lock()
        self._objects = HttpObjects(
            home=lambda path: hub_api.bucket_address(self._bucket_id, self._prefix + path),
            where=lambda path: f"{location.url}/{path}",
            headers=hub_api.auth_headers,
            tag=lambda headers: headers.get("x-xet-hash"),
            known=self._known,
            policy=self._policy,
            hint=hub_api.refusal_hint("buckets", self._bucket_id),
            redirects=True,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_bucket, (self._location, self._policy, self._known))

    def __repr__(self) -> str:
        return f"HubBucketStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def location(self) -> Location:
        """The bucket's location."""
        return self._location

    def identity(self, path: str) -> ObjectIdentity:
        known = self._listing_entry(path)
        return ObjectIdentity(path, known.size, known.tag, stable=known.tag is not None)

    def size(self, path: str) -> int:
        size = self._listing_entry(path).size
        assert size is not None  # listings always state sizes
        return size

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        self._listing_entry(path)
        hub_api.refuse_offline(f"{self.url}/{path}")
        return fetch_ranges(ranges, lambda start, stop: self._objects.read(path, start, stop))

    def read_all(self, path: str) -> bytes:
        known = self._listing_entry(path)
        data = hub_cache.cached_content(f"xet:{known.tag}:{known.size}") if known.tag else None
        if data is None:
            hub_api.refuse_offline(f"{self.url}/{path}")
            size = self.size(path)
            check_whole(size, f"{self.url}/{path}")
            data = self.read_ranges(path, [(0, size)])[0]
            if known.tag:
                hub_cache.store_content(f"xet:{known.tag}:{known.size}", data)
        return data

    def open(self, path: str) -> BinaryIO:
        if check_relative(path).startswith("meta/"):
            return io.BytesIO(self.read_all(path))
        return open_ranges(self, path)

    def list(self, prefix: str = "") -> builtins.list[ObjectIdentity]:
        folder = check_relative(prefix.rstrip("/")) if prefix.strip("/") else ""
        self._ensure_listed(folder)
        inside = f"{folder}/" if folder else ""
        return [self.identity(path) for path in self._known.paths() if path.startswith(inside) and "\0" not in path]

    def _listing_entry(self, path: str) -> Known:
        known = self._known.get(check_relative(path))
        if known.size is None:
            self._ensure_listed(path.partition("/")[0] if "/" in path else "")
            known = self._known.get(path)
        if known.size is None:
            raise ObjectNotFoundError(f"{self.url}/{path}: there is no such object in the bucket")
        return known

    def _ensure_listed(self, folder: str) -> None:
        with self._lock:
            if any(not listed or folder == listed or folder.startswith(f"{listed}/") for listed in self._listed):
                return
            full = (self._prefix + folder).rstrip("/")
            key = f"bucket:{self._bucket_id}/{full}"
            if settings.hub_offline():
                entries = hub_cache.load_listing(key)
                if entries is None:
                    hub_api.refuse_offline(f"the listing of {self.url}/{folder}")
                    return
            else:
                entries = hub_api.bucket_tree(self._bucket_id, full, policy=self._policy)
                hub_cache.store_listing(key, entries)
            inside = [(entry.path[len(self._prefix) :], Known(entry.size, entry.content)) for entry in entries]
            self._known.see_all(inside, self.url)
            self._listed.add(folder)


def _relative(entries: Sequence[TreeEntry], prefix: str) -> dict[str, int]:
    return {entry.path[len(prefix) :]: entry.size for entry in entries if entry.path.startswith(prefix)}


def _linked_tag(headers: Mapping[str, str]) -> str | None:
    return clean_tag(headers.get("x-linked-etag"))


def _rebuild_dataset(location: Location, policy: RetryPolicy) -> HubDatasetStore:
    return HubDatasetStore(location, policy=policy)


def _rebuild_bucket(location: Location, policy: RetryPolicy, known: KnownObjects) -> HubBucketStore:
    return HubBucketStore(location, policy=policy, known=known)
