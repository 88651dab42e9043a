"""Finds the one row that a resolver expression means on a frame.

State rows hold from their timestamp until a later row of the style replaces them; event rows exist on their frame only.
Times are compared as doubles exactly as given: readers narrow both sides to float32 first (``columns``), because mixed
precision moves almost half of all 30 fps boundaries by a frame.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from ingest.errors import LanguageError
from ingest.language.expressions import Expression, parse_expression
from ingest.language.rows import Row, StateRows, Timeline, mapping_rows, matches, state_rows, unwrap_number
from ingest.language.styles import STATE_COLUMN, STYLES

EMITTED_WINDOW_S = 0.1
"""How far from its timestamp, both ways and inclusive, ``emitted_at`` still sees a state row."""


def resolve(
    expression: Expression | str, persistent: Iterable[Row | None] | None, events: Iterable[Row | None] | None, t: float
) -> Row | None:
    """The row that an expression finds on one frame.

    Args:
        expression: parsed, or its text.
        persistent: state rows of the episode, in any order; null entries are skipped.
        events: event rows of this very frame.
        t: frame time in seconds (the float32 time widened to double).

    Returns:
        The matching row, the same object as in the input, or None.

    Raises:
        LanguageError: more than one row matches ``active_at`` or ``emitted_at``.
        LanguageKeyError: a state row of the style has no timestamp.
        LanguageTypeError: a row is not a mapping.
        RecipeError: the expression is malformed.
    """
    if isinstance(expression, str):
        expression = parse_expression(expression)
    return find_row(expression, state_rows(persistent), mapping_rows(events), unwrap_number(t, "t"))


def resolve_sequence(
    expression: Expression | str,
    persistent: Iterable[Row | None] | None,
    times: Iterable[float],
    events: Sequence[Iterable[Row | None] | None] | None = None,
) -> list[Row | None]:
    """``resolve`` over the frames of an episode; ``events`` has one list per time, or is None."""
    parsed = parse_expression(expression) if isinstance(expression, str) else expression
    rows = state_rows(persistent)
    return [
        find_row(parsed, rows, mapping_rows(events[frame]) if events is not None else [], unwrap_number(t, "t"))
        for frame, t in enumerate(times)
    ]


def find_row(expression: Expression, persistent: StateRows, events: Sequence[Row], t: float) -> Row | None:
    """``resolve`` on rows that are known to be mappings; ``t`` is a Python float, since a float32 would narrow the comparison."""
    if expression.function == "active_at":
        return _active(expression, persistent, t - expression.seconds_ago if expression.seconds_ago else t)
    if expression.function == "emitted_at":
        return _emitted(expression, persistent, events, t)
    return _nth(expression, persistent, t)


def active_at(t: float, persistent: Iterable[Row | None], **filters: str) -> Row | None:
    """The latest state row at or before ``t``; keyword filters as in the expression."""
    return _call("active_at", t, persistent, (), filters)


def emitted_at(t: float, persistent: Iterable[Row | None], events: Iterable[Row | None], **filters: str) -> Row | None:
    """The event row of this frame, or for state styles the row within 0.1 s of ``t``."""
    return _call("emitted_at", t, persistent, events, filters)


def nth_prev(t: float, persistent: Iterable[Row | None], **filters: str | int) -> Row | None:
    """The state row ``offset`` steps before the one in force."""
    return _call("nth_prev", t, persistent, (), filters)


def nth_next(t: float, persistent: Iterable[Row | None], **filters: str | int) -> Row | None:
    """The state row ``offset`` steps after the one in force."""
    return _call("nth_next", t, persistent, (), filters)


def _call(
    name: str, t: float, persistent: Iterable[Row | None], events: Iterable[Row | None], filters: dict[str, str] | dict[str, str | int]
) -> Row | None:
    arguments = "".join(f", {key}={value}" for key, value in filters.items())
    return resolve(f"{name}(t{arguments})", persistent, events, t)


def _timeline(expression: Expression, persistent: StateRows) -> Timeline:
    assert expression.style is not None  # parse_expression demands it
    return persistent.timeline(expression.style, expression.role, expression.camera, expression.tool_name)


def _active(expression: Expression, persistent: StateRows, t: float) -> Row | None:
    line = _timeline(expression, persistent)
    stop = bisect_right(line.times, t) if t == t else 0
    start = bisect_left(line.times, line.times[stop - 1]) if stop else 0
    return _only(line.rows[start:stop], expression, t)


def _emitted(expression: Expression, persistent: StateRows, events: Sequence[Row], t: float) -> Row | None:
    style = STYLES.find(expression.style)
    if style is not None and style.column == STATE_COLUMN:
        line = _timeline(expression, persistent)
        # Twice the window, because rounding decides at its edge; the plain difference has the last word.
        near = range(bisect_left(line.times, t - 2 * EMITTED_WINDOW_S), bisect_right(line.times, t + 2 * EMITTED_WINDOW_S))
        return _only([line.rows[place] for place in near if abs(line.times[place] - t) <= EMITTED_WINDOW_S], expression, t)
    wanted, role, camera, tool_name = expression.style, expression.role, expression.camera, expression.tool_name
    found = [row for row in events if (wanted is None or row.get("style") == wanted) and matches(row, role, camera, tool_name)]
    return _only(found, expression, t)


def _nth(expression: Expression, persistent: StateRows, t: float) -> Row | None:
    line = _timeline(expression, persistent)
    # With no row in force yet the anchor sits before the first row: one step on is the first row, one step back is none.
    anchor = (bisect_right(line.times, t) if t == t else 0) - 1
    if anchor < 0 and expression.function == "nth_prev":
        return None
    position = anchor + (expression.offset if expression.function == "nth_next" else -expression.offset)
    return line.rows[position] if 0 <= position < len(line.rows) else None


def _only(rows: list[Row], expression: Expression, t: float) -> Row | None:
    if len(rows) > 1:
        texts = ", ".join(repr(row.get("content"))[:40] for row in rows[:4])
        raise LanguageError(
            f"{expression} at t={t:.6f} s matches {len(rows)} rows ({texts}): "
            "narrow it with role=, camera= or tool_name=, or repair the data",
            kind="ambiguous_match",
            style=expression.style,
        )
    return rows[0] if rows else None
