"""Which picture of which video file belongs to which row: by position, the one rule of the whole system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.errors import PictureCountError
from ingest.lerobot.episodes import EpisodeTable, group_files
from ingest.lerobot.info import Info


@dataclass(frozen=True, slots=True)
class CameraMap:
    """One camera's files and the position of every episode in them.

    Attributes:
        camera: feature key.
        paths: video files, sorted by (chunk, file).
        file: int32[E], number in ``paths`` of each episode, by row of the episode table.
        first_picture: int64[E], picture number (presentation order of the file) of the episode's frame 0.
        pictures: int64[F], pictures that rows map to, by file.
        order: int64[E], rows of the episode table sorted by file, then position.
        borders: int64[F + 1], where each file's rows begin in ``order``.
        numbers: number in ``paths`` by path.
    """

    camera: str
    paths: tuple[str, ...]
    file: NDArray[np.int32]
    first_picture: NDArray[np.int64]
    pictures: NDArray[np.int64]
    order: NDArray[np.int64]
    borders: NDArray[np.int64]
    numbers: Mapping[str, int]

    def rows_of(self, file: int) -> NDArray[np.int64]:
        """Rows of the episode table whose pictures are in ``paths[file]``, by position."""
        return self.order[self.borders[file] : self.borders[file + 1]]


def map_cameras(info: Info, table: EpisodeTable) -> Mapping[str, CameraMap]:
    """Places every episode of every camera.

    Episodes of one file are sorted by ``from_timestamp``, then ``episode_index``; an episode's first picture is the sum
    of the lengths before it in that file.

    Raises:
        UnsafeInputError: a path leaves the dataset.
    """
    return {camera: _map_camera(info, table, camera) for camera in info.cameras}


def _map_camera(info: Info, table: EpisodeTable, camera: str) -> CameraMap:
    spans = table.cameras[camera]
    pairs, number = group_files(spans.chunk, spans.file)
    file = number.astype(np.int32)
    order = np.lexsort((table.episode_index, spans.from_timestamp, file))
    before = np.cumsum(table.length[order]) - table.length[order]
    borders = np.searchsorted(file[order], np.arange(len(pairs) + 1))
    first = np.empty(len(table), dtype=np.int64)
    first[order] = before - before[borders[:-1]][file[order]] if len(table) else before
    pictures = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(pictures, file, table.length)
    paths = tuple(info.video_file(camera, int(chunk), int(index)) for chunk, index in pairs)
    return CameraMap(
        camera=camera,
        paths=paths,
        file=file,
        first_picture=first,
        pictures=pictures,
        order=order.astype(np.int64),
        borders=borders.astype(np.int64),
        numbers={path: number for number, path in enumerate(paths)},
    )


def check_picture_count(where: str, table: EpisodeTable, camera: CameraMap, file: int, presented: int) -> None:
    """Compares the pictures of a file with the rows that map to it.

    Args:
        where: location of the dataset, for the message.
        table: the episode table that ``camera`` was made from.
        camera: the camera's map.
        file: number in ``camera.paths``.
        presented: pictures that the file presents, after edit lists.

    Raises:
        PictureCountError: names file, counts and episodes. With too few pictures ``episodes`` holds those whose last
            pictures are missing; with too many it holds every episode of the file, since nobody can tell which are shifted.
    """
    expected = int(camera.pictures[file])
    if presented == expected:
        return
    path = camera.paths[file]
    rows = camera.rows_of(file)
    rows = rows[table.length[rows] > 0]
    every = [int(episode) for episode in table.episode_index[rows]]
    head = f"{where}: {camera.camera}: {path} has {presented} pictures, but {expected} rows map to it (episode{_plural(every)})"
    if presented > expected:
        message = (
            f"{head}: {presented - expected} pictures belong to no row, so every row after them would get another row's picture; "
            "a discarded take was left in the video, or meta/episodes lists too few episodes"
        )
        raise PictureCountError(message, dataset=where, episodes=every, camera=camera.camera, file=path)
    short: list[int] = []
    parts: list[str] = []
    for row in rows:
        episode, length = int(table.episode_index[row]), int(table.length[row])
        missing = int(camera.first_picture[row]) + length - max(presented, int(camera.first_picture[row]))
        if missing > 0:
            short.append(episode)
            parts.append(f"the last {missing} of episode {episode}" if missing < length else f"all {length} of episode {episode}")
    shown = ", ".join(parts[:5]) + (" …" if len(parts) > 5 else "")
    message = f"{head}: missing are {shown}; the encode or the copy was cut short"
    raise PictureCountError(message, dataset=where, episodes=short, camera=camera.camera, file=path)


def _plural(episodes: list[int]) -> str:
    shown = ", ".join(str(episode) for episode in episodes[:8]) + (f" … {episodes[-1]}" if len(episodes) > 8 else "")
    return f"s {shown}" if len(episodes) > 1 else f" {shown}"
