"""A dataset's episodes, or runs of them, as the planner's units."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.engine.spec import SampleSpec
from ingest.lerobot.source import Source
from ingest.plan import Units, cut_units
from ingest.video.index import VideoIndex
from ingest.video.mini import mini_mp4_sizes
from ingest.video.payload import payload_sizes, pictures_fed
from ingest.video.span_table import episode_spans
from ingest.video.spans import gop_starts
from ingest.video.tables import SampleTable


def episode_units(source: Source, index: VideoIndex, spec: SampleSpec, selection: NDArray[np.int64], lengths: NDArray[np.int64]) -> Units:
    """Whole episodes in selection order; bytes are the sizes of their mini-MP4s (LeRobot's measure), cost is pixels to decode."""
    rows: NDArray[np.int64] = np.array([source.episodes.row(int(episode)) for episode in selection], dtype=np.int64)
    nbytes = np.zeros(len(selection), dtype=np.int64)
    cost = np.zeros(len(selection), dtype=np.float64)
    for camera in spec.cameras:
        height, width, _ = spec.features[camera].picture_shape
        cost += lengths * float(height * width)
        mapped, spans = source.camera_map(camera), source.episodes.cameras[camera]
        for number, here in _by_file(mapped.file[rows]):
            table = index.table(mapped.paths[number])
            times = spans.from_timestamp[rows[here]], spans.to_timestamp[rows[here]]
            nbytes[here] += mini_mp4_sizes(table, episode_spans(table, *times))
    return Units.from_lengths(lengths, episodes=selection, nbytes=nbytes, cost=cost if spec.cameras else None)


class FrameRuns(Protocol):
    """Runs of frames of some episodes: units, or parts of them that may overlap."""

    @property
    def episode(self) -> NDArray[np.int64]: ...

    @property
    def lo(self) -> NDArray[np.int64]: ...

    @property
    def hi(self) -> NDArray[np.int64]: ...


def payload_bytes(
    units: FrameRuns, source: Source, index: VideoIndex, spec: SampleSpec, leads: Mapping[str, int] | None = None
) -> NDArray[np.int64]:
    """Bytes of compressed pictures that reading each unit brings into memory, windows included, int64[U].

    Args:
        units: of one dataset.
        source: the dataset.
        index: sample tables of its video files.
        spec: what samples consist of.
        leads: by camera, how many random-access points further back decoding begins than the index says. Files whose
            key pictures need such a lead-in (intra refresh) are only found out when they are read.
    """
    leads = leads or {}
    nbytes = np.zeros(len(units.episode), dtype=np.int64)
    for camera in spec.cameras:
        for here, table, _, first, stop in _pictures_by_file(units, source, index, spec, camera):
            nbytes[here] += payload_sizes(table, first, stop, lead=leads.get(camera, 0))
    return nbytes


def decoding_saved(units: FrameRuns, source: Source, index: VideoIndex, spec: SampleSpec) -> NDArray[np.float64]:
    """Pixels that need not be decoded when a unit is decoded whole instead of sample by sample, float64[U].

    What a sample costs by itself follows from the groups of pictures that its windows reach into; what a unit costs whole is
    each of its pictures once. Both count pictures that are decoded and not shown.

    Args:
        units: of one dataset.
        source: the dataset.
        index: sample tables of its video files.
        spec: what samples consist of.
    """
    saved = np.zeros(len(units.episode), dtype=np.float64)
    for camera in spec.cameras:
        height, width, _ = spec.features[camera].picture_shape
        for here, table, begin, first, stop in _pictures_by_file(units, source, index, spec, camera):
            pictures = np.arange(table.pictures, dtype=np.int64)
            # Near the ends of an episode windows are cut shorter; that changes too little to ask each episode for.
            low, high = spec.reach_many((camera,), pictures, pictures + 1, np.full(table.pictures, table.pictures, np.int64))
            alone = np.concatenate([[0], np.cumsum(pictures_fed(table, low, high))])
            single = alone[begin + units.hi[here]] - alone[begin + units.lo[here]]
            saved[here] += (single - pictures_fed(table, first, stop)) * float(height * width)
    return saved


def _pictures_by_file(
    units: FrameRuns, source: Source, index: VideoIndex, spec: SampleSpec, camera: str
) -> Iterator[tuple[NDArray[np.int64], SampleTable, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """For each video file of a camera: the units that reach into it, its table, and for each of them three picture numbers.

    They are the first picture of the episode, the first that the unit's windows reach, and the one behind the last of those.
    """
    rows = source.episodes.rows(units.episode)
    mapped = source.camera_map(camera)
    first, stop = spec.reach_many((camera,), units.lo, units.hi, source.episode_frames()[rows])
    begin = mapped.first_picture[rows]
    for number, here in _by_file(mapped.file[rows]):
        here = here[stop[here] > first[here]]
        yield here, index.table(mapped.paths[number]), begin[here], begin[here] + first[here], begin[here] + stop[here]


def _by_file(file: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each file number that occurs, with the rows that have it."""
    order = np.argsort(file, kind="stable")
    numbers, starts = np.unique(file[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)


def keep_runs(units: Units, row: NDArray[np.int64], lo: NDArray[np.int64], hi: NDArray[np.int64]) -> Units:
    """Some runs of frames of whole episodes, with bytes and cost by their share of the frames.

    Args:
        units: whole episodes.
        row: int64[R], unit of each run.
        lo: int64[R], its first frame.
        hi: int64[R], one past its last frame.
    """
    share = (hi - lo) / np.maximum(units.frames[row], 1)
    nbytes = np.ceil(units.bytes[row] * share).astype(np.int64)
    return Units(units.dataset[row], units.episode[row], lo, hi, nbytes, units.cost[row] * share)


def cut_into_runs(units: Units, source: Source, index: VideoIndex, cameras: Sequence[str], max_frames: int) -> Units:
    """Cuts units into runs of at most ``max_frames`` frames that decode independently (or of one group of pictures)."""
    boundaries = {
        row: _clean_starts(source, index, cameras, int(units.episode[row])) for row in np.flatnonzero(units.frames > max_frames).tolist()
    }
    return cut_units(units, boundaries, max_frames=max_frames)


def _clean_starts(source: Source, index: VideoIndex, cameras: Sequence[str], episode: int) -> NDArray[np.int64]:
    """Frames of an episode where every camera can begin to decode; those of the camera with the fewest where none agree."""
    found: list[NDArray[np.int64]] = []
    for camera in cameras:
        path, first, count = source.pictures(episode, camera)
        starts = gop_starts(index.table(path)) - first
        found.append(starts[(starts >= 0) & (starts < count)])
    if not found:
        # Without pictures any frame is a clean start.
        return np.arange(int(source.episodes.length[source.episodes.row(episode)]), dtype=np.int64)
    common = found[0]
    for starts in found[1:]:
        common = np.intersect1d(common, starts)
    fewest = min(found, key=len)
    return common if 2 * len(common) >= len(fewest) else fewest


def dataset_fingerprint(source: Source) -> str:
    """Digest of what an order depends on: episodes, their lengths and rows. Equal for every copy of a dataset."""
    table = source.episodes
    digest = hashlib.blake2b(digest_size=16)
    for column in (table.episode_index, table.length, table.dataset_from):
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    digest.update(repr(float(source.info.fps)).encode())
    return digest.hexdigest()
