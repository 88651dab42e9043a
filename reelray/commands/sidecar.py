"""``reelray sidecar build | show | verify | push``: the MP4 index of a dataset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingest import settings
from ingest.engine.indexing import IndexedSource, log_progress
from ingest.errors import ObjectNotFoundError, SettingsError, SidecarError
from reelray.commands.common import Flat, PlaceArguments, check_outputs, human_bytes, print_facts, print_json, progress_bar
from train_integration.option_checks import require_non_negative

if TYPE_CHECKING:
    from ingest.video.sidecar.build import BuildProgress, BuildReport, Progress
    from ingest.video.sidecar.publish import PublishedSidecar

Positional = tyro.conf.Positional
OptionalSource = Annotated[str | None, Positional, tyro.conf.arg(metavar="SRC")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSource:
    """Which dataset is indexed, and what the sidecar says about it."""

    repo_id: str | None = None
    """Dataset name to record; by default OWNER/NAME, or the folder's name."""
    repo_type: Literal["dataset", "bucket"] | None = None
    """What OWNER/NAME names on the Hub; taken from the spelling when unset."""
    revision: str | None = None
    """Branch, tag or commit; recorded too. A local folder records its codebase version."""
    data_root: str | None = None
    """Where the videos are, if not at SRC; recorded as given."""

    def open(self, src: str | None) -> IndexedSource:
        """Opens metadata and payload.

        Raises:
            SettingsError: no location at all.
            DatasetError: the metadata cannot be read.
        """
        from ingest.lerobot.source import open_source
        from ingest.storage.stores import open_store

        place = src or self.data_root or self.repo_id
        if place is None:
            raise SettingsError("no dataset is named: give SRC, or --data-root, or --repo-id")
        location = PlaceArguments(repo_type=self.repo_type).location(place)
        # A payload root that says all itself, as LeRobot's builder takes it, leaves the revision a name to record.
        if self.revision is not None and (place != self.data_root or (location.kind == "hub" and location.revision is None)):
            location = PlaceArguments(revision=self.revision, repo_type=self.repo_type).location(place)
        source = open_source(open_store(location))
        store, payload = source.store, location
        if self.data_root is not None and self.data_root != place:
            payload = PlaceArguments().location(self.data_root)
            store = PlaceArguments().store(self.data_root)
        return IndexedSource.of(
            source,
            location,
            store=store,
            repo_id=self.repo_id,
            revision=self.revision,
            data_root=self.data_root if payload.is_local else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarBuild:
    """Index the MP4 files of a dataset once. An index that is there and still right is kept."""

    src: OptionalSource = None
    """Location of the dataset."""
    about: Flat[SidecarSource] = field(default_factory=SidecarSource)
    output: Path | None = None
    """Sidecar file to write; by default its place in the cache, where streams look for it."""
    workers: int = 8
    """Files indexed at once."""
    episodes: int | None = None
    """Index the videos of the first N episodes only; such a sidecar cannot be published."""
    max_probe_mb: int = 64
    """MiB of metadata read from one file, at most."""
    checksums: bool = False
    """Read the payload once and record a checksum per run between random-access points."""
    force: bool = False
    """Build even where a valid sidecar is."""
    lock_timeout_s: float = 1800.0
    """Longest wait for another process that builds the same sidecar, in seconds."""
    cluster: bool = False
    """Index with Ray tasks, and bring the sidecar to every node."""
    tasks: int | None = None
    """With --cluster: indexing tasks at once; one per CPU of the cluster when unset."""
    address: str | None = None
    """With --cluster: Ray cluster to join; RAY_ADDRESS, or a local one, when unset."""
    push: bool = False
    """Publish it beside its dataset; needs an hf:// location and the complete dataset."""
    json: bool = False
    """Print what was done as JSON."""

    def run(self) -> int:
        """Builds."""
        for name in ("workers", "max_probe_mb", "episodes", "tasks"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingsError(f"{name} must be positive, found {getattr(self, name)}")
        require_non_negative({"lock_timeout_s": self.lock_timeout_s})
        if not self.cluster and (self.tasks is not None or self.address is not None):
            raise SettingsError("tasks and address have no meaning without --cluster")
        check_outputs(output=self.output)
        opened = self.about.open(self.src)
        if self.push:
            _publisher(opened, complete=self.episodes is None).check_access()
        paths = opened.paths if self.episodes is None else opened.first_episodes(self.episodes)
        if not paths:
            raise SidecarError(f"{opened.store.url} has no video files, so it needs no sidecar")
        if self.output is None and self.episodes is not None:
            raise SettingsError("a sidecar of some episodes is not one that streams look for: give --output")
        with progress_bar(len(paths), " files", "indexing") as bar:
            report, cluster = self._build(opened, paths, _progress(bar, opened.store.url))
        published = _push(opened, report.path) if self.push else None
        facts: dict[str, Any] = {
            "sidecar": str(report.path),
            "repo_id": report.spec.repo_id,
            "revision": report.spec.revision,
            "data_root": report.spec.data_root,
            "reused": report.reused,
            "files": report.files,
            "samples": None if report.reused else report.samples,
            "checksums": report.checksums,
            "bytes_read": report.bytes_read,
            "source_bytes": report.source_bytes,
            "seconds": round(report.elapsed_s, 3),
            "truncated": report.truncated,
            "published": None if published is None else published.location,
            **cluster,
        }
        failed = any(node["origin"] == "failed" for node in cluster.get("nodes", ()))
        if self.json:
            print_json(facts)
            return int(failed)
        shown = {name.replace("_", " "): value for name, value in facts.items() if value is not None and name not in {"truncated", "nodes"}}
        print_facts(shown | {"bytes read": human_bytes(report.bytes_read), "source bytes": human_bytes(report.source_bytes)})
        for path, count in report.truncated.items():
            print(f"warning: {path}: {count} samples lie beyond the end of the file: it is truncated")
        for node in cluster.get("nodes", ()):
            print(f"node {node['node'][:8]}: {node['origin']} {node['message']}".rstrip())
        return int(failed)

    def _build(self, opened: IndexedSource, paths: Sequence[str], progress: Progress) -> tuple[BuildReport, dict[str, Any]]:
        from ingest.video.sidecar.build import build_sidecar
        from ingest.video.sidecar.spec import describe_source

        if self.cluster:
            from actors.sidecar_build import ClusterSettings, build_on_cluster
            from train_integration.cluster import ray_session

            how = ClusterSettings(
                tasks=self.tasks,
                max_probe_bytes=self.max_probe_mb << 20,
                checksums=self.checksums,
                force=self.force,
                lock_timeout_s=self.lock_timeout_s,
            )
            with ray_session(address=self.address):
                done = build_on_cluster(opened, how, paths=paths, output=self.output, progress=progress)
            return done.build, {"resumed": done.resumed, "tasks": done.tasks, "nodes": [asdict(node) for node in done.nodes]}
        report = build_sidecar(
            opened.store,
            paths,
            self.output or describe_source(opened.store, paths, **opened.identity()).cache_path(settings.lerobot_home()),
            **opened.identity(),
            workers=self.workers,
            max_probe_bytes=self.max_probe_mb << 20,
            checksums=self.checksums,
            force=self.force,
            lock_timeout_s=self.lock_timeout_s,
            progress=progress,
        )
        return report, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarShow:
    """Print a sidecar, or the index of one MP4 file. Status 1: the file cannot be indexed."""

    source: Annotated[Path, Positional, tyro.conf.arg(metavar="FILE")]
    """An MP4 file, or a sidecar (.npz)."""
    file: str | None = None
    """With a sidecar: which of its video files to show."""
    max_probe_mb: int = 64
    """MiB of metadata read from a video file, at most."""
    json: bool = False
    """Print JSON; for a video file {"timescale": T, "samples": [[offset, size, dts, pts, sync], …], "presented": [[pts, sample], …], …}."""

    def run(self) -> int:
        """Prints the index."""
        from ingest.video.sidecar.report import show_index

        if self.max_probe_mb < 1:
            raise SettingsError(f"max_probe_mb must be positive, found {self.max_probe_mb}")
        path = self.source.expanduser()
        if not path.is_file():
            raise ObjectNotFoundError(f"{path} is not a file: give an MP4 file or a sidecar (.npz)")
        shown = show_index(path, file=self.file, max_probe_bytes=self.max_probe_mb << 20)
        if self.json:
            print(json.dumps(shown))
            return 0
        facts = {name.replace("_", " "): value for name, value in shown.items() if not isinstance(value, list)}
        if "samples" in shown:
            sizes = [row[1] for row in shown["samples"]]
            facts |= {"samples": len(sizes), "payload": human_bytes(sum(sizes)), "key pictures": sum(row[4] for row in shown["samples"])}
            facts["random access"] = f"{len(shown['starts'])} points"
        print_facts({name: "none" if value is None else value for name, value in facts.items()})
        for entry in shown.get("files", ()):
            print(f"  {entry['path']}  {entry['size'] or 0:,} bytes  {entry['codec']}")
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarVerify:
    """Compare a sidecar with its source. Status 1: they differ."""

    sidecar: Annotated[Path, Positional, tyro.conf.arg(metavar="SIDECAR")]
    """Sidecar file."""
    src: OptionalSource = None
    """Location of the dataset; without it only the file itself is checked."""
    about: Flat[SidecarSource] = field(default_factory=SidecarSource)
    deep: bool = True
    """Index every video file again and compare."""
    payload: bool = False
    """Read the payload and compare the checksums, where there are any."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Prints what differs."""
        from ingest.video.sidecar.report import verify_sidecar

        sidecar = self.sidecar.expanduser()
        if not sidecar.is_file():
            raise ObjectNotFoundError(f"{sidecar} is not a file: give the sidecar (.npz), then the location of its dataset")
        opened = None if self.src is None and self.about.data_root is None else self.about.open(self.src)
        store = None if opened is None else opened.store
        paths = None if opened is None else opened.paths
        with progress_bar(None, " files", "verifying") as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            report = verify_sidecar(sidecar, store, paths, deep=self.deep, payload=self.payload, progress=progress)
        if self.json:
            print_json(
                {
                    "sidecar": str(report.path),
                    "ok": report.ok,
                    "files": report.files,
                    "samples": report.samples,
                    "runs": report.runs,
                    "bytes_read": report.bytes_read,
                    "findings": [{"file": finding.file, "message": finding.message} for finding in report.findings],
                }
            )
        else:
            for finding in report.findings:
                print(f"error    {finding.file or report.path}: {finding.message}")
            verdict = "no difference found" if report.ok else f"{len(report.findings)} differences"
            print(f"{report.path}: {verdict}; checked {report.files} files, {report.samples:,} samples, {report.runs:,} checksums")
        return 0 if report.ok else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarPush:
    """Publish a sidecar beside its dataset: to the branch lerobot-sidecars of a dataset, or into its bucket."""

    src: OptionalSource = None
    """Location of the dataset on the Hub."""
    about: Flat[SidecarSource] = field(default_factory=SidecarSource)
    sidecar: Path | None = None
    """Sidecar file; by default the cached one, built when there is none."""
    workers: int = 8
    """Files indexed at once when it must be built."""
    json: bool = False
    """Print where it went as JSON."""

    def run(self) -> int:
        """Publishes."""
        from ingest.video.sidecar.cache import resolve_sidecar

        opened = self.about.open(self.src)
        _publisher(opened).check_access()
        path = None if self.sidecar is None else self.sidecar.expanduser()
        if path is None:
            with progress_bar(len(opened.paths), " files", "indexing") as bar:
                progress = _progress(bar, opened.store.url)
                resolved = resolve_sidecar(opened.store, opened.paths, **opened.identity(), workers=self.workers, progress=progress)
            path = resolved.path
        published = _push(opened, path)
        facts = {"published": published.location, "path": published.path, "branch": published.branch or "none", "sidecar": str(path)}
        if self.json:
            print_json(facts)
        else:
            print_facts(facts)
        return 0


def _progress(bar: Any, where: str) -> Progress:
    """Moves a bar on a terminal, writes log lines elsewhere."""
    if bar.disable:
        return log_progress(where)

    def progress(done: BuildProgress) -> None:
        bar.update(done.done - bar.n)

    return progress


def _publisher(opened: IndexedSource, *, complete: bool = True) -> Any:
    """Write access to the place of the dataset, for `publish_sidecar`."""
    from ingest.storage.locations import parse_location
    from ingest.storage.publish import SidecarPublisher

    # A store's location is canonical and, for a Hub dataset, names the commit it is pinned to.
    return SidecarPublisher(parse_location(opened.store.url), complete=complete)


class _Uploads:
    """The Hub's publisher as `publish_sidecar` wants it: the branch is made together with the upload."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def prepare_branch(self, branch: str, commit: str) -> None:  # noqa: ARG002 - made from the pinned commit by publish
        self._publisher.check_access()

    def publish(self, source: Path, path: str, branch: str | None) -> str:  # noqa: ARG002 - one branch is ever written
        return self._publisher.publish(path, source, f"MP4 sidecar {Path(path).name}")


def _push(opened: IndexedSource, sidecar: Path) -> PublishedSidecar:
    from ingest.storage.locations import parse_location
    from ingest.video.sidecar.publish import publish_sidecar

    kind = "bucket" if parse_location(opened.store.url).kind == "bucket" else "dataset"
    return publish_sidecar(_Uploads(_publisher(opened)), sidecar, opened.store, opened.paths, repo_type=kind)
