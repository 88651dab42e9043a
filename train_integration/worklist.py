"""A rank's plan as work: which units to read in which order, when each is first and last needed, and the batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.datasource import UnitList
from ingest.engine.spec import SampleSpec
from ingest.errors import SettingsError
from ingest.plan import Batch, EpochPlan, Order, RankPlan

_SCAN_SAMPLES = 4_000_000
"""Samples looked through to learn which frames of begun units are left; beyond it such units are read whole."""


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
class WorkList:
    """What one rank reads, decodes and delivers, from a step on.

    Attributes:
        list: units in the order in which they are first needed; ``ordinal`` is their row here.
        first_step: int64[N], step at which each is first needed, ascending.
        last_step: int64[N], step after which it is not needed any more.
        pictures: int64[N], pictures it holds when decoded whole, windows and all cameras included.
        needed: frames still to deliver, for units of which some were delivered before.
        batch_size: samples of a full batch.
        plan: the rank's plan.
        epoch: epoch number.
        start: first step.
        stop: end of the steps, exclusive.
    """

    list: UnitList
    first_step: NDArray[np.int64]
    last_step: NDArray[np.int64]
    pictures: NDArray[np.int64]
    needed: Mapping[int, NDArray[np.int64]]
    batch_size: int
    plan: RankPlan
    epoch: int
    start: int
    stop: int
    _key_of: tuple[NDArray[np.int64], ...]
    _filler_key: int

    @property
    def steps(self) -> Iterator[PlannedStep]:
        """The batches, in order."""
        for batch in self.plan.batches(self.start, self.stop):
            yield PlannedStep(self.epoch, batch.step, batch.worker, self._keys(batch), batch.frame, batch.is_pad, batch.position)

    def _keys(self, batch: Batch) -> NDArray[np.int64]:
        if batch.is_pad.all():
            return np.full(len(batch), self._filler_key, dtype=np.int64)
        return self._key_of[batch.worker][batch.entry]

    def drained_after(self) -> dict[int, tuple[int, ...]]:
        """Units to let go of, by the step after which they are not needed."""
        order = np.argsort(self.last_step, kind="stable")
        steps, edges = np.unique(self.last_step[order], return_index=True)
        return {int(step): tuple(part.tolist()) for step, part in zip(steps, np.split(order, edges[1:]), strict=True)}


def work_list(plan: EpochPlan, rank: int, spec: SampleSpec, lengths: EpisodeLengths, *, max_steps: int | None = None) -> WorkList:
    """Turns a rank's plan into work.

    Args:
        plan: the epoch's plan.
        rank: data-parallel rank.
        spec: what samples consist of.
        lengths: frames of whole episodes; windows clamp to them.
        max_steps: deliver at most that many batches.

    Raises:
        SettingsError: the plan repeats for ever, which streams do epoch by epoch.
    """
    if plan.settings.tail == "loop":
        raise SettingsError("tail 'loop' repeats inside one endless epoch: streams repeat epoch by epoch, use tail 'pad'")
    ranked = plan.rank(rank)
    start = ranked.start_step
    stop = ranked.steps if max_steps is None else min(ranked.steps, start + max_steps)
    columns: list[tuple[NDArray[np.int64], ...]] = []
    for worker, order in enumerate(ranked.orders):
        admission = order.admission()
        first, last = ranked.step_of(worker, admission.first), ranked.step_of(worker, admission.last)
        columns.append((np.full(len(first), worker), admission.entry, admission.bytes, np.maximum(first, start), last))
    worker, entry, nbytes, first, last = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    filler_worker, filler = ranked.filler
    filler_entry = int(filler.entry[0])
    if filler_entry >= 0 and ranked.steps > ranked.turns.total:
        last = np.where((worker == filler_worker) & (entry == filler_entry), ranked.steps - 1, last)
    alive = np.flatnonzero((last >= start) & (first < stop))
    alive = alive[np.lexsort((np.arange(len(alive)), first[alive]))]
    worker, entry, nbytes, first, last = worker[alive], entry[alive], nbytes[alive], first[alive], last[alive]
    key_of = [np.full(len(order.pieces), -1, dtype=np.int64) for order in ranked.orders]
    dataset, episode, lo, hi = (np.zeros(len(alive), dtype=np.int64) for _ in range(4))
    needed: dict[int, NDArray[np.int64]] = {}
    done = ranked.samples_before(start)
    for number, order in enumerate(ranked.orders):
        mine = np.flatnonzero(worker == number)
        rows = entry[mine]
        key_of[number][rows] = mine
        pieces = order.pieces
        dataset[mine], episode[mine] = pieces.dataset[rows], pieces.episode[rows]
        lo[mine], hi[mine] = pieces.lo[rows], pieces.hi[rows]
        admission = order.admission()
        begun = np.zeros(len(pieces), dtype=np.bool_)
        begun[admission.entry[admission.first < done[number]]] = True
        open_rows = rows[begun[rows] | ~pieces.fresh[rows]]
        for row, frames in _left(order, done[number], open_rows).items():
            key = int(key_of[number][row])
            needed[key] = frames
            lo[key], hi[key] = int(frames.min()), int(frames.max()) + 1
    if filler_entry >= 0:
        filler_key = int(key_of[filler_worker][filler_entry])
    else:
        filler_key = len(first)
        unit, frame = int(filler.unit[0]), int(filler.frame[0])
        dataset = np.append(dataset, int(plan.units.dataset[unit]))
        episode = np.append(episode, int(plan.units.episode[unit]))
        lo, hi = np.append(lo, frame), np.append(hi, frame + 1)
        nbytes = np.append(nbytes, int(plan.units.bytes[unit]))
        first = np.append(first, min(ranked.turns.total, ranked.steps))
        last = np.append(last, ranked.steps - 1)
    listed = UnitList(np.arange(len(episode), dtype=np.int64), dataset.astype(np.int32), episode, lo, hi, nbytes.astype(np.int64))
    pictures = _pictures(spec, listed, lengths)
    size = plan.settings.batch_size
    return WorkList(listed, first, last, pictures, needed, size, ranked, plan.epoch, start, stop, tuple(key_of), filler_key)


def _left(order: Order, done: int, entries: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Frames that are left of some pieces of an order after ``done`` samples, ascending."""
    if not len(entries):
        return {}
    begin, end = order.extent(entries)
    begin = max(begin, done)
    if end - begin > _SCAN_SAMPLES:
        return {}
    wanted = np.zeros(len(order.pieces), dtype=np.bool_)
    wanted[entries] = True
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for at in range(begin, end, 1 << 16):
        span = order.span(at, min(at + (1 << 16), end))
        inside = wanted[span.entry]
        found.append((span.entry[inside], span.frame[inside]))
    entry, frame = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {int(row): np.unique(frame[entry == row]) for row in entries.tolist() if (entry == row).any()}


def _pictures(spec: SampleSpec, units: UnitList, lengths: EpisodeLengths) -> NDArray[np.int64]:
    whole = lengths.of(units.dataset, units.episode)
    total = np.zeros(len(units), dtype=np.int64)
    for camera in spec.cameras:
        deltas = spec.windows.deltas.get(camera, np.zeros(1, np.int64))
        first = np.maximum(0, units.lo + min(0, int(deltas.min())))
        total += np.minimum(whole, units.hi + max(0, int(deltas.max()))) - first
    return total
