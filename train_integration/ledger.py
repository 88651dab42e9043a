"""The record of what was delivered: one row per sample, and which rows count.

Ranks send their rows as they deliver them. When a group of ranks starts again from a cursor, the rows that an earlier
attempt delivered beyond that cursor are kept but marked as not committed: they are delivered again, identically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from numpy.typing import NDArray

from actors.resources import beside_caller
from ingest.engine.counters import merge_counts
from ingest.storage.atomic import write_atomic

ORDER_SCHEMA: dict[str, np.dtype[Any]] = {
    "dataset": np.dtype(np.int32),
    "epoch": np.dtype(np.int64),
    "rank": np.dtype(np.int32),
    "worker": np.dtype(np.int32),
    "step": np.dtype(np.int64),
    "position": np.dtype(np.int64),
    "episode_index": np.dtype(np.int64),
    "frame_index": np.dtype(np.int64),
    "index": np.dtype(np.int64),
    "is_pad": np.dtype(np.bool_),
    "committed": np.dtype(np.bool_),
    "t_ns": np.dtype(np.int64),
}
"""Columns of an order file; one ``digest:<camera>`` column (uint64, xxh3-64 of the HWC bytes) per camera follows, and
``digest:messages`` where a recipe renders."""

Rows = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Part:
    attempt: int
    segment: int
    rows: Rows


class OrderRecord:
    """Collects rows of every rank and attempt, and knows how far all ranks have committed."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._attempt = -1
        self._committed_to: list[tuple[int, tuple[int, ...]]] = []  # per attempt start: epoch, batches of each of its segments
        self._next_step: dict[tuple[int, int], int] = {}  # (epoch, rank) of this attempt → batches delivered
        self._finished: dict[tuple[int, int], int] = {}

    def begin(self, epoch: int, batches: Sequence[int]) -> int:
        """Starts an attempt at a cursor and returns its number.

        Args:
            epoch: epoch of the cursor.
            batches: batches that every rank had committed in each topology segment of the epoch, the one that now runs last.
        """
        self._attempt += 1
        self._committed_to.append((epoch, tuple(batches)))
        self._next_step.clear()
        self._finished.clear()
        return self._attempt

    def add(self, attempt: int, segment: int, rank: int, rows: Rows, *, finished_epoch: int | None = None) -> None:
        """Takes rows of whole batches that one rank delivered. Rows of a superseded attempt are kept as history."""
        if len(rows["step"]):
            self._parts.append(_Part(attempt, segment, rows))
            if attempt == self._attempt:
                self._next_step[int(rows["epoch"][-1]), rank] = int(rows["step"][-1]) + 1
        if finished_epoch is not None and attempt == self._attempt:
            self._finished[finished_epoch, rank] = 1

    def committed_batches(self, epoch: int, world_size: int, start: int) -> int | None:
        """Batches of ``epoch`` that every rank has delivered; None when every rank has finished the epoch."""
        open_ranks = [rank for rank in range(world_size) if (epoch, rank) not in self._finished]
        if not open_ranks:
            return None
        return min(self._next_step.get((epoch, rank), start) for rank in open_ranks)

    @property
    def rows(self) -> int:
        """Rows taken so far, replays included."""
        return sum(len(part.rows["step"]) for part in self._parts)

    def last_step(self, epoch: int, start: int) -> int:
        """Batches of ``epoch`` that the longest rank has delivered in this attempt."""
        return max((step for (of, _), step in self._next_step.items() if of == epoch), default=start)

    def columns(self) -> Rows:
        """All rows, ordered by attempt, rank and step, with ``committed`` filled in."""
        parts = sorted(self._parts, key=lambda part: part.attempt)
        if not parts:
            return {name: np.empty(0, dtype) for name, dtype in ORDER_SCHEMA.items()}
        tables: list[Rows] = []
        for part in parts:
            committed = np.ones(len(part.rows["step"]), dtype=np.bool_)
            for later in self._committed_to[part.attempt + 1 :]:
                committed &= _before(part, later)
            tables.append({**part.rows, "committed": committed})
        names = list(dict.fromkeys(name for table in tables for name in table))
        joined = {name: np.concatenate([table[name] for table in tables]) for name in names}
        order = np.lexsort((joined["position"], joined["step"], joined["rank"], joined["epoch"], ~joined["committed"]))
        return {name: values[order] for name, values in joined.items()}


def _before(part: _Part, start: tuple[int, tuple[int, ...]]) -> NDArray[np.bool_]:
    """Which rows of a part lie before the cursor at which a later attempt started."""
    epoch, batches = start
    rows_epoch, step = part.rows["epoch"], part.rows["step"]
    # What was delivered in a segment beyond its last checkpoint is shared again, among other ranks.
    committed = batches[part.segment] if part.segment < len(batches) else 0
    return (rows_epoch < epoch) | ((rows_epoch == epoch) & (step < committed))


def order_table(columns: Rows) -> pa.Table:
    """Arrow table of an order file: the fixed columns in their order, then the digests."""
    digests = sorted(name for name in columns if name.startswith("digest:"))
    names = [name for name in ORDER_SCHEMA if name in columns] + digests
    return pa.table({name: pa.array(columns[name]) for name in names})


