"""Finding a source's sidecar: in the cache, where it is published, or by building it once."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from ingest import settings
from ingest.errors import ObjectNotFoundError, SidecarError, StorageError
from ingest.storage.base import Store
from ingest.video.files import is_reported, locked, remove_leftovers, replacing, storage_failure
from ingest.video.layout import MAX_PROBE_BYTES
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.build import (
    DEFAULT_LOCK_TIMEOUT_S,
    DEFAULT_WORKERS,
    Progress,
    index_files,
    source_unchanged,
    valid_sidecar,
    write_sidecar,
)
from ingest.video.sidecar.carry import carry_checksums, earlier_checksums
from ingest.video.sidecar.mapped import GENERATION, MappedIndex, write_mapped_index
from ingest.video.sidecar.spec import PUBLISHED_FOLDER, SidecarSpec, describe_source, mismatch

_LOG = logging.getLogger(__name__)
_COPY_BYTES = 1 << 20


@runtime_checkable
class Shelf(Protocol):
    """Where finished sidecars can be read; every store is one."""

    def open(self, path: str) -> BinaryIO:
        """Opens a file below the root.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...


Published = Shelf | Callable[[], Shelf | None] | None
"""Read access to where sidecars are published, what gives it when it is needed, or None to look nowhere."""


@dataclass(frozen=True, slots=True)
class ResolvedSidecar:
    """A valid sidecar in the cache.

    Attributes:
        path: of the sidecar.
        spec: as written into it.
        origin: ``cache``, ``published`` or ``built``.
        has_checksums: whether the payload can be verified.
        mapped: its mapped index, where that was open already.
    """

    path: Path
    spec: SidecarSpec
    origin: str
    has_checksums: bool
    mapped: MappedIndex | None = None


def resolve_sidecar(
    store: Store,
    paths: Sequence[str],
    *,
    repo_id: str,
    revision: str,
    data_root: str | None = None,
    cache_home: Path | None = None,
    published: Published = None,
    workers: int = DEFAULT_WORKERS,
    max_probe_bytes: int = MAX_PROBE_BYTES,
    checksums: bool = False,
    rebuild: bool = False,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    progress: Progress | None = None,
) -> ResolvedSidecar:
    """The sidecar of a source: a valid cached one, else the published one, else one built here.

    Args:
        store: rooted at the dataset's payload.
        paths: every video file of the dataset.
        repo_id: dataset name.
        revision: branch, tag, commit or codebase version.
        data_root: location as the user gave it; the store's own by default.
        cache_home: LeRobot's cache folder; ``HF_LEROBOT_HOME`` by default.
        published: where sidecars are published.
        workers: files indexed concurrently when it must be built.
        max_probe_bytes: most metadata bytes read from one file.
        checksums: when it must be built, read the payload once and record checksums; else those of an earlier sidecar are kept.
        rebuild: build even when a sidecar is there: it turned out to be damaged.
        lock_timeout_s: longest wait for another process that builds the same.
        progress: called after every file of a build.

    Raises:
        VideoFormatError: a file cannot be indexed.
        LockTimeoutError: another process held the lock for too long.
        StorageError: source or cache cannot be read or written.
        SidecarError: what was built does not match the source.
    """
    home = cache_home or settings.lerobot_home()
    spec = describe_source(store, paths, repo_id=repo_id, revision=revision, data_root=data_root)
    target = spec.cache_path(home)
    if not rebuild and (found := _cached(target, spec, home)) is not None:
        return found
    with locked(target, lock_timeout_s, "MP4 sidecar"):
        if not rebuild and (found := _cached(target, spec, home)) is not None:
            return found
        remove_leftovers(target)
        if not rebuild and published is not None and _fetch(published, spec, target) and (found := _cached(target, spec, home)) is not None:
            return ResolvedSidecar(found.path, found.spec, "published", found.has_checksums)
        _LOG.info("building the MP4 sidecar %s for %d files", target, len(spec.sizes))
        indexed = index_files(store, spec.paths, sizes=spec.sizes, workers=workers, max_probe_bytes=max_probe_bytes, checksums=checksums)
        with earlier_checksums(target, spec) as earlier:
            checked = checksums or earlier is not None
            indexed = carry_checksums(indexed, earlier, store)
            report = write_sidecar(target, spec, indexed, checksums=checked, progress=progress, check=lambda: source_unchanged(store, spec))
    difference = mismatch(spec, report.spec)
    if difference is not None:
        raise SidecarError(f"Built MP4 sidecar failed revision and source validation: {target}: {difference}")
    return ResolvedSidecar(target, report.spec, "built", report.checksums)


