"""What was delivered against what the plan of an epoch holds, frame by frame, over all datasets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.plan import plan_epoch
from train_integration.options import StreamDescription


@dataclass(frozen=True, slots=True)
class FrameTally:
    """Deliveries of frames.

    Attributes:
        delivered: deliveries, padding excluded.
        distinct: different frames among them.
        repeated: deliveries of a frame after its first that the plan asks for: weights repeat small datasets.
        duplicated: deliveries beyond those that the plan has for a frame.
        missing: deliveries that the plan has, and that were not made.
    """

    delivered: int
    distinct: int
    repeated: int
    duplicated: int
    missing: int


class FrameAccount:
    """Counts deliveries of the frames of a stream.

    Args:
        description: the stream.
    """

    def __init__(self, description: StreamDescription) -> None:
        self._description = description
        sources = description.job.sources
        ends = [int((source.episodes.dataset_from + source.episodes.length).max(initial=0)) for source in sources]
        self._offsets: NDArray[np.int64] = np.cumsum([0, *ends])

    def tally(self, dataset: NDArray[np.int32], index: NDArray[np.int64], epoch: int) -> FrameTally:
        """Compares deliveries of one epoch with its plan, in which cursors and skipped episodes play no part.

        Args:
            dataset: int32[N], dataset of each delivered sample, padding excluded.
            index: int64[N], its global frame index inside the dataset.
            epoch: epoch number.
        """
        planned = self._planned(epoch)
        found = np.bincount(self._offsets[dataset] + index, minlength=len(planned))
        distinct = int(np.count_nonzero(found))
        duplicated = int(np.maximum(found - planned, 0).sum())
        return FrameTally(len(index), distinct, len(index) - distinct - duplicated, duplicated, int(np.maximum(planned - found, 0).sum()))

    def _planned(self, epoch: int) -> NDArray[np.int64]:
        """Deliveries of every frame that an epoch asks for."""
        description = self._description
        settings = replace(description.with_topology(world_size=1), workers=0)
        pieces = plan_epoch(description.units, settings, epoch=epoch).segment.pieces
        first = description.global_index(pieces.dataset, pieces.episode, pieces.lo) + self._offsets[pieces.dataset]
        change: NDArray[Any] = np.zeros(int(self._offsets[-1]) + 1, dtype=np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, first + pieces.hi - pieces.lo, -1)
        return np.cumsum(change[:-1])
