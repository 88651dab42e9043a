"""Prompts for a running policy, from the same recipe that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ingest.errors import LanguageError, LanguageTypeError, RecipeError
from ingest.language.recipe import TASK, TrainingRecipe
from ingest.language.render import render_turns
from ingest.language.step import MESSAGES_KEY
from ingest.language.styles import LANGUAGE_COLUMNS

QUERY_KINDS = ("vqa", "next_subtask")
_QUERY_KEYS = ("query_kind", "query_text")


@dataclass(frozen=True, slots=True)
class RenderRuntimeMessagesStep:
    """Turns a query (``query_kind``, ``query_text``) of a running policy into the prompt that training used.

    ``vqa`` becomes one user message with the text as it is. ``next_subtask`` becomes the turns before the first
    supervised assistant turn on ``${subtask}``, with the query text as the task; other names are taken from the data
    where present. A transition without a query is returned as it is; the input is never changed.

    Attributes:
        recipe: the recipe of the checkpoint; needed for ``next_subtask``.
        messages_key: key that the messages are written under.

    Raises:
        LanguageError: unknown query kind, or raw language columns beside a query.
        LanguageTypeError: the query text is no text.
        RecipeError: no recipe, or one without a supervised ``${subtask}`` turn.
    """

    recipe: TrainingRecipe | None = None
    messages_key: str = MESSAGES_KEY

    def __call__(self, transition: Mapping[str, Any]) -> Mapping[str, Any]:
        data = cast("Mapping[str, Any]", transition.get("complementary_data") or {})
        kind = data.get("query_kind")
        if kind is None:
            return transition
        if kind not in QUERY_KINDS:
            raise LanguageError(f"unknown query_kind {kind!r}: use one of {', '.join(QUERY_KINDS)}", kind="bad_query_kind")
        if any(name in data for name in LANGUAGE_COLUMNS):
            raise LanguageError(
                "a query must not carry raw language columns: they belong to training samples", kind="query_with_annotations"
            )
        text = data.get("query_text")
        if not isinstance(text, str):
            raise LanguageTypeError(f"query_text must be text, found {type(text).__name__} {text!r:.60}", kind="query_text_type")
        messages = [{"role": "user", "content": text}] if kind == "vqa" else self._next_subtask(data, text)
        rest = {name: value for name, value in data.items() if name not in _QUERY_KEYS}
        return {**transition, "complementary_data": {**rest, self.messages_key: messages}}

    def _next_subtask(self, data: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
        if self.recipe is None:
            raise RecipeError(
                "next_subtask needs the recipe that the policy was trained with; load it from the checkpoint", kind="missing_recipe"
            )
        return render_turns(self.recipe.prompt_turns("subtask"), {**data, TASK: text})["messages"]
