"""One stretch of an epoch with one topology: who owns what, and what is left after a number of batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ingest.errors import BudgetError, CursorError, PlanError
from ingest.plan.cursor import SkippedRange
from ingest.plan.looping import LoopOrder
from ingest.plan.mixture import MixtureOrder, block_quotas
from ingest.plan.order import Order
from ingest.plan.pieces import Pieces
from ingest.plan.settings import PlanSettings, Share, Topology
from ingest.plan.sharing import Division, divide, divide_mixture, make_order
from ingest.plan.skipping import SkippingOrder, covers, without_skipped
from ingest.plan.turns import UNLIMITED, Turns


class SegmentPlan:
    """Shares, orders and turns of all ranks for one topology.

    Args:
        settings: settings of the plan; its topology is not used.
        topology: world size, workers and batch size of the segment.
        epoch: epoch number.
        number: number of the segment inside the epoch.
        pieces: what the segment has to deliver.
        skipped: all episodes that the cursor knows to be skipped.
        starting: whether a run begins here, so that ranks and workers without an episode are refused. Later on,
            episodes are cut instead: neither a change of topology nor a skipped episode may end a run.

    Raises:
        PlanError: when a rank or worker would own nothing at the start of a run.
        BudgetError: when a unit exceeds a consumer's byte budget.
    """

    def __init__(
        self,
        settings: PlanSettings,
        topology: Topology,
        *,
        epoch: int,
        number: int,
        pieces: Pieces,
        skipped: Sequence[SkippedRange] = (),
        starting: bool = False,
    ) -> None:
        self.settings: PlanSettings = settings
        self.topology: Topology = topology
        self.epoch: int = epoch
        self.number: int = number
        self.pieces: Pieces = pieces.sorted_by_episode()
        self._skipped = tuple(skipped)
        self.skips: tuple[SkippedRange, ...] = tuple(sorted((one for one in skipped if one.segment == number), key=lambda one: one.step))
        self._may_cut = not starting or settings.share == "frame_exact" or settings.weights is not None
        world, workers = topology.world_size, topology.consumers
        cut_below = world * (1 if settings.clamp_workers else workers) if not starting else 0
        self._quotas = None if settings.weights is None else block_quotas(pieces.units, settings)
        self.ranks: Division = self._divide(self.pieces, world, settings.share, cut_below)
        if starting:
            self._refuse_empty_ranks()
        self._refuse_oversize()
        self._divisions: dict[int, Division] = {}

    def _divide(self, pieces: Pieces, parts: int, share: Share, cut_below: int) -> Division:
        if self._quotas is not None:
            return divide_mixture(pieces, parts, quotas=self._quotas, seed=self.settings.seed)
        return divide(pieces, parts, share=share, seed=self.settings.seed, cut_below=cut_below)

    def _refuse_empty_ranks(self) -> None:
        empty = np.flatnonzero(self.ranks.frames == 0)
        if len(empty):
            otherwise = "" if self._may_cut else ", or set share='frame_exact'"
            raise PlanError(
                f"rank {empty[0]} owns no streaming episodes: {int(self.ranks.episodes.sum())} episodes with "
                f"{int(self.pieces.count.sum())} frames over world_size {self.topology.world_size}; "
                f"reduce the data-parallel world size{otherwise}"
            )
        wanted = self.topology.consumers
        short = np.flatnonzero(self.ranks.episodes < wanted)
        if len(short) and not self._may_cut and not self.settings.clamp_workers:
            raise PlanError(
                f"rank {short[0]} owns {self.ranks.episodes[short[0]]} streaming episodes, fewer than its {wanted} workers; "
                "reduce num_workers (workers), or set clamp_workers"
            )

    def _refuse_oversize(self) -> None:
        budget = self.settings.byte_budget
        if budget is None or not len(self.pieces):
            return
        for rank in range(self.topology.world_size) if self.settings.clamp_workers else (0,):
            workers = self.workers(rank)
            share = self.settings.budget_share(workers)
            pieces = self.ranks.part(rank) if self.settings.clamp_workers else self.pieces
            large = np.flatnonzero(pieces.bytes > (share or 0))
            if len(large):
                row = int(large[0])
                raise BudgetError(
                    f"Episode {pieces.episode[row]} of dataset {pieces.dataset[row]} requires {pieces.bytes[row]} bytes, exceeding the "
                    f"byte budget {share} of a consumer (rank budget {budget} over {workers} workers); raise byte_budget "
                    "(streaming_byte_budget_gb), or use fewer workers"
                )

    def workers(self, rank: int) -> int:
        """Consumers of a rank, at least 1."""
        wanted = self.topology.consumers
        return max(1, min(wanted, int(self.ranks.episodes[rank]))) if self.settings.clamp_workers else wanted

    def division(self, rank: int) -> Division:
        """The rank's pieces divided among its workers."""
        if rank not in self._divisions:
            workers = self.workers(rank)
            share = "episodes" if self.settings.share == "frame_exact" else self.settings.share
            pieces = self.ranks.part(rank).sorted_by_episode()
            below = workers if self._may_cut else 0
            self._divisions[rank] = self._divide(pieces, workers, share, below)
        return self._divisions[rank]

    def damaged(self, unit: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some units belong to an episode that was skipped at any time, bool like ``unit``."""
        dataset, episode = self.pieces.units.dataset[unit], self.pieces.units.episode[unit]
        found = np.zeros(len(unit), dtype=np.bool_)
        for one in self._skipped:
            found |= covers(one, dataset, episode)
        return found

    def worker_frames(self, rank: int) -> NDArray[np.int64]:
        """Frames of each worker of a rank, int64[N], before anything is skipped."""
        if self.workers(rank) == 1:
            return self.ranks.frames[rank : rank + 1]
        return self.division(rank).frames

    def limits(self, frames: NDArray[np.int64]) -> tuple[int, ...]:
        """Batches of workers that own ``frames`` frames each."""
        size = self.topology.batch_size
        if self.settings.tail == "loop":
            return tuple(UNLIMITED if count else 0 for count in frames.tolist())
        if self.settings.tail == "drop_tail":
            return tuple((frames // size).tolist())
        return tuple((-(-frames // size)).tolist())

    def natural_steps(self, rank: int) -> int:
        """Batches of a rank by its own frames, whatever the other ranks have."""
        frames, size = self.worker_frames(rank), self.topology.batch_size
        whole = frames // size if self.settings.tail == "drop_tail" else -(-frames // size)
        return int(whole.sum())

    @cached_property
    def common_steps(self) -> int:
        """Steps of all ranks where they must be equal: the fewest for ``drop_tail``, otherwise the most (skips aside)."""
        steps = [self.natural_steps(rank) for rank in range(self.topology.world_size)]
        return min(steps) if self.settings.tail == "drop_tail" else max(steps)

    def refuse_beyond(self, batches: int) -> None:
        """Refuse a position behind the segment's end, which no run reaches: frames would be passed over in silence.

        Raises:
            CursorError: with both numbers. With several workers, which may each end with a short batch, some beyond pass.
        """
        if self.settings.tail == "loop" or self._skipped:
            return
        most = -(-int(self.ranks.frames.max(initial=0)) // self.topology.batch_size) + self.topology.consumers - 1
        if batches > most:
            raise CursorError(
                f"the cursor counts {batches} batches in segment {self.number} of epoch {self.epoch}, whose ranks have {most} at most: "
                "it is damaged, or of another dataset"
            )

    @property
    def _last_step(self) -> int:
        return UNLIMITED if self.settings.tail == "loop" else self.common_steps

    def _order(self, pieces: Pieces, workers: int, epoch: int) -> Order:
        settings, batch_size, number = self.settings, self.topology.batch_size, self.number

        def plain(part: Pieces, fraction: float = 1.0) -> Order:
            return make_order(part, settings, workers=workers, batch_size=batch_size, epoch=epoch, segment=number, fraction=fraction)

        if settings.weights is None or not len(pieces):
            return plain(pieces)
        return MixtureOrder(pieces, plain, block=settings.mixture_block, seed=settings.seed, epoch=epoch)

    def orders(self, rank: int) -> list[Order]:
        """The orders of the workers of a rank, with what is skipped taken out."""
        division, workers = self.division(rank), self.workers(rank)
        parts = [division.part(worker) for worker in range(workers)]
        orders: list[Order] = []
        for part in parts:
            if self.settings.tail == "loop" and len(part):
                orders.append(LoopOrder(partial(self._order, part, workers), self.epoch))
            else:
                orders.append(self._order(part, workers, self.epoch))
        for skip in self.skips:
            counts = self.turns(orders).counts(skip.step)
            begins = [min(int(count) * self.topology.batch_size, len(order)) for count, order in zip(counts, orders, strict=True)]
            orders = [SkippingOrder.without(order, skip, begin) for order, begin in zip(orders, begins, strict=True)]
        return orders

    def turns(self, orders: Sequence[Order]) -> Turns:
        """The turns of a rank's workers."""
        return Turns(self.limits(np.array([len(order) for order in orders], dtype=np.int64)))

    def delivered_counts(self, orders: Sequence[Order], batches: int) -> list[int]:
        """Samples that each of a rank's workers has delivered after ``batches`` batches."""
        counts = self.turns(orders).counts(min(batches, self._last_step)).tolist()
        return [min(count * self.topology.batch_size, len(order)) for count, order in zip(counts, orders, strict=True)]

    def leftover(self, batches: int) -> Pieces:
        """What all ranks together have left after ``batches`` batches each; skipped episodes are gone."""
        if batches == 0:
            rest = self.pieces
        else:
            parts: list[Pieces] = []
            for rank in range(self.topology.world_size):
                orders = self.orders(rank)
                done = self.delivered_counts(orders, batches)
                parts += [order.leftover(samples) for order, samples in zip(orders, done, strict=True)]
                self._divisions.pop(rank, None)
            rest = Pieces.concatenate(self.pieces.units, parts)
        return without_skipped(rest, self.skips)
