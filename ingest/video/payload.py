"""How many bytes a reader fetches for runs of pictures, for all runs of a file at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SelectionError
from ingest.video.span_table import reduce_runs
from ingest.video.spans import GAP_BYTES, sample_span
from ingest.video.tables import SampleTable


def payload_sizes(table: SampleTable, first: NDArray[np.int64], stop: NDArray[np.int64], *, lead: int = 0) -> NDArray[np.int64]:
    """``picture_span(table, range(first, stop), lead=lead).nbytes`` of every run.

    Args:
        table: of the file.
        first: int64[N], first picture of each run, presentation order of the file.
        stop: int64[N], picture behind its last one, greater than ``first``.
        lead: as in `picture_span`.

    Raises:
        SelectionError: a run is empty or leaves the file.
        ShortReadError: samples that are not in the order of the file lie beyond its end.
    """
    if not len(first):
        return np.zeros(0, dtype=np.int64)
    if bool(np.any((first < 0) | (stop <= first) | (stop > table.pictures))):
        row = int(np.flatnonzero((first < 0) | (stop <= first) | (stop > table.pictures))[0])
        raise SelectionError(f"{table.path}: pictures {first[row]}..{stop[row] - 1} asked for, the file presents {table.pictures}")
    begin, end = _samples_fed(table, first, stop, lead)
    if table.gop_xxh3 is not None:
        bounds = table.gop_bounds.astype(np.int64)
        end = bounds[np.searchsorted(bounds, end)]
    offsets = table.offsets.astype(np.int64)
    ends = offsets + table.sizes
    gaps = offsets[1:] - ends[:-1]
    skipped = _running(np.where(gaps > GAP_BYTES, gaps, 0))
    nbytes = ends[end - 1] - offsets[begin] - (skipped[end - 1] - skipped[begin])
    disordered = _running(gaps < 0)
    for row in np.flatnonzero(disordered[end - 1] > disordered[begin]).tolist():
        nbytes[row] = sample_span(table, int(begin[row]), int(end[row])).nbytes
    return nbytes


def pictures_fed(table: SampleTable, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pictures that a decoder is fed to show each run of pictures by itself, int64[N].

    Args:
        table: of the file.
        first: int64[N], first picture of each run, presentation order of the file.
        stop: int64[N], picture behind its last one, greater than ``first``.
    """
    if not len(first):
        return np.zeros(0, dtype=np.int64)
    begin, end = _samples_fed(table, first, stop, 0)
    return end - begin


def _samples_fed(
    table: SampleTable, first: NDArray[np.int64], stop: NDArray[np.int64], lead: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    presented = table.presented.astype(np.int64)
    ticks = table.dts.astype(np.int64) + table.composition
    begin = _starts(
        table,
        reduce_runs(np.minimum, presented, first, stop - 1),
        reduce_runs(np.minimum, ticks[presented], first, stop - 1),
        ticks,
        lead,
    )
    return begin, reduce_runs(np.maximum, presented, first, stop - 1) + 1


def _starts(
    table: SampleTable, sample: NDArray[np.int64], tick: NDArray[np.int64], ticks: NDArray[np.int64], lead: int
) -> NDArray[np.int64]:
    """First sample to feed for each run: the last random-access point not after its first sample nor shown after its first picture.

    From there it is ``lead`` points further back.
    """
    starts = table.starts.astype(np.int64)
    if not len(starts):
        return np.zeros_like(sample)
    index = np.searchsorted(starts, sample, side="right") - 1
    while True:
        late = (index >= 0) & (ticks[starts[np.maximum(index, 0)]] > tick)
        if not late.any():
            return np.where(index >= lead, starts[np.maximum(index - lead, 0)], 0)
        index = index - late


def _running(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """Sums of everything before each place, int64[len + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values, dtype=np.int64)])
