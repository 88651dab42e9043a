"""The plan of an epoch: the batches of every rank, from any step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ingest.errors import CursorError, PlanError
from ingest.plan.batches import RankPlan, RankTable
from ingest.plan.cursor import MAX_EPOCH, Cursor, Fingerprint, plan_fingerprint
from ingest.plan.mixture import mixture_pieces
from ingest.plan.pieces import Pieces
from ingest.plan.segment import SegmentPlan
from ingest.plan.settings import PlanSettings, require_int
from ingest.plan.skipping import left_out, without_skipped
from ingest.plan.units import Units


@dataclass(frozen=True, slots=True, eq=False)
class OrderTable:
    """The order of all ranks as columns, sorted by (rank, step); one row per sample.

    Attributes:
        dataset: int32. epoch, rank, worker, step, position, unit, episode_index, frame_index, cycle: int64.
        is_pad: bool.
    """

    dataset: NDArray[np.int32]
    epoch: NDArray[np.int64]
    rank: NDArray[np.int64]
    worker: NDArray[np.int64]
    step: NDArray[np.int64]
    position: NDArray[np.int64]
    unit: NDArray[np.int64]
    episode_index: NDArray[np.int64]
    frame_index: NDArray[np.int64]
    is_pad: NDArray[np.bool_]
    cycle: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.unit)


class EpochPlan:
    """What every rank delivers in an epoch (or the rest of one), as a pure function of units, settings and cursor.

    Attributes:
        units: the unit table.
        settings: the settings.
        cursor: the position that the plan starts from; its last segment has the settings' topology.
        segment: shares and orders of the present topology.
    """

    def __init__(self, units: Units, settings: PlanSettings, cursor: Cursor, segment: SegmentPlan) -> None:
        self.units: Units = units
        self.settings: PlanSettings = settings
        self.cursor: Cursor = cursor
        self.segment: SegmentPlan = segment

    @property
    def epoch(self) -> int:
        """Epoch number."""
        return self.cursor.epoch

    @property
    def fingerprint(self) -> Fingerprint:
        """What decides the order beside the topology; see ``plan_fingerprint``."""
        return self.cursor.fingerprint

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.segment.topology.world_size

    @cached_property
    def steps(self) -> int:
        """Batches of the longest rank in the present segment (of one epoch under ``tail='loop'``)."""
        if self.segment.skips and self.settings.tail == "exact":
            return max(self.rank(rank).steps for rank in range(self.world_size))
        return self.segment.common_steps

    @property
    def end(self) -> int:
        """Batch number behind the last of this pass: ``steps``; under ``tail='loop'``, without an end, their next multiple."""
        return (self.cursor.batches // self.steps + 1) * self.steps if self.settings.tail == "loop" else self.steps

    def rank(self, rank: int) -> RankPlan:
        """The batches of one rank.

        Raises:
            PlanError: when there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank must be in 0..{self.world_size - 1}, found {rank}")
        return RankPlan(self.segment, rank, self.cursor.batches)

    def cursor_at(self, batches: int) -> Cursor:
        """The cursor after ``batches`` committed batches per rank in this segment; the next epoch's after the last.

        Raises:
            CursorError: when that lies before the plan's own cursor.
        """
        if batches < self.cursor.batches:
            raise CursorError(f"the plan starts at batch {self.cursor.batches}, found {batches}: cursors do not go back")
        if batches >= self.steps and self.settings.tail != "loop":
            return self.cursor.next_epoch()
        return self.cursor.advance(batches - self.cursor.batches)

    def order_table(self, *, max_steps: int | None = None) -> OrderTable:
        """All samples that are still to come, at most ``max_steps`` batches of each rank."""
        parts: list[RankTable] = []
        ranks: list[NDArray[np.int64]] = []
        for rank in range(self.world_size):
            plan = self.rank(rank)
            last = self.end if self.settings.tail == "loop" else plan.steps
            stop = last if max_steps is None else min(last, plan.start_step + max_steps)
            parts.append(plan.table(plan.start_step, max(stop, plan.start_step)))
            ranks.append(np.full(len(parts[-1].unit), rank, dtype=np.int64))
        column = {name: np.concatenate([getattr(part, name) for part in parts]) for name in RankTable.__slots__}
        unit = column["unit"]
        return OrderTable(
            dataset=self.units.dataset[unit],
            epoch=np.full(len(unit), self.epoch, dtype=np.int64),
            rank=np.concatenate(ranks),
            worker=column["worker"],
            step=column["step"],
            position=column["position"],
            unit=unit,
            episode_index=self.units.episode[unit],
            frame_index=column["frame"],
            is_pad=column["is_pad"],
            cycle=column["cycle"],
        )


def plan_epoch(units: Units, settings: PlanSettings, cursor: Cursor | None = None, *, epoch: int = 0) -> EpochPlan:
    """Plan an epoch, or the rest of one.

    The same topology as the cursor's continues its order sample by sample. Another one re-shares whatever the
    cursor's segments have not delivered, which is recomputed from the plan without I/O.

    Args:
        units: what to deliver.
        settings: how, and with which topology.
        cursor: where to continue; None for a run that starts with ``epoch``.
        epoch: epoch number when there is no cursor.

    Raises:
        SettingsError: when the epoch is out of range.
        PlanError: when a rank or worker would own nothing at the start of a run, or nothing is selected.
        BudgetError: when a unit exceeds the byte budget.
        CursorError: when the cursor belongs to another plan.
    """
    require_int("epoch", epoch, least=0, most=MAX_EPOCH)
    fingerprint = plan_fingerprint(units, settings)
    starting = cursor is None
    if cursor is None:
        cursor = Cursor(fingerprint, epoch=epoch)
    cursor.check(fingerprint)
    cursor = cursor.resume(world_size=settings.world_size, workers=settings.workers, batch_size=settings.batch_size)
    if settings.tail == "loop" and len(cursor.segments) > 1:
        raise PlanError(
            "tail 'loop' has no common epoch to re-share after a change of world_size, workers or batch_size: "
            "resume with the old ones, or use tail 'pad'"
        )
    everything = Pieces.whole(units) if settings.weights is None else mixture_pieces(units, settings, cursor.epoch)
    pieces = without_skipped(everything, left_out(cursor.skipped))
    if not len(pieces):
        raise PlanError(f"no frames to deliver: {len(units)} units selected, all of them empty or skipped")
    segment = None
    for number, one in enumerate(cursor.segments):
        segment = SegmentPlan(
            settings, one.topology, epoch=cursor.epoch, number=number, pieces=pieces, skipped=cursor.skipped, starting=starting
        )
        segment.refuse_beyond(one.batches)
        if number + 1 < len(cursor.segments):
            pieces = segment.leftover(one.batches)
    assert segment is not None
    return EpochPlan(units, settings, cursor, segment)
