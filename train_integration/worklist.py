"""A rank's plan as work: which units to read in which order, when each is first and last needed, and the batches.

Work is planned in stretches of some ten thousand samples, so that neither a start nor a resume looks at a whole epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ingest.datasource import UnitList
from ingest.engine.spec import SampleSpec
from ingest.plan import EpochPlan, RankPlan, RankTable


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeLengths:
    """Frames of whole episodes, by dataset number.

    Attributes:
        episodes: int64 arrays, ascending episode indices, one array per dataset.
        frames: int64 arrays, frames of each of them.
    """

    episodes: tuple[NDArray[np.int64], ...]
    frames: tuple[NDArray[np.int64], ...]

    def of(self, dataset: NDArray[np.int32], episode: NDArray[np.int64]) -> NDArray[np.int64]:
        """Frames of some episodes."""
        out = np.zeros(len(episode), dtype=np.int64)
        for number in np.unique(dataset).tolist():
            here = dataset == number
            out[here] = self.frames[number][np.searchsorted(self.episodes[number], episode[here])]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """One batch to assemble.

    Attributes:
        epoch: epoch number.
        step: batch number inside the rank's segment.
        worker: consumer inside the rank.
        key: int64[B], row of the work list that each sample comes from.
        frame: int64[B], episode frame numbers.
        is_pad: bool[B], masked repeats.
        position: int64[B], sample numbers in the rank's order.
    """

    epoch: int
    step: int
    worker: int
    key: NDArray[np.int64]
    frame: NDArray[np.int64]
    is_pad: NDArray[np.bool_]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True, slots=True, eq=False)
class RowsByUnit:
    """Where the samples of each unit go.

    Attributes:
        frame: int64[R], episode frame numbers, unit after unit, each in the order of delivery.
        step: int64[R], which of the stretch's batches, counted from 0.
        place: int64[R], which sample of that batch.
        edges: int64[N + 1], where each unit begins.
    """

    frame: NDArray[np.int64]
    step: NDArray[np.int64]
    place: NDArray[np.int64]
    edges: NDArray[np.int64]

    def of(self, key: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Frames, batches and places of one unit's samples, masked repeats included."""
        rows = slice(int(self.edges[key]), int(self.edges[key + 1]))
        return self.frame[rows], self.step[rows], self.place[rows]


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """What one rank reads, decodes and delivers in a stretch of steps.

    Attributes:
        list: units in the order in which they are first needed; ``ordinal`` is their row here.
        first_step: int64[N], step at which each is first needed, ascending.
        last_step: int64[N], step after which it is not needed any more.
        first_row: int64[N], first sample of the stretch that needs it, ascending.
        last_row: int64[N], last sample of the stretch that needs it.
        pictures: int64[N], pictures it holds when decoded whole, windows and all cameras included.
        needed: frames to deliver, for units that the stretch uses in part.
        batch_size: samples of a full batch.
        epoch: epoch number.
        start: first step.
        stop: end of the steps, exclusive.
    """

    list: UnitList
    first_step: NDArray[np.int64]
    last_step: NDArray[np.int64]
    first_row: NDArray[np.int64]
    last_row: NDArray[np.int64]
    pictures: NDArray[np.int64]
    needed: Mapping[int, NDArray[np.int64]]
    batch_size: int
    epoch: int
    start: int
    stop: int
    _table: RankTable
    _keys: NDArray[np.int64]

    @property
    def steps(self) -> Iterator[PlannedStep]:
        """The batches, in order."""
        table = self._table
        steps, edges = np.unique(table.step, return_index=True)
        bounds = np.append(edges, len(table.step)).tolist()
        for step, (first, stop) in zip(steps.tolist(), pairwise(bounds), strict=True):
            rows = slice(first, stop)
            yield PlannedStep(
                self.epoch,
                step,
                int(table.worker[first]),
                self._keys[rows],
                table.frame[rows],
                table.is_pad[rows],
                table.position[rows],
            )

    @property
    def step_numbers(self) -> NDArray[np.int64]:
        """int64[S], the steps that have a batch, ascending."""
        return np.unique(self._table.step)

    def rows(self) -> RowsByUnit:
        """The samples by unit."""
        steps, first, step = np.unique(self._table.step, return_index=True, return_inverse=True)
        place = np.arange(len(step)) - first[step] if len(steps) else step
        order = np.argsort(self._keys, kind="stable")
        edges = np.searchsorted(self._keys[order], np.arange(len(self.list) + 1))
        return RowsByUnit(self._table.frame[order], step[order], place[order], edges)

    def drained_after(self) -> dict[int, tuple[int, ...]]:
        """Units to let go of, by the step after which they are not needed."""
        if not len(self.list):
            return {}
        order = np.argsort(self.last_step, kind="stable")
        steps, edges = np.unique(self.last_step[order], return_index=True)
        return {int(step): tuple(part.tolist()) for step, part in zip(steps, np.split(order, edges[1:]), strict=True)}


