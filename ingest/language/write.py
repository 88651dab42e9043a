"""Writes annotations into a local dataset: shard by shard, episode by episode, leaving what it is not told to change."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import LanguageError, ObjectNotFoundError
from ingest.language.annotate import ambiguities, column_row, row_order
from ingest.language.columns import canonical_type, language_features, normalise_column, rows_array
from ingest.language.rows import Row, row_time
from ingest.language.styles import EVENT_COLUMN, LANGUAGE_COLUMNS, STATE_COLUMN
from ingest.language.toolcalls import tool_names_of, with_say

LEGACY_COLUMNS = ("subtask_index", "tools")
"""Columns of older annotation formats; a rewritten shard loses them."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was written.

    Attributes:
        episodes: episodes that were given annotations.
        files: shards rewritten, relative to the dataset.
        state_rows: state rows written, counted once per episode.
        event_rows: event rows written.
    """

    episodes: tuple[int, ...]
    files: tuple[str, ...]
    state_rows: int
    event_rows: int


@dataclass(frozen=True, slots=True)
class EpisodeRowsToWrite:
    """The checked rows of one episode, in stored order.

    Attributes:
        state: state rows.
        events: event rows by frame.
    """

    state: list[dict[str, Any]]
    events: dict[int, list[dict[str, Any]]]


def write_annotations(root: str | os.PathLike[str], annotations: Mapping[int, Sequence[Row]]) -> WriteReport:
    """Gives episodes of a local dataset their annotations, replacing the ones they had.

    Other episodes keep theirs; shards without language columns get empty ones, so that all shards agree (an empty
    ``annotations`` only adds the columns). Every row is checked before the first file is touched. Each shard is written
    beside itself, one row group per episode, and then renamed; ``meta/info.json`` is last.

    Args:
        root: folder with ``meta/`` and ``data/``.
        annotations: rows by episode index. State rows carry ``timestamp``; event rows carry the exact ``timestamp`` of
            their frame as stored, or ``frame``, its number in the episode.

    Raises:
        LanguageError: a row breaks a rule, an event is on no frame (the nearest is named), rows are ambiguous, or an
            episode does not exist; names episode and frame.
        ObjectNotFoundError: there is no dataset.
    """
    base = Path(root)
    info = _read_info(base)
    shards = sorted((base / "data").rglob("*.parquet"))
    if not shards:
        raise ObjectNotFoundError(f"{base / 'data'} holds no parquet files")
    tools = with_say(info)
    features = cast("dict[str, Any]", info["features"])
    cameras = [key for key, value in features.items() if value.get("dtype") in ("video", "image")]
    placed: dict[int, EpisodeRowsToWrite] = {}
    for shard in shards:
        for episode, times in _episode_times(shard).items():
            if episode in placed:
                raise LanguageError(f"{shard}: episode {episode} is in more than one file", kind="split_episode", episode=episode)
            if episode in annotations:
                placed[episode] = place_rows(episode, annotations[episode], times, cameras, tool_names_of(tools))
    missing = sorted(set(annotations) - set(placed))
    if missing:
        raise LanguageError(f"{base}: there is no episode {missing[0]} to annotate", kind="unknown_episode", episode=missing[0])
    written = [shard for shard in shards if _rewrite(shard, placed)]
    info["features"] = {key: value for key, value in features.items() if key not in LEGACY_COLUMNS} | language_features()
    info["tools"] = tools
    _replace(base / "meta" / "info.json", partial(_write_json, info))
    return WriteReport(
        tuple(sorted(placed)),
        tuple(shard.relative_to(base).as_posix() for shard in written),
        sum(len(rows.state) for rows in placed.values()),
        sum(len(rows) for part in placed.values() for rows in part.events.values()),
    )


def place_rows(
    episode: int, rows: Sequence[Row], times: NDArray[np.float64], cameras: Sequence[str] | None, tools: Sequence[str] = ("say",)
) -> EpisodeRowsToWrite:
    """Checks the rows of one episode and puts each where it is stored.

    Args:
        episode: episode index, for messages.
        rows: see ``write_annotations``.
        times: float64[F], frame times as stored.
        cameras: camera keys of the dataset; None leaves existence unchecked.
        tools: names of the declared tools.

    Raises:
        LanguageError: see ``write_annotations``.
    """
    state: list[dict[str, Any]] = []
    events: dict[int, list[dict[str, Any]]] = {}
    for position, row in enumerate(rows):
        try:
            column, stored = column_row(row, tools)
            if row.get("camera") is not None and cameras is not None and row["camera"] not in cameras:
                raise LanguageError(
                    f"camera {row['camera']!r} is not one of {', '.join(cameras)}", kind="camera_unknown", style=row.get("style")
                )
            if column == STATE_COLUMN:
                stored["timestamp"] = float(np.float32(row_time(row)))
                state.append(stored)
            else:
                events.setdefault(_frame_of(row, times), []).append(stored)
        except LanguageError as error:
            raise _in_episode(error, episode, f"row {position}") from error
    doubts = ambiguities(state, events)
    if doubts:
        frame, style, message = doubts[0]
        where = "" if frame is None else f", frame {frame}"
        raise LanguageError(
            f"episode {episode}{where}: {message}: a resolver could not choose between them",
            kind="ambiguous_rows",
            episode=episode,
            frame=frame,
            style=style,
        )
    state = [state[position] for position in row_order(STATE_COLUMN, state)]
    return EpisodeRowsToWrite(
        state, {frame: [found[position] for position in row_order(EVENT_COLUMN, found)] for frame, found in events.items()}
    )


def unite_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Joins the rows of shards whose language columns differ physically or are absent from some.

    Each table is normalised first; where any has a language column, the others get empty lists. Other columns must
    agree. The language columns come last.

    Raises:
        LanguageError: no tables, a malformed language column, or other columns that differ.
    """
    if not tables:
        raise LanguageError("there are no tables to unite", kind="no_tables")
    present = [column for column in LANGUAGE_COLUMNS if any(column in table.column_names for table in tables)]
    complete = [_with_columns(table, present) for table in tables]
    try:
        return pa.concat_tables(complete, promote_options="none")
    except pa.ArrowInvalid as error:
        raise LanguageError(f"shards cannot be united: {str(error).splitlines()[0]}", kind="schema_mismatch") from None


