"""Annotations from other forms: the older ``subtask_index`` column, and files of spans (start, end, text)."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import LanguageError
from ingest.language.episode import EpisodeLanguage
from ingest.language.rows import Row
from ingest.language.styles import STATE_COLUMN, column_for_style
from ingest.lerobot.rows import RowReader
from ingest.lerobot.source import Source

SUBTASKS_PATH = "meta/subtasks.parquet"
MAX_SPAN_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """A text that holds for a stretch of frames.

    Attributes:
        start: first frame in the episode.
        stop: frame after the last.
        text: the content.
    """

    start: int
    stop: int
    text: str


def state_row(text: str, timestamp: float, *, style: str = "subtask", role: str = "assistant") -> Row:
    """A state row that comes into force at a time (s)."""
    return {"role": role, "content": text, "style": style, "timestamp": timestamp, "camera": None, "tool_calls": None}


def rows_from_spans(
    spans: Iterable[Span], times: NDArray[np.floating[Any]], *, style: str = "subtask", role: str = "assistant"
) -> list[Row]:
    """State rows for one episode; each span begins at the stored time of its first frame.

    A state row holds until the next one, so the end of a span shows only through the span that follows it.

    Args:
        spans: in any order.
        times: [F], frame times as stored.
        style, role: of the rows made.

    Raises:
        LanguageError: a span is empty, outside the episode, or overlaps another; or the style is no state style.
    """
    if column_for_style(style) != STATE_COLUMN:
        raise LanguageError(f"style {style!r} marks events; spans become state rows", kind="style_column_mismatch", style=style)
    ordered = sorted(spans, key=lambda span: (span.start, span.stop))
    for position, span in enumerate(ordered):
        if not 0 <= span.start < span.stop <= len(times):
            raise LanguageError(
                f"span {span.start}..{span.stop} {span.text[:40]!r} is empty or outside the {len(times)} frames",
                kind="bad_span",
                style=style,
            )
        if position and span.start < ordered[position - 1].stop:
            raise LanguageError(
                f"span {span.start}..{span.stop} {span.text[:40]!r} overlaps the one before it", kind="overlapping_spans", style=style
            )
    return [state_row(span.text, float(np.float32(times[span.start])), style=style, role=role) for span in ordered]


def spans_of(language: EpisodeLanguage, style: str = "subtask", *, role: str | None = None) -> list[Span]:
    """The stretches of frames on which each state row of a style is in force: the export beside ``rows_from_spans``.

    Args:
        language: annotations of one episode.
        style: a state style.
        role: only rows of this role; None takes all as one sequence.
    """
    times = language.timestamps.astype(np.float64)
    items: dict[int, tuple[float, Row]] = {}
    for state in language.rows.states:
        line = state.timeline(style, role)
        items.update({id(row): (time, row) for time, row in zip(line.times, line.rows, strict=True)})
    rows = sorted(items.values(), key=lambda item: item[0])
    starts = [int(np.searchsorted(times, time)) for time, _ in rows]
    # Rows that start together, such as rephrasings, are in force together until a later one starts.
    stops = [min((later for later in starts if later > start), default=len(times)) for start in starts]
    return [
        Span(start, stop, str(row.get("content") or "")) for (_, row), start, stop in zip(rows, starts, stops, strict=True) if start < stop
    ]


def rephrasings(texts: Iterable[str]) -> list[Row]:
    """``task_aug`` rows for alternative wordings of an episode's task."""
    return [state_row(text, 0.0, style="task_aug", role="user") for text in texts]


def read_span_file(path: str | Path, times_of: Mapping[int, NDArray[np.floating[Any]]]) -> dict[int, list[Span]]:
    """Spans by episode from a JSON, JSON-lines or CSV file.

    Each record has ``episode`` (or ``episode_index``), ``text``, and either ``start``/``end`` in seconds or
    ``start_frame``/``end_frame`` (end excluded). Seconds snap to the nearest frame.

    Args:
        path: the file, at most 64 MiB.
        times_of: frame times (s) by episode, for records in seconds.

    Raises:
        LanguageError: a record cannot be understood; names its number.
    """
    spans: dict[int, list[Span]] = {}
    for number, record in enumerate(_records(Path(path)), 1):
        where = f"{path}, record {number}"
        try:
            episode = int(record["episode"] if "episode" in record else record["episode_index"])
            text = str(record["text"])
            if "start_frame" in record:
                start, stop = int(record["start_frame"]), int(record["end_frame"])
            else:
                times = times_of.get(episode)
                if times is None:
                    raise LanguageError(f"{where}: there is no episode {episode}", kind="unknown_episode", episode=episode)
                start, stop = _nearest(times, float(record["start"])), _nearest(times, float(record["end"]), end=True)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, LanguageError):
                raise
            raise LanguageError(
                f"{where}: needs episode, text, and start and end (s) or start_frame and end_frame; found {dict(record)!r:.160}",
                kind="bad_span_record",
            ) from None
        spans.setdefault(episode, []).append(Span(start, stop, text))
    return spans


