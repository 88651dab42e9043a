"""Checks of single recipe fields; every error says what was expected and found, and where in the recipe."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

from ingest.errors import RecipeError, RecipeTypeError
from ingest.language.expressions import parse_expression

Rules = Literal["reelray", "lerobot"]
"""``reelray`` checks everything at load and knows the extensions; ``lerobot`` accepts and rejects what LeRobot does."""

_LARGEST_WHOLE_WEIGHT = 2**1000
"""Whole numbers beyond the range of a double cannot be summed with other weights."""


@contextmanager
def at(*keys: str | int) -> Generator[None]:
    """Puts ``keys`` in front of the path of any recipe error raised inside."""
    try:
        yield
    except RecipeError as error:
        error.path = (*keys, *error.path)
        raise


def typed(value: Any, kind_of: Any, expected: str, kind: str = "type_misuse") -> Any:
    """``value`` if it is of a kind, else a type error that says what was expected."""
    if not isinstance(value, kind_of):
        raise RecipeTypeError(f"must be {expected}, found {type(value).__name__} {value!r:.60}", kind=kind)
    return value


def one_of(name: str, value: object, allowed: tuple[str, ...], kind: str) -> None:
    """Refuses a value outside a fixed set; lists and mappings are type errors."""
    if isinstance(value, list | dict | set):
        raise RecipeTypeError(f"must be one of {', '.join(allowed)}, found {value!r:.60}", kind="type_misuse", path=(name,))
    if value not in allowed:
        raise RecipeError(f"must be one of {', '.join(allowed)}, found {value!r:.60}", kind=kind, path=(name,))


def check_content(content: object, tool_calls_from: str | None) -> None:
    """Text, blocks with a type, or nothing where tool calls take its place."""
    if content is None:
        if tool_calls_from is None:
            raise RecipeError("a turn without tool_calls_from needs content", kind="missing_content", path=("content",))
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RecipeTypeError(
            f"must be text or a list of blocks, found {type(content).__name__} {content!r:.60}", kind="bad_content_type", path=("content",)
        )
    for position, block in enumerate(cast("list[object]", content)):
        if not isinstance(block, Mapping) or "type" not in block:
            raise RecipeError(
                f"a block is a mapping with a type (text, image, …), found {block!r:.60}",
                kind="bad_content_block",
                path=("content", position),
            )


def check_dropout(value: object) -> None:
    """A share in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeTypeError(f"must be a number in [0, 1], found {value!r}", kind="bad_dropout", path=("dropout",))
    if not 0 <= value <= 1:
        raise RecipeError(f"must be in [0, 1], found {value!r}", kind="bad_dropout", path=("dropout",))


def check_weight(value: object, rules: Rules) -> None:
    """A finite number above 0; LeRobot's rules also let booleans, NaN and infinity pass."""
    path = ("weight",)
    if value is None:
        raise RecipeError("a component needs a weight", kind="missing_weight", path=path)
    if not isinstance(value, int | float) or (rules == "reelray" and isinstance(value, bool)):
        hint = " (YAML 1.1 reads 1e6 as text: write 1.0e+6)" if isinstance(value, str) else ""
        raise RecipeTypeError(f"must be a number, found {type(value).__name__} {value!r:.60}{hint}", kind="uncomparable", path=path)
    if value <= 0:
        raise RecipeError(f"must be greater than 0, found {value!r:.60}", kind="non_positive_weight", path=path)
    if (isinstance(value, int) and value > _LARGEST_WHOLE_WEIGHT) or (rules == "reelray" and not math.isfinite(value)):
        raise RecipeError(f"must be finite, found {value!r:.60}", kind="non_finite_weight", path=path)


def check_bindings(bindings: object, rules: Rules) -> None:
    """Names in text, each with a resolver call."""
    if bindings is None:
        return
    with at("bindings"):
        for name, expression in typed(bindings, Mapping, "a mapping of names to resolver calls").items():
            with at(name if isinstance(name, str | int) else str(name)):
                typed(name, str, "a name in text (quote it)")
                # LeRobot looks at an expression only when it renders, so its rules let any text pass here.
                typed(expression, str, "a resolver call in text")
                if rules == "reelray":
                    parse_expression(expression)