def _cached(target: Path, spec: SidecarSpec, home: Path) -> ResolvedSidecar | None:
    if not spec.stable:
        return None
    # The mapped index of this very file says the same, and opens faster than an archive of many members.
    try:
        mapped = MappedIndex(index_path(target, home))
    except (SidecarError, OSError):
        mapped = None
    if mapped is not None and mismatch(spec, mapped.spec) is None:
        return ResolvedSidecar(target, mapped.spec, "cache", mapped.has_checksums, mapped)
    archive = valid_sidecar(target, spec)
    if archive is None:
        return None
    with archive:
        return ResolvedSidecar(target, archive.spec, "cache", archive.has_checksums)


def _fetch(published: Shelf | Callable[[], Shelf | None], spec: SidecarSpec, target: Path) -> bool:
    """Copies the published sidecar into the cache when it is there, whole and of this source."""
    path = f"{PUBLISHED_FOLDER}/{spec.published().file_name()}"
    try:
        place = published if isinstance(published, Shelf) else published()
    except StorageError as error:
        _LOG.warning("no look at published MP4 sidecars: %s", error)
        return False
    if place is None:
        return False
    try:
        with replacing(target, "cannot write the MP4 sidecar") as local:
            _copy(place, path, local)
            local.flush()
            with SidecarArchive(Path(local.name)) as archive:
                difference = mismatch(spec, archive.spec)
                if difference is not None:
                    raise SidecarError(difference)
                archive.validate()
    except ObjectNotFoundError:
        return False
    except SidecarError as error:
        _LOG.warning("the published MP4 sidecar %s is not used: %s", path, error)
        return False
    return True


def _copy(published: Shelf, path: str, local: BinaryIO) -> None:
    # Only reading is guarded: a cache that cannot be written is the user's to know about.
    try:
        remote = published.open(path)
    except ObjectNotFoundError:
        raise
    except OSError as error:
        raise SidecarError(f"cannot be read ({error})") from error
    with remote:
        while True:
            try:
                piece = remote.read(_COPY_BYTES)
            except OSError as error:
                raise SidecarError(f"cannot be read ({error})") from error
            if not piece:
                return
            local.write(piece)


def index_path(sidecar: Path, cache_home: Path) -> Path:
    """Where the mapped index of a sidecar file is kept: named by the very file that it was derived from.

    Raises:
        OSError: the sidecar cannot be read.
    """
    stat = os.stat(sidecar)
    identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
    return cache_home / "streaming-indexes" / f"reelray-{GENERATION}-{digest}.bin"


def prepare_mapped_index(sidecar: Path, *, cache_home: Path | None = None, lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S) -> MappedIndex:
    """Opens the mapped index of a sidecar; derives it first where it is missing, damaged or foreign.

    Args:
        sidecar: a valid sidecar file.
        cache_home: LeRobot's cache folder; ``HF_LEROBOT_HOME`` by default.
        lock_timeout_s: longest wait for another process that derives the same.

    Raises:
        SidecarError: the sidecar is damaged.
        LockTimeoutError: another process held the lock for too long.
        StorageError: the index cannot be written; check permissions and free space.
    """
    home = cache_home or settings.lerobot_home()
    try:
        target = index_path(sidecar, home)
    except OSError as error:
        raise storage_failure(error, "cannot read the MP4 sidecar", sidecar) from error
    if (found := _opened(target)) is not None:
        return found
    with locked(target, lock_timeout_s, "mapped MP4 index"):
        if (found := _opened(target)) is not None:
            return found
        remove_leftovers(target)
        with SidecarArchive(sidecar) as archive:
            write_mapped_index(target, archive.spec, (archive.table(path) for path in archive.spec.paths), source=str(sidecar))
        _remove_older(target, str(sidecar))
    return MappedIndex(target)


def discard_mapped_index(index: MappedIndex) -> None:
    """Removes an index that turned out to be damaged, so that the next open derives it anew."""
    index.path.unlink(missing_ok=True)


def _opened(target: Path) -> MappedIndex | None:
    try:
        return MappedIndex(target)
    except SidecarError as error:
        _LOG.warning("the mapped MP4 index is derived anew: %s", error)
        return None
    except FileNotFoundError:
        return None
    except OSError as error:
        if is_reported(error):
            raise storage_failure(error, "cannot read the mapped MP4 index", target) from error
        return None


def _remove_older(target: Path, sidecar: str) -> None:
    """Removes indexes of earlier versions of the same sidecar; processes that have them mapped are not affected."""
    for path in target.parent.glob("reelray-*.bin"):
        if path == target:
            continue
        try:
            stale = MappedIndex(path).source == sidecar
        except (SidecarError, OSError):
            continue
        if stale:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
