"""The two language columns in Arrow: one canonical type, and every physical form on disk brought to it.

Writers disagree about the physical type: tool calls come as structs, JSON text or the JSON extension type, columns
without a value as ``null``, state timestamps as float64. Files of one dataset therefore cannot be united as they are;
``normalise_column`` is applied to each file (or episode) first.
"""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import LanguageError
from ingest.language.rows import Row
from ingest.language.styles import LANGUAGE_COLUMNS, STATE_COLUMN
from ingest.language.toolcalls import decode_call, encode_call

STATE_FIELDS = ("role", "content", "style", "timestamp", "camera", "tool_calls")
EVENT_FIELDS = ("role", "content", "style", "camera", "tool_calls")

LANGUAGE_FEATURE: Mapping[str, Any] = {"dtype": "language", "shape": [1], "names": None}
"""What ``info.json["features"]`` holds for each language column."""


def row_fields(column: str) -> tuple[str, ...]:
    """Field names of a column's rows, in stored order."""
    return STATE_FIELDS if column == STATE_COLUMN else EVENT_FIELDS


def canonical_type(column: str) -> pa.DataType:
    """The Arrow type of a language column: a list of structs with JSON tool calls.

    ``role`` and ``timestamp`` (float32, state rows only) are never null.
    """
    return _list_type(column, pa.json_())


def language_features() -> dict[str, dict[str, Any]]:
    """The ``info.json`` features of both columns."""
    return {column: dict(LANGUAGE_FEATURE) for column in LANGUAGE_COLUMNS}


def has_language_columns(info: Mapping[str, Any]) -> bool:
    """Whether ``info.json`` declares either language column."""
    features = cast("Mapping[str, Any]", info.get("features") or {})
    return any(column in features for column in LANGUAGE_COLUMNS)


def normalise_column(array: pa.Array | pa.ChunkedArray, column: str) -> pa.Array:
    """A language column of one file in canonical form, null lists kept.

    Unknown struct fields are dropped, absent ones become null, timestamps are narrowed to float32, tool calls become JSON
    text. Work and memory are proportional to the rows stored.

    Raises:
        LanguageError: the column is no list of row structs, or a row lacks its role or timestamp.
    """
    array = single_array(array)
    if not len(array):
        return rows_array([], column)
    if pa.types.is_null(array.type):
        return cast("pa.Array", pa.nulls(len(array), _list_type(column, pa.string()))).cast(canonical_type(column))
    check_lists(array, column)
    lists = cast("pa.ListArray", array)
    values, lengths = list_values(lists)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise LanguageError(f"column {column} has {offsets[-1]} rows in one file: read it by episode", kind="too_many_rows")
    rows = _normalise_rows(values, column)
    mask = lists.is_null()
    built = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), rows, type=_list_type(column, pa.string()), mask=mask)
    return built.cast(canonical_type(column))


def normalise_table(table: pa.Table) -> pa.Table:
    """A table whose language columns, where it has them, are canonical; apply per file before any union."""
    for column in LANGUAGE_COLUMNS:
        position = table.schema.get_field_index(column)
        if position >= 0:
            array = normalise_column(table.column(position), column)
            table = table.set_column(position, pa.field(column, array.type), array)
    return table


def rows_array(lists: Sequence[Sequence[Row] | None], column: str) -> pa.Array:
    """A canonical column built from rows in memory; tool calls are encoded, missing fields become null.

    Raises:
        LanguageError: a value has no place in the column's type.
    """
    stored = [None if rows is None else [_stored_row(row, column) for row in rows] for rows in lists]
    try:
        # Arrow builds no JSON extension arrays from Python values, but casts text to them.
        return pa.array(stored, type=_list_type(column, pa.string(), nullable=True)).cast(canonical_type(column))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise LanguageError(f"rows do not fit column {column}: {error}", kind="bad_row_value") from None


def decode_rows(array: pa.Array | pa.ChunkedArray, column: str) -> list[list[Row] | None]:
    """The rows of every frame as plain dicts with decoded tool calls; null lists stay None.

    Raises:
        LanguageError: see ``normalise_column``, or a tool call is not JSON.
    """
    return [None if rows is None else [_decoded_row(row) for row in rows] for rows in normalise_column(array, column).to_pylist()]


def read_language_columns(source: str | BinaryIO | pa.NativeFile) -> dict[str, list[list[Row] | None]]:
    """Both language columns of one parquet file, decoded; a column that the file lacks is left out.

    Raises:
        LanguageError: a column cannot be read as annotation rows.
    """
    file = pq.ParquetFile(source)
    present = [column for column in LANGUAGE_COLUMNS if column in file.schema_arrow.names]
    table = file.read(columns=present)
    return {column: decode_rows(table.column(column), column) for column in present}


