"""The parquet rows of one episode: pruned by row group, projected, and checked against the metadata."""

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import DatasetError, RowsError, SelectionError
from ingest.lerobot.columns import Numbers, item_value, numeric_values
from ingest.lerobot.findings import Finding
from ingest.lerobot.footercache import FooterCache
from ingest.lerobot.images import decode_cell
from ingest.lerobot.info import Info
from ingest.lerobot.parquet import ParquetSource, check_read_size, python_values
from ingest.lerobot.relocate import find_rows, missing_rows, moved_findings
from ingest.lerobot.source import Source
from ingest.storage.base import Store

KEY_COLUMNS = ("episode_index", "frame_index", "index")

_BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Failure:
    """Builds errors about one data file, each naming dataset, file and episode. A class, so that it pickles."""

    url: str
    path: str
    episode: int

    def __call__(self, message: str) -> RowsError:
        if message.startswith(self.url):
            text = f"{message} (needed by episode {self.episode})"
        else:
            text = f"{self.url}: {self.path}: episode {self.episode}: {message}"
        return RowsError(text, dataset=self.url, episode=self.episode, file=self.path)


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """The rows of one episode, in frame order. Row k is frame k.

    Attributes:
        episode: episode index.
        length: N, rows.
        keys: the columns, in the order asked (by default that of ``info.json``).
        numbers: columns of fixed shape, (N, *shape) or (N,): float32, int64 or bool.
        others: columns with nulls, text, rows of varying size, language or pictures, as Arrow.
        warnings: what was repaired to read them.
    """

    episode: int
    length: int
    keys: tuple[str, ...]
    numbers: Mapping[str, Numbers]
    others: Mapping[str, pa.ChunkedArray]
    warnings: tuple[Finding, ...]
    _info: Info
    _store: Store
    _fail: _Failure

    @property
    def nbytes(self) -> int:
        """Bytes held, for budgets."""
        return sum(values.nbytes for values in self.numbers.values()) + sum(column.nbytes for column in self.others.values())

    def value(self, key: str, frame: int) -> object:
        """One cell as an item holds it; arrays are copies.

        Returns:
            An array or NumPy scalar for numbers, text, None, or the Python value of anything else. Pictures come from ``image``.
        """
        if key in self.numbers:
            return self.numbers[key][frame].copy()
        return item_value(self._cell(key, frame))

    def _cell(self, key: str, frame: int) -> object:
        return python_values(self.others[key].slice(frame, 1), key, self._fail)[0]

    def gather(self, key: str, frames: NDArray[np.int64]) -> Numbers | list[object]:
        """Cells of several frames, repeats allowed: a new array (T, *shape) for numbers, else a list of values."""
        if key in self.numbers:
            return self.numbers[key][frames]
        return [self.value(key, int(frame)) for frame in frames]

    def image(self, key: str, frame: int) -> NDArray[np.uint8] | NDArray[np.uint16]:
        """Decodes one picture of an image feature.

        Returns:
            uint8[H, W, 3], or uint16[H, W, 1] for depth.

        Raises:
            RowsError: the cell holds no picture of the declared size.
        """

        def fail(message: str) -> DatasetError:
            return self._fail(f"frame {frame}: {message}")

        return decode_cell(self._cell(key, frame), self._info.feature(key), self._store, fail)


