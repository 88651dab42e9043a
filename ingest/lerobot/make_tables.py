"""Writes the parquet and JSON files of a made dataset in the v3 layout."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

QUANTILES = (1, 10, 50, 90, 99)
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def data_table(columns: Mapping[str, NDArray[Any]], images: Mapping[str, Sequence[bytes]]) -> pa.Table:
    """The rows of one episode.

    Args:
        columns: (N,) or (N, D) by name.
        images: encoded pictures by image feature, N each.
    """
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        flat = pa.array(values.reshape(-1))
        arrays[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    for name, cells in images.items():
        arrays[name] = pa.array([{"bytes": cell, "path": None} for cell in cells], type=_IMAGE_TYPE)
    return pa.table(arrays)


def write_data(path: Path, episodes: Sequence[pa.Table]) -> None:
    """Writes one data file with a row group for each episode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, episodes[0].schema) as writer:
        for table in episodes:
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def encode_png(luma: NDArray[np.uint8]) -> bytes:
    """A grey RGB picture as PNG."""
    buffer = io.BytesIO()
    full = np.clip((luma.astype(np.int32) - 16) * 255 // 219, 0, 255).astype(np.uint8)
    Image.fromarray(full).convert("RGB").save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def column_stats(values: NDArray[Any]) -> dict[str, list[Any]]:
    """Statistics of one numeric column, as LeRobot names them; lists of D numbers (of one for scalars)."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    stats: dict[str, list[Any]] = {
        "min": flat.min(axis=0).tolist(),
        "max": flat.max(axis=0).tolist(),
        "mean": flat.mean(axis=0).tolist(),
        "std": flat.std(axis=0).tolist(),
        "count": [len(flat)],
    }
    for percent, row in zip(QUANTILES, np.quantile(flat, np.array(QUANTILES) / 100, axis=0), strict=True):
        stats[f"q{percent:02d}"] = row.tolist()
    return stats


def picture_stats(luma: NDArray[np.uint8]) -> dict[str, list[Any]]:
    """Statistics of grey pictures, uint8[N, H, W] video-range luma, per RGB channel in 0..1 with shape [3][1][1]."""
    values = np.clip((luma.astype(np.float64) - 16) / 219, 0, 1).reshape(-1)
    numbers = {"min": values.min(), "max": values.max(), "mean": values.mean(), "std": values.std()}
    numbers |= {
        f"q{percent:02d}": number for percent, number in zip(QUANTILES, np.quantile(values, np.array(QUANTILES) / 100), strict=True)
    }
    stats: dict[str, list[Any]] = {name: [[[float(number)]]] * 3 for name, number in numbers.items()}
    stats["count"] = [len(luma)]
    return stats


def write_episodes(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes one metadata file; ``rows`` have equal keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


def write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """Writes the tasks with their text as the pandas index, as LeRobot does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"task_index": range(len(tasks))}, index=pd.Index(list(tasks), name="task")).to_parquet(path)


def write_json(path: Path, value: object) -> None:
    """Writes indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")
