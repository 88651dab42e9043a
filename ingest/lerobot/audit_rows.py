"""Every row of every data file against the metadata, in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.errors import DatasetError, ReelrayError, RowsError
from ingest.lerobot.columns import numeric_values
from ingest.lerobot.episodes import group_files
from ingest.lerobot.findings import Finding, Findings, Severity
from ingest.lerobot.images import decode_cell
from ingest.lerobot.info import Feature
from ingest.lerobot.parquet import ParquetSource, check_read_size, python_values
from ingest.lerobot.relocate import data_paths, moved_findings
from ingest.lerobot.source import Source

# pyarrow carries no type information.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

_BATCH_ROWS = 1 << 16
_KEYS = ("episode_index", "frame_index", "index", "task_index", "timestamp")


@dataclass(slots=True)
class ColumnSums:
    """Running statistics of one numeric column, per element."""

    count: int = 0
    total: Any = 0.0
    low: Any = np.inf
    high: Any = -np.inf

    def add(self, values: NDArray[Any]) -> None:
        flat = values.reshape(len(values), -1).astype(np.float64)
        self.count += len(flat)
        self.total = self.total + flat.sum(axis=0)
        self.low = np.minimum(self.low, flat.min(axis=0))
        self.high = np.maximum(self.high, flat.max(axis=0))


@dataclass(slots=True)
class RowAudit:
    """The state of a walk over all data files.

    Attributes:
        source: the dataset.
        findings: where faults go.
        tolerance_s: most that a row's timestamp may lie beside frame_index / fps.
        time_severity: severity of a deviation above it.
        sums: statistics by feature.
        rows, files: walked so far.
    """

    source: Source
    findings: Findings
    tolerance_s: float
    time_severity: Severity
    sums: dict[str, ColumnSums] = field(default_factory=dict[str, ColumnSums])
    rows: int = 0
    files: int = 0
    _seen: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _first_place: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    _walked: list[str] = field(default_factory=list[str])
    _worst_time: Finding | None = None
    _worst_deviation: float = 0.0
    _reported: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _unread: set[str] = field(default_factory=set[str])
    _spread: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def run(self) -> Iterator[str]:
        """Walks all files, yielding each path before it is read; findings are complete at the end."""
        table = self.source.episodes
        self._seen = np.zeros(len(table), dtype=np.int64)
        self._first_place = np.full(len(table), -1, dtype=np.int32)
        pairs, _ = group_files(table.data_chunk, table.data_file)
        listed = {self.source.info.data_file(int(chunk), int(file)) for chunk, file in pairs}
        for path in [*sorted(listed), *(path for path in data_paths(self.source) if path not in listed)]:
            yield path
            self._walked.append(path)
            self._file(path, orphan=path not in listed)
            if self._worst_time is not None:
                self.findings.add(self._worst_time)
                self._worst_time, self._worst_deviation = None, 0.0
        self._counts()
        self._statistics()

    def _once(self, code: str, place: str) -> bool:
        """Whether this is the first fault of its kind at this place."""
        if (code, place) in self._reported:
            return False
        self._reported.add((code, place))
        return True

    def _file(self, path: str, *, orphan: bool) -> None:
        def fail(message: str) -> RowsError:
            return RowsError(message, file=path)

        file = ParquetSource(self.source.store, path, fail)
        before = int(self._seen.sum())
        try:
            footer = file.footer()
            with file.opened(footer) as opened:
                self.files += 1
                names = file.column_names(opened)
                file.check_columns(names, _KEYS[:3])
                columns = self._readable(path, names, opened.schema_arrow, "warning" if orphan else "error")
                for group in range(len(footer.groups)):
                    check_read_size(footer, [group], columns, file.where, _BATCH_ROWS)
                    for batch in file.batches(opened, group, columns, _BATCH_ROWS):
                        self._batch(path, batch)
                    self._images(file, opened, group, names)
        except ReelrayError as error:
            self._unreadable(path, str(error), orphan)
            return
        if orphan and int(self._seen.sum()) == before:
            self.findings.add(
                Finding("orphan_data_file", "info", f"{path} is named by no episode and holds no row of a listed episode", file=path)
            )

    def _unreadable(self, path: str, message: str, orphan: bool) -> None:
        self._unread.add(path)
        episodes = self._listed_at(path)
        touched = f"; it should hold the rows of episodes {_shown(episodes)}" if episodes.size else "; no episode names it"
        self.findings.add(
            Finding(
                code="data_file_unreadable",
                severity="warning" if orphan else "error",
                message=f"{message}{touched}",
                file=path,
                episode=int(episodes[0]) if episodes.size else None,
                expected=None if orphan else "a complete parquet file",
            )
        )

    def _listed_at(self, path: str) -> NDArray[np.int64]:
        table = self.source.episodes
        pairs, number = group_files(table.data_chunk, table.data_file)
        wanted = [position for position, (chunk, file) in enumerate(pairs) if self.source.info.data_file(int(chunk), int(file)) == path]
        return table.episode_index[np.isin(number, wanted)]

    def _readable(self, path: str, names: list[str], schema: pa.Schema, severity: Severity) -> list[str]:
        """Columns to walk: keys and numeric features that are there; says which declared ones are not."""
        declared = {key: feature for key, feature in self.source.info.features.items() if not feature.is_video}
        missing = [key for key in declared if key not in names]
        if missing:
            self.findings.add(
                Finding(
                    code="column_missing",
                    severity=severity,
                    message=f"{path} lacks the declared columns {', '.join(missing)}; it has {', '.join(names[:40])}",
                    file=path,
                    column=missing[0],
                    found=", ".join(names[:40]),
                    expected=", ".join(missing),
                )
            )
        extra = [name for name in names if name not in declared]
        if extra:
            self.findings.add(
                Finding("column_undeclared", "info", f"{path} has columns that info.json does not declare: {', '.join(extra)}", file=path)
            )
        columns = [key for key, feature in declared.items() if key in names and feature.is_numeric]
        for key in [key for key in columns if pa.types.is_null(schema.field(key).type)]:
            self.findings.add(Finding("column_null", "info", f"{path}: column {key} holds nulls only", file=path, column=key))
        return list(dict.fromkeys([*(key for key in _KEYS if key in names), *columns]))

    def _batch(self, path: str, batch: pa.Table) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows

        def fail(message: str) -> DatasetError:
            return RowsError(f"{path}: {message}", file=path)

        values: dict[str, NDArray[Any]] = {}
        for key in batch.column_names:
            feature = self.source.info.features.get(key) or Feature(key, "int64", (1,), (), False, {})
            try:
                array = numeric_values(batch.column(key), feature, fail)
            except DatasetError as error:
                if self._once("column_mismatch", f"{path} {key}"):
                    self.findings.add(Finding("column_mismatch", "error", str(error), file=path, column=key))
                continue
            if array is not None:
                values[key] = array
        if "episode_index" not in values or "frame_index" not in values or "index" not in values:
            raise RowsError(f"{path}: episode_index, frame_index and index must hold a whole number in every row", file=path)
        episodes = values["episode_index"]
        known = np.isin(episodes, self.source.episodes.episode_index)
        for key, array in values.items():
            self._numbers(path, key, array[known], episodes[known], values["frame_index"][known])
        borders = np.concatenate([[0], np.flatnonzero(np.diff(episodes)) + 1, [len(episodes)]])
        for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            self._run(path, int(episodes[start]), {key: array[start:stop] for key, array in values.items() if key in _KEYS})

    def _numbers(self, path: str, key: str, array: NDArray[Any], episodes: NDArray[Any], frames: NDArray[Any]) -> None:
        if not len(array):
            return
        if array.dtype.kind == "f":
            finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
            bad = np.flatnonzero(~finite)
            if bad.size and self._once("not_finite", f"{path} {key}"):
                row = int(bad[0])
                self.findings.add(
                    Finding(
                        code="not_finite",
                        severity="error",
                        message=(
                            f"{path}: episode {int(episodes[row])}, frame {int(frames[row])}: column {key} holds a number that is not "
                            "finite; training on it gives a loss that is not a number"
                        ),
                        file=path,
                        episode=int(episodes[row]),
                        column=key,
                        found=str(np.asarray(array[row]).tolist())[:200],
                        expected="finite numbers",
                    )
                )
            array = array[finite]
        if len(array):
            self.sums.setdefault(key, ColumnSums()).add(array)

    def _run(self, path: str, episode: int, rows: dict[str, NDArray[Any]]) -> None:
        """Consecutive rows of one episode."""
        table = self.source.episodes
        row = int(np.searchsorted(table.episode_index, episode))
        count = len(rows["frame_index"])
        if row >= len(table) or int(table.episode_index[row]) != episode:
            if self._once("orphan_rows", f"{path} {episode}"):
                self.findings.add(
                    Finding(
                        code="orphan_rows",
                        severity="info",
                        message=f"{path} holds rows of episode {episode}, which meta/episodes does not list; they are never read",
                        file=path,
                        episode=episode,
                        column="episode_index",
                        found=str(episode),
                        expected=table.describe(),
                    )
                )
            return
        self._note_place(row, episode)
        before = int(self._seen[row])
        self._seen[row] += count
        frames, start = rows["frame_index"], int(table.dataset_from[row])
        self._expect(path, episode, "frame_index", frames, np.arange(before, before + count), "frames counted from 0")
        self._expect(path, episode, "index", rows["index"], start + frames, "dataset_from_index + frame_index")
        if "task_index" in rows:
            self._tasks(path, episode, rows["task_index"])
        if "timestamp" in rows:
            self._times(path, episode, frames, rows["timestamp"])

    def _note_place(self, row: int, episode: int) -> None:
        current, first = len(self._walked) - 1, int(self._first_place[row])
        if first < 0:
            self._first_place[row] = current
        elif first != current:
            places = self._spread.setdefault(episode, [self._walked[first]])
            if places[-1] != self._walked[current]:
                places.append(self._walked[current])

    def _expect(self, path: str, episode: int, column: str, found: NDArray[Any], expected: NDArray[Any], rule: str) -> None:
        bad = np.flatnonzero(found != expected)
        if not bad.size or not self._once(column, str(episode)):
            return
        number, table = int(bad[0]), self.source.episodes
        value, want = int(found[number]), int(expected[number])
        other = np.flatnonzero((table.dataset_from <= value) & (value < table.dataset_to) & (table.episode_index != episode))
        owner = f"; index {value} belongs to episode {int(table.episode_index[other[0]])}" if column == "index" and other.size else ""
        self.findings.add(
            Finding(
                code="frame_order" if column == "frame_index" else "duplicate_index" if owner else "index_mismatch",
                severity="error",
                message=f"{path}: episode {episode}: column {column} is {value}, expected {want} ({rule}){owner}",
                file=path,
                episode=episode,
                column=column,
                found=str(value),
                expected=str(want),
            )
        )

    def _tasks(self, path: str, episode: int, numbers: NDArray[Any]) -> None:
        tasks = self.source.tasks
        unknown = np.setdiff1d(numbers, tasks.index)
        if unknown.size and self._once("task_unknown", str(int(unknown[0]))):
            self.findings.add(
                Finding(
                    code="task_unknown",
                    severity="error",
                    message=(
                        f"{path}: episode {episode}: column task_index is {int(unknown[0])}, but meta/tasks.parquet has "
                        f"{len(tasks)} tasks without that number; it is older than the data"
                    ),
                    file=path,
                    episode=episode,
                    column="task_index",
                    found=str(int(unknown[0])),
                    expected=", ".join(str(number) for number in tasks.index[:20].tolist()) or "a task",
                )
            )

    def _times(self, path: str, episode: int, frames: NDArray[Any], times: NDArray[Any]) -> None:
        expected = frames / self.source.info.fps
        # A float32 second holds so many digits only; its own rounding is no fault of the recording.
        rounding = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
        deviation = np.abs(times.astype(np.float64) - expected)
        late = np.flatnonzero(~(deviation <= self.tolerance_s + rounding))
        if not late.size:
            return
        sizes = np.nan_to_num(deviation, nan=np.inf)
        worst = int(np.argmax(sizes))
        if float(sizes[worst]) <= self._worst_deviation:
            return
        self._worst_deviation = float(sizes[worst])
        self._worst_time = Finding(
            code="timestamps_off_grid",
            severity=self.time_severity,
            message=(
                f"{path}: column timestamp is up to {deviation[worst]:.4g} s off: episode {episode}, frame {int(frames[worst])}: "
                f"{float(times[worst]):.6g} s, expected {float(expected[worst]):.6g} s (frame_index / fps) within {self.tolerance_s:g} s; "
                "pictures belong to rows by position, so reading is exact"
            ),
            file=path,
            episode=episode,
            column="timestamp",
            found=f"{float(times[worst]):.6g}",
            expected=f"{float(expected[worst]):.6g}",
        )

    def _images(self, file: ParquetSource, opened: pq.ParquetFile, group: int, names: list[str]) -> None:
        """Decodes the first picture of each image feature in one row group."""

        def fail(message: str) -> DatasetError:
            return RowsError(f"{file.path}: row group {group}: {message}", file=file.path)

        for key in (key for key in self.source.info.images if key in names):
            try:
                for batch in islice(file.batches(opened, group, [key], 1), 1):
                    (cell,) = python_values(batch.column(key), key, fail)
                    decode_cell(cell, self.source.info.features[key], self.source.store, fail)
            except ReelrayError as error:
                if self._once("image_unreadable", f"{file.path} {key}"):
                    self.findings.add(Finding("image_unreadable", "error", str(error), file=file.path, column=key))

    def _counts(self) -> None:
        table = self.source.episodes
        places = {episode: tuple(paths) for episode, paths in self._spread.items()}
        numbers = {path: number for number, path in enumerate(self._walked)}
        pairs, pair = group_files(table.data_chunk, table.data_file)
        listed_place = np.array([numbers[self.source.info.data_file(int(chunk), int(file))] for chunk, file in pairs])[pair]
        for row in np.flatnonzero((self._first_place >= 0) & (self._first_place != listed_place)):
            places.setdefault(int(table.episode_index[row]), (self._walked[int(self._first_place[row])],))
        complete = self._seen == table.length
        moved = {episode: paths for episode, paths in sorted(places.items()) if complete[table.row(episode)]}
        self.findings.extend(moved_findings(self.source, moved))
        for row in np.flatnonzero(self._seen != table.length):
            episode, listed = int(table.episode_index[row]), self.source.listed_data_file(int(table.episode_index[row]))
            if listed in self._unread:
                continue
            self.findings.add(
                Finding(
                    code="row_count",
                    severity="error",
                    message=(
                        f"{listed}: episode {episode}: column length of {table.meta_paths[int(table.meta_file[row])]} is "
                        f"{int(table.length[row])}, but the data files hold {int(self._seen[row])} rows of it"
                    ),
                    file=listed,
                    episode=episode,
                    column="length",
                    found=str(int(self._seen[row])),
                    expected=str(int(table.length[row])),
                )
            )

    def _statistics(self) -> None:
        """``meta/stats.json`` against the rows; only numbers that training normalises by are compared."""
        for key, stats in self.source.stats.items():
            sums = self.sums.get(key)
            feature = self.source.info.features.get(key)
            if feature is None:
                self.findings.add(
                    Finding("stats_undeclared", "info", f"meta/stats.json has {key}, which info.json does not declare", column=key)
                )
            if sums is None or not sums.count:
                continue
            real = {"min": sums.low, "max": sums.high, "mean": sums.total / sums.count}
            spread = np.maximum(np.abs(sums.high - sums.low), 1e-6)
            for name, values in real.items():
                stated = stats.get(name)
                if stated is None:
                    continue
                flat, want = np.asarray(stated, dtype=np.float64).reshape(-1), np.asarray(values).reshape(-1)
                if flat.shape == want.shape and bool(np.all(np.abs(flat - want) <= 0.01 * spread + 1e-5 * np.abs(want))):
                    continue
                self.findings.add(
                    Finding(
                        code="stats_mismatch",
                        severity="warning",
                        message=(
                            f"meta/stats.json: {key}.{name} is {_rounded(flat)}, the rows give {_rounded(want)}; "
                            "normalisation would be off, recompute the statistics"
                        ),
                        file="meta/stats.json",
                        column=key,
                        found=_rounded(flat),
                        expected=_rounded(want),
                    )
                )
                break


def _rounded(values: NDArray[Any]) -> str:
    return "[" + ", ".join(f"{value:.5g}" for value in values[:8].tolist()) + (", …]" if len(values) > 8 else "]")


def _shown(episodes: NDArray[np.int64]) -> str:
    return ", ".join(str(int(episode)) for episode in episodes[:8]) + (f" … {int(episodes[-1])}" if len(episodes) > 8 else "")
