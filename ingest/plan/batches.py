"""The batches of one rank: its workers' orders, taken in turns, with the tail that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ingest.errors import CursorError, PlanError
from ingest.plan.order import Admission, Order, Span
from ingest.plan.pool_order import PoolOrder
from ingest.plan.segment import SegmentPlan
from ingest.plan.turns import UNLIMITED, Turns
from ingest.plan.units import Units

_WINDOW_SAMPLES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch of one rank; all samples come from one worker. Arrays have one row per sample.

    Attributes:
        step: batch number inside the rank's segment, from 0.
        worker: consumer inside the rank.
        unit: int64[B], unit numbers.
        frame: int64[B], frame numbers inside the episode.
        is_pad: bool[B], repeats that fill the batch; they are not delivered.
        position: int64[B], sample numbers in the rank's order, repeats included.
        entry: int64[B], row of the worker's ``order.pieces``; -1 for the filler of a rank that owns nothing.
        cycle: int64[B], pass over the data (``tail='loop'`` and weighted mixtures), otherwise 0.
    """

    step: int
    worker: int
    unit: NDArray[np.int64]
    frame: NDArray[np.int64]
    is_pad: NDArray[np.bool_]
    position: NDArray[np.int64]
    entry: NDArray[np.int64]
    cycle: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.unit)


@dataclass(frozen=True, slots=True, eq=False)
class RankTable:
    """Consecutive batches of a rank as columns: ``Batch`` with a step and a worker (int64) for every row."""

    step: NDArray[np.int64]
    worker: NDArray[np.int64]
    unit: NDArray[np.int64]
    frame: NDArray[np.int64]
    is_pad: NDArray[np.bool_]
    position: NDArray[np.int64]
    entry: NDArray[np.int64]
    cycle: NDArray[np.int64]

    def take(self, rows: NDArray[np.bool_]) -> RankTable:
        """The rows under a mask."""
        return RankTable(**{name: getattr(self, name)[rows] for name in self.__slots__})


