"""Which samples must be fetched and decoded to show given pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SelectionError, ShortReadError
from ingest.storage.base import ByteRange
from ingest.video.tables import SampleTable

GAP_BYTES = 64 << 10
"""Unwanted bytes between two samples that are fetched along rather than split into two ranges."""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """A run of samples, contiguous in decode order, that shows a set of pictures.

    Attributes:
        first: first sample to feed to a decoder; a clean random-access point, or sample 0.
        stop: sample behind the last one to feed.
        fetch_stop: sample behind the last one to fetch: the end of its run where runs carry checksums, else ``stop``.
        wanted: picture numbers asked for, ascending.
        ranges: byte ranges that hold the samples, ascending and coalesced.
        nbytes: total length of ``ranges``.
        sample_bytes: bytes of the samples themselves.
    """

    first: int
    stop: int
    fetch_stop: int
    wanted: NDArray[np.int64]
    ranges: tuple[ByteRange, ...]
    nbytes: int
    sample_bytes: int

    def chunks_of(self, table: SampleTable, *, fetched: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where samples of the span lie in the fetched ranges.

        Args:
            table: of the file.
            fetched: include samples that were fetched for their run's checksum alone.

        Returns:
            range number and offset inside that range, one per sample in decode order.
        """
        offsets = table.offsets[self.first : self.fetch_stop if fetched else self.stop].astype(np.int64)
        starts = np.array([start for start, _ in self.ranges], np.int64)
        numbers = np.searchsorted(starts, offsets, side="right") - 1
        return numbers, offsets - starts[numbers]


def picture_span(table: SampleTable, pictures: NDArray[np.integer] | Sequence[int] | range, *, lead: int = 0) -> PictureSpan:
    """The samples to feed to a decoder so that it shows ``pictures``.

    Decoding starts at the last clean random-access point that neither follows a wanted picture in decode order nor is shown
    after one: pictures shown before the key picture that they follow (open GOP) need the group before it.

    Args:
        table: of the file.
        pictures: picture numbers of the file, presentation order after edit lists; duplicates count once.
        lead: how many random-access points further back to start, for streams whose points need a lead-in.

    Raises:
        SelectionError: no picture, or one that the file does not present.
        ShortReadError: samples lie beyond the end of the file.
    """
    wanted = np.unique(np.asarray(pictures, np.int64))
    if not len(wanted) or int(wanted[0]) < 0 or int(wanted[-1]) >= table.pictures:
        found = "none" if not len(wanted) else f"{int(wanted[0])}..{int(wanted[-1])}"
        raise SelectionError(f"{table.path}: pictures {found} asked for, the file presents {table.pictures}")
    samples = table.presented[wanted]
    stop = int(samples.max()) + 1
    first = _start(table, int(samples.min()), int(_pts(table, samples).min()), lead)
    fetch_stop = stop
    if table.gop_xxh3 is not None:
        bounds = table.gop_bounds
        fetch_stop = int(bounds[np.searchsorted(bounds, stop)])
    return _span(table, first, stop, fetch_stop, wanted)


def sample_span(table: SampleTable, first: int, stop: int) -> PictureSpan:
    """A span of samples ``first..stop`` for fetching alone: it wants no picture.

    Args:
        table: of the file.
        first: first sample, decode order.
        stop: sample behind the last one, greater than ``first``.

    Raises:
        ShortReadError: samples lie beyond the end of the file.
    """
    return _span(table, first, stop, stop, np.zeros(0, np.int64))


def _pts(table: SampleTable, samples: NDArray[np.integer]) -> NDArray[np.int64]:
    return table.dts[samples].astype(np.int64) + table.composition[samples]


def _start(table: SampleTable, sample: int, tick: int, lead: int) -> int:
    starts = table.starts
    index = int(np.searchsorted(starts, sample, side="right")) - 1
    while index >= 0 and int(_pts(table, starts[index : index + 1])[0]) > tick:
        index -= 1
    index -= lead
    return int(starts[index]) if index >= 0 else 0


def _span(table: SampleTable, first: int, stop: int, fetch_stop: int, wanted: NDArray[np.int64]) -> PictureSpan:
    offsets, sizes = table.offsets[first:fetch_stop].astype(np.int64), table.sizes[first:fetch_stop].astype(np.int64)
    ends = offsets + sizes
    if int(ends.max()) > table.file_size:
        missing = first + int(np.argmax(ends > table.file_size))
        asked = f"pictures {int(wanted[0])}..{int(wanted[-1])} need" if len(wanted) else "the run needs"
        raise ShortReadError(
            f"{table.path}: {asked} sample {missing} at bytes "
            f"{int(table.offsets[missing])}..{int(table.offsets[missing]) + int(table.sizes[missing])}, but the file ends at byte "
            f"{table.file_size}: it is truncated"
        )
    if bool(np.any(offsets[1:] < offsets[:-1])):
        order = np.argsort(offsets, kind="stable")
        offsets, ends = offsets[order], ends[order]
    reach = np.maximum.accumulate(ends)
    cuts = np.flatnonzero(offsets[1:] > reach[:-1] + GAP_BYTES)
    starts = offsets[np.concatenate([[0], cuts + 1])].tolist()
    stops = reach[np.concatenate([cuts, [len(reach) - 1]])].tolist()
    ranges = tuple(zip(starts, stops, strict=True))
    return PictureSpan(first, stop, fetch_stop, wanted, ranges, int(sum(stops) - sum(starts)), int(sizes.sum()))


def gop_starts(table: SampleTable) -> NDArray[np.int64]:
    """Picture numbers where a run begins that decodes on its own: no later picture needs what precedes it.

    Pictures of an open group that are shown before its key picture belong to the run before it. Picture 0 is always the first
    start; runs in which no picture is presented are left out.

    Args:
        table: of the file.

    Returns:
        ascending picture numbers, int64.
    """
    if not table.pictures:
        return np.zeros(0, np.int64)
    keys = np.searchsorted(_pts(table, table.presented), _pts(table, table.starts), side="left")
    ascending = np.sort(np.concatenate([np.zeros(1, np.int64), keys[keys < table.pictures]]))
    return ascending[np.concatenate([[True], ascending[1:] != ascending[:-1]])]
