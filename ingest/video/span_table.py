"""Spans by time, as LeRobot's byte cache cuts them: what byte budgets are counted in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SelectionError
from ingest.video.tables import SampleTable

_MIN_PAD_S = 0.1
_PAD_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class EpisodeSpans:
    """The span table of LeRobot's byte cache, one element per episode of one file.

    Attributes:
        sample_lo: first sample, int64.
        sample_hi: last sample (inclusive), int64.
        mdat_offset: first byte in the source file, int64.
        mdat_length: bytes, contiguous, int64.
        first_pts: start of the episode in seconds, as asked.
        last_pts: end of the episode in seconds, as asked.
        source_start_pts: presentation time of the first sample in seconds.
    """

    sample_lo: NDArray[np.int64]
    sample_hi: NDArray[np.int64]
    mdat_offset: NDArray[np.int64]
    mdat_length: NDArray[np.int64]
    first_pts: NDArray[np.float64]
    last_pts: NDArray[np.float64]
    source_start_pts: NDArray[np.float64]

    @property
    def frame_count(self) -> NDArray[np.int64]:
        """Samples of each span."""
        return self.sample_hi - self.sample_lo + 1


def episode_spans(table: SampleTable, from_s: NDArray[np.float64], to_s: NDArray[np.float64]) -> EpisodeSpans:
    """Spans by time, as LeRobot cuts them: padded, from a key picture, and to the end of a group where pictures are reordered.

    They decide byte budgets only; which picture belongs to which row is decided by position elsewhere.

    Args:
        table: of the file.
        from_s: [E] starts in seconds inside the file.
        to_s: [E] ends in seconds.

    Raises:
        SelectionError: the file has no samples, or a time is not finite.
    """
    first, last = np.asarray(from_s, np.float64), np.asarray(to_s, np.float64)
    if not table.samples or not bool(np.all(np.isfinite(first) & np.isfinite(last))):
        raise SelectionError(f"{table.path}: no spans in {table.samples} samples for times that are not all finite")
    pad = np.maximum(_MIN_PAD_S, _PAD_SHARE * (last - first))
    start, end = np.maximum(first - pad, 0.0), last + pad
    pts, count = table.sample_pts, table.samples
    reordered = bool(np.any(table.composition))
    if reordered:
        low, high, earliest = _reordered_window(pts, start, end, first)
    else:
        low = np.clip(np.searchsorted(pts, start, side="left"), 0, count - 1)
        high = np.maximum(np.clip(np.searchsorted(pts, end, side="right") - 1, 0, count - 1), low)
        earliest = pts[low]
    sync = table.sync.astype(np.int64)
    if len(sync):
        key = _last_key(sync, pts[sync], low, earliest)
        low = np.where(key >= 0, sync[key], sync[0])
        high = np.maximum(high, low)
        if reordered:
            following = np.searchsorted(sync, high, side="right")
            high = np.append(sync, count)[following] - 1
    else:
        low = np.zeros_like(low)
        high = np.full_like(high, count - 1) if reordered else high
    offsets = table.offsets.astype(np.int64)
    at = reduce_runs(np.minimum, offsets, low, high)
    stop = np.minimum(reduce_runs(np.maximum, offsets + table.sizes, low, high), table.file_size)
    return EpisodeSpans(low, high, at, np.maximum(stop - at, 0), first, last, pts[low])


def _reordered_window(
    pts: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64], first: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    order = np.argsort(pts, kind="stable")
    ascending = pts[order]
    a = np.searchsorted(ascending, start, side="left")
    b = np.searchsorted(ascending, end, side="right") - 1
    right = np.clip(np.searchsorted(ascending, first), 0, len(pts) - 1)
    # Of samples equally near, the first in decode order; those with equal times are next to each other in that order.
    left = np.searchsorted(ascending, ascending[np.maximum(right - 1, 0)], side="left")
    before, after = np.abs(ascending[left] - first), np.abs(ascending[right] - first)
    nearest = np.where((before < after) | ((before == after) & (order[left] < order[right])), left, right)
    a, b = np.where(b < a, nearest, a), np.where(b < a, nearest, b)
    return reduce_runs(np.minimum, order, a, b), reduce_runs(np.maximum, order, a, b), ascending[a]


def _last_key(
    sync: NDArray[np.int64], key_pts: NDArray[np.float64], low: NDArray[np.int64], earliest: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Index of the last key picture at or before ``low`` that is not shown after ``earliest``; -1 without one."""
    by_number = np.searchsorted(sync, low, side="right") - 1
    if bool(np.all(np.diff(key_pts) >= 0)):
        return np.minimum(by_number, np.searchsorted(key_pts, earliest, side="right") - 1)
    found = by_number.copy()
    for row, tick in enumerate(earliest.tolist()):
        while found[row] >= 0 and key_pts[found[row]] > tick:
            found[row] -= 1
    return found


def reduce_runs(function: np.ufunc, values: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.int64]:
    """``function`` over ``values[low..high]`` (inclusive) for every pair."""
    padded = np.append(values, values[-1])
    pairs = np.stack([low, high + 1], axis=1).reshape(-1)
    return function.reduceat(padded, pairs)[::2]
