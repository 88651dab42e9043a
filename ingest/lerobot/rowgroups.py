"""What the footers of data files tell: which row groups may hold an episode, and how many rows of it."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import pyarrow.parquet as pq

from ingest.errors import DatasetError, RowsError
from ingest.lerobot.parquet import ParquetSource
from ingest.storage.base import Store


class FooterCache:
    """Footers of the last data files read. Thread-safe; holds no open file.

    Args:
        store: the dataset.
        limit: footers kept.
    """

    def __init__(self, store: Store, limit: int = 64) -> None:
        self._store = store
        self._limit = max(1, limit)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, make_error: Callable[[str], DatasetError] | None = None) -> pq.FileMetaData:
        """The footer of a data file.

        Args:
            path: relative to the store's root.
            make_error: builds the error; by default a ``RowsError`` that names the file.

        Raises:
            RowsError: the file is missing, or has no readable footer.
        """
        with self._lock:
            if path in self._footers:
                self._footers.move_to_end(path)
                return self._footers[path]

        def fail(message: str) -> RowsError:
            return RowsError(message, dataset=self._store.url, file=path)

        footer = ParquetSource(self._store, path, make_error or fail).footer()
        with self._lock:
            self._footers[path] = footer
            while len(self._footers) > self._limit:
                self._footers.popitem(last=False)
        return footer


def candidate_groups(footer: pq.FileMetaData, episode: int) -> list[int]:
    """Row groups whose ``episode_index`` range holds ``episode``; groups without statistics stay candidates."""
    groups: list[int] = []
    for group in range(footer.num_row_groups):
        low_high = _episode_range(footer, group)
        if footer.row_group(group).num_rows and (low_high is None or low_high[0] <= episode <= low_high[1]):
            groups.append(group)
    return groups


def rows_by_episode(footer: pq.FileMetaData) -> dict[int, int] | None:
    """Rows of each episode when every row group holds one episode and says so; else None."""
    counts: dict[int, int] = {}
    for group in range(footer.num_row_groups):
        rows = footer.row_group(group).num_rows
        low_high = _episode_range(footer, group)
        if rows and (low_high is None or low_high[0] != low_high[1]):
            return None
        if rows and low_high:
            counts[low_high[0]] = counts.get(low_high[0], 0) + rows
    return counts


def _episode_range(footer: pq.FileMetaData, group: int) -> tuple[int, int] | None:
    """Smallest and largest ``episode_index`` of a row group, or None when the footer does not say."""
    columns = footer.row_group(group)
    for position in range(columns.num_columns):
        column = columns.column(position)
        if column.path_in_schema == "episode_index":
            statistics = column.statistics if column.is_stats_set else None
            if statistics is None or not statistics.has_min_max:
                return None
            low, high = statistics.min, statistics.max
            return (low, high) if isinstance(low, int) and isinstance(high, int) else None
    return None
