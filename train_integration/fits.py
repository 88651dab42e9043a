"""Whether a work list can be held within its budgets, decided from the plan alone."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ingest.errors import BudgetError
from train_integration.worklist import WorkList

HOW_TO_MAKE_ROOM = "raise byte_budget_gb, raise decoded_budget_gb so that units are decoded whole, or mix fewer of them (pool_size, lanes)"


def refuse_what_never_fits(work: WorkList, once: NDArray[np.bool_], limit: int) -> None:
    """Refuses, before anything is fetched, units that could not be held however long they waited.

    A unit that is decoded whole holds its bytes until it is decoded, the others until their last use.

    Args:
        work: the units, and when they are used.
        once: bool[N], units that are decoded whole.
        limit: bytes of compressed pictures that may be held at a time.

    Raises:
        BudgetError: naming the first such episode and the setting to raise.
    """
    nbytes = work.list.nbytes
    if int(nbytes.sum()) <= limit:
        return
    large = np.flatnonzero(nbytes > limit)
    if len(large):
        raise BudgetError(
            f"episode {int(work.list.episode[large[0]])} requires {int(nbytes[large[0]])} bytes, exceeding the byte budget {limit} "
            "of the rank: raise byte_budget_gb (streaming_byte_budget_gb)"
        )
    still_open: list[tuple[int, int]] = []
    held = 0
    columns = (work.first_row, work.last_row, nbytes, once)
    for key, (first, last, size, whole) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        while still_open and still_open[0][0] < first:
            held -= heappop(still_open)[1]
        if held + size > limit:
            raise BudgetError(
                f"at step {int(work.first_step[key])} the {len(still_open)} units that stay open and episode "
                f"{int(work.list.episode[key])} need {held + size} bytes of compressed pictures, exceeding the byte budget {limit} of "
                f"the rank: {HOW_TO_MAKE_ROOM}"
            )
        if not whole:
            held += size
            heappush(still_open, (last, size))


def peak_pictures(first: NDArray[np.int64], last: NDArray[np.int64], pictures: NDArray[np.int64]) -> int:
    """Most pictures held at one step when each unit holds its own from its first to its last step."""
    if not len(first):
        return 0
    steps = np.concatenate([first, last + 1])
    change = np.concatenate([pictures, -pictures])
    order = np.argsort(steps, kind="stable")
    at, sums = steps[order], np.cumsum(change[order])
    ends = np.flatnonzero(np.append(at[1:] != at[:-1], True))
    return int(sums[ends].max())