def subtasks_from_index(source: Source, episodes: Sequence[int] | None = None) -> dict[int, list[Row]]:
    """``subtask`` state rows from the older format: a ``subtask_index`` column and ``meta/subtasks.parquet``.

    Runs of one index become one row at the time of the run's first frame. Negative indices mean "none" and make no row.

    Raises:
        LanguageError: the dataset has no such column or table, or an index has no text.
    """
    if "subtask_index" not in source.info.features:
        raise LanguageError("the dataset has no subtask_index column to import from", kind="no_subtask_index")
    texts = _subtask_texts(source)
    reader = RowReader(source)
    numbers = [int(number) for number in source.episodes.episode_index] if episodes is None else list(episodes)
    found: dict[int, list[Row]] = {}
    for episode in numbers:
        rows = reader.read(episode, ["timestamp", "subtask_index"])
        index = np.asarray(rows.numbers["subtask_index"], dtype=np.int64).reshape(-1)
        times = np.asarray(rows.numbers["timestamp"], dtype=np.float32).reshape(-1)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(index)) + 1])
        made: list[Row] = []
        for start in starts[: len(index)]:
            number = int(index[start])
            if number < 0:
                continue
            if number not in texts:
                raise LanguageError(
                    f"episode {episode}, frame {start}: {SUBTASKS_PATH} has no subtask_index {number}",
                    kind="unknown_subtask",
                    episode=episode,
                    frame=int(start),
                )
            made.append(state_row(texts[number], float(times[start])))
        found[episode] = made
    return found


def _subtask_texts(source: Source) -> dict[int, str]:
    try:
        table = pq.read_table(io.BytesIO(source.store.read_all(SUBTASKS_PATH)))
    except (OSError, pa.ArrowInvalid) as error:
        raise LanguageError(f"{SUBTASKS_PATH} cannot be read: {error}", kind="no_subtasks_table") from None
    names = [
        name
        for name in table.column_names
        if pa.types.is_string(table.schema.field(name).type) or pa.types.is_large_string(table.schema.field(name).type)
    ]
    if "subtask_index" not in table.column_names or not names:
        raise LanguageError(
            f"{SUBTASKS_PATH} needs a subtask_index and a text column, found {table.column_names}", kind="no_subtasks_table"
        )
    name = "subtask" if "subtask" in names else names[0]
    pairs = zip(table.column("subtask_index").to_pylist(), table.column(name).to_pylist(), strict=True)
    return {int(number): str(text) for number, text in pairs}


def _records(path: Path) -> list[Mapping[str, Any]]:
    if path.stat().st_size > MAX_SPAN_FILE_BYTES:
        raise LanguageError(f"{path} has more than {MAX_SPAN_FILE_BYTES} bytes", kind="too_large")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    try:
        found = [json.loads(line) for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else json.loads(text)
    except json.JSONDecodeError as error:
        raise LanguageError(f"{path} is not JSON: {error}", kind="bad_span_file") from None
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in cast("list[Any]", found)):
        raise LanguageError(f"{path} must hold a list of records", kind="bad_span_file")
    return cast("list[Mapping[str, Any]]", found)


def _nearest(times: NDArray[np.floating[Any]], seconds: float, *, end: bool = False) -> int:
    if not np.isfinite(seconds):
        raise ValueError("not finite")
    grid = np.asarray(times, np.float64)
    nearest = int(np.argmin(np.abs(grid - seconds)))
    # The end of the last span is the end of the episode, one step beyond its last frame.
    step = grid[-1] - grid[-2] if len(grid) > 1 else 0.0
    return len(grid) if end and nearest == len(grid) - 1 and seconds > grid[-1] + step / 2 else nearest
