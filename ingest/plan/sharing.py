"""Dividing pieces among ranks and workers, and building the order of one consumer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.plan.hashing import hash_key
from ingest.plan.lanes import LaneOrder
from ingest.plan.line import LineOrder
from ingest.plan.order import Order
from ingest.plan.pieces import Pieces
from ingest.plan.pool_order import PoolOrder
from ingest.plan.settings import RESERVOIR_ROUNDS, PlanSettings, Share
from ingest.plan.shards import assign_balanced, descending_order, even_bounds, quantised_costs

_LINE_SALT = 21


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Pieces divided among parts.

    Attributes:
        pieces: all pieces, those of part 0 first; inside a part in the order of assignment.
        bounds: int64[parts + 1], where each part begins and ends.
        episodes: int64[parts], episodes (or parts of one) of each part.
    """

    pieces: Pieces
    bounds: NDArray[np.int64]
    episodes: NDArray[np.int64]

    def part(self, number: int) -> Pieces:
        """The pieces of one part."""
        return self.pieces.take(np.arange(self.bounds[number], self.bounds[number + 1]))

    def frames(self) -> NDArray[np.int64]:
        """Frames of each part, int64[parts]."""
        ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(self.pieces.count)))
        return np.diff(ends[self.bounds])


def divide(pieces: Pieces, parts: int, *, share: Share, seed: int, cut_below: int = 0) -> Division:
    """Divide pieces, whole episodes by the greedy rule or a line cut into equal parts.

    Args:
        pieces: what to divide, sorted by episode.
        parts: number of parts.
        share: the rule; a line of all frames is cut for ``frame_exact``.
        seed: seed of the plan, which orders the episodes of the line.
        cut_below: with fewer episodes than this, the line is cut whatever ``share`` says.
    """
    group = pieces.groups()
    episodes = int(group[-1]) + 1 if len(group) else 0
    if share == "frame_exact" or episodes < cut_below:
        word = hash_key(seed, _LINE_SALT, pieces.dataset, pieces.episode, pieces.copy)[: len(pieces)]
        line = pieces.take(np.lexsort((pieces.start, pieces.lo, pieces.copy, pieces.episode, pieces.dataset, word)))
        cut, part = line.cut(even_bounds(int(line.count.sum()), parts))
        owners = np.unique(part * max(episodes, 1) + cut.groups()) // max(episodes, 1)
        bounds = np.searchsorted(part, np.arange(parts + 1))
        return Division(cut, bounds, np.bincount(owners, minlength=parts))
    weight = (
        quantised_costs(np.bincount(group, pieces.cost, minlength=episodes)) if share == "cost" else _totals(group, pieces.count, episodes)
    )
    order = descending_order(weight)
    assigned = assign_balanced(weight[order], parts)
    # Stable sorts by small integers keep the order of assignment inside each part, and take linear time.
    small = np.uint16 if parts < 1 << 16 else np.int64
    by_part = order[np.argsort(assigned.astype(small), kind="stable")]
    counts = np.bincount(assigned, minlength=parts)
    if episodes == len(pieces):
        rows, sizes = by_part, counts
    else:
        members = np.bincount(group, minlength=episodes)
        begin = np.cumsum(members) - members
        width = members[by_part]
        rows = np.repeat(begin[by_part] - (np.cumsum(width) - width), width) + np.arange(len(pieces))
        sizes = np.bincount(assigned, members[order], minlength=parts).astype(np.int64)
    bounds = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
    return Division(pieces.take(rows), bounds, counts)


def _totals(group: NDArray[np.int64], count: NDArray[np.int64], episodes: int) -> NDArray[np.int64]:
    if episodes == len(group):
        return count
    return np.bincount(group, count, minlength=episodes).astype(np.int64)


def make_order(pieces: Pieces, settings: PlanSettings, *, workers: int, batch_size: int, epoch: int, segment: int) -> Order:
    """The order of one consumer.

    Args:
        pieces: the consumer's share.
        settings: settings of the plan.
        workers: consumers of its rank, which divide the rank's pool and budget.
        batch_size: samples of a batch in this segment.
        epoch: epoch number.
        segment: number of the segment inside the epoch.
    """
    epoch = epoch if settings.shuffle else 0
    if settings.strategy == "remaining" or settings.strategy == "round_robin":
        return PoolOrder(
            pieces,
            pool_size=settings.pool_share(workers),
            byte_budget=settings.budget_share(workers),
            strategy=settings.strategy,
            seed=(settings.seed, epoch, segment) if segment else (settings.seed, epoch),
        )
    if settings.strategy in ("lanes", "reservoir"):
        rounds = RESERVOIR_ROUNDS if settings.strategy == "reservoir" else 1
        return LaneOrder(pieces, lanes=settings.lane_count(batch_size), rounds=rounds, seed=settings.seed, epoch=epoch)
    return LineOrder(pieces, (settings.seed, epoch) if settings.strategy == "episode_sequential" else None)
