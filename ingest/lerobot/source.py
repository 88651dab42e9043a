"""A dataset described: metadata only, no video and no data row is read to open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SelectionError
from ingest.lerobot.checks import check_counts, check_file_numbers, check_table, check_video_starts
from ingest.lerobot.episodes import EpisodeTable, read_episode_table
from ingest.lerobot.findings import Finding, raise_first
from ingest.lerobot.info import Info, read_info
from ingest.lerobot.tasks import Stats, Tasks, read_stats, read_tasks
from ingest.lerobot.videomap import CameraMap, check_picture_count, map_cameras
from ingest.storage.base import Store
from ingest.storage.together import together


@dataclass(frozen=True, slots=True)
class Source:
    """What a dataset holds and where; picklable and without open files.

    Attributes:
        store: where the files are.
        info: ``meta/info.json``.
        episodes: the episode table.
        tasks: task texts by ``task_index``.
        stats: statistics, empty when the dataset has none.
        maps: where each camera's pictures are, by camera key.
        warnings: repairs and oddities found while opening; ``str(warning)`` is a sentence.
        moved: data files of the episodes whose listed file does not hold all their rows, in row order.
    """

    store: Store
    info: Info
    episodes: EpisodeTable
    tasks: Tasks
    stats: Stats
    maps: Mapping[str, CameraMap]
    warnings: tuple[Finding, ...]
    moved: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])

    @property
    def cameras(self) -> tuple[str, ...]:
        """Video features in the order of ``info.json``."""
        return self.info.cameras

    def episode_frames(self) -> NDArray[np.int64]:
        """int64[E], frames of each episode, in the order of ``episodes.episode_index``."""
        return self.episodes.length

    def camera_map(self, camera: str) -> CameraMap:
        """The map of one camera.

        Raises:
            SelectionError: the dataset has no such camera; the message lists those it has.
        """
        try:
            return self.maps[camera]
        except KeyError:
            raise SelectionError(f"{self.store.url} has no video camera {camera!r}; it has {', '.join(self.cameras) or 'none'}") from None

    def pictures(self, episode: int, camera: str) -> tuple[str, int, int]:
        """Where an episode's pictures are: (video file, first picture number, count). Picture k belongs to row k.

        Raises:
            SelectionError: no such episode or camera.
        """
        mapped = self.camera_map(camera)
        row = self.episodes.row(episode)
        return mapped.paths[int(mapped.file[row])], int(mapped.first_picture[row]), int(self.episodes.length[row])

    def locate(self, episode: int, frame: int, camera: str) -> tuple[str, int]:
        """The picture of one row: (video file, picture number in presentation order after edit lists).

        Raises:
            SelectionError: no such episode, frame or camera.
        """
        path, first, count = self.pictures(episode, camera)
        if not 0 <= frame < count:
            raise SelectionError(f"{self.store.url}: episode {episode} has frames 0..{count - 1}, frame {frame} was asked for")
        return path, first + frame

    def check_pictures(self, path: str, camera: str, presented: int) -> None:
        """Compares the pictures a video file presents with the rows that map to it.

        Raises:
            PictureCountError: names file, counts and episodes.
            SelectionError: no episode maps to ``path``.
        """
        mapped = self.camera_map(camera)
        number = mapped.numbers.get(path)
        if number is None:
            raise SelectionError(f"{self.store.url}: no episode has pictures of {camera} in {path}")
        check_picture_count(self.store.url, self.episodes, mapped, number, presented)

    def listed_data_file(self, episode: int) -> str:
        """The data file that the metadata names for an episode.

        Raises:
            SelectionError: no such episode.
        """
        row = self.episodes.row(episode)
        return self.info.data_file(int(self.episodes.data_chunk[row]), int(self.episodes.data_file[row]))

    def data_files(self, episode: int) -> tuple[str, ...]:
        """The data files that hold an episode's rows, as far as known, in row order.

        Raises:
            SelectionError: no such episode.
        """
        return self.moved.get(episode) or (self.listed_data_file(episode),)

    def with_moved(self, moved: Mapping[int, tuple[str, ...]], warnings: Sequence[Finding]) -> Source:
        """The same source with corrected data files."""
        return replace(self, moved={**self.moved, **moved}, warnings=(*self.warnings, *warnings))


def open_source(store: Store, *, allow_unknown_version: bool = False) -> Source:
    """Reads a dataset's metadata and checks it against itself.

    Args:
        store: the dataset.
        allow_unknown_version: also read a missing, unreadable or newer ``codebase_version``.

    Raises:
        UnsupportedVersionError: another codebase version.
        MetadataError: metadata that is missing or unreadable, or a contradiction that cannot be repaired.
        UnsafeInputError: a path that leaves the dataset, or sizes no real dataset has.
    """
    source, findings = describe_source(store, allow_unknown_version=allow_unknown_version)
    raise_first(findings, store.url)
    return source


def describe_source(store: Store, *, allow_unknown_version: bool = False) -> tuple[Source, list[Finding]]:
    """Like ``open_source``, but contradictions are returned instead of raised, so that an audit sees all of them."""
    info = read_info(store, allow_unknown_version=allow_unknown_version)
    reads: list[Callable[[], Any]] = [partial(read_episode_table, store, info), partial(read_tasks, store), partial(read_stats, store)]
    (table, findings), tasks, stats = together(store, reads)
    return assemble(store, info, table, tasks, stats, findings)


def assemble(
    store: Store, info: Info, table: EpisodeTable, tasks: Tasks, stats: Stats, findings: Sequence[Finding]
) -> tuple[Source, list[Finding]]:
    """Joins the parts of a description and checks them against each other.

    Returns:
        The source, and ``findings`` with all contradictions behind them.
    """
    maps = map_cameras(info, table)
    found = [*findings, *check_table(table), *check_counts(info, table, len(tasks)), *check_file_numbers(info, table, list(maps.values()))]
    for camera in maps.values():
        found += check_video_starts(info, table, camera)
    kept = tuple(finding for finding in found if finding.severity != "error" or finding.repairable)
    return Source(store, info, table, tasks, stats, maps, kept), found
