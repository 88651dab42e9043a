"""Rules for rows before they are stored: which column, which order, and what makes an episode invalid."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from ingest.errors import LanguageError
from ingest.language.columns import row_fields
from ingest.language.rows import Row, mapping_value, tool_names, unwrap_number
from ingest.language.styles import EVENT_COLUMN, STATE_COLUMN, STYLES, Column, column_for_style, validate_camera_field

VQA_SHAPES: Mapping[str, frozenset[str]] = {
    "bbox": frozenset({"detections"}),
    "keypoint": frozenset({"label", "point_format", "point"}),
    "count": frozenset({"label", "count"}),
    "attribute": frozenset({"label", "attribute", "value"}),
    "spatial": frozenset({"subject", "relation", "object"}),
}
"""Keys of each kind of VQA answer; the first kind whose keys are all there is the answer's kind."""

STAGING_MODULES: Mapping[str, Column] = {"plan": STATE_COLUMN, "interjections": EVENT_COLUMN, "vqa": EVENT_COLUMN}
"""Staging files of an episode and the column that their rows must belong to."""


def column_row(row: Row, tools: Collection[str] = ("say",)) -> tuple[Column, dict[str, Any]]:
    """The column of a row to be written, and the row as it is stored there.

    Args:
        row: ``role``, ``content``, ``style``, ``camera``, ``tool_calls`` and, where it has one, ``timestamp`` (s).
        tools: names of the tools that a row without a style may call.

    Returns:
        Column and row with exactly the column's fields, in stored order; event rows lose their timestamp.

    Raises:
        LanguageError: the row breaks a rule; ``kind`` says which.
    """
    style, content, calls = row.get("style"), row.get("content"), row.get("tool_calls")
    column = column_for_style(style)
    _require(content is not None or calls is not None, "row_without_payload", row, "a row needs content or tool_calls")
    _require(calls is None or isinstance(calls, list | tuple), "tool_calls_type", row, "tool_calls must be a list or null")
    if style is None:
        _check_speech(row, tools)
    _require(isinstance(row.get("role"), str) and bool(row.get("role")), "row_missing_role", row, "a row needs a role")
    if column == STATE_COLUMN:
        _require(row.get("timestamp") is not None, "row_missing_timestamp", row, "a state row needs a timestamp")
        _require(math.isfinite(unwrap_number(row.get("timestamp"), "timestamp")), "bad_timestamp", row, "the timestamp must be finite")
    validate_camera_field(style, row.get("camera"))
    stored = {name: row.get(name) for name in row_fields(column)}
    if content is not None:
        stored["content"] = str(content)
    return column, stored


def row_order(column: Column, rows: Sequence[Row]) -> list[int]:
    """Positions of rows in the order in which they are stored; ties keep the order given.

    State rows go by time, style, role; the events of one frame by style, role, camera, so speech comes first.
    """

    def key(position: int) -> tuple[Any, ...]:
        row = rows[position]
        style, role = row.get("style") or "", row.get("role") or ""
        if column == STATE_COLUMN:
            return (unwrap_number(row.get("timestamp"), "timestamp"), style, role)
        return (style, role, row.get("camera") or "")

    return sorted(range(len(rows)), key=key)


@dataclass(frozen=True, slots=True)
class StagingFinding:
    """One finding about staged rows.

    Attributes:
        kind: short name of the rule.
        severity: ``error`` or ``warning``.
        message: what is wrong and where.
        module: staging file, or None for the episode as a whole.
        row: position in that file, or None.
    """

    kind: str
    severity: Literal["error", "warning"]
    message: str
    module: str | None = None
    row: int | None = None


