"""Parquet columns to the arrays that samples are made of."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.errors import DatasetError
from ingest.lerobot.info import Feature

MAX_VALUE_ELEMENTS = 1 << 26
"""Most numbers that one row of one column may hold."""

Numbers = NDArray[np.float32] | NDArray[np.int64] | NDArray[np.bool_]


def numeric_values(column: pa.ChunkedArray, feature: Feature, fail: Callable[[str], DatasetError]) -> Numbers | None:
    """A column as an array with the dtype of the delivered items: float32, int64 or bool.

    Lists of fixed and of variable type are read alike, as long as every row has the declared shape. Scalars declared with
    shape [] or [1] give one value per row, also when they are stored as lists of one.

    Args:
        column: the rows of one episode.
        feature: its declaration.
        fail: builds the error for a message.

    Returns:
        Array of shape (N, *shape), or (N,) for scalars; None when rows hold nulls or differ in size, so that they have
        to be taken one by one.

    Raises:
        DatasetError: another shape or kind of value than declared.
    """
    if column.null_count or feature.item_dtype is None:
        return None
    rows = len(column)
    array, sizes = column.combine_chunks(), list[int]()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], type=column.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    while _is_list(array.type):
        size = _row_size(array)
        if array.null_count or size is None:
            return None
        sizes.append(size)
        array = array.flatten()
    if array.null_count:
        return None
    if not (pa.types.is_boolean(array.type) or pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise fail(f"column {feature.key} has type {column.type}, but {feature.dtype} {list(feature.shape)} is declared")
    values = _as_item_dtype(np.asarray(array.to_numpy(zero_copy_only=False)), feature, fail)
    if not rows:
        sizes = list(feature.shape)
    if feature.is_scalar:
        if any(size != 1 for size in sizes) and rows:
            raise fail(f"column {feature.key} has {sizes} values per row, but shape {list(feature.shape)} is declared")
        return values.reshape(rows)
    if tuple(sizes) != feature.shape and int(np.prod(sizes, dtype=np.int64)) != int(np.prod(feature.shape, dtype=np.int64)):
        raise fail(f"column {feature.key} has shape {sizes} in each row, but shape {list(feature.shape)} is declared")
    return values.reshape(rows, *feature.shape)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _row_size(array: Any) -> int | None:
    """Elements per row when all rows agree, else None."""
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    sizes = np.diff(np.asarray(array.offsets.to_numpy()))
    if not sizes.size:
        return 0
    return int(sizes[0]) if bool(np.all(sizes == sizes[0])) else None


def _as_item_dtype(values: NDArray[Any], feature: Feature, fail: Callable[[str], DatasetError]) -> Numbers:
    kind = values.dtype.kind
    if feature.item_dtype == "float32":
        # Overflow to infinity is what a float64 beyond float32 becomes in the reference reader as well.
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    if feature.item_dtype == "int64":
        if kind == "f":
            bad = np.flatnonzero(~(np.isfinite(values) & (values == np.floor(values)) & (np.abs(values) < 2.0**53)))
            if bad.size:
                raise fail(f"column {feature.key} holds {values[bad[0]]}, but {feature.dtype} is declared")
        elif values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
            raise fail(f"column {feature.key} holds {int(values.max())}, which int64 cannot hold")
        return values.astype(np.int64)
    if kind != "b" and values.size and not bool(np.all((values == 0) | (values == 1))):
        raise fail(f"column {feature.key} holds values other than 0 and 1, but bool is declared")
    return values.astype(np.bool_)


def item_value(value: object) -> object:
    """One cell as an item holds it: numbers and lists of numbers become arrays, everything else stays.

    Python floats become float32, integers int64, booleans bool, as type inference over Python values gives.
    """
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int64(value)
    if isinstance(value, float):
        return np.float32(value)
    if isinstance(value, list) and value:
        try:
            array = np.asarray(cast("list[Any]", value))
        except ValueError:
            return cast("object", value)
        if array.dtype.kind == "f":
            return array.astype(np.float32)
        if array.dtype.kind in "iu":
            return array.astype(np.int64)
        return array if array.dtype.kind == "b" else cast("object", value)
    return value
