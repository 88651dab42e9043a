"""What metadata alone can show: contradictions inside the episode table and with ``info.json``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingest.lerobot.episodes import EpisodeTable, group_files
from ingest.lerobot.findings import Finding
from ingest.lerobot.info import INFO_PATH, Info
from ingest.lerobot.videomap import CameraMap


def check_table(table: EpisodeTable) -> Iterator[Finding]:
    """Lengths, index ranges and gaps of the episode table."""
    if not len(table):
        yield Finding("no_episodes", "error", "meta/episodes lists no episode", expected="at least one episode", found="0")
        return
    yield from _gaps(table)
    spans = table.dataset_to - table.dataset_from
    for row in np.flatnonzero(spans != table.length):
        episode, file = _place(table, int(row))
        yield Finding(
            code="length_mismatch",
            severity="error",
            message=(
                f"{file}: episode {episode}: dataset_to_index − dataset_from_index is {int(spans[row])} "
                f"({int(table.dataset_from[row])}..{int(table.dataset_to[row])}), but column length is {int(table.length[row])}"
            ),
            file=file,
            episode=episode,
            column="length",
            found=str(int(table.length[row])),
            expected=str(int(spans[row])),
        )
    # Consecutive episodes share a border; across a gap in the numbers the range may only move forward.
    follows = np.diff(table.episode_index) == 1
    expected = table.dataset_to[:-1]
    found = table.dataset_from[1:]
    bad = np.flatnonzero(np.where(follows, found != expected, found < expected)) + 1
    if table.episode_index[0] == 0 and table.dataset_from[0] != 0:
        bad = np.concatenate([[0], bad])
    for row in bad:
        episode, file = _place(table, int(row))
        start = int(table.dataset_from[row])
        before = "the first episode starts at 0"
        want = 0
        if row:
            want = int(table.dataset_to[row - 1])
            before = f"episode {int(table.episode_index[row - 1])} ends at {want}"
        yield Finding(
            code="index_range_shifted",
            severity="error",
            message=f"{file}: episode {episode}: column dataset_from_index is {start}, expected {want} ({before}); the ranges are stale",
            file=file,
            episode=episode,
            column="dataset_from_index",
            found=str(start),
            expected=str(want),
        )


def _gaps(table: EpisodeTable) -> Iterator[Finding]:
    first = int(table.episode_index[0])
    steps = np.flatnonzero(np.diff(table.episode_index) > 1)
    holes = [(0, first - 1)] if first > 0 else []
    holes += [(int(table.episode_index[step]) + 1, int(table.episode_index[step + 1]) - 1) for step in steps[:5]]
    if holes:
        shown = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in holes)
        yield Finding(
            code="episode_gap",
            severity="warning",
            message=f"meta/episodes lists {table.describe()}, without episode {shown}; only listed episodes exist for reading",
            column="episode_index",
            episode=holes[0][0],
            found=f"no row for {shown}",
            expected="episodes numbered without gaps",
        )


def check_counts(info: Info, table: EpisodeTable, tasks: int) -> Iterator[Finding]:
    """Counts of ``info.json`` against what the metadata lists; reading uses the latter."""
    listed = (
        ("total_episodes", info.total_episodes, len(table)),
        ("total_frames", info.total_frames, int(table.length.sum())),
        ("total_tasks", info.total_tasks, tasks),
    )
    for field, found, expected in listed:
        if found is not None and found != expected:
            where = "meta/tasks.parquet holds" if field == "total_tasks" else "meta/episodes lists"
            yield Finding(
                code="stale_info_counts",
                severity="error",
                message=(
                    f"{INFO_PATH}: {field} is {found}, but {where} {expected}; "
                    "the recording was interrupted or the dataset edited, and what is listed is used"
                ),
                file=INFO_PATH,
                column=field,
                found=str(found),
                expected=str(expected),
                repairable=True,
            )


def check_video_starts(info: Info, table: EpisodeTable, camera: CameraMap) -> Iterator[Finding]:
    """``from_timestamp`` values that were written for another file.

    The first episode of a file starts at the file's first picture, a few frames after 0 at most. A start that equals the
    end of the file before goes on counting where a new file began. A start that lies past everything the file can hold,
    drift and another frame rate allowed for, would also put the episode behind its neighbours.
    """
    spans = table.cameras[camera.camera]
    frame_s = 1.0 / info.fps
    previous_end = 0.0
    for number in range(len(camera.paths)):
        rows = camera.rows_of(number)
        if not len(rows):
            continue
        starts = spans.from_timestamp[rows]
        duration = float(camera.pictures[number]) * frame_s
        if number > 0 and starts[0] > 0.5 * frame_s and abs(starts[0] - previous_end) <= 0.5 * frame_s:
            yield _foreign_start(table, camera, number, int(rows[0]), duration, "so expected 0; it keeps counting from the file before")
        elif starts[0] > max(duration, 2.0):
            yield _foreign_start(table, camera, number, int(rows[0]), duration, "so expected 0; it was written for another file")
        else:
            for row in rows[starts > duration + max(2.0, 0.25 * duration)]:
                reason = "so expected a time inside it; it was written for another file"
                yield _foreign_start(table, camera, number, int(row), duration, reason)
        previous_end = float(spans.to_timestamp[rows[-1]])


def _foreign_start(table: EpisodeTable, camera: CameraMap, number: int, row: int, duration: float, reason: str) -> Finding:
    episode, file = _place(table, row)
    start = float(table.cameras[camera.camera].from_timestamp[row])
    key = f"videos/{camera.camera}/from_timestamp"
    first = int(camera.first_picture[row]) == 0
    return Finding(
        code="from_timestamp_not_reset",
        severity="error",
        message=(
            f"{file}: episode {episode}: column {key} is {start:.6g} s, but {camera.paths[number]} holds "
            f"{int(camera.pictures[number])} pictures, {duration:.6g} s{', and the episode is its first' if first else ''}, {reason}"
        ),
        file=file,
        episode=episode,
        column=key,
        found=f"{start:.6g}",
        expected="0" if first else f"at most {duration:.6g}",
    )


def check_file_numbers(info: Info, table: EpisodeTable, cameras: list[CameraMap]) -> Iterator[Finding]:
    """Templates that give two (chunk, file) pairs the same path."""
    pairs, _ = group_files(table.data_chunk, table.data_file)
    paths = {info.data_file(int(chunk), int(file)) for chunk, file in pairs}
    if len(paths) < len(pairs):
        yield _collision("data_path", info.data_path, len(pairs), len(paths))
    for camera in cameras:
        if len(set(camera.paths)) < len(camera.paths):
            yield _collision("video_path", info.video_path, len(camera.paths), len(set(camera.paths)))


def _collision(field: str, template: str, pairs: int, paths: int) -> Finding:
    return Finding(
        code="ambiguous_template",
        severity="error",
        message=f"{INFO_PATH}: {field} {template!r} names {paths} files for {pairs} (chunk_index, file_index) pairs of meta/episodes",
        file=INFO_PATH,
        column=field,
        found=template,
        expected="a template with {chunk_index} and {file_index}",
    )


def _place(table: EpisodeTable, row: int) -> tuple[int, str]:
    return int(table.episode_index[row]), table.meta_paths[int(table.meta_file[row])]
