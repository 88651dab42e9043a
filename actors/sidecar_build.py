"""Builds a dataset's MP4 sidecar on a cluster.

Tasks index the files, one process writes. What is indexed is kept beside the sidecar until that is written, so a build
that is killed goes on where it was; tasks that are killed run again. At the end every node has the sidecar and its mapped
index, or finds them in the cache that it shares with the writer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.causes import raise_typed, typed_cause
from actors.metrics import BuildMetrics, this_node
from actors.node_cache import HandedOver
from ingest import settings
from ingest.engine.indexing import IndexedSource
from ingest.errors import ReelrayError, ResourceUnavailableError, SettingsError
from ingest.storage.base import Store
from ingest.video.files import locked, remove_leftovers
from ingest.video.layout import MAX_PROBE_BYTES
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.build import (
    DEFAULT_LOCK_TIMEOUT_S,
    BuildProgress,
    BuildReport,
    IndexedFile,
    Progress,
    index_file,
    source_unchanged,
    valid_sidecar,
    write_sidecar,
)
from ingest.video.sidecar.cache import prepare_mapped_index
from ingest.video.sidecar.carry import carry_checksums, earlier_checksums
from ingest.video.sidecar.lookup import IndexRequest
from ingest.video.sidecar.parts import PartFolder, pack_part, remove_abandoned_parts
from ingest.video.sidecar.spec import SidecarSpec, describe_source

_LOG = logging.getLogger("reelray.actors")
_FILES_PER_TASK = 16
_TASK_RETRIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """How a build is spread.

    Attributes:
        tasks: indexing tasks at once; None takes one per CPU of the cluster. They reserve no CPU, so trainers cannot starve them.
        files_per_task: files that one task indexes, at most.
        max_probe_bytes: most metadata bytes read from one file.
        checksums: read the payload once and record checksums.
        force: build even where a valid sidecar is; what an interrupted build left is not used either.
        lock_timeout_s: longest wait for another build of the same sidecar.
        cache_home: LeRobot's cache folder on every node; None is ``HF_LEROBOT_HOME`` of each.
    """

    tasks: int | None = None
    files_per_task: int = _FILES_PER_TASK
    max_probe_bytes: int = MAX_PROBE_BYTES
    checksums: bool = False
    force: bool = False
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    cache_home: Path | None = None

    def __post_init__(self) -> None:
        for name in ("tasks", "files_per_task", "max_probe_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name} must be positive, found {value}")


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What became of the sidecar on one node.

    Attributes:
        node: node id.
        origin: ``cache`` (it was there, or the cache is shared), ``published`` (handed over), ``built``, or ``failed``.
        message: why it failed.
    """

    node: str
    origin: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What a cluster build did.

    Attributes:
        build: of the one writer.
        resumed: files that an interrupted build had indexed already.
        tasks: indexing tasks that were started.
        nodes: the other nodes, empty for an explicit output file.
    """

    build: BuildReport
    resumed: int
    tasks: int
    nodes: tuple[NodeOutcome, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    store: Store
    spec: SidecarSpec
    max_probe_bytes: int
    checksums: bool


@dataclass(frozen=True, slots=True)
class _Indexed:
    parts: list[tuple[str, bytes]]
    bytes_read: int
    reads: int
    error: ReelrayError | None


@ray.remote(num_cpus=0, max_retries=_TASK_RETRIES, scheduling_strategy="SPREAD")
def _index(job: _Job, paths: list[str]) -> _Indexed:
    """Indexes some files. What was done before one that cannot be indexed comes back, too."""
    parts: list[tuple[str, bytes]] = []
    bytes_read = reads = 0
    for path in paths:
        try:
            found = index_file(job.store, path, size=job.spec.sizes[path], max_probe_bytes=job.max_probe_bytes, checksums=job.checksums)
        except ReelrayError as error:
            return _Indexed(parts, bytes_read, reads, error)
        parts.append((path, pack_part(job.spec, found.table)))
        bytes_read, reads = bytes_read + found.bytes_read, reads + found.reads
    return _Indexed(parts, bytes_read, reads, None)


@ray.remote(num_cpus=0, max_retries=_TASK_RETRIES)
def _install(request: IndexRequest, shelf: HandedOver) -> str:
    """Makes sure that a node has the sidecar and its mapped index."""
    return request.open(published=shelf).origin


def build_on_cluster(
    videos: IndexedSource,
    how: ClusterSettings | None = None,
    *,
    paths: Sequence[str] | None = None,
    output: Path | None = None,
    progress: Progress | None = None,
) -> ClusterReport:
    """Builds the sidecar of a dataset with the connected cluster, unless a valid one is there, and brings it to every node.

    Args:
        videos: the dataset.
        how: how to spread the work.
        paths: video files to index; None is all of them.
        output: sidecar to create or replace; by default its place in the cache, from where it goes to every node.
        progress: called after every task.

    Raises:
        VideoFormatError: a file cannot be indexed; what others gave is kept for the next build.
        ObjectChangedError: a file changed while it was indexed.
        LockTimeoutError: another build held the lock for too long.
        StorageError: the source cannot be read, or the sidecar cannot be written.
        ResourceUnavailableError: tasks were lost again and again.
    """
    how = how or ClusterSettings()
    home = how.cache_home or settings.lerobot_home()
    spec = describe_source(videos.store, videos.paths if paths is None else paths, **videos.identity())
    target = spec.cache_path(home) if output is None else output
    with locked(target, how.lock_timeout_s, "MP4 sidecar"):
        remove_leftovers(target)
        report = None if how.force else _present(target, spec, how)
        report = report or _build(videos.store, spec, target, how, progress)
    nodes: tuple[NodeOutcome, ...] = ()
    if output is None:
        prepare_mapped_index(target, cache_home=home, lock_timeout_s=how.lock_timeout_s)
        request = videos.request(cache_home=how.cache_home, lock_timeout_s=how.lock_timeout_s, checksums=how.checksums)
        nodes = _bring_to_nodes(request, target)
    return replace(report, nodes=nodes)


def _present(target: Path, spec: SidecarSpec, how: ClusterSettings) -> ClusterReport | None:
    found = valid_sidecar(target, spec)
    if found is None:
        return None
    with found:
        if how.checksums and not found.has_checksums:
            return None
        # A build may have been killed between installing the sidecar and clearing up behind it.
        PartFolder(target, spec, checksums=how.checksums).remove()
        sizes = [size or 0 for size in found.spec.sizes.values()]
        build = BuildReport(target, found.spec, True, len(sizes), 0, {}, found.has_checksums, 0, 0, sum(sizes), 0.0)
        return ClusterReport(build, 0, 0, ())


def _build(store: Store, spec: SidecarSpec, target: Path, how: ClusterSettings, progress: Progress | None) -> ClusterReport:
    began = time.monotonic()
    folder = PartFolder(target, spec, checksums=how.checksums)
    if how.force:
        folder.remove()
    missing = folder.missing()
    total, resumed = len(spec.sizes), len(spec.sizes) - len(missing)
    if resumed:
        _LOG.info("%s: %d of %d files were indexed by a build that was interrupted", target, resumed, total)
    in_flight = how.tasks or max(1, int(ray.cluster_resources().get("CPU", 1)))
    size = max(1, min(how.files_per_task, -(-len(missing) // in_flight)))
    chunks = [missing[start : start + size] for start in range(0, len(missing), size)]
    bytes_read = reads = done = 0
    metrics = BuildMetrics("sidecar", store.url, this_node())
    metrics.update(resumed, total, 0, None)
    job = ray.put(_Job(store, spec, how.max_probe_bytes, how.checksums))
    failed: ReelrayError | None = None
    for indexed in _run(job, chunks, in_flight):
        for path, part in indexed.parts:
            folder.keep(path, part)
        done += len(indexed.parts)
        bytes_read, reads = bytes_read + indexed.bytes_read, reads + indexed.reads
        failed = failed or indexed.error
        elapsed = time.monotonic() - began
        rate = done / elapsed if elapsed > 0 else 0.0
        eta = (len(missing) - done) / rate if rate else None
        metrics.update(resumed + done, total, bytes_read, eta)
        if progress is not None and done:
            progress(BuildProgress(resumed + done, total, bytes_read, elapsed, rate, eta))
    if failed is not None:
        raise failed
    indexed_files: Iterator[IndexedFile] = (folder.indexed(path) for path in spec.paths)
    with _earlier(target, spec, how) as earlier:
        checked = how.checksums or earlier is not None
        carried = carry_checksums(indexed_files, earlier, store)
        report = write_sidecar(target, spec, carried, checksums=checked, check=lambda: source_unchanged(store, spec))
    remove_abandoned_parts(target)
    report = replace(report, bytes_read=bytes_read, reads=reads, elapsed_s=time.monotonic() - began)
    return ClusterReport(report, resumed, len(chunks), ())


def _earlier(target: Path, spec: SidecarSpec, how: ClusterSettings) -> AbstractContextManager[SidecarArchive | None]:
    return nullcontext() if how.force else earlier_checksums(target, spec)


def _run(job: ray.ObjectRef[_Job], chunks: list[list[str]], in_flight: int) -> Iterator[_Indexed]:
    """Runs tasks, ``in_flight`` at a time, and yields what they did as they end. After a failure no more are started."""
    waiting: list[Any] = []
    todo, stopped = deque(chunks), False
    try:
        while waiting or (todo and not stopped):
            while todo and not stopped and len(waiting) < in_flight:
                waiting.append(_index.remote(job, todo.popleft()))
            ready, waiting = ray.wait(waiting, num_returns=1)
            indexed: _Indexed = _result(ready[0])
            stopped = stopped or indexed.error is not None
            yield indexed
    finally:
        for ref in waiting:
            ray.cancel(ref)


def _result(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise_typed(error)
    except RayError as error:
        if isinstance(found := typed_cause(error), ReelrayError):
            raise found from error
        raise ResourceUnavailableError(
            f"an indexing task was lost {_TASK_RETRIES} times: {error}; what others indexed is kept: build again once the cluster is well"
        ) from error


def _bring_to_nodes(request: IndexRequest, sidecar: Path) -> tuple[NodeOutcome, ...]:
    here = ray.get_runtime_context().get_node_id()
    nodes: list[str] = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    if not nodes:
        return ()
    shelf = HandedOver(ray.put(sidecar.read_bytes()))
    task: Any = _install
    refs = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(request, shelf) for node in nodes
    }
    outcomes: list[NodeOutcome] = []
    for node, ref in refs.items():
        try:
            outcomes.append(NodeOutcome(node, _result(ref)))
        except (ReelrayError, RayError) as error:
            _LOG.warning("node %s did not get the sidecar: %s", node[:8], error)
            outcomes.append(NodeOutcome(node, "failed", str(error)))
    return tuple(outcomes)
