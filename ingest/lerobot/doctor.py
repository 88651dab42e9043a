"""Finds everything that is wrong with a dataset, each fault once and by name."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from ingest.errors import DatasetError, MetadataError, ReelrayError, StorageError, UnsafeInputError
from ingest.lerobot.audit_rows import RowAudit
from ingest.lerobot.audit_videos import VideoAudit
from ingest.lerobot.episodes import read_episode_table
from ingest.lerobot.findings import AuditReport, Finding, Findings, Severity
from ingest.lerobot.info import INFO_PATH, Info, read_info
from ingest.lerobot.parquet import ParquetSource, integer_column, python_values, read_columns
from ingest.lerobot.source import Source, assemble
from ingest.lerobot.tasks import STATS_PATH, TASKS_PATH, Tasks, read_stats, read_tasks
from ingest.lerobot.windows import DEFAULT_TOLERANCE_S
from ingest.storage.base import Store
from ingest.video.index import ProbingIndex, VideoIndex

_T = TypeVar("_T")

Progress = Callable[[str, int], None]
"""Called with (file about to be read, files read before it)."""


def audit(
    store: Store,
    *,
    index: VideoIndex | None = None,
    strict_time: bool = False,
    tolerance_s: float = DEFAULT_TOLERANCE_S,
    allow_unknown_version: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Audits metadata, every row and the picture count of every video file. Nothing is decoded and nothing is written.

    Args:
        store: the dataset.
        index: sample tables of its videos; by default read from the files themselves.
        strict_time: deviations of time above ``tolerance_s`` are errors instead of warnings.
        tolerance_s: most that a picture's or a row's time may lie beside the frame grid.
        allow_unknown_version: also audit a missing, unreadable or newer ``codebase_version``.
        progress: told about each file.

    Returns:
        The report; faults never raise.
    """
    found = Findings()
    checked = {"episodes": 0, "rows": 0, "data_files": 0, "video_files": 0, "pictures": 0}
    info = _attempt(found, "info_unreadable", INFO_PATH, lambda: read_info(store, allow_unknown_version=allow_unknown_version))
    if info is None:
        return AuditReport.of(store.url, found, checked)
    tasks = _attempt(found, "tasks_unreadable", TASKS_PATH, lambda: read_tasks(store))
    stats = _attempt(found, "stats_unreadable", STATS_PATH, lambda: read_stats(store))
    _check_features(info, found)
    table = _attempt(found, "episodes_unreadable", "meta/episodes", lambda: read_episode_table(store, info))
    if table is None:
        return AuditReport.of(store.url, found, checked)
    described = _attempt(
        found,
        "metadata_unusable",
        INFO_PATH,
        lambda: assemble(store, info, table[0], tasks or Tasks(np.empty(0, dtype=np.int64), ()), stats or {}, table[1]),
    )
    if described is None:
        return AuditReport.of(store.url, found, checked)
    source, contradictions = described
    found.extend(contradictions)
    checked["episodes"] = len(source.episodes)
    if tasks is not None:
        for path in source.episodes.meta_paths:
            _attempt(found, "task_unreadable", path, partial(_check_task_texts, source, path, found))
    time_severity: Severity = "error" if strict_time else "warning"
    rows = RowAudit(source, found, tolerance_s, time_severity)
    videos = VideoAudit(source, index or ProbingIndex(store), found, tolerance_s, time_severity)
    if len(source.episodes):
        for number, path in enumerate(_walk(rows.run(), videos.run())):
            if progress:
                progress(path, number)
        _find_orphan_videos(source, found)
    checked |= {"rows": rows.rows, "data_files": rows.files, "video_files": videos.files, "pictures": videos.pictures}
    return AuditReport.of(store.url, found, checked)


def _walk(*parts: Iterator[str]) -> Iterator[str]:
    for part in parts:
        yield from part


def _attempt(found: Findings, code: str, path: str, action: Callable[[], _T]) -> _T | None:
    """Runs one step; a fault becomes a finding, so that the steps after it still run."""
    try:
        return action()
    except (DatasetError, UnsafeInputError, StorageError) as error:
        fields: dict[str, Any] = vars(error)
        found.add(Finding(code=code, severity="error", message=str(error), file=fields.get("file") or path, episode=fields.get("episode")))
        return None


def _check_features(info: Info, found: Findings) -> None:
    for key, feature in info.features.items():
        if feature.shape == () and not feature.is_video and not feature.is_image:
            found.add(
                Finding(
                    code="scalar_shape",
                    severity="warning",
                    message=f"{INFO_PATH}: features[{key!r}].shape is [], where LeRobot writes [1]; it is read as one value per row",
                    file=INFO_PATH,
                    column=key,
                    found="[]",
                    expected="[1]",
                )
            )
        if not (feature.is_numeric or feature.is_video or feature.is_image or feature.dtype in ("string", "language", "null")):
            found.add(
                Finding(
                    code="unknown_dtype",
                    severity="info",
                    message=f"{INFO_PATH}: features[{key!r}].dtype is {feature.dtype!r}; its values are passed through as they are",
                    file=INFO_PATH,
                    column=key,
                    found=feature.dtype,
                )
            )


def _check_task_texts(source: Source, path: str, found: Findings) -> None:
    """Task texts that the episodes of one metadata file name and ``tasks.parquet`` does not have."""
    known = set(source.tasks.texts)
    file = ParquetSource(source.store, path)
    table = read_columns(file, ["episode_index"], optional=["tasks"])
    if "tasks" not in table.column_names:
        return
    episodes = integer_column(table, "episode_index", file).tolist()
    cells = python_values(table.column("tasks"), "tasks", lambda message: MetadataError(f"{file.where}: {message}"))
    for episode, cell in zip(episodes, cells, strict=True):
        named = cast("list[object]", cell if isinstance(cell, list) else [cell] if isinstance(cell, str) else [])
        unknown = [text for text in named if text not in known]
        if unknown:
            found.add(
                Finding(
                    code="task_not_indexed",
                    severity="error",
                    message=f"{path}: episode {episode}: column tasks names {unknown[0]!r}, which {TASKS_PATH} does not have",
                    file=path,
                    episode=episode,
                    column="tasks",
                    found=str(unknown[0]),
                    expected=f"one of the {len(known)} texts of {TASKS_PATH}",
                )
            )


def _find_orphan_videos(source: Source, found: Findings) -> None:
    folder = source.info.video_path.split("{", 1)[0].rpartition("/")[0]
    if not source.cameras or not folder:
        return
    used = {path for camera in source.maps.values() for path in camera.paths}
    try:
        present = [entry.path for entry in source.store.list(folder)]
    except ReelrayError:
        return
    for path in present:
        if path.endswith(".mp4") and path not in used:
            found.add(Finding("orphan_video", "info", f"{path} is named by no episode", file=path))
