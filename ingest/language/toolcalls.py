"""Tool calls as JSON text on disk and decoded objects in memory, and the catalogue of tools."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ingest.errors import LanguageError
from ingest.language.rows import mapping_value

MAX_CALL_CHARS = 1_000_000

SAY_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "say",
        "description": "Speaks a short sentence to the person.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "What to say."}}, "required": ["text"]},
    },
}
"""The catalogue of a dataset that declares none."""


def encode_call(call: Any) -> str:
    """One tool call as compact ASCII JSON text, the form that is stored."""
    return json.dumps(call, separators=(",", ":"), allow_nan=False)


def decode_call(text: str) -> Any:
    """A stored tool call as the object that its JSON text means; scalars and lists decode to themselves.

    Raises:
        LanguageError: not JSON, or unreasonably long.
    """
    if len(text) > MAX_CALL_CHARS:
        raise LanguageError(f"tool call of {len(text)} characters: at most {MAX_CALL_CHARS} are read", kind="tool_call_too_large")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise LanguageError(f"tool call is not JSON: {text[:80]!r}", kind="tool_call_not_json") from None


def tool_catalogue(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The function schemas that ``meta/info.json`` declares, or the one-entry default with ``say``.

    Raises:
        LanguageError: ``tools`` is there but is no list of function schemas.
    """
    tools = info.get("tools")
    if tools is None:
        return [copy.deepcopy(dict(SAY_TOOL))]
    if not isinstance(tools, list) or not all(_tool_name(tool) for tool in cast("list[Any]", tools)):
        raise LanguageError(f"info.json tools must be a list of function schemas with names, found {tools!r:.120}", kind="bad_tools")
    return copy.deepcopy(cast("list[dict[str, Any]]", tools))


def tool_names_of(catalogue: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the functions of a catalogue, in order."""
    return [cast("str", _tool_name(tool)) for tool in catalogue]


def tools_for(messages: Sequence[Mapping[str, Any]], catalogue: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools to put into a prompt: all of the catalogue where a message calls one, none elsewhere.

    Tools in every prompt would differ from what a policy without tool calls sees when it runs.
    """
    return list(catalogue) if any(message.get("tool_calls") for message in messages) else []


def with_say(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The declared tools with ``say`` appended if no tool of that name exists: what a writer stores."""
    declared = tool_catalogue(info) if info.get("tools") is not None else []
    return declared if "say" in tool_names_of(declared) else [*declared, copy.deepcopy(dict(SAY_TOOL))]


def _tool_name(tool: Any) -> str | None:
    name = mapping_value(mapping_value(tool, "function"), "name")
    return name if isinstance(name, str) and name else None
