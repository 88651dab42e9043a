"""What a plan amounts to: shares, balance, peaks and cost, as numbers a person or a program can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.plan.batches import RankPlan
from ingest.plan.epoch import EpochPlan
from ingest.plan.mixing import Mixing, measure_mixing


@dataclass(frozen=True, slots=True, eq=False)
class PlanReport:
    """Shares of all consumers, and what they add up to. Arrays have one row per consumer.

    Attributes:
        rank: int64[C]. worker: int64[C].
        episodes: int64[C], episodes that the consumer owns, whole or in part.
        pieces: int64[C], pieces that its reader opens.
        frames: int64[C], samples of its order.
        bytes: int64[C], estimated compressed bytes of its pieces, by their part of the unit's frames.
        cost: float64[C], estimated decode cost of its pieces.
        peak_bytes: int64[C], most bytes reserved at a time (an upper bound where units are cut); -1 when not computed.
        peak_open: int64[C], most pieces open at a time; -1 when not computed.
        peak_frames: int64[C], most frames of pieces open at a time; -1 when not computed.
        steps: int64[W], batches of each rank.
        padded: samples that repeat others to fill batches.
        dropped: samples that ``drop_tail`` leaves out.
        mixing: measures of rank 0's order.
    """

    rank: NDArray[np.int64]
    worker: NDArray[np.int64]
    episodes: NDArray[np.int64]
    pieces: NDArray[np.int64]
    frames: NDArray[np.int64]
    bytes: NDArray[np.int64]
    cost: NDArray[np.float64]
    peak_bytes: NDArray[np.int64]
    peak_open: NDArray[np.int64]
    peak_frames: NDArray[np.int64]
    steps: NDArray[np.int64]
    padded: int
    dropped: int
    mixing: Mixing

    @property
    def frame_balance(self) -> float:
        """Frames of the largest rank over the mean of all ranks; 1 is perfect."""
        return _balance(np.bincount(self.rank, self.frames))

    @property
    def cost_balance(self) -> float:
        """Decode cost of the largest rank over the mean of all ranks; 1 is perfect."""
        return _balance(np.bincount(self.rank, self.cost))

    @property
    def rank_peak_bytes(self) -> NDArray[np.int64]:
        """Sum over each rank's workers of their peaks, int64[W]; meaningless when peaks were not computed."""
        return np.bincount(self.rank, self.peak_bytes).astype(np.int64)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        columns = ("rank", "worker", "episodes", "pieces", "frames", "bytes", "cost", "peak_bytes", "peak_open", "peak_frames")
        return {
            "consumers": {name: getattr(self, name).tolist() for name in columns},
            "steps": self.steps.tolist(),
            "frame_balance": self.frame_balance,
            "cost_balance": self.cost_balance,
            "padded": self.padded,
            "dropped": self.dropped,
            "mixing": {name: getattr(self.mixing, name) for name in Mixing.__slots__},
        }


def _balance(loads: NDArray[Any]) -> float:
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0


def report_plan(plan: EpochPlan, *, peaks: bool = True, max_samples: int = 200_000) -> PlanReport:
    """Describe a plan.

    Args:
        plan: the plan.
        peaks: whether to compute peaks, which runs the whole epoch of every consumer of a pool order.
        max_samples: samples of rank 0 for the mixing measures.
    """
    rows: list[tuple[float, ...]] = []
    steps: list[int] = []
    delivered = owned = shown = 0
    first: RankPlan | None = None
    for number in range(plan.world_size):
        rank = plan.rank(number)
        first = first or rank
        steps.append(rank.steps)
        delivered += rank.frames
        shown += rank.steps * plan.settings.batch_size if plan.settings.tail == "pad" else rank.frames
        for worker, order in enumerate(rank.orders):
            pieces = order.pieces
            count = pieces.count
            part = count / np.maximum(pieces.units.frames[pieces.unit], 1)
            episodes = len(np.unique(np.stack([pieces.dataset, pieces.episode]), axis=1).T) if len(pieces) else 0
            peak = (-1, -1, -1)
            if peaks:
                admission = order.admission()
                peak = (admission.peak_bytes(), admission.peak_open(), admission.peak_frames())
            nbytes = float(np.ceil(pieces.bytes * part).sum())
            frames = int(count.sum())
            owned += frames
            rows.append((number, worker, episodes, len(pieces), frames, nbytes, float(pieces.cost.sum()), *peak))
    assert first is not None
    columns = np.array(rows, dtype=np.float64).T
    whole = [column.astype(np.int64) for column in columns]
    return PlanReport(
        rank=whole[0],
        worker=whole[1],
        episodes=whole[2],
        pieces=whole[3],
        frames=whole[4],
        bytes=whole[5],
        cost=columns[6],
        peak_bytes=whole[7],
        peak_open=whole[8],
        peak_frames=whole[9],
        steps=np.array(steps, dtype=np.int64),
        padded=shown - delivered,
        dropped=owned - delivered if plan.settings.tail == "drop_tail" else 0,
        mixing=measure_mixing(first, max_samples=max_samples),
    )