class RowReader:
    """Reads episodes of one source and keeps the footers of the last files.

    Thread-safe; holds no open file.

    Args:
        source: the dataset.
        cached_footers: footers kept.
        normalise: brings a table of one file to types that go together with those of other files; it is asked only for an
            episode whose files disagree. None leaves that to Arrow.
    """

    def __init__(self, source: Source, *, cached_footers: int = 64, normalise: Callable[[pa.Table], pa.Table] | None = None) -> None:
        self._source = source
        self._normalise = normalise
        self._footers = FooterCache(source.store, cached_footers)

    def read(self, episode: int, columns: Sequence[str] | None = None) -> EpisodeRows:
        """Reads one episode.

        Args:
            episode: episode index.
            columns: features to read; None reads every feature that is not a video.

        Raises:
            SelectionError: no such episode or column.
            RowsError: rows that are missing, foreign, out of order or unreadable; the message names file and episode.
        """
        source = self._source
        row = source.episodes.row(episode)
        keys = _projection(source.info, columns)
        length, start = int(source.episodes.length[row]), int(source.episodes.dataset_from[row])
        paths = source.data_files(episode)
        warnings: tuple[Finding, ...] = ()
        parts = [(path, self._part(path, episode, keys)) for path in paths]
        if sum(part.num_rows for _, part in parts) != length and episode not in source.moved:
            found = find_rows(source, episode, self._footers)
            if found is None:
                raise missing_rows(source, episode, paths, sum(part.num_rows for _, part in parts))
            warnings = tuple(moved_findings(source, {episode: found}))
            parts = [(path, self._part(path, episode, keys)) for path in found]
        if sum(part.num_rows for _, part in parts) != length:
            raise missing_rows(source, episode, paths, sum(part.num_rows for _, part in parts))
        fail = _Failure(source.store.url, parts[0][0], episode)
        _check_order(parts, length, start, fail)
        numbers: dict[str, Numbers] = {}
        others: dict[str, pa.ChunkedArray] = {}
        for key in keys:
            values = [
                numeric_values(part.column(key), source.info.features[key], _Failure(source.store.url, path, episode))
                for path, part in parts
            ]
            arrays = [array for array in values if array is not None]
            if len(arrays) == len(values):
                numbers[key] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)  # type: ignore[assignment]
            else:
                tables = [part.select([key]) for _, part in parts]
                if self._normalise is not None and any(table.schema.types != tables[0].schema.types for table in tables):
                    tables = [self._normalise(table) for table in tables]
                others[key] = _join(tables, key, fail)
        return EpisodeRows(episode, length, keys, numbers, others, warnings, source.info, source.store, fail)

    def _part(self, path: str, episode: int, keys: Sequence[str]) -> pa.Table:
        """The rows of ``episode`` in one file, in file order."""
        make_error = _Failure(self._source.store.url, path, episode)
        footer = self._footers.get(path, make_error)
        file = ParquetSource(self._source.store, path, make_error)
        columns = list(dict.fromkeys((*keys, *KEY_COLUMNS)))
        with file.opened(footer) as opened:
            file.check_columns(file.column_names(opened), columns)
            groups = footer.groups.candidates(episode)
            check_read_size(footer, groups, columns, file.where, _BATCH_ROWS)
            pieces = [
                piece for group in groups for piece in _filtered(file, opened, group, int(footer.groups.rows[group]), columns, episode)
            ]
            with file.faults():
                return pa.concat_tables(pieces) if pieces else opened.schema_arrow.empty_table().select(columns)


def read_rows(source: Source, episode: int, columns: Sequence[str] | None = None) -> EpisodeRows:
    """Reads one episode; ``RowReader`` is cheaper for many. Arguments and errors are those of ``RowReader.read``."""
    return RowReader(source).read(episode, columns)


def _projection(info: Info, columns: Sequence[str] | None) -> tuple[str, ...]:
    stored = tuple(key for key, feature in info.features.items() if not feature.is_video)
    if columns is None:
        return stored
    wrong = [key for key in columns if key not in stored]
    if wrong:
        raise SelectionError(f"columns {', '.join(map(repr, wrong))} are not stored in the data files; stored are {', '.join(stored)}")
    return tuple(dict.fromkeys(columns))


def _filtered(file: ParquetSource, opened: pq.ParquetFile, group: int, rows: int, columns: list[str], episode: int) -> Iterator[pa.Table]:
    """Rows of ``episode`` in one row group; large groups are walked in batches, so that memory stays bounded."""
    if rows <= 2 * _BATCH_ROWS:
        with file.faults():
            tables = iter([opened.read_row_group(group, columns=columns, use_threads=False)])
    else:
        tables = file.batches(opened, group, columns, _BATCH_ROWS)
    for table in tables:
        with file.faults():
            kept = table.select(columns).filter(pc.equal(table.column("episode_index"), episode))  # type: ignore[attr-defined]
        if kept.num_rows:
            yield kept


def _check_order(parts: Sequence[tuple[str, pa.Table]], length: int, start: int, fail: Callable[[str], RowsError]) -> None:
    columns = {name: np.concatenate([_integers(part.column(name), name, fail) for _, part in parts]) for name in ("frame_index", "index")}
    expected = {"frame_index": np.arange(length, dtype=np.int64), "index": np.arange(start, start + length, dtype=np.int64)}
    for name, values in columns.items():
        bad = np.flatnonzero(values != expected[name])
        if bad.size:
            row = int(bad[0])
            rule = "0..n−1 in file order" if name == "frame_index" else "dataset_from_index + frame_index"
            raise fail(f"row {row} of the episode: column {name} is {int(values[row])}, expected {int(expected[name][row])} ({rule})")


def _integers(column: pa.ChunkedArray, name: str, fail: Callable[[str], RowsError]) -> NDArray[np.int64]:
    if column.null_count or not pa.types.is_integer(column.type):
        raise fail(f"column {name} has type {column.type} with {column.null_count} nulls, expected whole numbers")
    return np.asarray(column.to_numpy()).astype(np.int64)


def _join(tables: Sequence[pa.Table], key: str, fail: Callable[[str], RowsError]) -> pa.ChunkedArray:
    try:
        return pa.concat_tables(tables, promote_options="permissive").column(key)
    except pa.ArrowException as error:
        types = ", ".join(dict.fromkeys(str(table.schema.field(key).type) for table in tables))
        raise fail(f"column {key} has types that do not go together in the files of the episode: {types}") from error
