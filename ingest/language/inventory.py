"""The vocabulary of a dataset's annotations: distinct texts with counts and spans, and what is questionable about them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ingest.language.audit import AnnotationFinding, audit_annotations
from ingest.language.episode import EpisodeLanguage
from ingest.language.importing import spans_of
from ingest.language.pages import heading, page, table, text_table
from ingest.language.rows import Row
from ingest.language.styles import STATE_COLUMN, STYLES


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
                key = (row.get("style"), str(row.get("role")), row_text(row))
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


def row_text(row: Row) -> str:
    """Content and tool calls of a row on one line."""
    parts = [str(row["content"])] if row.get("content") is not None else []
    if row.get("tool_calls"):
        parts.append(json.dumps(row["tool_calls"], ensure_ascii=False))
    return " ".join(parts)


def _span_text(spans: Sequence[tuple[int, int, int]]) -> str:
    return f"ep {spans[0][0]} [{spans[0][1]}, {spans[0][2]})" if spans else ""


def _short(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
