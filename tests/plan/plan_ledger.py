"""What the planning tests share: small tables, ledgers, and strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from ingest.plan import Batch, Cursor, EpochPlan, PlanSettings, Units, plan_epoch

STRATEGIES = ("lanes", "remaining", "round_robin", "sequential", "episode_sequential", "reservoir")
TRIAL_LENGTHS = (11, 7, 1, 23, 2, 9, 16, 4)
"""Episode lengths of a small data set with a prime number of frames, one- and two-frame episodes included."""

Sample = tuple[int, int, int]

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)
strategies = st.sampled_from(STRATEGIES)
topologies = st.tuples(st.integers(1, 8), st.integers(0, 3), st.sampled_from([1, 4, 7]))


def trial_units() -> Units:
    return Units.from_lengths(TRIAL_LENGTHS)


def every_frame(units: Units) -> list[Sample]:
    rows = zip(units.dataset.tolist(), units.episode.tolist(), units.lo.tolist(), units.hi.tolist(), strict=True)
    return sorted((dataset, episode, frame) for dataset, episode, lo, hi in rows for frame in range(lo, hi))


def settings(strategy: str, topology: tuple[int, int, int], **more: object) -> PlanSettings:
    world, workers, batch = topology
    options = {"clamp_workers": True, **more}
    return PlanSettings(strategy=strategy, world_size=world, workers=workers, batch_size=batch, **options)


def planned(units: Units, strategy: str, topology: tuple[int, int, int], cursor: Cursor | None = None, **more: object) -> EpochPlan:
    epoch = int(str(more.pop("epoch", 0)))
    return plan_epoch(units, settings(strategy, topology, **more), cursor, epoch=epoch)


def samples_of(units: Units, batches: Iterable[Batch]) -> list[Sample]:
    """Delivered samples, repeats left out, in order."""
    delivered: list[Sample] = []
    for batch in batches:
        real = ~batch.is_pad
        unit = batch.unit[real]
        delivered += zip(units.dataset[unit].tolist(), units.episode[unit].tolist(), batch.frame[real].tolist(), strict=True)
    return delivered


def all_ranks(plan: EpochPlan, *, batches: int | None = None) -> list[Sample]:
    """Delivered samples of all ranks, of at most ``batches`` batches of each."""
    delivered: list[Sample] = []
    for number in range(plan.world_size):
        rank = plan.rank(number)
        stop = None if batches is None else rank.start_step + batches
        delivered += samples_of(plan.units, rank.batches(stop=stop))
    return delivered


def assert_once(samples: Iterable[Sample], expected: Iterable[Sample]) -> None:
    found, wanted = Counter(samples), Counter(expected)
    assert not wanted - found, f"missing {list((wanted - found).items())[:5]}"
    assert not found - wanted, f"too many {list((found - wanted).items())[:5]}"


def batch_key(batch: Batch) -> tuple[object, ...]:
    """Everything in a batch, comparable."""
    arrays = (batch.unit, batch.frame, batch.is_pad, batch.position, batch.entry, batch.cycle)
    return (batch.step, batch.worker, *(tuple(array.tolist()) for array in arrays))


def sorted_bytes(units: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 100, units)