@dataclass(frozen=True, slots=True)
class StagingReport:
    """Findings about one episode's staged rows, in the order found."""

    findings: tuple[StagingFinding, ...]

    @property
    def errors(self) -> list[str]:
        """Sorted kinds of the errors, repeats included."""
        return sorted(finding.kind for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> list[str]:
        """Sorted kinds of the warnings, repeats included."""
        return sorted(finding.kind for finding in self.findings if finding.severity == "warning")


def check_staging(
    staged: Mapping[str, Sequence[Row]],
    frame_timestamps: Sequence[float] | np.ndarray[Any, Any],
    cameras: Collection[str] | None = None,
    *,
    tolerance_s: float = 0.0,
) -> StagingReport:
    """Checks the staged rows of one episode before they are written.

    Args:
        staged: rows by module: ``plan`` (state rows), ``interjections`` and ``vqa`` (event rows with timestamps).
        frame_timestamps: the episode's frame times as stored, widened to double.
        cameras: the dataset's camera keys; None leaves existence unchecked.
        tolerance_s: how far an event may lie from its frame; 0 demands the exact double.

    Returns:
        Every finding; nothing is raised for bad rows.
    """
    grid = np.asarray(frame_timestamps, dtype=np.float64)
    findings: list[StagingFinding] = []
    placed = [(module, position, row) for module, rows in staged.items() for position, row in enumerate(rows)]
    for module, position, row in placed:
        for kind, message in _row_faults(module, row, grid, cameras, tolerance_s):
            findings.append(StagingFinding(kind, "error", f"{module} row {position}: {message}", module, position))
    rows = [row for _, _, row in placed]
    findings += [StagingFinding(kind, "error", message) for kind, message in _episode_faults(rows)]
    findings += [StagingFinding(kind, "warning", message) for kind, message in _episode_doubts(rows)]
    return StagingReport(tuple(findings))


def vqa_answer_shape(content: Any) -> str | None:
    """The kind of a VQA answer (``bbox``, ``keypoint``, ``count``, ``attribute``, ``spatial``), None for an unknown shape.

    Raises:
        LanguageError: the answer is null or not JSON.
    """
    if content is None:
        raise LanguageError("a VQA answer needs content", kind="vqa_answer_null", style="vqa")
    try:
        answer = json.loads(content) if isinstance(content, str) else content
    except (json.JSONDecodeError, RecursionError):
        raise LanguageError(f"a VQA answer must be JSON, found {str(content)[:60]!r}", kind="vqa_answer_not_json", style="vqa") from None
    if not isinstance(answer, Mapping):
        return None
    keys = set(cast("Mapping[str, Any]", answer))
    return next((name for name, needed in VQA_SHAPES.items() if needed <= keys), None)


def ambiguities(state: Sequence[Row], events: Mapping[int, Sequence[Row]]) -> list[tuple[int | None, str | None, str]]:
    """Rows that make a resolver fail in the middle of training.

    Args:
        state: state rows of an episode.
        events: event rows by frame.

    Returns:
        ``(frame, style, message)``; the frame is None for state rows, whose message gives the time. Several rephrasings
        of the task at one time are normal and not reported.
    """
    found: list[tuple[int | None, str | None, str]] = []
    states = Counter((row.get("style"), row.get("role"), row.get("timestamp")) for row in state if row.get("style") != "task_aug")
    for (style, role, time), count in states.items():
        if count > 1:
            found.append((None, style, f"{count} {style} rows with role {role} at {time} s"))
    for frame, rows in events.items():
        keys = Counter((row.get("style"), row.get("role"), row.get("camera")) for row in rows if row.get("style") is not None)
        for (style, role, camera), count in keys.items():
            if count > 1:
                found.append((frame, style, f"{count} {style} rows with role {role}" + (f" and camera {camera}" if camera else "")))
        calls = Counter((name, row.get("role")) for row in rows for name in set(tool_names(row)))
        found += [(frame, None, f"{count} rows with role {role} call {name}") for (name, role), count in calls.items() if count > 1]
    return found


def _require(holds: bool, kind: str, row: Row, rule: str) -> None:
    if not holds:
        raise LanguageError(f"{rule}; found {dict(row)!r:.200}", kind=kind, style=row.get("style"))


def _check_speech(row: Row, tools: Collection[str]) -> None:
    calls = row.get("tool_calls")
    _require(calls is not None, "styleless_without_tools", row, "a row without a style must call a tool")
    _require(
        row.get("role") == "assistant" and row.get("content") is None,
        "styleless_form",
        row,
        "a row without a style has role assistant and no content",
    )
    first: Any = calls[0] if calls else None
    function = mapping_value(first, "function")
    name, arguments = mapping_value(function, "name"), mapping_value(function, "arguments")
    known = mapping_value(first, "type") == "function" and name in tools and isinstance(arguments, Mapping)
    spoken = name != "say" or isinstance(mapping_value(arguments, "text"), str)
    rule = f"the first tool call must be a function call of {', '.join(tools)} (say needs a text argument)"
    _require(known and spoken, "speech_tool_calls", row, rule)


def _row_faults(
    module: str, row: Row, grid: np.ndarray[Any, Any], cameras: Collection[str] | None, tolerance_s: float
) -> list[tuple[str, str]]:
    style, camera = row.get("style"), row.get("camera")
    try:
        column = column_for_style(style)
    except LanguageError as error:
        return [(error.kind, str(error))]
    faults: list[tuple[str, str]] = []
    expected = STAGING_MODULES.get(module)
    if expected is not None and column != expected:
        faults.append(("style_column_mismatch", f"style {style!r} belongs to {column}, this module writes {expected}"))
    try:
        validate_camera_field(style, camera)
        if camera is not None and cameras is not None and camera not in cameras:
            faults.append(("camera_unknown", f"camera {camera!r} is not one of {', '.join(sorted(cameras))}"))
    except LanguageError as error:
        faults.append((error.kind, str(error)))
    if column == EVENT_COLUMN:
        faults += _time_faults(row, grid, tolerance_s)
    if style == "vqa" and row.get("role") == "assistant":
        try:
            if vqa_answer_shape(row.get("content")) is None:
                faults.append(
                    ("vqa_answer_shape", f"the answer has none of the shapes {', '.join(VQA_SHAPES)}: {row.get('content')!r:.80}")
                )
        except LanguageError as error:
            faults.append((error.kind, str(error)))
    return faults


def _time_faults(row: Row, grid: np.ndarray[Any, Any], tolerance_s: float) -> list[tuple[str, str]]:
    if row.get("timestamp") is None:
        return [("event_without_timestamp", "an event row needs the timestamp of its frame")]
    time = unwrap_number(row.get("timestamp"), "timestamp")
    if not len(grid) or not math.isfinite(time):
        return [("event_off_frame", f"{time} s is on no frame")]
    nearest = int(np.argmin(np.abs(grid - time)))
    if abs(grid[nearest] - time) <= tolerance_s:
        return []
    return [("event_off_frame", f"{time!r} s is on no frame; the nearest is frame {nearest} at {float(grid[nearest])!r} s")]


def _times(rows: Sequence[Row], style: str | None) -> list[Any]:
    return [row.get("timestamp") for row in rows if row.get("style") == style]


def _episode_faults(rows: Sequence[Row]) -> list[tuple[str, str]]:
    speech = {row.get("timestamp") for row in rows if row.get("style") is None and "say" in tool_names(row)}
    plans = set(_times(rows, "plan"))
    faults: list[tuple[str, str]] = []
    for time in _times(rows, "interjection"):
        if time not in speech:
            faults.append(("interjection_without_speech", f"the interjection at {time} s has no say row at the same time"))
        if time not in plans:
            faults.append(("interjection_without_plan_refresh", f"the interjection at {time} s has no plan row at the same time"))
    questions = Counter((row.get("timestamp"), row.get("camera"), row.get("role")) for row in rows if row.get("style") == "vqa")
    for (time, camera, role), count in questions.items():
        if count > 1:
            faults.append(("vqa_duplicate", f"{count} vqa rows with role {role} for {camera} at {time} s"))
    return faults


def _episode_doubts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    doubts: list[tuple[str, str]] = []
    styles = [STYLES.find(row.get("style")) for row in rows]
    if any(style is not None and style.column == STATE_COLUMN for style in styles) and not _times(rows, "plan"):
        doubts.append(("no_plan", "there are state rows but no plan"))
    boundaries = set(_times(rows, "subtask"))
    doubts += [
        ("memory_off_boundary", f"the memory at {time} s changes where no subtask does")
        for time in _times(rows, "memory")
        if time not in boundaries
    ]
    return doubts
