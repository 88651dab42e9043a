"""How well an order mixes: measures on the samples of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.plan.batches import RankPlan

GRID = 16
"""Cells per side of the grid that ``uniform_distance`` counts in."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Measures of one rank's order.

    Attributes:
        samples: samples that were looked at.
        batch_size: samples of the windows that stand for batches.
        distinct_episodes: mean number of distinct episodes in a window of ``batch_size`` samples.
        neighbour_frames: median distance in frames between neighbours (by frame) of one episode in one window; None
            when no window holds two frames of an episode.
        uniform_distance: total variation distance between (place in the order, place in the data set), counted in a
            16 x 16 grid, and independence: 0 for an order that spreads everything evenly, 0.94 for the order of the
            data itself. A uniform permutation of N samples has about 0.4 * 16 / sqrt(N).
    """

    samples: int
    batch_size: int
    distinct_episodes: float
    neighbour_frames: float | None
    uniform_distance: float


def measure_mixing(plan: RankPlan, *, batch_size: int | None = None, max_samples: int = 200_000) -> Mixing:
    """Measure the beginning of a rank's order.

    Args:
        plan: the rank.
        batch_size: size of the windows; default the plan's batch size.
        max_samples: most samples to look at.
    """
    size = plan.batch_size if batch_size is None else batch_size
    table = plan.table(0, min(plan.steps, -(-max_samples // plan.batch_size)))
    real = ~table.is_pad
    unit, frame = table.unit[real], table.frame[real]
    units = plan.units
    key = units.dataset[unit].astype(np.int64) << 40 | units.episode[unit]
    # What drop_tail leaves out has its place in the data too; what loop repeats comes on top.
    owned = sum(int(order.pieces.count.sum()) for order in plan.orders)
    return mixing_of(key, frame, size, place=_place(plan, unit, frame), total=max(owned, plan.frames))


def mixing_of(episode: NDArray[np.int64], frame: NDArray[np.int64], batch_size: int, *, place: NDArray[np.int64], total: int) -> Mixing:
    """Measures of any order.

    Args:
        episode: int64[N], a number for the episode of each sample, in delivery order.
        frame: int64[N], frame numbers inside the episodes.
        batch_size: size of the windows.
        place: int64[N], each sample's place in the data, in ``range(total)``.
        total: samples of the whole order, of which these are the first.
    """
    windows = len(episode) // batch_size
    rows = np.repeat(np.arange(windows), batch_size)
    kept = windows * batch_size
    order = np.lexsort((frame[:kept], episode[:kept], rows))
    row, name, number = rows[order], episode[:kept][order], frame[:kept][order]
    same = (row[1:] == row[:-1]) & (name[1:] == name[:-1])
    gaps = (number[1:] - number[:-1])[same]
    distinct = (kept - int(same.sum())) / windows if windows else float(len(np.unique(episode)))
    return Mixing(
        samples=len(episode),
        batch_size=batch_size,
        distinct_episodes=distinct,
        neighbour_frames=float(np.median(gaps)) if len(gaps) else None,
        uniform_distance=_uniform_distance(place, total),
    )


def _uniform_distance(place: NDArray[np.int64], total: int) -> float:
    if not len(place):
        return 0.0
    when = np.arange(len(place)) * GRID // total
    where = place * GRID // total
    cells = np.bincount(when * GRID + where, minlength=GRID * GRID).reshape(GRID, GRID) / len(place)
    # Columns of a small order hold unequal numbers of places; compare with those, not with 1 / GRID.
    columns = np.bincount(np.arange(total) * GRID // total, minlength=GRID) / total
    return float(0.5 * np.abs(cells - cells.sum(axis=1, keepdims=True) * columns).sum())


def _place(plan: RankPlan, unit: NDArray[np.int64], frame: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place of each sample among all frames of the rank, in the order of the data."""
    parts = [order.pieces for order in plan.orders]
    owned = np.concatenate([piece.unit for piece in parts])
    counts = np.bincount(owned, np.concatenate([piece.count for piece in parts]), minlength=len(plan.units))
    begin = np.cumsum(counts) - counts
    span = np.maximum(plan.units.frames[unit], 1)
    inside = (frame - plan.units.lo[unit]) / span * counts[unit]
    total = int(counts.sum())
    return np.minimum((begin[unit] + inside).astype(np.int64), max(total - 1, 0))
