"""Annotation rows in memory: plain mappings, grouped once per episode for fast look-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex, cast

from ingest.errors import LanguageError, LanguageKeyError, LanguageTypeError

Row = Mapping[str, Any]
"""``role``, ``content``, ``style``, ``camera``, ``tool_calls`` and, in state rows, ``timestamp`` (s); absent keys read as None."""


class StateRows(list[Row]):
    """The state rows of one episode, with an index by style that is built at the first look-up.

    It is a list, so it passes wherever rows pass; treat it as read-only. Sharing one object among all frames of an
    episode is what keeps annotations from costing memory per frame.
    """

    __slots__ = ("_by_style",)

    def __init__(self, rows: Iterable[Row | None] = ()) -> None:
        super().__init__(mapping_rows(rows))
        self._by_style: dict[Any, list[tuple[float, Row]]] | None = None

    def of_style(self, style: str) -> list[tuple[float, Row]]:
        """``(timestamp, row)`` of every row of one style, in stored order.

        Raises:
            LanguageKeyError: one of them has no timestamp.
        """
        if self._by_style is None:
            self._by_style = {}
        found = self._by_style.get(style)
        if found is None:
            found = [(row_time(row), row) for row in self if row.get("style") == style]
            self._by_style[style] = found
        return found

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return (StateRows, (list(self),))


def mapping_rows(rows: Iterable[Row | None] | None) -> list[Row]:
    """The rows of one list without null entries; the row objects stay the same.

    Raises:
        LanguageTypeError: an entry is not a mapping.
    """
    kept: list[Row] = []
    for position, row in enumerate(rows or ()):
        if row is None:
            continue
        if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] rows come from files
            raise LanguageTypeError(
                f"language row {position} must be a mapping with role, content, style, …; found {type(row).__name__} {str(row)[:60]!r}",
                kind="row_not_mapping",
            )
        kept.append(row)
    return kept


def state_rows(rows: Iterable[Row | None] | None) -> StateRows:
    """``rows`` as ``StateRows``; an object that is one already is returned as it is."""
    return rows if isinstance(rows, StateRows) else StateRows(rows or ())


def row_time(row: Row) -> float:
    """The timestamp of a state row in seconds, as a double.

    Raises:
        LanguageKeyError: the row has none.
        LanguageTypeError: it is not a number.
    """
    if "timestamp" not in row:
        raise LanguageKeyError(f"state row without timestamp: {dict(row)!r:.160}", kind="row_missing_timestamp", style=row.get("style"))
    return unwrap_number(row["timestamp"], "timestamp")


def unwrap_number(value: Any, name: str) -> float:
    """A plain, NumPy or tensor scalar, or a list or array of exactly one, as a double.

    Raises:
        LanguageTypeError: not a number, or a list or array of another length.
    """
    value = unwrap_scalar(value, name)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise LanguageTypeError(f"{name} must be a number, found {type(value).__name__} {value!r:.60}", kind="not_a_number") from None


def unwrap_scalar(value: Any, name: str) -> Any:
    """Takes the one element out of a list, array or tensor; other values are returned as they are."""
    if isinstance(value, list | tuple):
        items = cast("list[Any]", list(value))  # pyright: ignore[reportUnknownArgumentType]
        if len(items) != 1:
            raise LanguageTypeError(f"{name} must be a single value, found {len(items)} values", kind="not_a_scalar")
        return unwrap_scalar(items[0], name)
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (ValueError, RuntimeError):
            raise LanguageError(
                f"{name} of one sample must be a single value, found shape {getattr(value, 'shape', '?')}", kind="not_a_scalar"
            ) from None
    return value


def tool_names(row: Row) -> list[str]:
    """Names of the decoded tool calls of a row; calls left as JSON text have no name."""
    names: list[str] = []
    calls = row.get("tool_calls")
    for call in cast("list[Any]", calls) if isinstance(calls, list | tuple) else ():
        name = mapping_value(mapping_value(call, "function"), "name")
        if isinstance(name, str):
            names.append(name)
    return names


def mapping_value(value: Any, key: str) -> Any:
    """``value[key]`` where ``value`` is a mapping that has the key, else None."""
    return cast("Mapping[str, Any]", value).get(key) if isinstance(value, Mapping) else None


def matches(row: Row, role: str | None, camera: str | None, tool_name: str | None) -> bool:
    """Whether a row passes the filters; None constrains nothing."""
    return (
        (role is None or row.get("role") == role)
        and (camera is None or row.get("camera") == camera)
        and (tool_name is None or tool_name in tool_names(row))
    )
