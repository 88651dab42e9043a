"""The index that streaming uses: sample tables from the mapped sidecar of a source."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingest import settings
from ingest.errors import ObjectChangedError, SidecarError
from ingest.storage.base import Store
from ingest.storage.publish import published_store
from ingest.video.layout import MAX_PROBE_BYTES
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.build import DEFAULT_LOCK_TIMEOUT_S, DEFAULT_WORKERS, Progress
from ingest.video.sidecar.cache import Published, discard_mapped_index, prepare_mapped_index, resolve_sidecar
from ingest.video.sidecar.mapped import MappedIndex
from ingest.video.tables import SampleTable

_LOG = logging.getLogger(__name__)
_TABLES_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRequest:
    """What it takes to find or build the index of a source on whatever machine asks.

    Attributes:
        store: rooted at the dataset's payload.
        paths: every video file of the dataset.
        repo_id: dataset name.
        revision: branch, tag, commit or codebase version.
        data_root: location as the user gave it; None is the store's own.
        cache_home: LeRobot's cache folder; None is ``HF_LEROBOT_HOME`` of the machine that asks.
        lock_timeout_s: longest wait for another process.
        workers: files indexed concurrently when the sidecar must be built.
        max_probe_bytes: most metadata bytes read from one file.
        checksums: when it must be built, read the payload once and record checksums.
    """

    store: Store
    paths: tuple[str, ...]
    repo_id: str
    revision: str
    data_root: str | None = None
    cache_home: Path | None = None
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    workers: int = DEFAULT_WORKERS
    max_probe_bytes: int = MAX_PROBE_BYTES
    checksums: bool = False

    def key(self) -> str:
        """Digest that tells requests for different sources apart."""
        parts = (self.repo_id, self.revision, self.data_root or self.store.url, str(self.cache_home), self.paths)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def open(self, progress: Progress | None = None, *, published: Published = None) -> SidecarIndex:
        """The index: a valid cached sidecar, else the published one, else one built here.

        Args:
            progress: called after every file of a build.
            published: where sidecars are published; by default where the store's kind publishes them.

        Raises:
            VideoFormatError: a file cannot be indexed.
            LockTimeoutError: another process held a lock for too long.
            StorageError: source or cache cannot be read or written.
            SidecarError: what was built does not match the source.
        """
        home = self.cache_home or settings.lerobot_home()
        if not self.paths:
            return SidecarIndex(None, home, "none", False, self.lock_timeout_s)
        resolve = functools.partial(
            resolve_sidecar,
            self.store,
            self.paths,
            repo_id=self.repo_id,
            revision=self.revision,
            data_root=self.data_root,
            cache_home=home,
            published=published or functools.partial(published_store, self.store),
            workers=self.workers,
            max_probe_bytes=self.max_probe_bytes,
            checksums=self.checksums,
            lock_timeout_s=self.lock_timeout_s,
            progress=progress,
        )
        resolved = resolve()
        try:
            mapped = resolved.mapped or prepare_mapped_index(resolved.path, cache_home=home, lock_timeout_s=self.lock_timeout_s)
        except SidecarError as error:
            # The manifest matched, but arrays are damaged, or LeRobot's record cannot tell what the file presents.
            _LOG.warning("the MP4 sidecar is built anew: %s", error)
            resolved = resolve(rebuild=True)
            mapped = prepare_mapped_index(resolved.path, cache_home=home, lock_timeout_s=self.lock_timeout_s)
        index = SidecarIndex(resolved.path, home, resolved.origin, resolved.has_checksums, self.lock_timeout_s, self)
        index.use(mapped)
        return index


@dataclass(slots=True)
class SidecarIndex:
    """Sample tables from a sidecar, as a ``VideoIndex``. Thread-safe; pickles as the paths of its files.

    Attributes:
        sidecar: path of the sidecar file; None for a dataset without videos.
        cache_home: LeRobot's cache folder, below which the mapped index lies.
        origin: ``cache``, ``published``, ``built``, or ``none`` for a dataset without videos.
        has_checksums: whether payload can be verified; the stream's report says "payload unchecked" when not.
        lock_timeout_s: longest wait for another process that derives the index.
        request: how to find the index again on a machine whose cache does not hold it; None for a file given by path.
    """

    sidecar: Path | None
    cache_home: Path
    origin: str
    has_checksums: bool
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    request: IndexRequest | None = None
    _mapped: MappedIndex | None = field(default=None, init=False, repr=False)
    _tables: OrderedDict[str, SampleTable] = field(default_factory=OrderedDict[str, SampleTable], init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def table(self, path: str) -> SampleTable:
        """The sample table of one video file.

        Raises:
            SidecarError: the file is not in the sidecar, or sidecar and index are damaged.
            StorageError: they cannot be read.
        """
        with self._lock:
            found = self._tables.get(path)
            if found is None:
                found = self._load(path)
                self._tables[path] = found
                if len(self._tables) > _TABLES_KEPT:
                    self._tables.popitem(last=False)
            else:
                self._tables.move_to_end(path)
            return found

    def check_unchanged(self, store: Store, path: str) -> None:
        """Compares a file with the one that was indexed; cheap where identities are (a local ``stat``).

        Args:
            store: rooted at the dataset's payload.
            path: of the video file.

        Raises:
            ObjectChangedError: it is another one now; names both identities.
            ObjectNotFoundError: it is gone.
        """
        spec = self.mapped.spec
        now, size, fingerprint = store.identity(path), spec.sizes.get(path), spec.fingerprints.get(path)
        if (now.size is not None and now.size != size) or (now.stable and now.fingerprint != fingerprint):
            raise ObjectChangedError(
                f"{store.url}: {path} was indexed with {size} bytes and identity {fingerprint}, it has {now.size} bytes and identity "
                f"{now.fingerprint} now; it changed under a running stream. Start the stream again to index it anew"
            )

    @property
    def mapped(self) -> MappedIndex:
        """The mapped index, opened on first use.

        Raises:
            SidecarError: there is no sidecar, or it is damaged.
        """
        if self._mapped is None:
            if self.sidecar is None:
                raise SidecarError("the dataset has no video files, so it has no sidecar")
            if self.request is not None and not self.sidecar.exists():
                found = self.request.open()
                self.sidecar, self.cache_home, self.origin = found.sidecar, found.cache_home, found.origin
                return self.use(found.mapped)
            self._mapped = prepare_mapped_index(self.sidecar, cache_home=self.cache_home, lock_timeout_s=self.lock_timeout_s)
        return self._mapped

    def use(self, mapped: MappedIndex) -> MappedIndex:
        """Takes over a mapped index that was opened already."""
        self._mapped = mapped
        return mapped

    def _load(self, path: str) -> SampleTable:
        try:
            return self.mapped.table(path)
        except SidecarError:
            if self._mapped is None or path not in self._mapped:
                raise
        # The record is damaged: derive the index anew, once; a damaged sidecar fails the second time.
        discard_mapped_index(self._mapped)
        self._mapped = None
        return self.mapped.table(path)

    def __reduce__(self) -> tuple[object, ...]:
        return (SidecarIndex, (self.sidecar, self.cache_home, self.origin, self.has_checksums, self.lock_timeout_s, self.request))


def open_video_index(
    source_store: Store,
    paths: Sequence[str],
    repo_id: str,
    revision: str,
    data_root: str | None = None,
    cache_home: Path | None = None,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
    *,
    published: Published = None,
    max_probe_bytes: int = MAX_PROBE_BYTES,
    checksums: bool = False,
) -> SidecarIndex:
    """Opens the index of a dataset's videos: a valid cached sidecar, else the published one, else one built here.

    Args:
        source_store: rooted at the dataset's payload.
        paths: every video file of the dataset; none gives an index without files.
        repo_id: dataset name.
        revision: branch, tag, commit or codebase version.
        data_root: location as the user gave it; the store's own by default.
        cache_home: LeRobot's cache folder; ``HF_LEROBOT_HOME`` by default.
        lock_timeout_s: longest wait for another process.
        workers: files indexed concurrently when the sidecar must be built.
        progress: called after every file of a build.
        published: where sidecars are published; by default where the store's kind publishes them.
        max_probe_bytes: most metadata bytes read from one file.
        checksums: when it must be built, read the payload once and record checksums.

    Raises:
        VideoFormatError: a file cannot be indexed.
        LockTimeoutError: another process held a lock for too long.
        StorageError: source or cache cannot be read or written.
        SidecarError: what was built does not match the source.
    """
    request = IndexRequest(
        store=source_store,
        paths=tuple(paths),
        repo_id=repo_id,
        revision=revision,
        data_root=data_root,
        cache_home=cache_home,
        lock_timeout_s=lock_timeout_s,
        workers=workers,
        max_probe_bytes=max_probe_bytes,
        checksums=checksums,
    )
    return request.open(progress, published=published)


def open_sidecar_file(sidecar: Path, *, cache_home: Path | None = None) -> SidecarIndex:
    """An index over a sidecar file given by path, whatever source it describes.

    Raises:
        SidecarError: it is no schema 3 sidecar.
        OSError: it cannot be read.
    """
    with SidecarArchive(sidecar) as archive:
        checksums = archive.has_checksums
    return SidecarIndex(sidecar, cache_home or settings.lerobot_home(), "file", checksums)
