"""Everything questionable about the annotations of a dataset, found before training, with episode, frame and style."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ingest.errors import DatasetError, LanguageError, RowsError
from ingest.language.annotate import ambiguities
from ingest.language.episode import EpisodeLanguage, check_declared, read_language
from ingest.language.rows import Row, StateRows, row_time
from ingest.language.styles import EVENT_COLUMN, LANGUAGE_COLUMNS, STATE_COLUMN, STYLES, column_for_style, validate_camera_field
from ingest.lerobot.findings import Finding
from ingest.lerobot.source import Source

_LISTED = 200
"""Findings about annotations that an audit of the whole dataset lists, at most."""


@dataclass(frozen=True, slots=True)
class AnnotationFinding:
    """One finding.

    Attributes:
        kind: short name of the rule.
        severity: ``error`` for rows that a recipe cannot use or that break a resolver, ``warning`` for what looks wrong.
        message: what is wrong; names column and value.
        episode: episode index.
        frame: frame in the episode, or None where the episode as a whole is concerned.
        style: style of the rows, or None.
    """

    kind: str
    severity: Literal["error", "warning"]
    message: str
    episode: int
    frame: int | None = None
    style: str | None = None

    def __str__(self) -> str:
        place = f"episode {self.episode}" + ("" if self.frame is None else f", frame {self.frame}")
        return f"{self.severity} [{self.kind}] {place}: {self.message}"


def audit_annotations(episodes: Iterable[EpisodeLanguage], cameras: Collection[str] | None = None) -> Iterator[AnnotationFinding]:
    """Checks the annotations of a dataset, episode by episode.

    Args:
        episodes: from ``read_language``.
        cameras: the dataset's camera keys; None leaves existence unchecked.

    Yields:
        Rows with an unknown style, in the wrong column, with a camera that breaks the rule or does not exist; rows among
        which a resolver could not choose; state lists that differ between frames; state rows on no frame's time.
    """
    for language in episodes:
        rows = language.rows
        for state in rows.states:
            for row in state:
                yield from _row(language.episode, None, row, STATE_COLUMN, cameras)
        for frame, events in sorted(rows.events.items()):
            for row in events:
                yield from _row(language.episode, frame, row, EVENT_COLUMN, cameras)
        yield from _episode(language)


def audit_source(source: Source) -> list[Finding]:
    """The annotations of a whole dataset as findings of `reelray doctor`; none without language columns. Reads no picture."""
    found: list[Finding] = []
    try:
        check_declared(source)
    except LanguageError as error:
        return [Finding(f"language_{error.kind}", "error", str(error), file="meta/info.json")]
    except RowsError:
        # A shard without a readable footer is a finding of the files' own audit.
        return []
    if not any(column in source.info.features for column in LANGUAGE_COLUMNS):
        return []

    def unreadable(episode: int, error: DatasetError) -> None:
        # Rows that are missing or damaged are findings of the files' own audit.
        if isinstance(error, LanguageError):
            found.append(Finding(f"language_{error.kind}", "error", str(error), episode=episode))

    for finding in audit_annotations(read_language(source, damaged=unreadable), (*source.cameras, *source.info.images)):
        if len(found) == _LISTED:
            found.append(Finding("language_more", "info", "more annotations are questionable: `reelray recipe styles` lists all"))
            break
        place = "" if finding.frame is None else f", frame {finding.frame}"
        message = f"episode {finding.episode}{place}: {finding.message}"
        found.append(Finding(f"language_{finding.kind}", finding.severity, message, episode=finding.episode, found=finding.style))
    return found


def _row(episode: int, frame: int | None, row: Row, column: str, cameras: Collection[str] | None) -> Iterator[AnnotationFinding]:
    style, camera = row.get("style"), row.get("camera")
    try:
        expected = column_for_style(style)
        if expected != column:
            message = f"{column} holds a row of style {style!r}, which belongs to {expected}"
            yield AnnotationFinding("style_column_mismatch", "error", message, episode, frame, style)
        validate_camera_field(style, camera)
    except LanguageError as error:
        yield AnnotationFinding(error.kind, "error", f"{column}: {error}", episode, frame, style)
    if camera is not None and cameras is not None and camera not in cameras:
        known = ", ".join(sorted(cameras)) or "none"
        yield AnnotationFinding("camera_unknown", "error", f"{column}: there is no camera {camera!r}, only {known}", episode, frame, style)
    if row.get("content") is None and not row.get("tool_calls"):
        yield AnnotationFinding(
            "row_without_payload", "warning", f"{column}: a {style} row has neither content nor tool calls", episode, frame, style
        )


def _episode(language: EpisodeLanguage) -> Iterator[AnnotationFinding]:
    rows, episode = language.rows, language.episode
    for frame, style, message in ambiguities(rows.states[0] if rows.states else StateRows(), rows.events):
        yield AnnotationFinding("ambiguous_rows", "error", f"{message}: a resolver cannot choose between them", episode, frame, style)
    if len(rows.states) > 1 or (rows.states and (rows.state_of < 0).any()):
        frame = int(np.flatnonzero(rows.state_of != rows.state_of[0])[0])
        message = f"{STATE_COLUMN} must be the same on every frame of an episode and changes at this one"
        yield AnnotationFinding("state_not_broadcast", "warning", message, episode, frame)
    times = {float(time) for time in language.timestamps}
    for row in (row for state in rows.states[:1] for row in state):
        style = STYLES.find(row.get("style"))
        if style is not None and style.name != "task_aug" and row_time(row) not in times:
            message = f"a {style.name} row begins at {row_time(row)!r} s, which is no frame's time; it shows from the next frame on"
            yield AnnotationFinding("state_off_frame", "warning", message, episode, None, style.name)
