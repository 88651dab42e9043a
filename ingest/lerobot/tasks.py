"""``meta/tasks.parquet`` and ``meta/stats.json``."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.errors import MetadataError, ObjectNotFoundError
from ingest.lerobot.info import read_json
from ingest.lerobot.parquet import ParquetSource, check_read_size, integer_column, python_values
from ingest.storage.base import Store

TASKS_PATH = "meta/tasks.parquet"
STATS_PATH = "meta/stats.json"

Stats = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""Statistics by feature and name (``mean``, ``std``, ``min``, ``max``, ``count``, ``q01`` …)."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """Task texts, looked up by ``task_index`` and never by row position.

    Attributes:
        index: int64[T], sorted, each once.
        texts: the text of each entry of ``index``.
    """

    index: NDArray[np.int64]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, task_index: int) -> str:
        """The text of a task.

        Raises:
            MetadataError: no task has that number; the message says which numbers exist.
        """
        position = int(np.searchsorted(self.index, task_index))
        if position >= len(self.index) or int(self.index[position]) != task_index:
            known = "none" if not len(self) else f"{len(self)} tasks, task_index {int(self.index[0])}..{int(self.index[-1])}"
            raise MetadataError(f"{TASKS_PATH} has no row with task_index {task_index} (it has {known}); it is older than the data")
        return self.texts[position]


def read_tasks(store: Store) -> Tasks:
    """Reads ``meta/tasks.parquet``, whichever way pandas stored the text: named index, unnamed index, or plain column.

    Raises:
        MetadataError: missing, unreadable, without a text column, or one task_index with two texts.
    """
    source = ParquetSource(store, TASKS_PATH)
    footer = source.footer()
    with source.opened(footer) as file:
        names = source.column_names(file)
        wanted = ["task_index", _text_column(file.schema_arrow, names, source)]
        source.check_columns(names, wanted)
        check_read_size(footer, range(len(footer.groups)), wanted, source.where)
        with source.faults():
            table = file.read(columns=wanted, use_threads=False)
    column = wanted[1]
    numbers = integer_column(table, "task_index", source)
    texts = python_values(table.column(column), column, lambda message: source.make_error(f"{source.where}: {message}"))
    known: dict[int, str] = {}
    for number, text in zip(numbers.tolist(), texts, strict=True):
        if not isinstance(text, str):
            raise MetadataError(f"{source.where}: task_index {number} has the text {text!r} in column {column}, expected a string")
        if known.setdefault(number, text) != text:
            raise MetadataError(f"{source.where}: task_index {number} has two texts, {known[number]!r} and {text!r}")
    order = sorted(known)
    return Tasks(np.array(order, dtype=np.int64), tuple(known[number] for number in order))


def _text_column(schema: pa.Schema, names: list[str], source: ParquetSource) -> str:
    index = _pandas_index(schema)
    for name in ("task", "__index_level_0__", *index):
        if name in names and _is_text(schema.field(name).type):
            return name
    texts = [name for name in names if _is_text(schema.field(name).type)]
    if len(texts) != 1:
        raise MetadataError(f"{source.where} has no column 'task' with the text of each task; it has {', '.join(names)}")
    return texts[0]


def _pandas_index(schema: pa.Schema) -> list[str]:
    """Index columns that pandas noted as JSON; anything odd in that note is ignored."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        columns = noted.get("index_columns", []) if isinstance(noted, dict) else []
    except (ValueError, RecursionError):
        return []
    return [name for name in cast("list[Any]", columns) if isinstance(name, str)] if isinstance(columns, list) else []


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def read_stats(store: Store) -> Stats:
    """Reads ``meta/stats.json``; a dataset without it gives an empty mapping.

    Raises:
        MetadataError: not JSON, or a value that is not made of numbers; the message names it.
    """
    try:
        raw = read_json(store, STATS_PATH)
    except ObjectNotFoundError:
        return {}
    if not isinstance(raw, dict):
        raise MetadataError(f"{store.url}: {STATS_PATH} holds a {type(raw).__name__}, expected an object")
    stats: dict[str, Mapping[str, NDArray[np.float64]]] = {}
    for feature, values in cast("dict[str, Any]", raw).items():
        if not isinstance(values, dict):
            raise MetadataError(f"{store.url}: {STATS_PATH}: {feature!r} is a {type(values).__name__}, expected an object of statistics")
        stats[feature] = {name: _numbers(value, feature, name, store.url) for name, value in cast("dict[str, Any]", values).items()}
    return stats


def _numbers(value: object, feature: str, name: str, where: str) -> NDArray[np.float64]:
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MetadataError(f"{where}: {STATS_PATH}: {feature}.{name} is not made of numbers of one shape") from error
