"""Showing and verifying indexes: what the command line prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingest.errors import ReelrayError, VideoFormatError
from ingest.storage.base import Store
from ingest.storage.local import LocalStore
from ingest.video.checksums import add_checksums
from ingest.video.entries import parse_sample_entries
from ingest.video.index import probe_table
from ingest.video.keys import length_size
from ingest.video.layout import MAX_PROBE_BYTES
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.build import index_file
from ingest.video.sidecar.spec import describe_source, mismatch
from ingest.video.tables import SampleTable


def show_index(source: Path | str, *, file: str | None = None, max_probe_bytes: int = MAX_PROBE_BYTES) -> dict[str, Any]:
    """The index of one video file as plain data, or the contents of a sidecar.

    Args:
        source: an MP4 or QuickTime file, or a sidecar, whatever its name.
        file: with a sidecar, which of its source files to show; None lists them.
        max_probe_bytes: most metadata bytes read from a video file.

    Returns:
        ``{"timescale": T, "samples": [[offset, size, dts, pts, sync], …], "presented": [[pts, sample], …], …}`` in media ticks,
        samples in decode order and media time before edit lists (what the file leaves untimed stands at the end of what it times;
        ``presented`` shows it one by one, as players do); for a sidecar without ``file`` its manifest in short.

    Raises:
        VideoFormatError: the file cannot be indexed, its samples lie beyond its end, or they do not begin as its codec demands.
        SidecarError: damaged sidecar, or ``file`` is not in it.
        StorageError: it cannot be read.
    """
    path = Path(source)
    if _is_archive(path):
        with SidecarArchive(path) as archive:
            return _show_table(archive.table(file)) if file is not None else _show_sidecar(archive)
    store = LocalStore.at(path.parent)
    table = probe_table(store, path.name, max_probe_bytes=max_probe_bytes)
    missing = table.truncated
    if missing.size:
        raise VideoFormatError(
            f"{path}: {missing.size} of {table.samples} samples lie beyond the end of the file ({table.file_size} bytes), from sample "
            f"{int(missing[0])} on: it is truncated",
            file=str(path),
        )
    misframed = _first_misframed(store, table)
    if misframed is not None:
        raise VideoFormatError(
            f"{path}: sample {misframed} does not hold {table.codec} data: the size table is wrong or the payload is damaged",
            file=str(path),
        )
    return _show_table(table)


def _is_archive(path: Path) -> bool:
    if path.suffix == ".npz" or not path.is_file():
        return path.suffix == ".npz"
    with path.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def _first_misframed(store: LocalStore, table: SampleTable) -> int | None:
    """First sample of a length-prefixed codec whose first unit is empty or longer than the sample; None when all are sound."""
    entries = parse_sample_entries(table.stsd, table.path)
    prefixed = np.array([length_size(entry) or 0 for entry in entries])
    widths = prefixed[table.descriptions.astype(np.int64)]
    numbers = np.flatnonzero((widths > 0) & (table.sizes > 0))
    starts = table.offsets[numbers].astype(np.int64)
    stops = starts + np.minimum(widths[numbers], table.sizes[numbers])
    lengths = [int.from_bytes(raw, "big") for raw in store.read_ranges(table.path, list(zip(starts.tolist(), stops.tolist(), strict=True)))]
    wrong = numbers[
        (np.array(lengths, np.int64) <= 0) | (np.array(lengths, np.int64) > table.sizes[numbers].astype(np.int64) - widths[numbers])
    ]
    return int(wrong[0]) if len(wrong) else None


def _show_table(table: SampleTable) -> dict[str, Any]:
    flags = np.zeros(table.samples, np.int64)
    flags[table.sync.astype(np.int64)] = 1
    dts = table.dts.astype(np.int64)
    dts[table.samples - table.untimed :] = dts[table.samples - table.untimed] if table.untimed else 0
    rows = np.stack([table.offsets.astype(np.int64), table.sizes.astype(np.int64), dts, dts + table.composition, flags], axis=1)
    return {
        "path": table.path,
        "codec": table.codec,
        "width": table.width,
        "height": table.height,
        "timescale": table.timescale,
        "pictures": table.pictures,
        "starts": table.starts.tolist(),
        "samples": rows.tolist(),
        "presented": np.stack([table.presented_pts.astype(np.int64), table.presented.astype(np.int64)], axis=1).tolist(),
    }


def _show_sidecar(archive: SidecarArchive) -> dict[str, Any]:
    spec = archive.spec
    return {
        "schema_version": 3,
        "repo_id": spec.repo_id,
        "revision": spec.revision,
        "data_root": spec.data_root,
        "checksums": archive.has_checksums,
        "fingerprints": len(spec.fingerprints),
        "files": [{"path": path, "size": spec.sizes[path], "codec": archive.files[path].record.get("codec")} for path in spec.paths],
    }


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a sidecar: the source file that it concerns (or None) and what is wrong."""

    file: str | None
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verifying a sidecar found.

    Attributes:
        path: of the sidecar.
        files: source files checked.
        samples: samples checked.
        runs: payload runs whose checksum was compared.
        bytes_read: from the source.
        findings: everything wrong; empty when it is right.
    """

    path: Path
    files: int
    samples: int
    runs: int
    bytes_read: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def verify_sidecar(
    sidecar: Path | str,
    store: Store | None = None,
    paths: Sequence[str] | None = None,
    *,
    deep: bool = True,
    payload: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Checks a sidecar: its arrays, and with a store its source.

    Args:
        sidecar: the file.
        store: rooted at the source; without one only the file itself is checked.
        paths: every video file of the dataset, to find ones that are not indexed.
        deep: index every source file again and compare.
        payload: read the payload and compare the checksums, where there are any.
        progress: called with (files checked, files) after every file.

    Raises:
        SidecarError: the file is no schema 3 sidecar at all.
        OSError: the file cannot be read.
    """
    target, findings = Path(sidecar), list[Finding]()
    samples = runs = bytes_read = 0
    with SidecarArchive(target) as archive:
        spec = archive.spec
        if store is not None:
            now = describe_source(store, paths or spec.paths, repo_id=spec.repo_id, revision=spec.revision, data_root=spec.data_root)
            if not now.stable:
                # A source without identities never matches; its files can still be compared.
                now = replace(now, fingerprints=spec.fingerprints)
            difference = mismatch(now, spec)
            if difference is not None:
                findings.append(Finding(None, f"it does not describe the source as it is now: {difference}"))
        for done, path in enumerate(spec.paths):
            try:
                table = archive.table(path)
                samples += table.samples
                if store is not None and deep:
                    fresh = index_file(store, path)
                    bytes_read += fresh.bytes_read
                    findings.extend(Finding(path, message) for message in _differences(table, fresh.table))
                if store is not None and payload and table.gop_xxh3 is not None:
                    messages, nbytes = _payload_differences(store, table)
                    findings.extend(Finding(path, message) for message in messages)
                    bytes_read += nbytes
                    runs += len(table.gop_xxh3)
            except ReelrayError as error:
                findings.append(Finding(path, str(error)))
            if progress is not None:
                progress(done + 1, len(spec.sizes))
    return VerifyReport(target, len(spec.sizes), samples, runs, bytes_read, tuple(findings))


