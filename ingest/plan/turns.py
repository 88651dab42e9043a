"""Whose batch is next: the workers of a rank take turns, one batch each, and leave after their last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ingest.errors import PlanError

UNLIMITED = 1 << 53
"""Stands for a worker that never runs out of batches."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of the workers of one rank, as arithmetic on the number of batches of each.

    Attributes:
        limits: batches of each worker; ``UNLIMITED`` for one that repeats for ever.
    """

    limits: tuple[int, ...]
    _limits: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    _edges: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    _before: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.limits or min(self.limits) < 0:
            raise PlanError(f"batches per worker must be numbers >= 0, one for each worker, found {list(self.limits)}")
        limits = np.minimum(np.array(self.limits, dtype=np.int64), UNLIMITED)
        # Between two neighbouring edges the set of workers that still take turns is constant.
        edges = np.unique(np.append(limits, 0))
        object.__setattr__(self, "_limits", limits)
        object.__setattr__(self, "_edges", edges)
        object.__setattr__(self, "_before", np.array([int(np.minimum(limits, edge).sum()) for edge in edges], dtype=np.int64))

    @property
    def total(self) -> int:
        """Batches of all workers together."""
        return int(self._before[-1])

    def _round(self, step: int) -> tuple[int, NDArray[np.int64], int]:
        stage = int(np.searchsorted(self._before, step, side="right")) - 1
        active = np.flatnonzero(self._limits > self._edges[stage])
        rounds, turn = divmod(step - int(self._before[stage]), len(active))
        return int(self._edges[stage]) + rounds, active, turn

    def worker_at(self, step: int) -> tuple[int, int]:
        """Worker and number of its batch at a step of the rank, ``0 <= step < total``."""
        number, active, turn = self._round(step)
        return int(active[turn]), number

    def workers_at(self, steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Vectorised ``worker_at``: workers int64[K], batch numbers int64[K]."""
        stages = np.searchsorted(self._before, steps, side="right") - 1
        workers, numbers = np.empty_like(steps), np.empty_like(steps)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            active = np.flatnonzero(self._limits > self._edges[stage])
            rounds, turn = np.divmod(steps[here] - self._before[stage], len(active))
            workers[here], numbers[here] = active[turn], self._edges[stage] + rounds
        return workers, numbers

    def counts(self, step: int) -> NDArray[np.int64]:
        """Batches that each worker has produced when the rank has taken ``step`` of them, int64[N]."""
        if step >= self.total:
            return self._limits.copy()
        number, active, turn = self._round(step)
        counts = np.minimum(self._limits, number)
        counts[active[:turn]] += 1
        return counts

    def step_of(self, worker: int, batches: ArrayLike) -> NDArray[np.int64]:
        """Step of the rank at which a worker's batches come, int64 like ``batches``."""
        numbers = np.asarray(batches, dtype=np.int64)
        before = np.minimum(self._limits[:, None], numbers.reshape(1, -1)).sum(axis=0)
        ahead = (self._limits[:worker, None] > numbers.reshape(1, -1)).sum(axis=0)
        return (before + ahead).reshape(numbers.shape)


def worker_turns(num_batches: int, limits: Sequence[int | None]) -> tuple[list[int], int]:
    """Replay the turns for a number of batches.

    Args:
        num_batches: batches taken from the rank so far.
        limits: batches of each worker, None for unlimited.

    Returns:
        Batches produced by each worker, and the worker whose turn is next (0 when none is left).

    Raises:
        PlanError: when a number is negative or there is no worker.
    """
    if num_batches < 0:
        raise PlanError(f"the number of batches must be >= 0, found {num_batches}")
    turns = Turns(tuple(UNLIMITED if limit is None else limit for limit in limits))
    produced = turns.counts(num_batches).tolist()
    following = turns.worker_at(num_batches)[0] if num_batches < turns.total else 0
    return produced, following


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Where one physical worker of a restarted rank begins.

    Attributes:
        logical: the logical worker whose shard it takes.
        epoch: the epoch it begins in.
        skip: samples of that epoch that it passes over; None when the worker has nothing left to yield.
    """

    logical: int
    epoch: int
    skip: int | None


def worker_starts(
    offset: int, batch_size: int, frames: Sequence[int], *, epoch: int = 0, repeat: bool = False, shuffle: bool = True
) -> list[WorkerStart]:
    """LeRobot's resume rule for a rank: which shard each physical worker takes, and where it starts in it.

    A fresh loader starts at its worker 0, so physical worker p takes the place of logical worker (p + r) mod N,
    r being the worker whose turn is next.

    Args:
        offset: samples (nominal: batches times batch size) that the rank has taken.
        batch_size: samples of a batch.
        frames: frames of each worker's share.
        epoch: epoch that the offset counts from.
        repeat: whether workers loop over their epochs for ever.
        shuffle: whether each pass is a new epoch.

    Raises:
        PlanError: when a number is out of range, or several workers are asked to resume inside a batch.
    """
    if offset < 0 or epoch < 0 or batch_size < 1 or not frames or min(frames) < 0:
        raise PlanError(
            "expected offset >= 0, epoch >= 0, batch_size >= 1 and frames >= 0 for each worker, found "
            f"offset {offset}, epoch {epoch}, batch_size {batch_size}, frames {list(frames)}"
        )
    workers = len(frames)
    produced, following = [0] * workers, 0
    if workers > 1 and offset:
        if offset % batch_size:
            raise PlanError(
                f"offset {offset} is not a whole number of batches of {batch_size}; resuming with {workers} workers needs whole batches"
            )
        limits: list[int | None] = [0 if not count else None if repeat else -(-count // batch_size) for count in frames]
        produced, following = worker_turns(offset // batch_size, limits)
    starts: list[WorkerStart] = []
    for physical in range(workers):
        logical = (physical + following) % workers
        samples = produced[logical] * batch_size if workers > 1 else offset
        count = frames[logical]
        if not count or (not repeat and samples >= count):
            starts.append(WorkerStart(logical, epoch, None))
        else:
            passes, skip = divmod(samples, count)
            starts.append(WorkerStart(logical, epoch + passes if shuffle else epoch, skip))
    return starts
