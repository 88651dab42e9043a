"""The annotations of one episode, held once: what planning reads and what every sample of the episode shares."""

# Arrow arrays carry no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import LanguageError
from ingest.language.columns import decode_rows, list_values, single_array
from ingest.language.rows import Row, StateRows, mapping_rows
from ingest.language.styles import EVENT_COLUMN, LANGUAGE_COLUMNS, STATE_COLUMN
from ingest.lerobot.rows import EpisodeRows, RowReader
from ingest.lerobot.source import Source
from ingest.lerobot.tasks import Tasks

PLANNING_COLUMNS = ("timestamp", "index", "task_index")
"""Columns besides the annotations that planning reads; no picture and no video is touched."""


@dataclass(frozen=True, slots=True)
class EpisodeLanguage:
    """Annotations of one episode of F frames.

    Attributes:
        episode: episode index.
        timestamps: float32[F], frame times in seconds as stored.
        index: int64[F], global frame index of the dataset.
        tasks: distinct task texts of the episode.
        task_of: int32[F], position in ``tasks``, −1 for none.
        states: distinct lists of state rows; one, where the file keeps the rule that all frames carry the same list.
        state_of: int32[F], position in ``states``, −1 for a frame without state rows.
        events: event rows by frame; frames without events are left out.
    """

    episode: int
    timestamps: NDArray[np.float32]
    index: NDArray[np.int64]
    tasks: tuple[str, ...]
    task_of: NDArray[np.int32]
    states: tuple[StateRows, ...]
    state_of: NDArray[np.int32]
    events: Mapping[int, list[Row]]

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def annotated(self) -> bool:
        """Whether any frame has any row."""
        return bool(self.states or self.events)

    def time(self, frame: int) -> float:
        """The float32 frame time, widened to double."""
        return float(self.timestamps[frame])

    def task(self, frame: int) -> str | None:
        """The task text of a frame."""
        position = int(self.task_of[frame])
        return None if position < 0 else self.tasks[position]

    def state(self, frame: int) -> StateRows:
        """State rows that a frame carries; the object is shared by all frames of the episode."""
        position = int(self.state_of[frame])
        return _NO_ROWS if position < 0 else self.states[position]

    def frame_events(self, frame: int) -> list[Row]:
        """Event rows of a frame, possibly none."""
        return self.events.get(frame, [])

    def raw(self, frame: int) -> dict[str, list[Row]]:
        """Both raw columns of a sample: what passes through when there is no recipe."""
        return {STATE_COLUMN: self.state(frame), EVENT_COLUMN: self.frame_events(frame)}

    def pack(self) -> bytes:
        """One compact blob for a block or a message between processes; state rows are in it once, not per frame."""
        fields: dict[str, Any] = {
            "episode": self.episode,
            "tasks": self.tasks,
            "task_of": _runs(self.task_of),
            "states": self.states,
            "state_of": _runs(self.state_of),
            "events": {str(frame): rows for frame, rows in self.events.items()},
        }
        head = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        return len(head).to_bytes(8, "little") + head + self.index.astype("<i8").tobytes() + self.timestamps.astype("<f4").tobytes()

    @classmethod
    def unpack(cls, blob: bytes) -> EpisodeLanguage:
        """What ``pack`` made, equal value for value.

        Raises:
            LanguageError: the blob is cut off or was made by something else.
        """
        size = int.from_bytes(blob[:8], "little")
        frames, rest = divmod(len(blob) - 8 - size, 12)
        try:
            if frames < 0 or rest:
                raise ValueError(f"{len(blob)} bytes")
            fields = cast("dict[str, Any]", json.loads(blob[8 : 8 + size]))
            return cls(
                episode=int(fields["episode"]),
                timestamps=np.frombuffer(blob, "<f4", frames, 8 + size + 8 * frames),
                index=np.frombuffer(blob, "<i8", frames, 8 + size),
                tasks=tuple(fields["tasks"]),
                task_of=_from_runs(fields["task_of"], frames),
                states=tuple(StateRows(rows) for rows in fields["states"]),
                state_of=_from_runs(fields["state_of"], frames),
                events={int(frame): rows for frame, rows in fields["events"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LanguageError(f"not a packed episode of annotations: {error}", kind="bad_pack") from None


_NO_ROWS = StateRows()


def episode_language(rows: EpisodeRows, tasks: Tasks) -> EpisodeLanguage | None:
    """The annotations among the rows of one episode, normalised; None when the dataset declares no language column.

    Args:
        rows: read with at least ``timestamp``, ``index``, ``task_index`` and the language columns there are.
        tasks: the dataset's task texts.

    Raises:
        LanguageError: a column cannot be read as annotation rows; names the episode.
    """
    if not any(column in rows.keys for column in LANGUAGE_COLUMNS):
        return None
    timestamps = np.asarray(rows.numbers["timestamp"], dtype=np.float32)
    index = np.asarray(rows.numbers["index"], dtype=np.int64)
    task_index = np.asarray(rows.numbers["task_index"], dtype=np.int64)
    numbers, task_of = np.unique(task_index, return_inverse=True)
    try:
        states, state_of = _states(rows.others.get(STATE_COLUMN), rows.length)
        events = _events(rows.others.get(EVENT_COLUMN))
    except LanguageError as error:
        error.episode = rows.episode
        error.args = (f"episode {rows.episode}: {error}",)
        raise
    texts = tuple(tasks.text(int(number)) for number in numbers)
    return EpisodeLanguage(rows.episode, timestamps, index, texts, task_of.astype(np.int32).reshape(-1), states, state_of, events)


def read_language(source: Source, episodes: Sequence[int] | None = None) -> Iterator[EpisodeLanguage]:
    """The annotations of many episodes, read from the parquet files alone; episodes without annotations come too.

    Raises:
        LanguageError: a language column is malformed, or stored without being declared in ``info.json``.
        RowsError: rows are missing or unreadable.
    """
    declared = [column for column in LANGUAGE_COLUMNS if column in source.info.features]
    numbers = [int(number) for number in source.episodes.episode_index] if episodes is None else list(episodes)
    if numbers:
        _check_declared(source, numbers[0], declared)
    reader = RowReader(source)
    for number in numbers:
        rows = reader.read(number, [*PLANNING_COLUMNS, *declared])
        found = episode_language(rows, source.tasks)
        yield found if found is not None else _unannotated(rows, source.tasks)


def _unannotated(rows: EpisodeRows, tasks: Tasks) -> EpisodeLanguage:
    task_index = np.asarray(rows.numbers["task_index"], dtype=np.int64)
    numbers, task_of = np.unique(task_index, return_inverse=True)
    return EpisodeLanguage(
        rows.episode,
        np.asarray(rows.numbers["timestamp"], dtype=np.float32),
        np.asarray(rows.numbers["index"], dtype=np.int64),
        tuple(tasks.text(int(number)) for number in numbers),
        task_of.astype(np.int32).reshape(-1),
        (),
        np.full(rows.length, -1, np.int32),
        {},
    )


def _check_declared(source: Source, episode: int, declared: Sequence[str]) -> None:
    path = source.data_files(episode)[0]
    with source.store.open(path) as file:
        stored = pq.read_schema(file).names
    hidden = [column for column in LANGUAGE_COLUMNS if column in stored and column not in declared]
    if hidden:
        raise LanguageError(
            f"{path} stores {', '.join(hidden)} but meta/info.json does not declare it: "
            'add {"dtype": "language", "shape": [1], "names": null} to its features',
            kind="undeclared_column",
        )


def _states(column: pa.ChunkedArray | None, frames: int) -> tuple[tuple[StateRows, ...], NDArray[np.int32]]:
    """Distinct lists and which frame has which; the rows of all frames are compared in Arrow, not in Python."""
    nothing = np.full(frames, -1, np.int32)
    if column is None or not frames or pa.types.is_null(column.type):
        return (), nothing
    lists = single_array(column)
    values, lengths = list_values(lists)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    used = np.flatnonzero(lengths)
    if not len(used):
        return (), nothing
    size = int(lengths[used[0]])
    if bool(np.all(lengths[used] == size)) and values.slice(size).equals(values.slice(0, len(values) - size)):
        nothing[used] = 0
        return (_decoded(lists, int(used[0])),), nothing
    distinct: list[int] = []
    for frame in used:
        start, length = int(starts[frame]), int(lengths[frame])
        if not distinct or not values.slice(start, length).equals(values.slice(int(starts[distinct[-1]]), int(lengths[distinct[-1]]))):
            distinct.append(int(frame))
        nothing[frame] = len(distinct) - 1
    return tuple(_decoded(lists, frame) for frame in distinct), nothing


def _decoded(lists: pa.Array, frame: int) -> StateRows:
    return StateRows(decode_rows(lists.slice(frame, 1), STATE_COLUMN)[0] or ())


def _events(column: pa.ChunkedArray | None) -> dict[int, list[Row]]:
    if column is None or not len(column) or pa.types.is_null(column.type):
        return {}
    lists = single_array(column)
    lengths = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    frames = np.flatnonzero(lengths)
    if not len(frames):
        return {}
    rows = decode_rows(lists.take(pa.array(frames)), EVENT_COLUMN)
    return {int(frame): mapping_rows(found) for frame, found in zip(frames, rows, strict=True)}


def _runs(values: NDArray[np.int32]) -> list[list[int]]:
    """``[value, count]`` runs."""
    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = np.concatenate([[0], edges, [len(values)]])
    return [[int(values[start]), int(stop - start)] for start, stop in pairwise(bounds) if stop > start]


def _from_runs(runs: Sequence[Sequence[int]], frames: int) -> NDArray[np.int32]:
    if sum(count for _, count in runs) != frames or any(count < 0 for _, count in runs):
        raise ValueError("runs do not cover the frames")
    return np.repeat(np.asarray([value for value, _ in runs], np.int32), [count for _, count in runs])
