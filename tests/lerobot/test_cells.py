"""Cells of the rows: pictures in them, and how columns become item values."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from spoilable import Dataset

from ingest.errors import DatasetError, RowsError
from ingest.lerobot.columns import item_value, numeric_values
from ingest.lerobot.info import Feature
from ingest.lerobot.rows import read_rows

FILES = ("data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet")


# --- pictures in cells ---------------------------------------------------------------------------


def png(value: int, size: tuple[int, int] = (4, 6), mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (size[1], size[0]), value if mode != "RGB" else (value, 0, 1)).save(buffer, format="PNG")
    return buffer.getvalue()


def add_images(dataset: Dataset, cells: Any, **feature: Any) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for path in FILES:
        dataset.edit_table(
            path, lambda table: table.append_column("image", pa.array([cells(row) for row in range(table.num_rows)], type=kind))
        )
    declared = {"dtype": "image", "shape": [4, 6, 3], "names": ["height", "width", "channels"], **feature}
    dataset.edit_info(lambda info: info["features"].update(image=declared))


def test_pictures_in_cells_are_decoded_when_asked_for(dataset: Dataset) -> None:
    add_images(dataset, lambda row: {"bytes": png(row) if row != 1 else b"broken", "path": None})
    rows = read_rows(dataset.open(), 0)
    picture = rows.image("image", 2)
    assert (picture.shape, picture.dtype) == ((4, 6, 3), np.uint8)
    assert picture[0, 0].tolist() == [2, 0, 1]
    with pytest.raises(RowsError, match=r"frame 1.*cannot be decoded"):
        rows.image("image", 1)


def test_depth_pictures_keep_sixteen_bits(dataset: Dataset) -> None:
    add_images(dataset, lambda row: {"bytes": png(40_000 + row, mode="I;16"), "path": None}, shape=[4, 6, 1], info={"is_depth_map": True})
    picture = read_rows(dataset.open(), 0).image("image", 3)
    assert (picture.shape, picture.dtype, int(picture[0, 0, 0])) == ((4, 6, 1), np.uint16, 40_003)


def test_pictures_of_another_size_or_place(dataset: Dataset) -> None:
    (dataset.root / "images").mkdir()
    (dataset.root / "images/0.png").write_bytes(png(9))
    cells = [
        {"bytes": png(0, (8, 8)), "path": None},
        {"bytes": None, "path": "images/0.png"},
        {"bytes": None, "path": "../secret.png"},
        {"bytes": None, "path": None},
    ]
    add_images(dataset, lambda row: cells[row % 4])
    rows = read_rows(dataset.open(), 0)
    with pytest.raises(RowsError, match="8x8, but 6x4 is declared"):
        rows.image("image", 0)
    assert rows.image("image", 1)[0, 0, 0] == 9
    with pytest.raises(RowsError, match=r"\.\."):
        rows.image("image", 2)
    with pytest.raises(RowsError, match="no picture"):
        rows.image("image", 3)


# --- conversion ----------------------------------------------------------------------------------


def fail(message: str) -> DatasetError:
    return RowsError(message)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
def test_every_numeric_type_becomes_an_item_type(dtype: str, shape: tuple[int, ...]) -> None:
    values = (np.arange(4 * int(np.prod(shape))) % 2).astype(dtype).reshape(4, *(() if shape == (1,) else shape))
    column = pa.chunked_array([pa.array(values.tolist(), type=_arrow(dtype, values.ndim - 1))])
    array = numeric_values(column, Feature("x", dtype, shape, (), False, {}), fail)
    assert array is not None
    assert array.dtype.name == {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}[np.dtype(dtype).kind]
    np.testing.assert_array_equal(array, values)


def _arrow(dtype: str, depth: int) -> pa.DataType:
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.lists(st.floats(width=64), min_size=2, max_size=2), min_size=1, max_size=9),
    fixed=st.booleans(),
    cut=st.integers(0, 8),
)
def test_sliced_and_chunked_lists_convert_alike(values: list[list[float]], fixed: bool, cut: int) -> None:
    kind = pa.list_(pa.float64(), 2) if fixed else pa.list_(pa.float64())
    whole = pa.array([[0.0, 0.0], *values, [1.0, 1.0]], type=kind).slice(1, len(values))
    column = pa.chunked_array([whole.slice(0, cut), whole.slice(cut)])
    array = numeric_values(column, Feature("x", "float64", (2,), (), False, {}), fail)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(array, np.array(values).astype(np.float32))  # type: ignore[arg-type]


def test_cells_taken_one_by_one_follow_type_inference() -> None:
    assert item_value(None) is None
    assert item_value("x") == "x"
    assert item_value([{"role": "user"}]) == [{"role": "user"}]
    for value, dtype in ((True, np.bool_), (3, np.int64), (0.5, np.float32)):
        assert getattr(item_value(value), "dtype", None) == dtype
        assert getattr(item_value([value]), "dtype", None) == dtype