def _with_columns(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    for column in columns:
        if column in table.column_names:
            array = normalise_column(table.column(column), column)
            table = table.drop_columns([column])
        else:
            array = rows_array([[]] * table.num_rows, column)
        table = table.append_column(pa.field(column, canonical_type(column)), array)
    return table.replace_schema_metadata(None)


def _frame_of(row: Row, times: NDArray[np.float64]) -> int:
    frame = row.get("frame")
    if frame is not None:
        if not 0 <= int(frame) < len(times):
            raise LanguageError(
                f"frame {frame} does not exist: the episode has {len(times)}", kind="event_off_frame", style=row.get("style")
            )
        return int(frame)
    if row.get("timestamp") is None:
        raise LanguageError(
            "an event row needs the timestamp of its frame, or frame", kind="event_without_timestamp", style=row.get("style")
        )
    time = row_time(row)
    nearest = int(np.argmin(np.abs(times - time))) if len(times) else -1
    if nearest < 0 or times[nearest] != time:
        hint = f"the nearest is frame {nearest} at {float(times[nearest])!r} s" if nearest >= 0 else "the episode is empty"
        raise LanguageError(
            f"event at {time!r} s is on no frame; {hint} (frame times are stored as float32: copy them, or give frame)",
            kind="event_off_frame",
            frame=nearest,
            style=row.get("style"),
        )
    return nearest


def _in_episode(error: LanguageError, episode: int, place: str) -> LanguageError:
    return type(error)(f"episode {episode}, {place}: {error}", kind=error.kind, episode=episode, frame=error.frame, style=error.style)


def _read_info(base: Path) -> dict[str, Any]:
    path = base / "meta" / "info.json"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ObjectNotFoundError(f"{path} does not exist: give the folder that holds meta/ and data/") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LanguageError(f"{path} is not JSON: {error}", kind="bad_info") from None
    if not isinstance(info, dict) or not isinstance(cast("dict[str, Any]", info).get("features"), dict):
        raise LanguageError(f"{path} declares no features", kind="bad_info")
    return cast("dict[str, Any]", info)


def _episode_times(shard: Path) -> dict[int, NDArray[np.float64]]:
    """Frame times by episode, in file order.

    Raises:
        LanguageError: the rows of an episode do not stand together.
    """
    table = pq.read_table(shard, columns=["episode_index", "timestamp"])
    times = np.asarray(table.column("timestamp").to_numpy(), dtype=np.float64)
    return {episode: times[start:stop] for episode, start, stop in _runs(shard, table)}


def _runs(shard: Path, table: pa.Table) -> list[tuple[int, int, int]]:
    numbers = table.column("episode_index").to_numpy()
    edges = np.flatnonzero(np.diff(numbers)) + 1
    starts = [0, *edges.tolist()] if len(numbers) else []
    runs = [(int(numbers[start]), start, stop) for start, stop in zip(starts, [*edges.tolist(), len(numbers)], strict=False)]
    if len({episode for episode, _, _ in runs}) != len(runs):
        raise LanguageError(f"{shard}: the rows of an episode do not stand together", kind="scattered_episode")
    return runs


def _rewrite(shard: Path, placed: Mapping[int, EpisodeRowsToWrite]) -> bool:
    schema = pq.read_schema(shard)
    runs = _runs(shard, pq.read_table(shard, columns=["episode_index"]))
    complete = all(column in schema.names for column in LANGUAGE_COLUMNS)
    if complete and not any(episode in placed for episode, _, _ in runs):
        return False
    table = pq.read_table(shard)
    table = table.drop_columns([name for name in LEGACY_COLUMNS if name in table.column_names])
    plain = table.drop_columns([name for name in LANGUAGE_COLUMNS if name in table.column_names])
    # Dataset-library metadata describes the old columns; readers that trust it would refuse the new ones.
    metadata = {key: value for key, value in (plain.schema.metadata or {}).items() if key != b"huggingface"}
    target = pa.schema([*plain.schema, *(pa.field(column, canonical_type(column)) for column in LANGUAGE_COLUMNS)], metadata=metadata)

    def write(path: Path) -> None:
        with pq.ParquetWriter(path, target, compression="snappy", use_dictionary=True) as writer:
            for episode, start, stop in runs:
                columns = [_column(table.slice(start, stop - start), placed.get(episode), column) for column in LANGUAGE_COLUMNS]
                part = plain.slice(start, stop - start)
                writer.write_table(pa.table([*part.columns, *columns], schema=target), row_group_size=max(stop - start, 1))

    _replace(shard, write)
    return True


def _column(part: pa.Table, rows: EpisodeRowsToWrite | None, column: str) -> pa.Array:
    frames = part.num_rows
    if rows is None:
        kept = part.column(column) if column in part.column_names else None
        return rows_array([[]] * frames, column) if kept is None else normalise_column(kept, column)
    if column == EVENT_COLUMN:
        return rows_array([rows.events.get(frame, []) for frame in range(frames)], column)
    once = rows_array([rows.state], column)
    # The same list on every frame, repeated in Arrow so that no row becomes a Python object per frame.
    return once.take(pa.array(np.zeros(frames, np.int64)))


def _write_json(value: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False), encoding="utf-8")


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Writes beside ``path`` and renames, so that a crash leaves the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