_COMPARED = ("file_size", "codec", "timescale", "duration", "width", "height", "stsd", "moov_offset", "mdat_offset", "edit_offset_ticks")
_COMPARED_ARRAYS = ("offsets", "sizes", "durations", "composition", "dts", "sync", "presented", "descriptions")


def _differences(table: SampleTable, fresh: SampleTable) -> list[str]:
    found = [
        f"{name} is {getattr(table, name)!r} in the sidecar, {getattr(fresh, name)!r} in the file"
        for name in _COMPARED
        if getattr(table, name) != getattr(fresh, name)
    ]
    found += [
        f"{name} differs from the file" for name in _COMPARED_ARRAYS if not np.array_equal(getattr(table, name), getattr(fresh, name))
    ]
    return found


def _payload_differences(store: Store, table: SampleTable) -> tuple[list[str], int]:
    assert table.gop_xxh3 is not None
    fresh, nbytes = add_checksums(store, table)
    assert fresh.gop_xxh3 is not None
    wrong = np.flatnonzero(fresh.gop_xxh3 != table.gop_xxh3)
    if not len(wrong):
        return [], nbytes
    bounds = table.gop_bounds
    first, stop = int(bounds[wrong[0]]), int(bounds[wrong[0] + 1])
    return [f"the payload of {len(wrong)} of {len(table.gop_xxh3)} runs differs, first in samples {first}..{stop - 1}"], nbytes
