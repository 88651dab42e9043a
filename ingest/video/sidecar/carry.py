"""Checksums outlive the sidecar that they were recorded in: a file that was only touched keeps them, and so damage shows.

A local file whose bits were changed in place is another file by its times, so its sidecar is built anew. Without what the
earlier one recorded, the damage would become the new truth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ingest.errors import SidecarError
from ingest.storage.base import Store
from ingest.video.checksums import add_checksums
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.spec import SidecarSpec
from ingest.video.tables import SampleTable

if TYPE_CHECKING:
    from ingest.video.sidecar.build import IndexedFile


@contextmanager
def earlier_checksums(target: Path, spec: SidecarSpec) -> Generator[SidecarArchive | None]:
    """Opens the newest sidecar with checksums that was kept for an earlier state of the same source.

    Args:
        target: where the sidecar of the present state belongs; earlier ones lie beside it.
        spec: of the present state.
    """
    with contextlib.ExitStack() as opened:
        yield next((archive for archive in _earlier(target, spec, opened)), None)


def _earlier(target: Path, spec: SidecarSpec, opened: contextlib.ExitStack) -> Iterator[SidecarArchive]:
    dated: list[tuple[int, Path]] = []
    for path in target.parent.glob("mp4-v3-*.npz"):
        with contextlib.suppress(OSError):
            dated.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(dated, reverse=True):
        try:
            archive = opened.enter_context(SidecarArchive(path))
        except (SidecarError, OSError):
            continue
        same = (archive.spec.repo_id, archive.spec.data_root) == (spec.repo_id, spec.data_root)
        if same and archive.has_checksums:
            yield archive


def carry_checksums(indexed: Iterable[IndexedFile], earlier: SidecarArchive | None, store: Store) -> Iterator[IndexedFile]:
    """Gives files the checksums that were recorded for them; those that are coded otherwise now are read once.

    Args:
        indexed: files of the present state.
        earlier: with checksums; None leaves everything as it is.
        store: rooted at the source.

    Raises:
        StorageError: the payload of a new file cannot be read.
    """
    for file in indexed:
        if earlier is None or file.table.gop_xxh3 is not None:
            yield file
            continue
        known = _known(earlier, file.table.path)
        if known is not None and _same_samples(known, file.table):
            yield replace(file, table=replace(file.table, gop_xxh3=known.gop_xxh3))
        else:
            table, nbytes = add_checksums(store, file.table)
            yield replace(file, table=table, bytes_read=file.bytes_read + nbytes, reads=file.reads + 1)


def _known(earlier: SidecarArchive, path: str) -> SampleTable | None:
    if path not in earlier.files:
        return None
    try:
        return earlier.table(path)
    except SidecarError:
        return None


def _same_samples(known: SampleTable, table: SampleTable) -> bool:
    names = ("offsets", "sizes", "starts")
    return known.file_size == table.file_size and all(np.array_equal(getattr(known, name), getattr(table, name)) for name in names)
