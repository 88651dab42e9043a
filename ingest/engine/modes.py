"""Which units are decoded whole when they open, and which sample by sample."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

DecodeMode = Literal["auto", "once", "on_demand"]
"""Whether units are decoded whole, sample by sample, or as costs less within the decoded budget."""


def choose_once(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    pictures: NDArray[np.int64],
    budget: int,
    saved: NDArray[np.float64] | None = None,
) -> NDArray[np.bool_]:
    """Units that are decoded whole without ever holding more than ``budget`` pictures.

    A unit holds its pictures from its first to its last use. Units are taken in the order of what they save for each
    picture and step that they hold, as long as they fit beside those taken before; the others are decoded on demand.
    The answer changes neither order nor pixels, only cost.

    Args:
        first: step at which each unit opens, ascending.
        last: step of its last use, included.
        pictures: pictures it holds when decoded whole.
        budget: pictures that may be held at once.
        saved: what decoding it whole saves; units that save nothing are not taken. None takes units as they open.

    Returns:
        True where the unit is decoded once.
    """
    once = np.zeros(len(first), dtype=np.bool_)
    # Units only add to what is held where one opens, so it is enough to look there.
    openings = np.unique(first)
    begin, end = np.searchsorted(openings, first), np.searchsorted(openings, last, side="right")
    room = np.full(len(openings), budget, dtype=np.int64)
    order = np.arange(len(first))
    if saved is not None:
        order = np.argsort(-saved / (np.maximum(pictures, 1) * (last - first + 1)), kind="stable")
        order = order[saved[order] > 0]
    for unit in order.tolist():
        here = slice(begin[unit], end[unit])
        if int(room[here].min()) >= pictures[unit]:
            once[unit] = True
            room[here] -= pictures[unit]
    return once
