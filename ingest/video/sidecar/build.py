"""Building a sidecar: files indexed in parallel, written in order, installed whole."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ingest.errors import ObjectChangedError, SettingsError, SidecarError
from ingest.storage.base import ByteRange, Store
from ingest.video.boxes import read_sample_table
from ingest.video.checksums import add_checksums
from ingest.video.files import is_reported, locked, parts_folder, remove_leftovers, replacing, storage_failure
from ingest.video.layout import MAX_PROBE_BYTES
from ingest.video.sidecar.archive import ArchiveWriter, SidecarArchive
from ingest.video.sidecar.carry import carry_checksums, earlier_checksums
from ingest.video.sidecar.spec import SidecarSpec, describe_source, mismatch
from ingest.video.tables import SampleTable

DEFAULT_WORKERS = 8
DEFAULT_LOCK_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build has come.

    Attributes:
        done: files indexed and written.
        total: files of the source.
        bytes_read: from the source so far.
        elapsed_s: since the start.
        rate: files per second.
        eta_s: seconds left at that rate; None before the first file.
    """

    done: int
    total: int
    bytes_read: int
    elapsed_s: float
    rate: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One file indexed: its table and what reading it cost."""

    table: SampleTable
    bytes_read: int
    reads: int


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did.

    Attributes:
        path: the sidecar.
        spec: the source as written into it.
        reused: whether a valid sidecar was there already and nothing was built.
        files: source files.
        samples: samples of all files.
        truncated: samples that lie beyond the end of their file, by path; only files that have some.
        checksums: whether the payload has checksums.
        bytes_read: from the source.
        reads: range reads from the source.
        source_bytes: size of all source files.
        elapsed_s: seconds.
    """

    path: Path
    spec: SidecarSpec
    reused: bool
    files: int
    samples: int
    truncated: dict[str, int]
    checksums: bool
    bytes_read: int
    reads: int
    source_bytes: int
    elapsed_s: float


Progress = Callable[[BuildProgress], None]


def index_file(
    store: Store, path: str, *, size: int | None = None, max_probe_bytes: int = MAX_PROBE_BYTES, checksums: bool = False
) -> IndexedFile:
    """Indexes one file.

    Args:
        store: rooted at the dataset.
        path: of the video file.
        size: its bytes where they are known already; saves a request.
        max_probe_bytes: most metadata bytes read.
        checksums: also read the payload once and add its checksums.

    Raises:
        VideoFormatError: the file cannot be indexed.
        StorageError: it cannot be read.
    """
    spent: list[int] = []

    def read(start: int, stop: int) -> bytes:
        wanted: list[ByteRange] = [(start, stop)]
        spent.append(stop - start)
        return store.read_ranges(path, wanted)[0]

    table = read_sample_table(read, store.size(path) if size is None else size, path, max_probe_bytes=max_probe_bytes)
    if checksums:
        table, nbytes = add_checksums(store, table)
        spent.append(nbytes)
    return IndexedFile(table, sum(spent), len(spent))


def index_files(
    store: Store,
    paths: Sequence[str],
    *,
    sizes: Mapping[str, int | None] | None = None,
    workers: int = DEFAULT_WORKERS,
    max_probe_bytes: int = MAX_PROBE_BYTES,
    checksums: bool = False,
) -> Iterator[IndexedFile]:
    """Indexes files in parallel and yields them in the order given; at most ``workers`` results wait in memory.

    Raises:
        SettingsError: ``workers`` is not positive.
        VideoFormatError: a file cannot be indexed.
        StorageError: one cannot be read.
    """
    if workers < 1:
        raise SettingsError(f"workers must be positive, found {workers}")
    waiting: deque[Future[IndexedFile]] = deque()
    todo, known = iter(paths), sizes or {}
    with ThreadPoolExecutor(workers, thread_name_prefix="index-video") as pool:
        try:
            while True:
                while len(waiting) < workers and (path := next(todo, None)) is not None:
                    waiting.append(
                        pool.submit(index_file, store, path, size=known.get(path), max_probe_bytes=max_probe_bytes, checksums=checksums)
                    )
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def build_sidecar(
    store: Store,
    paths: Sequence[str],
    output: Path | str,
    *,
    repo_id: str,
    revision: str,
    data_root: str | None = None,
    workers: int = DEFAULT_WORKERS,
    max_probe_bytes: int = MAX_PROBE_BYTES,
    checksums: bool = False,
    force: bool = False,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    progress: Progress | None = None,
) -> BuildReport:
    """Builds the sidecar of a source, unless a valid one is there already.

    Processes that ask for the same file at once build it once. A failed or interrupted build leaves the previous file as it was.

    Args:
        store: rooted at the dataset's payload.
        paths: video files to index (all of the dataset's, or a subset that is then not publishable).
        output: sidecar to create or replace.
        repo_id: dataset name, recorded.
        revision: recorded.
        data_root: location as the user gave it, recorded; the store's own by default.
        workers: files indexed concurrently.
        max_probe_bytes: most metadata bytes read from one file.
        checksums: read the payload once and record a checksum per run between random-access points; those that an earlier
            sidecar beside this one recorded are kept where a file's samples are where they were.
        force: build even when a valid sidecar is there, and forget the checksums of earlier ones.
        lock_timeout_s: longest wait for another process.
        progress: called after every file.

    Raises:
        VideoFormatError: a file cannot be indexed; names it and why.
        ObjectChangedError: a file changed while it was indexed.
        LockTimeoutError: another process held the lock for too long.
        StorageError: the source cannot be read, or the sidecar cannot be written (disk full, read-only).
    """
    target = Path(output)
    spec = describe_source(store, paths, repo_id=repo_id, revision=revision, data_root=data_root)
    with locked(target, lock_timeout_s, "MP4 sidecar"):
        remove_leftovers(target)
        if not force:
            present = valid_sidecar(target, spec)
            if present is not None:
                with present:
                    if present.has_checksums or not checksums:
                        return _reused(target, present)
        indexed = index_files(store, spec.paths, sizes=spec.sizes, workers=workers, max_probe_bytes=max_probe_bytes, checksums=checksums)
        with nullcontext() if force else earlier_checksums(target, spec) as earlier:
            checked = checksums or earlier is not None
            carried = carry_checksums(indexed, earlier, store)
            return write_sidecar(target, spec, carried, checksums=checked, progress=progress, check=lambda: source_unchanged(store, spec))