def work_list(
    plan: EpochPlan,
    ranked: RankPlan,
    spec: SampleSpec,
    lengths: EpisodeLengths,
    unit_bytes: NDArray[np.int64],
    *,
    start: int,
    stop: int,
    worker: int | None = None,
) -> WorkList:
    """Turns a stretch of a rank's plan into work.

    Consecutive stretches of one ``ranked`` cost the same as one long one, in pool orders too.

    Args:
        plan: the epoch's plan.
        ranked: the rank's plan.
        spec: what samples consist of.
        lengths: frames of whole episodes; windows clamp to them.
        unit_bytes: int64[U], bytes to reserve for each of the plan's units.
        start: first step.
        stop: end of the steps, exclusive.
        worker: only the batches of this consumer; None for those of all.
    """
    table = _table(ranked, start, max(start, stop))
    if worker is not None:
        table = table.take(table.worker == worker)
    # Under ``loop`` a piece of another pass over the data is another unit.
    keys, first, last, samples = _numbered(table, table.cycle if plan.settings.tail == "loop" else table.cycle * 0)
    lo = np.full(len(first), np.iinfo(np.int64).max)
    hi = np.zeros(len(first), dtype=np.int64)
    np.minimum.at(lo, keys, table.frame)
    np.maximum.at(hi, keys, table.frame + 1)
    unit = table.unit[first]
    dataset, episode, nbytes = plan.units.dataset[unit], plan.units.episode[unit], unit_bytes[unit]
    needed = _frames_of(keys, table.frame, np.flatnonzero(samples != hi - lo))
    listed = UnitList(np.arange(len(first), dtype=np.int64), dataset.astype(np.int32), episode, lo, hi, nbytes)
    step = table.step
    return WorkList(
        listed,
        step[first],
        step[last],
        first,
        last,
        _pictures(spec, listed, lengths),
        needed,
        plan.settings.batch_size,
        plan.epoch,
        start,
        max(start, stop),
        table,
        keys,
    )


def _table(ranked: RankPlan, start: int, stop: int) -> RankTable:
    """The stretch's batches; those beyond the rank's own come last, because what fills them is only known behind those."""
    own = min(max(ranked.turns.total, start), stop)
    parts = [ranked.table(begin, end) for begin, end in ((start, own), (own, stop)) if end > begin]
    if not parts:
        return ranked.table(start, start)
    return (
        parts[0] if len(parts) == 1 else RankTable(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS})
    )


_COLUMNS = ("step", "worker", "unit", "frame", "is_pad", "position", "entry", "cycle")


def _numbered(
    table: RankTable, cycle: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Unit of every sample, numbered by first use; first and last row of each, and its samples without repeats."""
    empty = np.zeros(0, dtype=np.int64)
    if not len(table.unit):
        return empty, empty, empty, empty
    # A piece of another worker, or the filler that belongs to none (entry -1), is another unit of work.
    word = (cycle * (int(table.worker.max()) + 1) + table.worker) * (int(table.entry.max()) + 2) + table.entry + 1
    _, first, inverse = np.unique(word, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    keys = rank[inverse]
    last = np.empty(len(order), dtype=np.int64)
    last[keys] = np.arange(len(keys))
    samples = np.bincount(keys[~table.is_pad], minlength=len(order))
    return keys, first[order].astype(np.int64), last, samples


def _frames_of(keys: NDArray[np.int64], frames: NDArray[np.int64], wanted: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Distinct frames of some units, ascending."""
    if not len(wanted):
        return {}
    chosen = np.zeros(int(keys.max()) + 1, dtype=np.bool_)
    chosen[wanted] = True
    rows = np.flatnonzero(chosen[keys])
    order = rows[np.lexsort((frames[rows], keys[rows]))]
    edges = np.flatnonzero(np.diff(keys[order], prepend=-1))
    parts = np.split(frames[order], edges[1:])
    return {int(keys[order[edge]]): np.unique(part) for edge, part in zip(edges.tolist(), parts, strict=True)}


def _pictures(spec: SampleSpec, units: UnitList, lengths: EpisodeLengths) -> NDArray[np.int64]:
    whole = lengths.of(units.dataset, units.episode)
    total = np.zeros(len(units), dtype=np.int64)
    for camera in spec.cameras:
        deltas = spec.windows.deltas.get(camera, np.zeros(1, np.int64))
        first = np.maximum(0, units.lo + min(0, int(deltas.min())))
        total += np.minimum(whole, units.hi + max(0, int(deltas.max()))) - first
    return total
