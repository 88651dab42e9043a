"""The annotations of one episode, held once: what planning reads and what every sample of the episode shares."""

# Arrow arrays carry no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.errors import DatasetError, LanguageError, RowsError
from ingest.language.columns import check_lists, decode_rows, list_values, normalise_table, single_array
from ingest.language.rows import Row, StateRows, mapping_rows
from ingest.language.styles import EVENT_COLUMN, LANGUAGE_COLUMNS, STATE_COLUMN
from ingest.lerobot.footercache import FooterCache
from ingest.lerobot.rows import EpisodeRows, RowReader
from ingest.lerobot.source import Source
from ingest.lerobot.tasks import Tasks

PLANNING_COLUMNS = ("timestamp", "index", "task_index")
"""Columns besides the annotations that planning reads; no picture and no video is touched."""


@dataclass(frozen=True, slots=True)
class AnnotationRows:
    """Both language columns of F consecutive frames of one episode, each state list held once.

    This is what a fetched unit carries and what travels between processes, instead of the stored columns that repeat the
    state rows on every frame.

    Attributes:
        states: distinct lists of state rows; one, where the file keeps the rule that all frames carry the same list.
        state_of: int32[F], position in ``states``, −1 for a frame without state rows.
        events: event rows by frame, counted from the first of the F; frames without events are left out.
    """

    states: tuple[StateRows, ...]
    state_of: NDArray[np.int32]
    events: Mapping[int, list[Row]]

    def __len__(self) -> int:
        return len(self.state_of)

    @classmethod
    def from_columns(cls, columns: Mapping[str, pa.ChunkedArray | pa.Array], frames: int) -> AnnotationRows:
        """Reads the columns as stored, in any physical form; a column that is absent has no rows.

        Args:
            columns: Arrow columns by name; others than the two language columns are ignored.
            frames: F.

        Raises:
            LanguageError: a column cannot be read as annotation rows.
        """
        states, state_of = _states(columns.get(STATE_COLUMN), frames)
        return cls(states, state_of, _events(columns.get(EVENT_COLUMN)))

    @classmethod
    def empty(cls, frames: int) -> AnnotationRows:
        """F frames without annotations."""
        return cls((), np.full(frames, -1, np.int32), {})

    @property
    def annotated(self) -> bool:
        """Whether any frame has any row."""
        return bool(self.states or self.events)

    def state(self, frame: int) -> StateRows:
        """State rows that a frame carries; frames share the object."""
        position = int(self.state_of[frame])
        return _NO_ROWS if position < 0 else self.states[position]

    def frame_events(self, frame: int) -> list[Row]:
        """Event rows of a frame, possibly none."""
        return self.events.get(frame, [])

    def raw(self, frame: int) -> dict[str, list[Row]]:
        """Both raw columns of a sample: what passes through when there is no recipe, and what a recipe renders."""
        return {STATE_COLUMN: self.state(frame), EVENT_COLUMN: self.frame_events(frame)}

    def part(self, start: int, stop: int) -> AnnotationRows:
        """The rows of some consecutive frames; state lists stay the same objects, those of no frame are left out."""
        used, state_of = np.unique(self.state_of[start:stop], return_inverse=True)
        states = tuple(self.states[position] for position in used.tolist() if position >= 0)
        state_of = state_of.astype(np.int32) - int(len(states) < len(used))
        events = {frame - start: rows for frame, rows in self.events.items() if start <= frame < stop}
        return AnnotationRows(states, state_of, events)

    def pack(self) -> bytes:
        """UTF-8 JSON for a block or a message between processes; its size grows with the rows, not with the frames."""
        edges = np.flatnonzero(np.diff(self.state_of)) + 1
        bounds = np.concatenate([[0], edges, [len(self.state_of)]])
        runs = [[int(self.state_of[start]), int(stop - start)] for start, stop in pairwise(bounds) if stop > start]
        fields = {"states": self.states, "state_of": runs, "events": list(self.events.items())}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, blob: bytes | memoryview) -> AnnotationRows:
        """What ``pack`` made, equal value for value.

        Raises:
            LanguageError: the blob is cut off or was made by something else.
        """
        try:
            fields = cast("dict[str, Any]", json.loads(bytes(blob)))
            values, counts = zip(*fields["state_of"], strict=True) if fields["state_of"] else ((), ())
            return cls(
                states=tuple(StateRows(rows) for rows in fields["states"]),
                state_of=np.repeat(np.asarray(values, np.int32), np.asarray(counts, np.int64)),
                events={int(frame): rows for frame, rows in fields["events"]},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LanguageError(f"not packed annotations: {error}", kind="bad_pack") from None


_NO_ROWS = StateRows()


@dataclass(frozen=True, slots=True)
class EpisodeLanguage:
    """All that rendering needs to know about one episode of F frames.

    Attributes:
        episode: episode index.
        timestamps: float32[F], frame times in seconds as stored.
        index: int64[F], global frame index of the dataset.
        tasks: distinct task texts of the episode.
        task_of: int32[F], position in ``tasks``, −1 for none.
        rows: the annotations.
    """

    episode: int
    timestamps: NDArray[np.float32]
    index: NDArray[np.int64]
    tasks: tuple[str, ...]
    task_of: NDArray[np.int32]
    rows: AnnotationRows

    def __len__(self) -> int:
        return len(self.timestamps)

    def time(self, frame: int) -> float:
        """The float32 frame time, widened to double."""
        return float(self.timestamps[frame])

    def task(self, frame: int) -> str | None:
        """The task text of a frame."""
        position = int(self.task_of[frame])
        return None if position < 0 else self.tasks[position]

    def sample(self, frame: int) -> dict[str, Any]:
        """The part of a sample that a recipe reads: raw columns, ``timestamp``, ``index`` and ``task``."""
        return {**self.rows.raw(frame), "timestamp": self.timestamps[frame], "index": int(self.index[frame]), "task": self.task(frame)}


def episode_language(rows: EpisodeRows, tasks: Tasks) -> EpisodeLanguage:
    """The annotations among the rows of one episode; a dataset that declares no language column has none.

    Args:
        rows: read with at least ``timestamp``, ``index``, ``task_index`` and the language columns there are.
        tasks: the dataset's task texts.

    Raises:
        LanguageError: a column cannot be read as annotation rows; names the episode.
    """
    numbers, task_of = np.unique(np.asarray(rows.numbers["task_index"], dtype=np.int64), return_inverse=True)
    try:
        found = AnnotationRows.from_columns(rows.others, rows.length)
    except LanguageError as error:
        raise type(error)(f"episode {rows.episode}: {error}", kind=error.kind, episode=rows.episode, style=error.style) from error
    return EpisodeLanguage(
        rows.episode,
        np.asarray(rows.numbers["timestamp"], dtype=np.float32),
        np.asarray(rows.numbers["index"], dtype=np.int64),
        tuple(tasks.text(int(number)) for number in numbers),
        task_of.astype(np.int32).reshape(-1),
        found,
    )


def read_language(
    source: Source, episodes: Sequence[int] | None = None, *, damaged: Callable[[int, DatasetError], None] | None = None
) -> Iterator[EpisodeLanguage]:
    """The annotations of many episodes, read from the parquet files alone; episodes without annotations come too.

    Args:
        source: the dataset.
        episodes: episode indices; None reads all.
        damaged: told of an episode whose rows cannot be read, which is then left out; None raises.

    Raises:
        LanguageError: a language column is malformed, or stored without being declared in ``info.json``.
        RowsError: rows are missing or unreadable.
    """
    check_declared(source)
    declared = [column for column in LANGUAGE_COLUMNS if column in source.info.features]
    numbers = [int(number) for number in source.episodes.episode_index] if episodes is None else list(episodes)
    reader = RowReader(source, normalise=normalise_table)
    for number in numbers:
        try:
            language = episode_language(reader.read(number, [*PLANNING_COLUMNS, *declared]), source.tasks)
        except (RowsError, LanguageError) as error:
            if damaged is None:
                raise
            damaged(number, error)
        else:
            yield language


def check_declared(source: Source, episode: int | None = None) -> None:
    """Refuses a dataset whose files hold a language column that ``info.json`` does not declare; looks at one shard's footer.

    Args:
        source: the dataset.
        episode: whose shard to look at; None takes the first one's.

    Raises:
        LanguageError: names the column and the line to add.
        RowsError: the shard has no readable footer.
    """
    if not len(source.episodes) or all(column in source.info.features for column in LANGUAGE_COLUMNS):
        return
    path = source.data_files(int(source.episodes.episode_index[0]) if episode is None else episode)[0]
    stored = FooterCache(source.store).get(path).groups.column_bytes
    hidden = [column for column in LANGUAGE_COLUMNS if column in stored and column not in source.info.features]
    if hidden:
        raise LanguageError(
            f"{path} stores {', '.join(hidden)} but meta/info.json does not declare it: "
            'add {"dtype": "language", "shape": [1], "names": null} to its features',
            kind="undeclared_column",
        )


def _states(column: pa.ChunkedArray | pa.Array | None, frames: int) -> tuple[tuple[StateRows, ...], NDArray[np.int32]]:
    """Distinct lists and which frame has which; the rows of all frames are compared in Arrow, not in Python."""
    nothing = np.full(frames, -1, np.int32)
    if column is None or not frames or pa.types.is_null(column.type):
        return (), nothing
    lists = single_array(column)
    check_lists(lists, STATE_COLUMN)
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


def _events(column: pa.ChunkedArray | pa.Array | None) -> dict[int, list[Row]]:
    if column is None or not len(column) or pa.types.is_null(column.type):
        return {}
    lists = single_array(column)
    check_lists(lists, EVENT_COLUMN)
    lengths = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    frames = np.flatnonzero(lengths)
    if not len(frames):
        return {}
    rows = decode_rows(lists.take(pa.array(frames)), EVENT_COLUMN)
    return {int(frame): mapping_rows(found) for frame, found in zip(frames, rows, strict=True)}
