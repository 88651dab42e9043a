"""Which units are decoded whole when they open, and which picture by picture."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray


def choose_once(first: NDArray[np.int64], last: NDArray[np.int64], pictures: NDArray[np.int64], budget: int) -> NDArray[np.bool_]:
    """Units that may be decoded whole without ever holding more than ``budget`` pictures.

    A unit holds its pictures from its first to its last use. Walking units in the order they open, each one is taken
    as long as it fits beside those still open; the others are decoded on demand. The answer changes neither order
    nor pixels, only cost.

    Args:
        first: step at which each unit opens, ascending.
        last: step of its last use, included.
        pictures: pictures it holds when decoded whole.
        budget: pictures that may be held at once.

    Returns:
        True where the unit is decoded once.
    """
    once = np.zeros(len(first), dtype=np.bool_)
    still_open: list[tuple[int, int]] = []
    held = 0
    for unit, (start, stop, size) in enumerate(zip(first.tolist(), last.tolist(), pictures.tolist(), strict=True)):
        while still_open and still_open[0][0] < start:
            held -= heappop(still_open)[1]
        if held + size <= budget:
            once[unit] = True
            held += size
            heappush(still_open, (stop, size))
    return once
