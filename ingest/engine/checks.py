"""What is wrong with the selected part of a dataset, found from footers and file heads before anything is planned."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ingest.engine.pictures import PictureForm, check_shape
from ingest.engine.spec import SampleSpec
from ingest.errors import DamagedDataError, ObjectNotFoundError, RowsError, SettingsError, TimeDriftError, VideoFormatError
from ingest.lerobot.audit_videos import find_drift
from ingest.lerobot.relocate import verify_data_files
from ingest.lerobot.source import Source
from ingest.video.index import VideoIndex
from ingest.video.tables import SampleTable

_LOG = logging.getLogger("reelray.engine")

_LISTED = 5


def check_selection(
    source: Source, index: VideoIndex, spec: SampleSpec, selection: NDArray[np.int64]
) -> tuple[Source, dict[int, DamagedDataError]]:
    """Checks that the files hold the selected rows and their pictures. Reads footers and file heads, no payload.

    Args:
        source: the dataset.
        index: sample tables of its videos.
        spec: what is read.
        selection: int64[E], episodes.

    Returns:
        The source with stale data files corrected, and the damaged episodes, ascending, with what is wrong with each.

    Raises:
        StorageError: a file cannot be looked at.
    """
    problems: list[RowsError] = []
    repaired = verify_data_files(source, selection, problems=problems)
    damaged: dict[int, DamagedDataError] = {}
    for problem in problems:
        _note(damaged, problem, problem.episodes, selection)
    for camera in spec.cameras:
        mapped = source.camera_map(camera)
        for number in np.unique(mapped.file[source.episodes.rows(selection)]).tolist():
            _check_file(source, index, spec, camera, int(number), selection, damaged)
    return repaired, dict(sorted(damaged.items()))


def _check_file(
    source: Source,
    index: VideoIndex,
    spec: SampleSpec,
    camera: str,
    number: int,
    selection: NDArray[np.int64],
    damaged: dict[int, DamagedDataError],
) -> None:
    mapped = source.camera_map(camera)
    path, every = mapped.paths[number], source.episodes.episode_index[mapped.rows_of(number)].tolist()
    try:
        table = index.table(path)
        source.check_pictures(path, camera, table.pictures)
        check_shape(table, PictureForm.of(spec, camera), spec.features[camera])
    except ObjectNotFoundError as error:
        missing = VideoFormatError(f"{source.store.url}: {camera}: {path} is missing ({error})", camera=camera, file=path)
        _note(damaged, missing, every, selection)
    except DamagedDataError as error:
        error.camera = error.camera or camera
        _note(damaged, error, error.episodes or every, selection)
    else:
        _check_times(source, spec, camera, number, table, selection, damaged)


def _check_times(
    source: Source,
    spec: SampleSpec,
    camera: str,
    number: int,
    table: SampleTable,
    selection: NDArray[np.int64],
    damaged: dict[int, DamagedDataError],
) -> None:
    drift = find_drift(source, source.camera_map(camera), number, table, spec.options.tolerance_s)
    if drift is None or not np.isin(drift.episodes, selection).any():
        return
    if not spec.options.strict_time:
        _LOG.warning("%s: %s", source.store.url, drift.message)
        return
    late = TimeDriftError(f"{source.store.url}: {drift.message}", dataset=source.store.url, camera=camera, file=drift.path)
    _note(damaged, late, drift.episodes.tolist(), selection)


def _note(damaged: dict[int, DamagedDataError], error: DamagedDataError, episodes: Sequence[int], selection: NDArray[np.int64]) -> None:
    hit = selection[np.isin(selection, np.asarray(episodes, dtype=np.int64))].tolist()
    error.episodes = tuple(hit)
    for episode in hit:
        damaged.setdefault(int(episode), error)


def first_of(damaged: Mapping[int, DamagedDataError]) -> DamagedDataError:
    """The first error, its message with those of the others behind it."""
    errors = list(dict.fromkeys(damaged.values()))
    first = errors[0]
    others = [str(error) for error in errors[1 : _LISTED + 1]]
    more = f" (and {len(errors) - 1 - _LISTED} more: `reelray doctor` lists all)" if len(errors) - 1 > _LISTED else ""
    if others:
        first.args = ("; also ".join([str(first), *others]) + more, *first.args[1:])
    return first


def refuse_transform_of_planes(spec: SampleSpec, transform: object) -> None:
    """Refuses picture transforms where cameras deliver no RGB for them to work on.

    Raises:
        SettingsError: naming the cameras.
    """
    cameras = [camera for camera in spec.cameras if not spec.features[camera].is_depth]
    if transform is not None and cameras and spec.options.pixel_format != "rgb24":
        raise SettingsError(
            f"image_transforms work on RGB, and pixel_format {spec.options.pixel_format!r} delivers none of {', '.join(cameras)}: "
            "use rgb24, or transform on the device"
        )
