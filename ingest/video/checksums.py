"""Checksums of payload runs: what a decoder is fed is what was indexed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from ingest.errors import ChecksumError
from ingest.storage.base import Store
from ingest.video.spans import PictureSpan, sample_span
from ingest.video.tables import SampleTable, read_only

_BATCH_BYTES = 16 << 20


def add_checksums(store: Store, table: SampleTable) -> tuple[SampleTable, int]:
    """Reads a file's payload once and adds the checksum of every run between random-access points.

    Args:
        store: rooted at the dataset.
        table: of the file.

    Returns:
        the table with ``gop_xxh3``, and the bytes read.

    Raises:
        StorageError: the payload cannot be read.
        ShortReadError: samples lie beyond the end of the file.
    """
    bounds = table.gop_bounds
    before = np.concatenate([[0], np.cumsum(table.sizes, dtype=np.int64)])[bounds]
    found, nbytes, run = np.empty(len(bounds) - 1, np.uint64), 0, 0
    while run < len(found):
        # As many whole runs as fit the batch, one at least.
        stop = max(run + 1, int(np.searchsorted(before, before[run] + _BATCH_BYTES, side="right")) - 1)
        span = sample_span(table, int(bounds[run]), int(bounds[stop]))
        nbytes += span.nbytes
        buffers = [memoryview(part) for part in store.read_ranges(table.path, span.ranges)]
        found[run:stop] = [digest for _, digest in _digests(table, span, buffers)]
        run = stop
    return replace(table, gop_xxh3=read_only(found)), nbytes


def verify_payload(table: SampleTable, span: PictureSpan, buffers: Sequence[bytes | memoryview]) -> None:
    """Compares fetched payload with the index; does nothing for a table without checksums.

    Args:
        table: of the file.
        span: whole runs, as ``picture_span`` makes them for a table with checksums.
        buffers: contents of ``span.ranges``.

    Raises:
        ChecksumError: a run differs; names file, bytes and the first picture that it shows.
    """
    if table.gop_xxh3 is None:
        return
    for run, digest in _digests(table, span, buffers):
        if digest != int(table.gop_xxh3[run]):
            raise _differs(table, run, digest)


def _digests(table: SampleTable, span: PictureSpan, buffers: Sequence[bytes | memoryview]) -> Iterator[tuple[int, int]]:
    """(run number, xxh3-64 of its samples) for every run that lies wholly in the span."""
    bounds = table.gop_bounds
    runs = range(int(np.searchsorted(bounds, span.first)), int(np.searchsorted(bounds, span.fetch_stop, side="right")) - 1)
    chunk, at = span.chunks_of(table, fetched=True)
    sizes = table.sizes[span.first : span.fetch_stop].astype(np.int64)
    ends = at + sizes
    follows = np.concatenate([[False], (chunk[1:] == chunk[:-1]) & (at[1:] == ends[:-1])])
    breaks = np.concatenate([[0], np.cumsum(~follows)])
    for run in runs:
        low, high = int(bounds[run]) - span.first, int(bounds[run + 1]) - span.first
        if breaks[high] == breaks[low + 1]:
            piece = memoryview(buffers[int(chunk[low])])[int(at[low]) : int(ends[high - 1])]
            yield run, xxhash.xxh3_64_intdigest(piece)
            continue
        yield run, _scattered(buffers, chunk[low:high], at[low:high], ends[low:high])


def _scattered(buffers: Sequence[bytes | memoryview], chunk: NDArray[np.int64], at: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    state = xxhash.xxh3_64()
    pieces: list[tuple[int, int, int]] = list(zip(chunk.tolist(), at.tolist(), ends.tolist(), strict=True))
    for index, start, stop in pieces:
        state.update(memoryview(buffers[index])[start:stop])
    return state.intdigest()


def _differs(table: SampleTable, run: int, digest: int) -> ChecksumError:
    assert table.gop_xxh3 is not None
    first, stop = table.gop_bounds[run : run + 2].tolist()
    start = int(table.offsets[first:stop].min())
    end = int((table.offsets[first:stop].astype(np.int64) + table.sizes[first:stop]).max())
    shown = np.flatnonzero((table.presented >= first) & (table.presented < stop))
    picture = int(shown[0]) if len(shown) else None
    return ChecksumError(
        f"{table.path}: samples {first}..{stop - 1} (bytes {start}..{end}, from picture {picture} on) have checksum {digest:016x}, "
        f"the sidecar recorded {int(table.gop_xxh3[run]):016x}: the payload is damaged or was replaced",
        file=table.path,
        byte_range=(start, end),
        picture=picture,
    )
