"""One frame for looking at: its annotations, the chat that a recipe makes of them, and the pictures beside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ingest.errors import SelectionError
from ingest.language.episode import EpisodeLanguage
from ingest.language.inventory import row_text
from ingest.language.pages import heading, page, table
from ingest.language.rows import Row
from ingest.language.stage import RenderStage, Verdict

Picture = Callable[[int, int, str], NDArray[np.uint8]]
"""``(episode, frame, camera)`` to a picture, uint8[H, W, 3]."""


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
            [row.get("style") or "", row.get("role") or "", row.get("timestamp", ""), row.get("camera") or "", row_text(row)]
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


def _row_line(row: Row) -> str:
    place = f" @{row['camera']}" if row.get("camera") else ""
    since = f" since {float(row['timestamp']):.3f} s" if row.get("timestamp") is not None else ""
    return f"{row.get('style') or 'call'}/{row.get('role')}{place}{since}: {row_text(row)}"


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
