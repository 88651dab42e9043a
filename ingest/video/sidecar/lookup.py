"""The index that streaming uses: sample tables from the mapped sidecar of a source."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingest import settings
from ingest.errors import ObjectChangedError, SidecarError
from ingest.storage.base import Store
from ingest.video.layout import MAX_PROBE_BYTES
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.build import DEFAULT_LOCK_TIMEOUT_S, DEFAULT_WORKERS, Progress
from ingest.video.sidecar.cache import discard_mapped_index, prepare_mapped_index, resolve_sidecar
from ingest.video.sidecar.mapped import MappedIndex
from ingest.video.tables import SampleTable

_LOG = logging.getLogger(__name__)
_TABLES_KEPT = 4096


@dataclass(slots=True)
class SidecarIndex:
    """Sample tables from a sidecar, as a ``VideoIndex``. Thread-safe; pickles as the paths of its files.

    Attributes:
        sidecar: path of the sidecar file; None for a dataset without videos.
        cache_home: LeRobot's cache folder, below which the mapped index lies.
        origin: ``cache``, ``published``, ``built``, or ``none`` for a dataset without videos.
        has_checksums: whether payload can be verified; the stream's report says "payload unchecked" when not.
        lock_timeout_s: longest wait for another process that derives the index.
    """

    sidecar: Path | None
    cache_home: Path
    origin: str
    has_checksums: bool
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
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
            self._mapped = prepare_mapped_index(self.sidecar, cache_home=self.cache_home, lock_timeout_s=self.lock_timeout_s)
        return self._mapped

    def use(self, mapped: MappedIndex) -> None:
        """Takes over a mapped index that was opened already."""
        self._mapped = mapped

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
        return (SidecarIndex, (self.sidecar, self.cache_home, self.origin, self.has_checksums, self.lock_timeout_s))


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
    published: Store | None = None,
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
        published: read access to where sidecars are published; None looks nowhere.
        max_probe_bytes: most metadata bytes read from one file.
        checksums: when it must be built, read the payload once and record checksums.

    Raises:
        VideoFormatError: a file cannot be indexed.
        LockTimeoutError: another process held a lock for too long.
        StorageError: source or cache cannot be read or written.
        SidecarError: what was built does not match the source.
    """
    home = cache_home or settings.lerobot_home()
    if not paths:
        return SidecarIndex(None, home, "none", False, lock_timeout_s)
    resolve = functools.partial(
        resolve_sidecar,
        source_store,
        paths,
        repo_id=repo_id,
        revision=revision,
        data_root=data_root,
        cache_home=home,
        published=published,
        workers=workers,
        max_probe_bytes=max_probe_bytes,
        checksums=checksums,
        lock_timeout_s=lock_timeout_s,
        progress=progress,
    )
    resolved = resolve()
    try:
        mapped = resolved.mapped or prepare_mapped_index(resolved.path, cache_home=home, lock_timeout_s=lock_timeout_s)
    except SidecarError as error:
        # The manifest matched, but arrays are damaged, or LeRobot's record cannot tell what the file presents.
        _LOG.warning("the MP4 sidecar is built anew: %s", error)
        resolved = resolve(rebuild=True)
        mapped = prepare_mapped_index(resolved.path, cache_home=home, lock_timeout_s=lock_timeout_s)
    index = SidecarIndex(resolved.path, home, resolved.origin, resolved.has_checksums, lock_timeout_s)
    index.use(mapped)
    return index


def open_sidecar_file(sidecar: Path, *, cache_home: Path | None = None) -> SidecarIndex:
    """An index over a sidecar file given by path, whatever source it describes.

    Raises:
        SidecarError: it is no schema 3 sidecar.
        OSError: it cannot be read.
    """
    with SidecarArchive(sidecar) as archive:
        checksums = archive.has_checksums
    return SidecarIndex(sidecar, cache_home or settings.lerobot_home(), "file", checksums)