def write_order(path: Path, columns: Rows) -> None:
    """Writes an order file as parquet, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(order_table(columns), sink)
    write_atomic(path, sink.getvalue())


class _Ledger:
    """An `OrderRecord` for several ranks, as an actor. Ranks of one worker group join the same attempt."""

    def __init__(self) -> None:
        self._record = OrderRecord()
        self._groups: dict[str, tuple[int, int]] = {}
        self._world_sizes: list[int] = []
        self._counts: dict[str, float] = {}
        self._first_batch_s: float | None = None
        self._attempt = -1
        self._error: Exception | None = None
        self._pids: dict[int, int] = {}
        self._log: list[dict[str, float]] = []
        self._skips: dict[tuple[int, int, int], dict[str, object]] = {}

    def join(self, group: str, world_size: int, epoch: int, segments: tuple[int, ...]) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Attempt number, batches from which the group goes on, and episodes skipped so far.

        Args:
            group: names the worker group, equal on all its ranks.
            world_size: its ranks.
            epoch: epoch of the cursor that the run started with.
            segments: batches committed in each of that cursor's segments.
        """
        if group not in self._groups:
            batches = segments[-1]
            if self._groups:
                _, before = next(reversed(self._groups.values()))
                done = self._record.committed_batches(epoch, world_size, before)
                batches = self._record.last_step(epoch, before) if done is None else done
            self._begin(group, world_size, epoch, (*segments[:-1], batches))
        attempt, batches = self._groups[group]
        return attempt, batches, list(self._skips)

    def begin_group(self, group: str, world_size: int, epoch: int, segments: tuple[int, ...]) -> int:
        """Attempt number of a worker group that goes on from a cursor with that epoch and those batches in its segments."""
        if group not in self._groups:
            self._begin(group, world_size, epoch, segments)
        return self._groups[group][0]

    def _begin(self, group: str, world_size: int, epoch: int, segments: tuple[int, ...]) -> None:
        self._attempt = self._record.begin(epoch, segments)
        self._world_sizes.append(world_size)
        self._groups[group] = (self._attempt, segments[-1] if segments else 0)
        self._error = None

    def started(self, rank: int, pid: int) -> None:
        """Notes the process of a rank."""
        self._pids[rank] = pid

    def progress(self) -> dict[str, Any]:
        """Process of every rank, worker groups so far, ranks of the last one, and rows delivered."""
        return {
            "pids": dict(self._pids),
            "attempts": len(self._groups),
            "world_size": self._world_sizes[-1] if self._world_sizes else 0,
            "rows": self._record.rows,
        }

    def log(self, entry: dict[str, float]) -> None:
        """Takes one line of a training log."""
        self._log.append(entry)

    def training_log(self) -> list[dict[str, float]]:
        """Every line of the training log, replayed steps included."""
        return self._log

    def add_rows(self, attempt: int, segment: int, rank: int, rows: Rows | None, finished_epoch: int | None) -> bool:
        """Takes rows of one rank; ``finished_epoch`` says that the rank has no more of that epoch.

        Returns:
            Whether the rank should go on: False once any rank has met an error that a new start would meet again.
        """
        empty = {"step": np.empty(0, np.int64), "epoch": np.empty(0, np.int64)}
        self._record.add(attempt, segment, rank, empty if rows is None else rows, finished_epoch=finished_epoch)
        return self._error is None

    def fail(self, attempt: int, error: Exception) -> None:
        """Notes an error of a rank; the first one of the present attempt counts.

        A worker group that starts anew clears it. New groups start only after a process was lost, and a process that
        Ray is tearing down beside it may see its memory vanish and report any error on its way out.
        """
        if attempt == self._attempt:
            self._error = self._error or error

    def error(self) -> Exception | None:
        """The first such error, if any."""
        return self._error

    def skipped(self, dataset: int, episode: int, step: int, record: dict[str, object]) -> None:
        """Notes an episode that a rank dropped."""
        self._skips.setdefault((dataset, episode, step), record)

    def finish_rank(self, counts: dict[str, float], first_batch_s: float | None) -> None:
        """Takes a rank's totals."""
        self._counts = dict.fromkeys(counts, 0.0) | self._counts
        merge_counts(self._counts, counts)
        if first_batch_s is not None:
            self._first_batch_s = max(first_batch_s, self._first_batch_s or 0.0)

    def columns(self) -> Rows:
        """All rows; see `OrderRecord.columns`."""
        return self._record.columns()

    def summary(self) -> dict[str, Any]:
        """Totals, time to the first batch, attempts with their ranks, and skipped episodes."""
        return {
            "counts": self._counts,
            "first_batch_s": self._first_batch_s,
            "attempts": len(self._groups),
            "world_sizes": self._world_sizes,
            "skips": list(self._skips),
            "damage": list(self._skips.values()),
        }


def start_ledger(name: str | None = None) -> Any:
    """A ledger actor owned by the calling driver; it reserves no CPU.

    Args:
        name: under which other drivers of the same namespace find it with `ray.get_actor`.
    """
    options = beside_caller("ledger")
    return ray.remote(_Ledger).options(**options | ({} if name is None else {"name": name})).remote()
