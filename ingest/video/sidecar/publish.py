"""Publishing a sidecar: explicit, complete datasets only, checked against the source first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ingest.errors import SidecarError
from ingest.storage.base import Store
from ingest.storage.paths import check_relative
from ingest.video.files import replacing
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.spec import PUBLISHED_BRANCH, PUBLISHED_FOLDER, describe_source, mismatch

_COPY_BYTES = 1 << 20


class SidecarPublisher(Protocol):
    """Write access to where sidecars are published."""

    def prepare_branch(self, branch: str, commit: str) -> None:
        """Creates ``branch`` from ``commit`` unless it is there (dataset repositories only).

        Raises:
            StorageError: it cannot be created.
        """
        ...

    def publish(self, source: Path, path: str, branch: str | None) -> str:
        """Uploads one file, whole or not at all.

        Args:
            source: local file.
            path: below the repository or bucket.
            branch: of a dataset repository; None for a bucket.

        Returns:
            location as a person would write it.

        Raises:
            StorageError: it cannot be written.
        """
        ...


@dataclass(frozen=True, slots=True)
class PublishedSidecar:
    """Where a sidecar went: the location, its path below the root, and its branch."""

    location: str
    path: str
    branch: str | None


def publish_sidecar(
    publisher: SidecarPublisher, sidecar: Path, source_store: Store, paths: Sequence[str], *, repo_type: str = "dataset"
) -> PublishedSidecar:
    """Publishes a sidecar after checking it against its source.

    Args:
        publisher: write access.
        sidecar: the file.
        source_store: rooted at the dataset's payload; the source is described afresh.
        paths: every video file of the dataset; a sidecar of fewer is refused.
        repo_type: ``dataset`` (goes to the branch ``lerobot-sidecars``) or ``bucket`` (no branch).

    Raises:
        SidecarError: damaged, of another schema, of a subset, of another state of the source, or of a source that is not pinned.
        StorageError: source or destination cannot be read or written.
    """
    with SidecarArchive(sidecar) as archive:
        spec = archive.spec
        if set(spec.sizes) != set(paths):
            raise SidecarError(
                f"{sidecar}: only a complete dataset sidecar can be published: it has {len(spec.sizes)} of {len(set(paths))} video files"
            )
        commit = spec.pinned_commit
        if repo_type == "dataset" and commit is None:
            raise SidecarError(
                f"{sidecar}: publishing to a dataset needs a pinned source commit, found {spec.data_root!r}; build it from "
                "hf://datasets/OWNER/NAME@COMMIT with the 40 hexadecimal digits"
            )
        if repo_type == "bucket" and not spec.fingerprints:
            raise SidecarError(f"{sidecar}: publishing to a bucket needs source fingerprints, and it has none; build it again")
        if repo_type not in ("dataset", "bucket"):
            raise SidecarError(f"{sidecar}: repo type {repo_type!r} is neither 'dataset' nor 'bucket'")
        now = describe_source(source_store, paths, repo_id=spec.repo_id, revision=spec.revision, data_root=spec.data_root)
        difference = mismatch(now, spec)
        if difference is not None:
            raise SidecarError(f"{sidecar}: does not describe the source as it is now: {difference}")
        archive.validate()
    branch = PUBLISHED_BRANCH if repo_type == "dataset" else None
    if branch is not None and commit is not None:
        publisher.prepare_branch(branch, commit)
    path = f"{PUBLISHED_FOLDER}/{spec.published().file_name()}"
    return PublishedSidecar(publisher.publish(sidecar, path, branch), path, branch)


@dataclass(frozen=True, slots=True)
class LocalPublisher:
    """Publishes into a directory: branches are folders below it.

    Attributes:
        root: the directory.
    """

    root: Path

    def branch_folder(self, branch: str | None) -> Path:
        """Folder that a reader of the branch, or of the bucket, is rooted at."""
        return self.root / check_relative(branch) if branch else self.root

    def prepare_branch(self, branch: str, commit: str) -> None:
        folder = self.branch_folder(branch)
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / ".source-commit"
        if not marker.exists():
            marker.write_text(commit, encoding="utf-8")

    def publish(self, source: Path, path: str, branch: str | None) -> str:
        target = self.branch_folder(branch) / check_relative(path)
        with replacing(target, "cannot publish the MP4 sidecar") as stream, source.open("rb") as local:
            while piece := local.read(_COPY_BYTES):
                stream.write(piece)
        return str(target)
