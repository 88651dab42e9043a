"""Edit lists: which samples a file presents, in which order and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.errors import UnsupportedTimelineError
from ingest.video.layout import fail
from ingest.video.tables import Timeline

_RATE_ONE = 1 << 16
_UNSIGNED_32 = (1 << 32) - 1
_MAX_TICKS = 1 << 61


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit: segment duration in movie ticks, media time in media ticks (-1: empty), rate in 16.16."""

    duration: int
    media_time: int
    rate: int


def parse_edits(payload: bytes, path: str) -> tuple[Edit, ...]:
    """Parses the payload of an ``elst`` box.

    Raises:
        VideoFormatError: the box is shorter than its entries.
        UnsupportedTimelineError: its version is neither 0 nor 1.
    """
    if len(payload) < 8:
        raise fail(path, f"elst holds {len(payload)} bytes, expected at least 8")
    version, count = payload[0], int.from_bytes(payload[4:8], "big")
    if version > 1:
        raise UnsupportedTimelineError(f"{path}: unsupported MP4 edit list: version {version}, expected 0 or 1", file=path)
    width = 8 if version else 4
    record = np.dtype([("duration", f">u{width}"), ("time", f">i{width}"), ("rate", ">i4")])
    if count > (len(payload) - 8) // record.itemsize:
        raise fail(path, f"elst declares {count} edits in {len(payload)} bytes")
    if count > 2:  # at most one empty edit before one media edit can be followed; no need to list the others
        raise unsupported(path, f"{count} edits")
    rows = np.frombuffer(payload, record, count, 8)
    return tuple(Edit(int(row["duration"]), int(row["time"]), int(row["rate"])) for row in rows)


def unsupported(path: str, found: str) -> UnsupportedTimelineError:
    """The error for an edit list that cannot be followed exactly."""
    return UnsupportedTimelineError(
        f"{path}: unsupported MP4 edit list: {found}; only one media edit at rate 1, after at most one empty edit, can be followed "
        "exactly. Re-encode the file to flatten its timeline",
        file=path,
    )


def resolve_edits(edits: tuple[Edit, ...], timescale: int, movie_timescale: int, *, fragmented: bool, path: str) -> tuple[Timeline, float]:
    """Turns an edit list into an offset and the presented part of media time.

    Args:
        edits: as parsed; none means that everything is presented.
        timescale: media ticks per second.
        movie_timescale: movie ticks per second.
        fragmented: in fragmented files an edit of duration 0 lasts for ever.
        path: for messages.

    Returns:
        the timeline in ticks, and its offset in seconds without rounding to ticks.

    Raises:
        UnsupportedTimelineError: several media edits, a rate other than 1, or nothing but an empty edit.
    """
    if not edits:
        return Timeline(0, 0, None, None), 0.0
    for edit in edits:
        if edit.rate != _RATE_ONE:
            raise unsupported(path, f"rate {edit.rate / _RATE_ONE:g}")
        if not -1 <= edit.media_time < _MAX_TICKS:
            raise unsupported(path, f"media time {edit.media_time}")
    media = [edit for edit in edits if edit.media_time >= 0]
    if len(media) != 1 or edits[-1] is not media[0]:
        raise unsupported(path, f"{len(media)} media edits and {len(edits) - len(media)} empty ones")
    edit = media[0]
    empty, empty_s = 0, 0.0
    if len(edits) == 2:
        if movie_timescale <= 0:
            raise unsupported(path, "an empty edit in a movie whose timescale is 0")
        empty = _rescale(edits[0].duration, timescale, movie_timescale)
        empty_s = edits[0].duration / movie_timescale
        if empty >= _MAX_TICKS:
            raise unsupported(path, f"an empty edit of {edits[0].duration} movie ticks")
    lasting = (fragmented and edit.duration == 0) or movie_timescale <= 0 or edit.duration >= _UNSIGNED_32
    stop = None if lasting else edit.media_time + _rescale(edit.duration, timescale, movie_timescale)
    if stop is not None and stop >= _MAX_TICKS:
        stop = None
    return Timeline(empty - edit.media_time, empty, edit.media_time, stop), empty_s - edit.media_time / timescale


def present(pts: NDArray[np.int64], timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample numbers and presentation ticks of the presented samples, in presentation order.

    Samples with equal times keep decode order. As in libavformat, an edit that begins between two pictures is moved to the
    later one, so that the first picture is shown when the edit begins.

    Args:
        pts: [S] media time of every sample.
        timeline: from ``resolve_edits``.
    """
    kept = np.ones(len(pts), np.bool_)
    if timeline.first_tick is not None:
        kept &= pts >= timeline.first_tick
    if timeline.stop_tick is not None:
        kept &= pts < timeline.stop_tick
    numbers = np.flatnonzero(kept)
    times = pts[numbers]
    if len(times) > 1 and bool(np.any(times[1:] < times[:-1])):
        order = np.argsort(times, kind="stable")
        numbers, times = numbers[order], times[order]
    offset = timeline.offset_ticks
    if timeline.first_tick is not None and len(times):
        offset -= max(0, int(times[0]) + offset - timeline.empty_ticks)
    return numbers, times + offset


def _rescale(ticks: int, to: int, source: int) -> int:
    # Rounds to nearest, halves away from zero, as players do; ticks are never negative here.
    return (2 * ticks * to + source) // (2 * source)
