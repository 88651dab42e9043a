"""The sample table of one video file: where every picture lies, when it is shown, and where decoding can begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T", bound=np.generic)

Ints = NDArray[np.integer[Any]]
"""Integer array; mapped indexes store the smallest exact type, so consumers must not assume int64."""

MAX_SAMPLES = 1 << 21
"""Most samples accepted in one file (19 hours at 30 pictures/s): bounds memory before anything is allocated."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What an edit list does to media time.

    Attributes:
        offset_ticks: added to media time to give presentation time.
        empty_ticks: how long nothing is shown at first; part of ``offset_ticks``.
        first_tick: media time of the first presented tick, or None for no limit.
        stop_tick: media time behind the last presented tick, or None for no limit.
    """

    offset_ticks: int
    empty_ticks: int
    first_tick: int | None
    stop_tick: int | None


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Everything needed to fetch, decode and number the pictures of one video file.

    All arrays are read-only. ``S`` is the number of samples (decode order), ``P`` the number of pictures that the
    file presents; ``P < S`` where an edit list hides samples.

    Attributes:
        path: relative to the dataset root.
        file_size: bytes.
        codec: four-character code of the first sample entry.
        width: picture width in pixels as the track header declares it.
        height: picture height in pixels as the track header declares it.
        timescale: media ticks per second as declared (0 in some broken files: use ``ticks_per_second``).
        movie_timescale: movie ticks per second.
        duration: media ticks as the media header declares them (movie duration where that is 0).
        track_id: of the first video track.
        ftyp: the whole ``ftyp`` box, header included; empty when the file has none.
        stsd: payload of the ``stsd`` box, verbatim.
        moov_offset: byte position of the ``moov`` box.
        mdat_offset: byte position of the first ``mdat`` box (its header).
        mdat_payload_offset: byte position of the first payload byte of that box.
        mdat_payload_size: payload bytes of that box.
        faststart: whether ``moov`` precedes ``mdat``.
        fragmented: whether samples come from movie fragments.
        edit_offset_ticks: added to media time to give presentation time.
        offsets: [S] byte position of each sample.
        sizes: [S] bytes of each sample.
        durations: [S] ticks.
        composition: [S] ticks from decode to presentation, before edits; may be negative.
        dts: [S] decode time in ticks, before edits.
        sync: sample numbers that the file declares as key pictures, ascending.
        starts: sample numbers where decoding may really begin (checked where the declaration looks wrong), ascending.
        descriptions: [S] index into the sample entries of ``stsd``, from 0.
        presented: [P] sample numbers in presentation order, after edit lists. Picture ``k`` of the file is
            ``presented[k]``.
        presented_pts: [P] presentation time in ticks, after edit lists.
        sample_pts: [S] presentation time in seconds, float64, edit offset applied; hidden samples have one too.
        timeline: the presented part of media time, so that the table can be stored and rebuilt.
        gop_xxh3: [G] xxh3-64 of the payload of each run of ``gop_bounds``, decode order; None when it was never read.
        untimed: samples at the end, decode order, whose durations the file leaves out; they go on at the pace of the last one.
        samples_before: samples of the file that precede sample 0; 0 except in a table that was cut out of another.
    """

    path: str
    file_size: int
    codec: str
    width: int
    height: int
    timescale: int
    movie_timescale: int
    duration: int
    track_id: int
    ftyp: bytes
    stsd: bytes
    moov_offset: int
    mdat_offset: int
    mdat_payload_offset: int
    mdat_payload_size: int
    faststart: bool
    fragmented: bool
    edit_offset_ticks: int
    offsets: Ints
    sizes: Ints
    durations: Ints
    composition: Ints
    dts: Ints
    sync: Ints
    starts: Ints
    descriptions: Ints
    presented: Ints
    presented_pts: Ints
    sample_pts: NDArray[np.float64]
    timeline: Timeline
    gop_xxh3: NDArray[np.uint64] | None = None
    untimed: int = 0
    samples_before: int = 0

    @property
    def samples(self) -> int:
        """Number of samples in the file."""
        return len(self.sizes)

    @property
    def pictures(self) -> int:
        """Number of pictures that the file presents."""
        return len(self.presented)

    @property
    def ticks_per_second(self) -> int:
        """Media ticks per second; the movie's where the media header declares 0, as libavformat does."""
        return self.timescale or self.movie_timescale or 1

    @property
    def gop_bounds(self) -> NDArray[np.int64]:
        """[G + 1] first samples of the runs between random-access points, decode order, ending with ``samples``."""
        inner = self.starts.astype(np.int64)
        if not len(inner) or inner[0]:
            inner = np.concatenate([np.zeros(min(self.samples, 1), np.int64), inner])
        return np.append(inner, self.samples)

    @property
    def truncated(self) -> NDArray[np.int64]:
        """Sample numbers that lie wholly or partly beyond the end of the file."""
        return np.flatnonzero(self.offsets.astype(np.int64) + self.sizes > self.file_size)


def read_only(values: NDArray[_T]) -> NDArray[_T]:
    """Marks an array read-only and returns it."""
    values.setflags(write=False)
    return values


def constant(value: int, count: int) -> NDArray[np.int64]:
    """A read-only array of ``count`` equal values that occupies one element."""
    return np.broadcast_to(np.int64(value), (count,))
