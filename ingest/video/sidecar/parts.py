"""Single files of a sidecar under construction, kept until the whole is written, so that a killed build goes on."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import time
from dataclasses import replace
from pathlib import Path

from ingest.errors import LockTimeoutError, SidecarError, StorageError
from ingest.video.files import locked, parts_folder, replacing
from ingest.video.sidecar.archive import SidecarArchive, write_archive
from ingest.video.sidecar.build import IndexedFile
from ingest.video.sidecar.spec import SidecarSpec, mismatch
from ingest.video.tables import SampleTable

_ABANDONED_S = 24 * 3600.0


def spec_of_file(spec: SidecarSpec, path: str) -> SidecarSpec:
    """The description of a source that is cut down to one of its files."""
    fingerprints = {path: spec.fingerprints[path]} if spec.fingerprints else {}
    return replace(spec, sizes={path: spec.sizes[path]}, fingerprints=fingerprints)


def pack_part(spec: SidecarSpec, table: SampleTable) -> bytes:
    """One indexed file as a sidecar of its own."""
    buffer = io.BytesIO()
    write_archive(buffer, spec_of_file(spec, table.path), [table])
    return buffer.getvalue()


class PartFolder:
    """Indexed files beside the sidecar that they will make up. Use it under the lock of that sidecar.

    Args:
        target: the sidecar.
        spec: of the whole source.
        checksums: whether parts must have checksums.
    """

    def __init__(self, target: Path, spec: SidecarSpec, *, checksums: bool) -> None:
        self.folder = parts_folder(target)
        self._spec = spec
        self._checksums = checksums

    def _path(self, path: str) -> Path:
        return self.folder / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.npz"

    def keep(self, path: str, part: bytes) -> None:
        """Stores one indexed file.

        Raises:
            StorageError: it cannot be written.
        """
        with replacing(self._path(path), "cannot keep an indexed file at") as stream:
            stream.write(part)

    def load(self, path: str) -> IndexedFile | None:
        """One indexed file, or None where it is missing, damaged or of another state of the source."""
        try:
            with SidecarArchive(self._path(path)) as archive:
                if mismatch(spec_of_file(self._spec, path), archive.spec) is None and (archive.has_checksums or not self._checksums):
                    return IndexedFile(archive.table(path), 0, 0)
        except (SidecarError, OSError):
            return None
        return None

    def missing(self) -> list[str]:
        """Files of the source that are still to be indexed, ascending."""
        return [path for path in self._spec.paths if self.load(path) is None]

    def indexed(self, path: str) -> IndexedFile:
        """One indexed file that must be there.

        Raises:
            SidecarError: it is not, or it is damaged.
        """
        found = self.load(path)
        if found is None:
            raise SidecarError(f"{self._path(path)}: the index of {path} was kept here and is gone or damaged; build again")
        return found

    def remove(self) -> None:
        """Removes all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)


def remove_abandoned_parts(target: Path, *, older_than_s: float = _ABANDONED_S) -> int:
    """Removes what killed builds of other states of the same dataset left beside ``target``: their sources changed, so none goes on.

    Args:
        target: a sidecar in the cache.
        older_than_s: age in seconds; younger ones may be waiting for their build to be started again.

    Returns:
        how many folders were removed.
    """
    removed = 0
    for folder in target.parent.glob(".mp4-v3-*.npz.parts"):
        if folder == parts_folder(target):
            continue
        other = target.with_name(folder.name[1 : -len(".parts")])
        # Whoever holds the lock is at work on them; whatever cannot be read or locked is left alone.
        with contextlib.suppress(LockTimeoutError, StorageError, OSError):
            if time.time() - folder.stat().st_mtime < older_than_s:
                continue
            with locked(other, 0, "MP4 sidecar"):
                shutil.rmtree(folder)
                removed += 1
    return removed
