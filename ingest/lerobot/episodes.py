"""The episode table: ``meta/episodes/*/*.parquet`` as a struct of arrays.

Statistics columns are never read, and nothing is kept per episode but numbers, so that a million episodes stay small.
"""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import MetadataError, ObjectNotFoundError, SelectionError
from ingest.lerobot.findings import Finding
from ingest.lerobot.info import Info
from ingest.lerobot.parquet import ParquetSource, float_column, integer_column, read_columns
from ingest.storage.base import Store
from ingest.storage.together import together

EPISODES_PREFIX = "meta/episodes"

_NUMBERS = ("episode_index", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index")
_LISTED = 5


_Column = NDArray[Any]
"""int64, or float64 for times."""


@dataclass(frozen=True, slots=True)
class CameraSpans:
    """Where one camera's pictures are, one entry per row of the episode table.

    Attributes:
        chunk, file: int64[E], the video file.
        from_timestamp, to_timestamp: float64[E], seconds inside that file; they order episodes and check times.
    """

    chunk: NDArray[np.int64]
    file: NDArray[np.int64]
    from_timestamp: NDArray[np.float64]
    to_timestamp: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpisodeTable:
    """All episodes, sorted by ``episode_index``, each once. Arrays have one entry per episode and are read-only.

    Attributes:
        episode_index: int64[E], strictly increasing; gaps are possible.
        length: int64[E], rows of the episode.
        dataset_from, dataset_to: int64[E], half-open range of the global ``index``.
        data_chunk, data_file: int64[E], the data file.
        cameras: spans by camera key.
        meta_file: int32[E], which of ``meta_paths`` lists the episode.
        meta_paths: the metadata files read, sorted.
    """

    episode_index: NDArray[np.int64]
    length: NDArray[np.int64]
    dataset_from: NDArray[np.int64]
    dataset_to: NDArray[np.int64]
    data_chunk: NDArray[np.int64]
    data_file: NDArray[np.int64]
    cameras: Mapping[str, CameraSpans]
    meta_file: NDArray[np.int32]
    meta_paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.episode_index)

    def row(self, episode: int) -> int:
        """Row number of an episode.

        Raises:
            SelectionError: the table does not list it.
        """
        position = int(np.searchsorted(self.episode_index, episode))
        if position >= len(self) or int(self.episode_index[position]) != episode:
            raise SelectionError(f"episode {episode} does not exist; the dataset has {self.describe()}")
        return position

    def rows(self, episodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row numbers of several episodes, in the order given.

        Raises:
            SelectionError: one of them is not listed.
        """
        positions = np.searchsorted(self.episode_index, episodes)
        clipped = np.minimum(positions, max(0, len(self) - 1))
        missing = (
            np.flatnonzero((positions >= len(self)) | (self.episode_index[clipped] != episodes)) if len(self) else np.arange(len(episodes))
        )
        if missing.size:
            raise SelectionError(f"episode {int(episodes[missing[0]])} does not exist; the dataset has {self.describe()}")
        return positions.astype(np.int64)

    def describe(self) -> str:
        """For messages: ``4 episodes, 0..3``."""
        if not len(self):
            return "no episodes"
        return f"{len(self)} episodes, {int(self.episode_index[0])}..{int(self.episode_index[-1])}"


def group_files(chunk: NDArray[np.int64], file: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct files of a column pair.

    Args:
        chunk: int64[E], chunk numbers.
        file: int64[E], file numbers.

    Returns:
        int64[F, 2], the distinct (chunk, file) pairs in order, and int64[E], the number of each row's pair.
    """
    order = np.lexsort((file, chunk))
    pairs = np.stack([chunk[order], file[order]], axis=1)
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = np.any(pairs[1:] != pairs[:-1], axis=1)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return pairs[new], number


def metadata_files(store: Store) -> list[str]:
    """Paths of the episode metadata files, sorted.

    Raises:
        MetadataError: there is none; the message says what that usually means.
    """
    try:
        found = [entry.path for entry in store.list(EPISODES_PREFIX)]
    except ObjectNotFoundError:
        found = []
    paths = [path for path in found if path.endswith(".parquet") and path.count("/") == EPISODES_PREFIX.count("/") + 2]
    if not paths:
        stray = f" (it holds {', '.join(found[:3])})" if found else ""
        raise MetadataError(
            f"{store.url}: {EPISODES_PREFIX} holds no chunk-*/file-*.parquet{stray}, so no episode is known: the recording was not "
            "finalised (killed before finalize()) or meta/ was copied in part"
        )
    return sorted(paths)


def read_episode_table(store: Store, info: Info) -> tuple[EpisodeTable, list[Finding]]:
    """Reads every metadata file and joins them.

    Returns:
        The table, and findings about rows that were listed twice (identical: dropped).

    Raises:
        MetadataError: no or unreadable metadata, a missing column or value, or two rows of one episode that differ.
    """
    paths = metadata_files(store)
    parts = together(store, [partial(_read_file, ParquetSource(store, path), info.cameras) for path in paths])
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    origin = np.repeat(np.arange(len(paths), dtype=np.int32), [len(part["episode_index"]) for part in parts])
    order = np.argsort(columns["episode_index"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    keep, findings = _drop_duplicates(columns, origin[order], paths, store.url)
    columns = {name: values[keep] for name, values in columns.items()}
    for values in columns.values():
        values.flags.writeable = False
    if len(keep) and int(columns["episode_index"][0]) < 0:
        raise MetadataError(f"{store.url}: {EPISODES_PREFIX} lists episode {int(columns['episode_index'][0])}; episode_index starts at 0")
    cameras = {
        camera: CameraSpans(
            *(columns[f"videos/{camera}/{name}"] for name in ("chunk_index", "file_index", "from_timestamp", "to_timestamp"))
        )
        for camera in info.cameras
    }
    table = EpisodeTable(
        episode_index=columns["episode_index"],
        length=columns["length"],
        dataset_from=columns["dataset_from_index"],
        dataset_to=columns["dataset_to_index"],
        data_chunk=columns["data/chunk_index"],
        data_file=columns["data/file_index"],
        cameras=cameras,
        meta_file=origin[order][keep],
        meta_paths=tuple(paths),
    )
    return table, findings


def _read_file(source: ParquetSource, cameras: tuple[str, ...]) -> dict[str, _Column]:
    spans = [f"videos/{camera}/{name}" for camera in cameras for name in ("chunk_index", "file_index")]
    times = [f"videos/{camera}/{name}" for camera in cameras for name in ("from_timestamp", "to_timestamp")]
    table = read_columns(source, [*_NUMBERS, *spans, *times], optional=["length"])
    lengths = ["length"] if "length" in table.column_names else []
    columns: dict[str, _Column] = {}
    for name in (*_NUMBERS, *lengths, *spans):
        columns[name] = integer_column(table, name, source)
    for name in times:
        columns[name] = float_column(table, name, source)
    if not lengths:
        columns["length"] = columns["dataset_to_index"] - columns["dataset_from_index"]
    for name in ("length", "data/chunk_index", "data/file_index", *spans):
        bad = np.flatnonzero(columns[name] < 0)
        if bad.size:
            episode = int(columns["episode_index"][bad[0]])
            raise MetadataError(f"{source.where}: episode {episode}: column {name} is {columns[name][bad[0]]}, expected 0 or more")
    return columns


def _drop_duplicates(
    columns: Mapping[str, _Column], origin: NDArray[np.int32], paths: list[str], where: str
) -> tuple[NDArray[np.int64], list[Finding]]:
    """Rows to keep (the first of each episode); rows that repeat it must agree in every column."""
    episodes = columns["episode_index"]
    repeats = np.flatnonzero(episodes[1:] == episodes[:-1]) + 1
    if not repeats.size:
        return np.arange(len(episodes), dtype=np.int64), []
    for name, values in columns.items():
        differing = np.flatnonzero(values[repeats] != values[repeats - 1])
        if differing.size:
            row = int(repeats[differing[0]])
            raise MetadataError(
                f"{where}: episode {int(episodes[row])} is listed twice and the rows differ: column {name} is {values[row - 1]} in "
                f"{paths[origin[row - 1]]} and {values[row]} in {paths[origin[row]]}; keep the one that fits the files"
            )
    keep = np.ones(len(episodes), dtype=bool)
    keep[repeats] = False
    return np.flatnonzero(keep).astype(np.int64), list(_duplicate_findings(episodes[repeats], origin[repeats], paths))


def _duplicate_findings(episodes: _Column, origin: NDArray[np.int32], paths: list[str]) -> Iterator[Finding]:
    for number in np.unique(origin):
        listed = episodes[origin == number].astype(np.int64)
        shown = ", ".join(str(int(episode)) for episode in listed[:_LISTED]) + (" …" if len(listed) > _LISTED else "")
        yield Finding(
            code="duplicate_episode_rows",
            severity="error",
            message=(
                f"{paths[number]} lists {len(listed)} episode rows that were listed before with the same values "
                f"(column episode_index, episodes {shown}); each episode is used once"
            ),
            file=paths[number],
            episode=int(listed[0]),
            column="episode_index",
            found=f"{len(listed)} repeated rows",
            expected="each episode_index once",
            repairable=True,
        )
