"""A run of a plan on imagined hardware, piece by piece: stalls and peaks before a machine is rented.

Each rank fetches its pieces in plan order over its own share of the bandwidth, decodes them in the same order, and
takes steps of equal length; a step waits until every piece that it is the first to use is decoded. Compressed bytes
count against the byte budget from the start of the fetch until the piece is decoded; decoded frames count from the
start of the decode until the piece's last use. Samples are never materialised, so the cost is that of the pieces.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.errors import BudgetError, SettingsError
from ingest.plan.batches import RankPlan
from ingest.plan.epoch import EpochPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the simulation assumes of one rank.

    Attributes:
        bandwidth_bytes_s: bytes fetched per second.
        decode_cost_s: decode cost done per second, in the scale of the units' cost (frames by default).
        step_s: seconds of a training step without waiting.
        latency_s: seconds from the end of a transfer to its arrival; transfers overlap with it.
        byte_budget: bytes fetched and not yet decoded, at most; None for no limit.
        decoded_frames: frames of decoded pieces held at a time, at most; None for no limit.

    Raises:
        SettingsError: naming a field that is not positive (``latency_s``: negative).
    """

    bandwidth_bytes_s: float
    decode_cost_s: float
    step_s: float
    latency_s: float = 0.0
    byte_budget: int | None = None
    decoded_frames: int | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_s", "decode_cost_s", "step_s", "byte_budget", "decoded_frames"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingsError(f"{name} must be positive, found {value!r}")
        if self.latency_s < 0:
            raise SettingsError(f"latency_s must be non-negative, found {self.latency_s!r}")


@dataclass(frozen=True, slots=True)
class RankRun:
    """What a rank went through.

    Attributes:
        rank: the rank.
        steps: batches taken.
        first_batch_s: seconds until the first step could start.
        total_s: seconds of the whole epoch.
        stall_s: seconds of waiting after the first batch.
        fetched_bytes: bytes fetched.
        peak_bytes: most bytes fetched and not decoded at a time.
        peak_frames: most frames of decoded pieces held at a time.
    """

    rank: int
    steps: int
    first_batch_s: float
    total_s: float
    stall_s: float
    fetched_bytes: int
    peak_bytes: int
    peak_frames: int

    @property
    def stall_share(self) -> float:
        """Share of the time after the first batch that was spent waiting."""
        busy = self.total_s - self.first_batch_s
        return self.stall_s / busy if busy > 0 else 0.0


def simulate_rank(plan: RankPlan, hardware: Hardware) -> RankRun:
    """Run one rank.

    Raises:
        BudgetError: when a piece, or what one step needs at a time, exceeds a budget: the rank would wait for ever.
    """
    size, cost, frames, first, last = _needs(plan)
    clock = _Steps(hardware.step_s)
    network = decoder = 0.0
    waiting: deque[tuple[float, int]] = deque()
    held: list[tuple[int, int]] = []
    bytes_held = frames_held = peak_bytes = peak_frames = 0
    for nbytes, work, count, need, release in zip(size, cost, frames, first, last, strict=True):
        start = network
        _refuse_larger("byte_budget", nbytes, hardware.byte_budget)
        while waiting and (waiting[0][0] <= start or (hardware.byte_budget is not None and bytes_held + nbytes > hardware.byte_budget)):
            done, freed = waiting.popleft()
            start, bytes_held = max(start, done), bytes_held - freed
        network = start + nbytes / hardware.bandwidth_bytes_s
        bytes_held += nbytes
        peak_bytes = max(peak_bytes, bytes_held)
        begin = max(network + hardware.latency_s, decoder)
        _refuse_larger("decoded_frames", count, hardware.decoded_frames)
        while held and (
            (held[0][0] < need and clock.end(held[0][0]) <= begin)
            or (hardware.decoded_frames is not None and frames_held + count > hardware.decoded_frames)
        ):
            step, freed = heapq.heappop(held)
            if step >= need:
                raise BudgetError(
                    f"rank {plan.rank}, step {need}: the pieces open at a time have more than decoded_frames="
                    f"{hardware.decoded_frames} frames; raise it, cut units into shorter runs, or use fewer lanes"
                )
            begin, frames_held = max(begin, clock.end(step)), frames_held - freed
        decoder = begin + work / hardware.decode_cost_s
        waiting.append((decoder, nbytes))
        heapq.heappush(held, (release, count))
        frames_held += count
        peak_frames = max(peak_frames, frames_held)
        clock.wait(need, decoder)
    total = clock.end(plan.steps - 1) if plan.steps else 0.0
    return RankRun(plan.rank, plan.steps, clock.first, total, clock.stalled, sum(size), peak_bytes, peak_frames)


def simulate(plan: EpochPlan, hardware: Hardware, *, ranks: list[int] | None = None) -> list[RankRun]:
    """Run several ranks, each on its own hardware; default all of them.

    Raises:
        BudgetError: as ``simulate_rank``.
    """
    numbers = range(plan.world_size) if ranks is None else ranks
    return [simulate_rank(plan.rank(number), hardware) for number in numbers]


class _Steps:
    """When steps start and end: they follow each other, except where one had to wait."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._steps = [0]
        self._starts = [0.0]
        self.first = 0.0
        self.stalled = 0.0

    def start(self, step: int) -> float:
        place = bisect_right(self._steps, step) - 1
        return self._starts[place] + (step - self._steps[place]) * self._step_s

    def end(self, step: int) -> float:
        return self.start(step) + self._step_s

    def wait(self, step: int, until: float) -> None:
        late = until - self.start(step)
        if late <= 0:
            return
        if step == 0:
            self.first = until
        else:
            self.stalled += late
        if self._steps[-1] == step:
            self._starts[-1] = until
        else:
            self._steps.append(step)
            self._starts.append(until)


def _refuse_larger(name: str, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise BudgetError(f"one piece needs {size}, more than {name}={limit}: raise it, or cut units into shorter runs")


def _needs(plan: RankPlan) -> tuple[list[int], list[float], list[int], list[int], list[int]]:
    """Bytes, cost, frames, first and last step of every piece of a rank, by first step."""
    columns: list[tuple[NDArray[np.int64], ...]] = []
    costs: list[NDArray[np.float64]] = []
    for worker, order in enumerate(plan.orders):
        own, pieces = order.admission(), order.pieces
        part = pieces.count[own.entry] / np.maximum(pieces.units.frames[own.unit], 1)
        first, last = plan.step_of(worker, own.first), plan.step_of(worker, own.last)
        nbytes = np.ceil(own.bytes * part).astype(np.int64)
        kept = first < plan.steps
        columns.append(tuple(column[kept] for column in (nbytes, own.frames, first, np.minimum(last, plan.steps - 1))))
        costs.append(pieces.cost[own.entry][kept])
    size, frames, first, last = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    cost = np.concatenate(costs)
    order = np.argsort(first, kind="stable")
    return size[order].tolist(), cost[order].tolist(), frames[order].tolist(), first[order].tolist(), last[order].tolist()
