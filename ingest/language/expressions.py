"""Resolver expressions, such as ``emitted_at(t, style=vqa, role=user)``, parsed once into frozen values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ingest.errors import RecipeError, RecipeTypeError
from ingest.language.styles import STATE_COLUMN, STYLES

Function = Literal["active_at", "emitted_at", "nth_prev", "nth_next"]

FUNCTIONS: tuple[Function, ...] = ("active_at", "emitted_at", "nth_prev", "nth_next")

_CALL = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*\((.*)\)\s*", re.DOTALL)
_FILTERS = ("style", "role", "camera", "tool_name")
_EXTRA: dict[str, tuple[str, ...]] = {"active_at": ("seconds_ago",), "emitted_at": (), "nth_prev": ("offset",), "nth_next": ("offset",)}
_MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Expression:
    """One resolver call.

    Attributes:
        function: which rule finds the row.
        style: wanted ``style``, or None for no constraint; the other filters likewise.
        offset: steps from the row in force (``nth_prev`` and ``nth_next`` only), never 0.
        seconds_ago: how far before the frame to look (``active_at`` only; an extension).
    """

    function: Function
    style: str | None = None
    role: str | None = None
    camera: str | None = None
    tool_name: str | None = None
    offset: int = 1
    seconds_ago: float = 0.0

    def __str__(self) -> str:
        parts = ["t"] + [f"{name}={getattr(self, name)}" for name in _FILTERS if getattr(self, name) is not None]
        if self.function in ("nth_prev", "nth_next"):
            parts.append(f"offset={self.offset}")
        if self.seconds_ago:
            parts.append(f"seconds_ago={self.seconds_ago}")
        return f"{self.function}({', '.join(parts)})"


def parse_expression(text: str) -> Expression:
    """Parses and checks one resolver expression; results are cached by text.

    Raises:
        RecipeError: not a call, an unknown function, a bad argument, or a style that the function cannot search.
        RecipeTypeError: not a string, or an argument that the function does not take.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] recipes come from files
        raise RecipeTypeError(f"a binding is a resolver call in a string, found {type(text).__name__} {text!r}", kind="type_misuse")
    expression = _parse(text)
    _check_style(expression)
    return expression


@lru_cache(maxsize=4096)
def _parse(text: str) -> Expression:
    match = _CALL.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise RecipeError(f"expected name(arguments), such as active_at(t, style=subtask), found {text[:120]!r}", kind="bad_expression")
    name = match.group(1)
    if name not in FUNCTIONS:
        raise RecipeError(f"unknown resolver {name!r}: use one of {', '.join(FUNCTIONS)}", kind="unknown_resolver")
    function: Function = name
    filters: dict[str, str] = {}
    offset, seconds_ago = 1, 0.0
    for raw in match.group(2).split(","):
        part = raw.strip()
        if part in ("", "t"):
            continue
        key, equals, value = part.partition("=")
        if not equals:
            raise RecipeError(f"{text!r}: argument {part!r} must be key=value", kind="bad_argument")
        key, value = key.strip(), value.strip().strip("\"'")
        if key in _FILTERS:
            filters[key] = value
            continue
        if key == "offset":
            offset = _offset(text, value)
        elif key == "seconds_ago":
            seconds_ago = _seconds(text, value)
        if key not in _EXTRA[function]:
            raise RecipeTypeError(f"{text!r}: {function} does not take {key!r}", kind="unknown_field")
    if offset == 0:
        raise RecipeError(f"{text!r}: offset 0 is the row in force: use active_at", kind="zero_offset")
    return Expression(
        function, filters.get("style"), filters.get("role"), filters.get("camera"), filters.get("tool_name"), offset, seconds_ago
    )


def _offset(text: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise RecipeError(f"{text!r}: offset must be a whole number, found {value!r}", kind="bad_offset_literal") from None


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        raise RecipeError(f"{text!r}: seconds_ago must be a number of seconds, found {value!r}", kind="bad_lookback_literal") from None
    if not math.isfinite(seconds) or seconds < 0:
        raise RecipeError(f"{text!r}: seconds_ago must be finite and not negative, found {value!r}", kind="bad_lookback")
    return seconds


def _check_style(expression: Expression) -> None:
    """Outside the parse cache, because styles may be registered later."""
    name, function = expression.style, expression.function
    if function == "emitted_at":
        if name is not None and STYLES.find(name) is None:
            raise RecipeError(f"{expression}: unknown style {name!r}: known are {', '.join(STYLES.styles)}", kind="unknown_style")
        return
    if name is None:
        raise RecipeError(f"{expression}: {function} needs style=..., the style whose row is in force", kind="style_required")
    style = STYLES.find(name)
    if style is None:
        raise RecipeError(f"{expression}: unknown style {name!r}: known are {', '.join(STYLES.styles)}", kind="unknown_style")
    if style.column != STATE_COLUMN:
        raise RecipeError(
            f"{expression}: {name!r} rows are events; {function} searches state rows: use emitted_at", kind="event_style_in_state_resolver"
        )