class RankPlan:
    """The batches of one rank in one segment.

    Attributes:
        rank: the rank.
        steps: its batches; under ``tail='loop'``, where batches never end, those of one epoch of the longest rank.
        orders: the order of each worker.
    """

    def __init__(self, segment: SegmentPlan, rank: int, start_step: int) -> None:
        self._segment = segment
        self._size = segment.topology.batch_size
        self._loops = segment.settings.tail == "loop"
        self.rank: int = rank
        self.start_step: int = start_step
        self.orders: list[Order] = segment.orders(rank)
        self.turns: Turns = segment.turns(self.orders)
        self._full = segment.settings.tail != "exact"
        self.steps: int = segment.common_steps if self._full else self.turns.total

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self._size

    @property
    def units(self) -> Units:
        """The unit table of the plan."""
        return self._segment.pieces.units

    @property
    def workers(self) -> int:
        """Consumers of the rank, at least 1."""
        return len(self.orders)

    @property
    def frames(self) -> int:
        """Samples that the rank delivers in its steps, repeats not counted."""
        return int(self._before(self.steps))

    def _before(self, step: int) -> int:
        counts = self.turns.counts(step) * self._size
        return sum(min(int(count), len(order)) for count, order in zip(counts, self.orders, strict=True))

    def admission(self, worker: int = 0, start: int = 0, stop: int | None = None) -> Admission:
        """What a worker's reader must fetch for its samples ``start..stop``, in order; see ``Order.admission``."""
        return self.orders[worker].admission(start, stop)

    def step_of(self, worker: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Step of the rank at which a worker's samples are delivered, int64 like ``samples``; -1 stays -1."""
        return np.where(samples < 0, -1, self.turns.step_of(worker, np.maximum(samples, 0) // self._size))

    def samples_before(self, step: int) -> list[int]:
        """Samples that each worker has delivered when the rank has taken ``step`` batches."""
        return self._segment.delivered_counts(self.orders, step)

    def batches(self, from_step: int | None = None, stop: int | None = None) -> Iterator[Batch]:
        """The batches from a step on.

        Args:
            from_step: first batch number; default the one that the cursor stands at.
            stop: end (exclusive); default ``steps``, or none at all under ``tail='loop'``.
        """
        step = self.start_step if from_step is None else from_step
        if step < 0:
            raise PlanError(f"batch numbers begin at 0, found {step}")
        end = UNLIMITED if self._loops else self.steps
        end = end if stop is None else min(end, stop)
        window = max(1, _WINDOW_SAMPLES // self._size)
        while step < end:
            until = min(step + window, end)
            table = self.table(step, until)
            edges = np.searchsorted(table.step, np.arange(step, until + 1))
            for number, first, last in zip(range(step, until), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                rows = slice(first, last)
                yield Batch(
                    number,
                    int(table.worker[first]),
                    table.unit[rows],
                    table.frame[rows],
                    table.is_pad[rows],
                    table.position[rows],
                    table.entry[rows],
                    table.cycle[rows],
                )
            step = until

    def table(self, from_step: int, stop: int) -> RankTable:
        """The batches ``from_step..stop`` (``stop`` at most the rank's last) as columns, sorted by step."""
        size, count = self._size, max(stop - from_step, 0)
        real = min(stop, self.turns.total) - from_step
        workers, numbers = self.turns.workers_at(np.arange(from_step, from_step + max(real, 0)))
        owner = np.zeros(count, dtype=np.int64)
        owner[: len(workers)] = workers
        filled = np.zeros((count, size), dtype=np.bool_)
        grids = {name: np.zeros((count, size), dtype=np.int64) for name in ("entry", "unit", "frame", "cycle")}
        if real < count and self._full:
            owner[max(real, 0) :], filler = self.filler
            for name, grid in grids.items():
                grid[max(real, 0) :] = getattr(filler, name)
        present: list[int] = np.unique(workers).tolist()
        for worker in present:
            rows = np.flatnonzero(workers == worker)
            order, first = self.orders[worker], int(numbers[rows[0]]) * size
            span = order.span(first, first + len(rows) * size)
            place = np.arange(len(span))
            filled[rows[place // size], place % size] = True
            for name, grid in grids.items():
                grid[rows[place // size], place % size] = getattr(span, name)
            if len(span) < len(rows) * size and self._full:
                missing = ~filled[rows[-1]]
                for name, grid in grids.items():
                    grid[rows[-1], missing] = getattr(span, name)[-1]
        steps = np.repeat(np.arange(from_step, from_step + count), size)
        start = from_step * size if self._full else self._before(from_step)
        shown = np.ones(count * size, dtype=np.bool_) if self._full else filled.reshape(-1)
        position = start + np.cumsum(shown) - 1
        columns = {name: grid.reshape(-1) for name, grid in grids.items()}
        table = RankTable(step=steps, worker=np.repeat(owner, size), is_pad=~filled.reshape(-1), position=position, **columns)
        return table if self._full else table.take(shown)

    @cached_property
    def filler(self) -> tuple[int, Span]:
        """The worker and the sample that fill batches beyond the rank's own.

        That is the rank's last sample; where it has none, or the sample's episode was skipped, the first frame of a unit
        that is not damaged, with entry -1 and worker 0.
        """
        if self.turns.total:
            worker, number = self.turns.worker_at(self.turns.total - 1)
            order = self.orders[worker]
            last = min((number + 1) * self._size, len(order))
            sample = order.span(last - 1, last)
            if not self._segment.damaged(sample.unit).any():
                return worker, sample
        units = self.units
        usable = np.flatnonzero(units.hi > units.lo)
        unit = usable[np.argsort(self._segment.damaged(usable), kind="stable")[:1]]
        return 0, Span(np.full(1, -1), unit, units.lo[unit], np.zeros(1, dtype=np.int64))

    def pool_state(self, worker: int, step: int) -> bytes | None:
        """State of a worker's coverage pool after ``step`` batches of the rank, at most 32 KiB.

        None for orders that need no state, and where the state would be larger.
        """
        order = self.orders[worker]
        return order.dump_state(self.samples_before(step)[worker]) if isinstance(order, PoolOrder) else None

    def load_pool_state(self, worker: int, state: bytes) -> None:
        """Start a worker's coverage pool from a stored state instead of replaying its draws.

        Raises:
            CursorError: when the state is damaged, belongs to another pool, or the order has no pool.
        """
        order = self.orders[worker]
        if not isinstance(order, PoolOrder):
            raise CursorError(f"worker {worker} of rank {self.rank} has no coverage pool to restore (strategy or skipped episodes)")
        order.load_state(state)
