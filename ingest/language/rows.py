"""Annotation rows in memory: plain mappings, grouped once per episode for fast look-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, cast

from ingest.errors import LanguageError, LanguageKeyError, LanguageTypeError

Row = Mapping[str, Any]
"""``role``, ``content``, ``style``, ``camera``, ``tool_calls`` and, in state rows, ``timestamp`` (s); absent keys read as None."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows in the order of their times, then roles; rows without a comparable time (NaN) are left out.

    Attributes:
        times: seconds, ascending.
        rows: the row of each time.
    """

    times: list[float]
    rows: list[Row]


class StateRows(list[Row]):
    """The state rows of one episode, with a timeline per set of filters that is made at the first look-up.

    It is a list, so it passes wherever rows pass; treat it as read-only. Sharing one object among all frames of an
    episode is what keeps annotations from costing memory per frame and look-ups from costing time per row.
    """

    __slots__ = ("_timelines",)

    def __init__(self, rows: Iterable[Row | None] = ()) -> None:
        super().__init__(mapping_rows(rows))
        self._timelines: dict[tuple[str | None, ...], Timeline] = {}

    def timeline(self, style: str, role: str | None = None, camera: str | None = None, tool_name: str | None = None) -> Timeline:
        """The rows of one style that pass the filters, in time order.

        Raises:
            LanguageKeyError: one of them has no timestamp.
        """
        key = (style, role, camera, tool_name)
        found = self._timelines.get(key)
        if found is None:
            rows = [row for row in self if row.get("style") == style and matches(row, role, camera, tool_name)]
            items = [(time, row) for time, row in ((row_time(row), row) for row in rows) if time == time]
            items.sort(key=lambda item: (item[0], str(item[1].get("role") or "")))
            found = Timeline([time for time, _ in items], [row for _, row in items])
            self._timelines[key] = found
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