def valid_sidecar(path: Path, spec: SidecarSpec) -> SidecarArchive | None:
    """Opens the sidecar at ``path`` when it is one of this source, else None.

    Raises:
        StorageError: permissions or the disk keep it from being read; building again would not help.
    """
    try:
        archive = SidecarArchive(path)
    except SidecarError:
        return None
    except OSError as error:
        if is_reported(error):
            raise storage_failure(error, "cannot read the MP4 sidecar", path) from error
        return None
    if mismatch(spec, archive.spec) is None:
        return archive
    archive.close()
    return None


def write_sidecar(
    target: Path,
    spec: SidecarSpec,
    indexed: Iterable[IndexedFile],
    *,
    checksums: bool = False,
    progress: Progress | None = None,
    check: Callable[[], None] | None = None,
) -> BuildReport:
    """Writes indexed files as a sidecar, and removes what an interrupted build on a cluster kept for it; the caller holds its lock.

    Args:
        target: sidecar to create or replace.
        spec: of the source.
        indexed: in ascending order of path.
        checksums: whether the tables carry checksums, for the report.
        progress: called after every file.
        check: called before the sidecar is installed; raising keeps the previous one.

    Raises:
        SidecarError: the files are not those of the source.
        StorageError: the sidecar cannot be written.
    """
    began = time.monotonic()
    samples = bytes_read = reads = source_bytes = done = 0
    truncated: dict[str, int] = {}
    with replacing(target, "cannot write the MP4 sidecar") as stream:
        writer = ArchiveWriter(stream)
        try:
            for file in indexed:
                writer.add(file.table)
                done += 1
                samples += file.table.samples
                bytes_read += file.bytes_read
                reads += file.reads
                source_bytes += file.table.file_size
                if file.table.truncated.size:
                    truncated[file.table.path] = int(file.table.truncated.size)
                if progress is not None:
                    progress(_progress(done, len(spec.sizes), bytes_read, time.monotonic() - began))
            written = writer.finish(spec)
        except BaseException:
            writer.abandon()
            raise
        if check is not None:
            check()
    shutil.rmtree(parts_folder(target), ignore_errors=True)
    elapsed = time.monotonic() - began
    return BuildReport(target, written, False, done, samples, truncated, checksums, bytes_read, reads, source_bytes, elapsed)


def _progress(done: int, total: int, bytes_read: int, elapsed_s: float) -> BuildProgress:
    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    return BuildProgress(done, total, bytes_read, elapsed_s, rate, (total - done) / rate if rate > 0 else None)


def source_unchanged(store: Store, before: SidecarSpec) -> None:
    if not before.stable:
        return
    now = describe_source(store, before.paths, repo_id=before.repo_id, revision=before.revision, data_root=before.data_root)
    difference = mismatch(now, before)
    if difference is not None:
        raise ObjectChangedError(
            f"{before.data_root}: a video file changed while it was indexed: {difference}. Build again once writing has ended"
        )


def _reused(target: Path, present: SidecarArchive) -> BuildReport:
    sizes = [size or 0 for size in present.spec.sizes.values()]
    return BuildReport(target, present.spec, True, len(sizes), 0, {}, present.has_checksums, 0, 0, sum(sizes), 0.0)


def partial_writes(target: Path) -> list[Path]:
    """Temporary files of builds that are under way or were killed."""
    return sorted(path for path in target.parent.glob(f".{target.name}.*.tmp{target.suffix}") if os.path.isfile(path))
