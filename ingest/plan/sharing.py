"""Dividing pieces among ranks and workers, and building the order of one consumer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.plan.hashing import hash_key
from ingest.plan.lanes import LaneOrder
from ingest.plan.line import LineOrder
from ingest.plan.mixture import mixture_ends
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
        pieces: all pieces.
        rows: int64[P], rows of ``pieces``, those of part 0 first; inside a part in the order of assignment.
        bounds: int64[parts + 1], where each part begins and ends in ``rows``.
        frames: int64[parts], frames of each part.
        episodes: int64[parts], episodes (or parts of one) of each part.
    """

    pieces: Pieces
    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]
    frames: NDArray[np.int64]
    episodes: NDArray[np.int64]

    def part(self, number: int) -> Pieces:
        """The pieces of one part."""
        return self.pieces.take(self.rows[self.bounds[number] : self.bounds[number + 1]])


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
    if parts == 1:
        frames = np.array([int(pieces.count.sum())], dtype=np.int64)
        return Division(pieces, np.arange(len(pieces)), np.array([0, len(pieces)]), frames, np.array([episodes]))
    if share == "frame_exact" or episodes < cut_below:
        return _in_line([_line(pieces, seed).cut(even_bounds(int(pieces.count.sum()), parts))], pieces, parts)
    frames = _totals(group, pieces.count, episodes)
    weight = quantised_costs(np.bincount(group, pieces.cost, minlength=episodes)) if share == "cost" else frames
    order = descending_order(weight)
    assigned = assign_balanced(weight[order], parts)
    # Stable sorts by small integers keep the order of assignment inside each part, and take linear time.
    small = np.uint16 if parts < 1 << 16 else np.int64
    by_part = order[np.argsort(assigned.astype(small), kind="stable")]
    counts = np.bincount(assigned, minlength=parts)
    rows, sizes = by_part, counts
    if episodes < len(pieces):
        members = np.bincount(group, minlength=episodes)
        width = members[by_part]
        rows = np.repeat((np.cumsum(members) - members)[by_part] - (np.cumsum(width) - width), width) + np.arange(len(pieces))
        sizes = np.bincount(assigned, members[order], minlength=parts).astype(np.int64)
    bounds = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
    loads = np.bincount(assigned, frames[order], minlength=parts).astype(np.int64)
    return Division(pieces, rows, bounds, loads, counts)


def _totals(group: NDArray[np.int64], count: NDArray[np.int64], episodes: int) -> NDArray[np.int64]:
    if episodes == len(group):
        return count
    return np.bincount(group, count, minlength=episodes).astype(np.int64)


def divide_mixture(pieces: Pieces, parts: int, *, quotas: NDArray[np.int64], seed: int) -> Division:
    """Divide every dataset's pieces on their own, so that each part has whole mixture blocks as far as they go.

    Args:
        pieces: what to divide, sorted by episode.
        parts: number of parts.
        quotas: int64[D], samples of each dataset in a block.
        seed: seed of the plan.
    """
    dataset = pieces.dataset
    ends = mixture_ends(np.bincount(dataset, pieces.count, minlength=len(quotas)).astype(np.int64), quotas, parts)
    lines = [_line(pieces.take(dataset == number), seed).cut(ends[number]) for number in range(len(quotas))]
    return _in_line(lines, pieces, parts)


def _in_line(lines: list[tuple[Pieces, NDArray[np.int64]]], pieces: Pieces, parts: int) -> Division:
    """A division from lines that were cut into the same number of parts."""
    joined = Pieces.concatenate(pieces.units, [cut for cut, _ in lines])
    owner = np.concatenate([part for _, part in lines])
    rows = np.argsort(owner, kind="stable")
    frames = np.bincount(owner, joined.count, minlength=parts).astype(np.int64)
    episodes = np.sum([_distinct(part, cut, parts) for cut, part in lines], axis=0)
    return Division(joined, rows, np.searchsorted(owner[rows], np.arange(parts + 1)), frames, episodes)


def _line(pieces: Pieces, seed: int) -> Pieces:
    word = hash_key(seed, _LINE_SALT, pieces.dataset, pieces.episode, pieces.copy)[: len(pieces)]
    return pieces.take(np.lexsort((pieces.start, pieces.lo, pieces.copy, pieces.episode, pieces.dataset, word)))


def _distinct(part: NDArray[np.int64], pieces: Pieces, parts: int) -> NDArray[np.int64]:
    """Episodes (or parts of one) of each part, where pieces of an episode stand together."""
    group = pieces.groups()
    size = int(group[-1]) + 1 if len(group) else 1
    return np.bincount(np.unique(part * size + group) // size, minlength=parts)


def make_order(
    pieces: Pieces,
    settings: PlanSettings,
    *,
    workers: int,
    batch_size: int,
    epoch: int,
    segment: int,
    fraction: float = 1.0,
) -> Order:
    """The order of one consumer.

    Args:
        pieces: the consumer's share.
        settings: settings of the plan.
        workers: consumers of its rank, which divide the rank's pool and budget.
        batch_size: samples of a batch in this segment.
        epoch: epoch number.
        segment: number of the segment inside the epoch.
        fraction: part of the consumer's samples that the pieces are, which is its part of the lanes.
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
        lanes = max(1, round(settings.lane_count(batch_size) * fraction))
        return LaneOrder(pieces, lanes=lanes, rounds=rounds, seed=settings.seed, epoch=epoch)
    return LineOrder(pieces, (settings.seed, epoch) if settings.strategy == "episode_sequential" else None)
