"""``python -m actors.build_sidecars SRC``: a dataset's MP4 sidecar, built by the cluster that the job runs on."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import ray
import tyro

from actors.sidecar_build import ClusterSettings, build_on_cluster
from ingest.engine.indexing import IndexedSource, log_progress
from ingest.errors import ReelrayError, SidecarError
from ingest.lerobot.source import open_source
from ingest.storage.locations import parse_location
from ingest.storage.stores import open_store
from ingest.video.sidecar.build import DEFAULT_LOCK_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSidecars:
    """Index the MP4 files of a dataset with a Ray cluster. Status 1: a node did not get the sidecar."""

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Location of the dataset."""
    repo_id: str | None = None
    """Dataset name to record; by default OWNER/NAME, or the folder's name."""
    repo_type: Literal["dataset", "bucket"] | None = None
    """What OWNER/NAME names on the Hub; taken from the spelling when unset."""
    revision: str | None = None
    """Branch, tag or commit."""
    tasks: int | None = None
    """Indexing tasks at once; one per CPU of the cluster when unset."""
    max_probe_mb: int = 64
    """MiB of metadata read from one file, at most."""
    checksums: bool = False
    """Read the payload once and record checksums."""
    force: bool = False
    """Build even where a valid sidecar is."""
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    """Longest wait for another build."""
    address: str | None = None
    """Ray cluster to join; RAY_ADDRESS, or a local one, when unset."""

    def run(self) -> int:
        """Builds and prints what was done."""
        location = parse_location(self.src, repo_type=self.repo_type, revision=self.revision)
        videos = IndexedSource.of(open_source(open_store(location)), location, repo_id=self.repo_id, revision=self.revision)
        if not videos.paths:
            raise SidecarError(f"{videos.store.url} has no video files, so it needs no sidecar")
        how = ClusterSettings(
            tasks=self.tasks,
            max_probe_bytes=self.max_probe_mb << 20,
            checksums=self.checksums,
            force=self.force,
            lock_timeout_s=self.lock_timeout_s,
        )
        if not ray.is_initialized():
            ray.init(address=self.address or os.environ.get("RAY_ADDRESS"), log_to_driver=False, logging_level=logging.WARNING)
        report = build_on_cluster(videos, how, progress=log_progress(videos.store.url))
        build = report.build
        state = "was there" if build.reused else f"built from {build.files} files in {build.elapsed_s:.1f} s ({report.resumed} resumed)"
        lines = [f"{build.path}: {state}"]
        lines += [f"node {outcome.node[:8]}: {outcome.origin} {outcome.message}".rstrip() for outcome in report.nodes]
        sys.stdout.write("\n".join(lines) + "\n")
        return 1 if any(outcome.origin == "failed" for outcome in report.nodes) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m actors.build_sidecars``; errors are one line and status 1."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return tyro.cli(BuildSidecars, args=arguments, prog="python -m actors.build_sidecars").run()
    except ReelrayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
