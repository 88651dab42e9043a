"""What people look at before they train: coverage of a recipe, one rendered frame, the texts of a dataset."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ingest.errors import SelectionError
from ingest.language.audit import AnnotationFinding, audit_annotations
from ingest.language.coverage import LanguagePlan, coverage_summary
from ingest.language.episode import EpisodeLanguage
from ingest.language.importing import spans_of
from ingest.language.pages import Raw, bar, heading, page, percent, table, text_table
from ingest.language.rows import Row
from ingest.language.stage import RenderStage, Verdict
from ingest.language.styles import STATE_COLUMN, STYLES

Picture = Callable[[int, int, str], NDArray[np.uint8]]
"""``(episode, frame, camera)`` to a picture, uint8[H, W, 3]."""


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """Share of frames per branch and outcome, for people and programs."""

    plan: LanguagePlan

    def to_json(self) -> dict[str, Any]:
        """Plain values; see ``coverage_summary``."""
        return coverage_summary(self.plan)

    def to_text(self) -> str:
        """Tables for a terminal."""
        data = self.to_json()
        lines = [
            f"{data['frames']} frames of {data['episodes']} episodes, policy {data['policy']} (ambiguous: {data['on_ambiguous']}), "
            f"{data['kept_frames']} stay in the selection",
            text_table(["branch", "chosen", "share", "rendered", "share"], self._branches(data)),
            text_table(["outcome", "frames", "share"], self._outcomes(data)),
        ]
        return "\n\n".join([*lines, *self._notes(data)])

    def to_html(self) -> str:
        """A page of its own."""
        data = self.to_json()
        branches = [[*row, Raw(bar(entry["rendered_share"]))] for row, entry in zip(self._branches(data), data["branches"], strict=True)]
        outcomes = [[*row, Raw(bar(entry["share"]))] for row, entry in zip(self._outcomes(data), data["outcomes"], strict=True)]
        kept = f"{data['kept_frames']} stay in the selection (policy {data['policy']})"
        body = f"<p>{data['frames']} frames of {data['episodes']} episodes; {kept}.</p>"
        body += table(["branch", "chosen", "share", "rendered", "share", ""], branches) + table(
            ["outcome", "frames", "share", ""], outcomes
        )
        body += "".join(f"<p>{escape(note)}</p>" for note in self._notes(data, faults=False))
        faults = [[fault["episode"], fault["frame"], fault["style"] or "", fault["message"]] for fault in data["faults"]]
        return page(
            "Recipe coverage",
            body + (heading("Ambiguous frames") + table(["episode", "frame", "style", "problem"], faults) if faults else ""),
        )

    @staticmethod
    def _branches(data: Mapping[str, Any]) -> list[list[object]]:
        return [
            [entry["branch"], entry["chosen"], percent(entry["chosen_share"]), entry["rendered"], percent(entry["rendered_share"])]
            for entry in data["branches"]
        ]

    @staticmethod
    def _outcomes(data: Mapping[str, Any]) -> list[list[object]]:
        return [[entry["outcome"], entry["frames"], percent(entry["share"])] for entry in data["outcomes"]]

    @staticmethod
    def _notes(data: Mapping[str, Any], *, faults: bool = True) -> list[str]:
        notes = [f"Branch {name} renders on no frame." for name in data["never_rendered"]]
        if data["empty_targets"]:
            notes.append(f"{data['empty_targets']} frames supervise an empty text: guard the target with if_present.")
        if data["leaving"]:
            frames = sum(stop - start for ranges in data["leaving"].values() for start, stop in ranges)
            notes.append(f"{frames} frames of {len(data['leaving'])} episodes have no supervision and leave the selection.")
        if faults:
            notes += [f"episode {fault['episode']}, frame {fault['frame']}: {fault['message']}" for fault in data["faults"][:20]]
        return notes


@dataclass(frozen=True, slots=True)
class FramePreview:
    """One frame: its annotations and the chat it becomes.

    Attributes:
        language: annotations of the episode.
        frame: frame number in the episode.
        verdict: what the recipe makes of it.
        cameras: camera keys whose pictures belong beside the chat.
    """

    language: EpisodeLanguage
    frame: int
    verdict: Verdict
    cameras: tuple[str, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """State rows in force, latest of each style and role, then the events of the frame."""
        time = self.language.time(self.frame)
        latest: dict[tuple[Any, Any], Row] = {}
        for row in sorted(self.language.rows.state(self.frame), key=lambda row: float(row.get("timestamp") or 0.0)):
            if float(row.get("timestamp") or 0.0) <= time:
                latest[(row.get("style"), row.get("role"))] = row
        return [*latest.values(), *self.language.rows.frame_events(self.frame)]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "episode": self.language.episode,
            "frame": self.frame,
            "timestamp": self.language.time(self.frame),
            "index": int(self.language.index[self.frame]),
            "task": self.language.task(self.frame),
            "rows": [dict(row) for row in self.rows],
            "outcome": self.verdict.outcome.name.lower(),
            "branch": self.verdict.branch,
            "error": None if self.verdict.error is None else str(self.verdict.error),
            "rendered": None if self.verdict.rendered is None else dict(self.verdict.rendered),
        }

    def to_text(self) -> str:
        """The chat for a terminal."""
        lines = [self._title(), f"task: {self.language.task(self.frame)!r}"]
        lines += [f"  {_row_line(row)}" for row in self.rows]
        lines.append(self._verdict())
        rendered = self.verdict.rendered
        for position, message in enumerate(rendered["messages"] if rendered else ()):
            assert rendered is not None
            mark = " [target]" if position in rendered["target_message_indices"] else ""
            lines.append(f"{message['role']} ({rendered['message_streams'][position]}){mark}: {_message_text(message)}")
        return "\n".join(lines)

    def to_html(self, picture: Picture | None = None) -> str:
        """The chat as a page, beside the pictures where ``picture`` gives them."""
        body = f"<p>task: {escape(str(self.language.task(self.frame)))}</p>"
        if picture is not None:
            tags = [(camera, _picture_tag(picture(self.language.episode, self.frame, camera))) for camera in self.cameras]
            figures = [f"<figure>{tag}<figcaption class=tag>{escape(camera)}</figcaption></figure>" for camera, tag in tags]
            body += f'<div class="pictures">{"".join(figures)}</div>'
        body += heading(self._verdict())
        rendered = self.verdict.rendered
        for position, message in enumerate(rendered["messages"] if rendered else ()):
            assert rendered is not None
            target = position in rendered["target_message_indices"]
            tag = f"{message['role']} · {rendered['message_streams'][position]}" + (" · target" if target else "")
            body += (
                f'<div class="chat {escape(message["role"])}{" target" if target else ""}">'
                f'<div class="tag">{escape(tag)}</div>{escape(_message_text(message))}</div>'
            )
        rows = [
            [row.get("style") or "", row.get("role") or "", row.get("timestamp", ""), row.get("camera") or "", _row_text(row)]
            for row in self.rows
        ]
        return page(self._title(), body + heading("Annotations") + table(["style", "role", "since (s)", "camera", "content"], rows))

    def _title(self) -> str:
        time = self.language.time(self.frame)
        return f"Episode {self.language.episode}, frame {self.frame}, t={time:.6f} s, index {int(self.language.index[self.frame])}"

    def _verdict(self) -> str:
        branch = f", branch {self.verdict.branch}" if self.verdict.branch else ""
        problem = f": {self.verdict.error}" if self.verdict.error is not None else ""
        return f"{self.verdict.outcome.name.lower()}{branch}{problem}"


def preview_frame(stage: RenderStage, language: EpisodeLanguage, frame: int, cameras: Sequence[str] = ()) -> FramePreview:
    """Renders one frame for looking at.

    Raises:
        SelectionError: the episode has no such frame.
        LanguageError: see ``RenderStage.judge``.
    """
    if not 0 <= frame < len(language):
        raise SelectionError(f"episode {language.episode} has frames 0..{len(language) - 1}, asked for {frame}")
    verdict = stage.judge(
        language.rows.state(frame),
        language.rows.frame_events(frame),
        language.time(frame),
        int(language.index[frame]),
        language.task(frame),
    )
    return FramePreview(language, frame, verdict, tuple(cameras))


@dataclass(frozen=True, slots=True)
class StyleEntry:
    """One distinct text of a style and role.

    Attributes:
        style: None for rows without a style.
        role: of the rows.
        text: the content, or the tool calls as JSON.
        rows: rows with it (state rows counted once per episode).
        episodes: episodes that have it.
        frames: frames on which it is in force or fires.
        spans: the first ``(episode, start, stop)`` stretches; stop is excluded.
    """

    style: str | None
    role: str
    text: str
    rows: int
    episodes: int
    frames: int
    spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class StyleReport:
    """The vocabulary of a dataset's annotations.

    Attributes:
        entries: sorted by style, then most frames first.
        episodes: episodes looked at.
        annotated: episodes with at least one row.
        findings: what is questionable about the rows.
    """

    entries: tuple[StyleEntry, ...]
    episodes: int
    annotated: int
    findings: tuple[AnnotationFinding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "episodes": self.episodes,
            "annotated_episodes": self.annotated,
            "texts": [
                {
                    "style": entry.style,
                    "role": entry.role,
                    "text": entry.text,
                    "rows": entry.rows,
                    "episodes": entry.episodes,
                    "frames": entry.frames,
                    "spans": [{"episode": episode, "start": start, "stop": stop} for episode, start, stop in entry.spans],
                }
                for entry in self.entries
            ],
            "findings": [
                {
                    "kind": finding.kind,
                    "severity": finding.severity,
                    "message": finding.message,
                    "episode": finding.episode,
                    "frame": finding.frame,
                    "style": finding.style,
                }
                for finding in self.findings
            ],
        }

    def to_text(self) -> str:
        """A table for a terminal."""
        head = f"{self.annotated} of {self.episodes} episodes are annotated, {len(self.entries)} distinct texts"
        parts = [head, text_table(_STYLE_HEADER, self._rows(60)) if self.entries else "", "\n".join(map(str, self.findings))]
        return "\n\n".join(part for part in parts if part)

    def to_html(self) -> str:
        """A page of its own."""
        head = f"<p>{self.annotated} of {self.episodes} episodes are annotated.</p>"
        rows = [[item.severity, item.kind, item.episode, "" if item.frame is None else item.frame, item.message] for item in self.findings]
        problems = heading("Findings") + table(["severity", "rule", "episode", "frame", "message"], rows) if rows else ""
        return page("Language annotations", head + table(_STYLE_HEADER, self._rows(2000)) + problems)

    def _rows(self, width: int) -> list[list[object]]:
        return [
            [entry.style or "", entry.role, entry.rows, entry.episodes, entry.frames, _span_text(entry.spans), _short(entry.text, width)]
            for entry in self.entries
        ]


_STYLE_HEADER = ("style", "role", "rows", "episodes", "frames", "first span", "text")
_KEPT_SPANS = 20


def style_report(episodes: Iterable[EpisodeLanguage], cameras: Collection[str] | None = None) -> StyleReport:
    """Distinct texts of a selection with counts and spans, and what is questionable about the rows.

    Args:
        episodes: from ``read_language``.
        cameras: the dataset's camera keys, to check those of the rows; None leaves them unchecked.
    """
    findings: list[AnnotationFinding] = []
    found: dict[tuple[str | None, str, str], list[tuple[int, int, int]]] = {}
    total = annotated = 0
    for language in episodes:
        total += 1
        annotated += language.rows.annotated
        findings += audit_annotations([language], cameras)
        for style in [name for name, known in STYLES.styles.items() if known.column == STATE_COLUMN]:
            for role in dict.fromkeys(str(row.get("role")) for state in language.rows.states for row in state if row.get("style") == style):
                for span in spans_of(language, style, role=role):
                    found.setdefault((style, role, span.text), []).append((language.episode, span.start, span.stop))
        for frame, rows in language.rows.events.items():
            for row in rows:
                key = (row.get("style"), str(row.get("role")), _row_text(row))
                found.setdefault(key, []).append((language.episode, frame, frame + 1))
    entries = [
        StyleEntry(
            style,
            role,
            text,
            len(spans),
            len({episode for episode, _, _ in spans}),
            sum(stop - start for _, start, stop in spans),
            tuple(spans[:_KEPT_SPANS]),
        )
        for (style, role, text), spans in found.items()
    ]
    ordered = sorted(entries, key=lambda entry: (entry.style or "", -entry.frames, entry.role, entry.text))
    return StyleReport(tuple(ordered), total, annotated, tuple(findings))


def _row_text(row: Row) -> str:
    parts = [str(row["content"])] if row.get("content") is not None else []
    if row.get("tool_calls"):
        parts.append(json.dumps(row["tool_calls"], ensure_ascii=False))
    return " ".join(parts)


def _row_line(row: Row) -> str:
    place = f" @{row['camera']}" if row.get("camera") else ""
    since = f" since {float(row['timestamp']):.3f} s" if row.get("timestamp") is not None else ""
    return f"{row.get('style') or 'call'}/{row.get('role')}{place}{since}: {_row_text(row)}"


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content is not None else []
    if message.get("tool_calls"):
        parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return " ".join(parts)


def _picture_tag(pixels: NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _span_text(spans: Sequence[tuple[int, int, int]]) -> str:
    return f"ep {spans[0][0]} [{spans[0][1]}, {spans[0][2]})" if spans else ""


def _short(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