def single_array(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array with the values of a chunked one."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    # Arrow has no empty array to hand out for a nested extension type.
    return array.combine_chunks() if array.num_chunks > 1 else array.chunk(0) if array.num_chunks else pa.nulls(0)


def check_lists(array: pa.Array, column: str) -> None:
    """Refuses a language column that does not hold lists of structs.

    Raises:
        LanguageError: names the column and the type found.
    """
    holds_lists = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    if not holds_lists or not (pa.types.is_struct(array.type.value_type) or pa.types.is_null(array.type.value_type)):
        raise LanguageError(f"column {column} must hold lists of rows, found {array.type}", kind="bad_column_type")


def list_values(lists: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """The rows inside a list array, end to end, and how many each list has (null lists have none).

    Arrow's own ``flatten`` cannot skip null lists of extension types.
    """
    lengths = pc.fill_null(lists.value_lengths(), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = lists.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    first, stop = (int(starts[0]), int(starts[-1])) if len(starts) else (0, 0)
    if stop - first == int(lengths.sum()):
        return lists.values.slice(first, stop - first), lengths
    before = np.cumsum(lengths) - lengths
    positions = np.repeat(starts[:-1] - before, lengths) + np.arange(int(lengths.sum()))
    return lists.values.take(pa.array(positions)), lengths


def _list_type(column: str, call: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    types: dict[str, pa.DataType] = {"timestamp": pa.float32(), "tool_calls": pa.list_(call)}
    required = () if nullable else ("role", "timestamp")
    return pa.list_(pa.struct([pa.field(name, types.get(name, pa.string()), name not in required) for name in row_fields(column)]))


def _normalise_rows(rows: pa.Array, column: str) -> pa.Array:
    target = cast("pa.StructType", _list_type(column, pa.string()).value_type)
    if pa.types.is_null(rows.type):
        return pa.array([None] * len(rows), type=target)
    if not pa.types.is_struct(rows.type):
        raise LanguageError(f"column {column} must hold row structs, found {rows.type}", kind="bad_column_type")
    structs = cast("pa.StructArray", rows)
    present = {structs.type.field(position).name: position for position in range(structs.type.num_fields)}
    null_rows = structs.is_null()
    children: list[pa.Array] = []
    for field in target:
        child = structs.field(present[field.name]) if field.name in present else pa.nulls(len(rows))
        try:
            child = _call_texts(child) if field.name == "tool_calls" else pc.cast(child, field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise LanguageError(
                f"column {column}, field {field.name}: cannot read {child.type} as {field.type}: {error}", kind="bad_field_type"
            ) from None
        missing = [] if field.nullable or not child.null_count else np.flatnonzero(_mask(child) & ~_mask(structs))
        if len(missing):
            position = int(missing[0])
            raise LanguageError(f"column {column}: row {position} of the file has no {field.name}", kind=f"row_missing_{field.name}")
        if not field.nullable and child.null_count:
            child = pc.fill_null(child, "" if field.name == "role" else np.float32(0))
        children.append(child)
    return pa.StructArray.from_arrays(children, fields=list(target), mask=null_rows)


def _mask(array: pa.Array) -> NDArray[np.bool_]:
    return cast("NDArray[np.bool_]", array.is_null().to_numpy(zero_copy_only=False))


def _call_texts(array: pa.Array) -> pa.Array:
    """Tool calls of any physical form as lists of JSON text."""
    wanted = pa.list_(pa.string())
    if array.null_count == len(array):
        return pa.nulls(len(array), wanted)
    inner = getattr(array.type, "value_type", None)
    if inner is None:
        raise pa.ArrowInvalid("tool calls must be a list")
    if isinstance(inner, pa.JsonType):
        return array.cast(pa.list_(inner.storage_type)).cast(wanted)
    if pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_null(inner):
        return array.cast(wanted)
    # A struct cannot be told from the mapping that it stood for, so padding nulls stay, as in LeRobot's own reader.
    return pa.array([None if calls is None else [encode_call(call) for call in calls] for calls in array.to_pylist()], type=wanted)


def _stored_row(row: Row, column: str) -> dict[str, Any]:
    stored = {name: row.get(name) for name in row_fields(column)}
    for name in ("role", "timestamp"):
        if name in stored and stored[name] is None:
            raise LanguageError(f"{column} row without {name}: {dict(row)!r:.160}", kind=f"row_missing_{name}", style=row.get("style"))
    if stored["content"] is not None:
        stored["content"] = str(stored["content"])
    calls = stored["tool_calls"]
    if calls is not None:
        if not isinstance(calls, list | tuple):
            raise LanguageError(
                f"tool_calls must be a list or null, found {type(calls).__name__}", kind="tool_calls_type", style=row.get("style")
            )
        stored["tool_calls"] = [call if isinstance(call, str) else encode_call(call) for call in cast("Sequence[Any]", calls)]
    return stored


def _decoded_row(row: dict[str, Any] | None) -> Row:
    if row is None:
        return cast("Row", None)
    calls = row["tool_calls"]
    if calls is not None:
        # The JSON extension type hands out text or, in newer Arrow, decoded objects.
        row["tool_calls"] = [decode_call(call) if isinstance(call, str) else call for call in calls]
    return row
