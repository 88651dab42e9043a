"""Rendered chats as plain task strings, for policies that read one text and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ingest.language.step import MESSAGES_KEY

BASE_TASK_KEY = "base_task"
"""Key under which the sample's own task is kept."""


def user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts of the user turns, those of text blocks included, joined by line breaks."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") != "user" or content is None:
            continue
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else cast("Sequence[Mapping[str, Any]]", content)
        texts += [str(block.get("text", "")) for block in blocks if block.get("type") == "text"]
    return "\n".join(texts)


@dataclass(frozen=True, slots=True)
class MessagesToTask:
    """Replaces ``task`` by the user text of the messages and keeps the old one as ``base_task``.

    Runs after the rendering stage, on single samples and on batches; samples without messages pass through.

    Attributes:
        messages_key: where the messages are.
    """

    messages_key: str = MESSAGES_KEY

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A copy with the new ``task``."""
        messages = cast("list[Any] | None", sample.get(self.messages_key))
        if not messages:
            return dict(sample)
        batched = isinstance(messages[0], list)
        text = [user_text(chat) for chat in messages] if batched else user_text(messages)
        return {**sample, "task": text, BASE_TASK_KEY: sample.get("task")}
