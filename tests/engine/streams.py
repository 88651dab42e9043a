"""Streams without Ray, for tests: local reads, decoding threads, and everything they used within reach."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingest.datasource import UnitList
from ingest.engine import ReadOptions
from ingest.engine.counters import Counters
from ingest.engine.frames import HeapFrames
from ingest.plan import PlanSettings, plan_epoch
from train_integration.credits import UnitCredits
from train_integration.decoding import InlineDecoding
from train_integration.feed import Arrival, Feed, LocalFeed
from train_integration.options import StreamConfig, StreamDescription, open_stream
from train_integration.stream import SampleStream

STRATEGIES = ("lanes", "remaining", "round_robin", "sequential", "episode_sequential", "reservoir")
PICTURE_BYTES = 32 * 64 * 3
"""Of the ``small`` dataset."""


def described(root: Path, *, budget: int | None = None, **plan: Any) -> tuple[StreamDescription, Any]:
    """A description of a stream over a dataset; ``budget`` in bytes limits compressed pictures."""
    names = ("epochs", "damage", "lane_frames", "stall_s", "read", "image_transforms", "prefetch_batches", "fetch_threads")
    extra = {name: plan.pop(name) for name in names if name in plan}
    if budget is not None:
        extra["byte_budget_gb"] = (budget + 0.5) / 2**30
        plan["byte_budget"] = budget
    return open_stream(root, StreamConfig(plan=PlanSettings(clamp_workers=True, **plan), decode="inline", **extra))


def opened(description: StreamDescription, rank: int = 0, world: int = 1, *, feed: Feed | None = None, **options: Any) -> SampleStream:
    """A rank's stream."""
    options = {"decoded_bytes": 64 << 20, "output": "numpy"} | options
    return SampleStream(
        description, rank, world, feed or LocalFeed(description.job), lambda counters: InlineDecoding(2, "here", counters), **options
    )


def indices(stream: SampleStream) -> list[list[int]]:
    """Global indices of every batch that is left, repeats included."""
    return [batch["index"].tolist() for batch in stream]


def delivered(stream: SampleStream) -> list[int]:
    """Global indices of every sample that is left, repeats left out."""
    return [index for batch in stream for index in batch["index"][~batch["is_pad"]].tolist()]


@dataclass(slots=True)
class WatchedFeed:
    """A local feed with a delay before every unit, that remembers the credits it was given.

    Attributes:
        inner: reads.
        delay: called with the number of a unit before it is handed on.
        credits: of every work list, in order.
    """

    inner: LocalFeed
    delay: Callable[[int], None]
    credits: list[UnitCredits]

    def units(self, wanted: UnitList, counters: Counters, credits: UnitCredits) -> Iterator[Arrival]:
        self.credits.append(credits)
        for ordinal, unit in self.inner.units(wanted, counters, credits):
            self.delay(ordinal)
            yield ordinal, unit


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Checks that whatever was started in the block has ended."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("reelray")]
    assert not left


def bytes_of_units(description: StreamDescription) -> np.ndarray[Any, Any]:
    """Compressed bytes of every unit."""
    return description.units.bytes


class Opened(SampleStream):
    """A stream that remembers the slots it used."""

    stores: list[HeapFrames]


def open_rank(description: StreamDescription, rank: int, world: int, *, decoded: int = 64 << 20, **options: Any) -> Opened:
    made: list[HeapFrames] = []

    def backend(counters: Any) -> InlineDecoding:
        decoding = InlineDecoding(2, "here", counters)
        make = decoding.make_frames

        def remember(slot_bytes: int, slots: int) -> HeapFrames:
            made.append(make(slot_bytes, slots))
            return made[-1]

        decoding.make_frames = remember  # type: ignore[method-assign]
        return decoding

    stream = Opened(description, rank, world, LocalFeed(description.job), backend, decoded_bytes=decoded, output="numpy", **options)
    stream.stores = made
    return stream


def config(root: Path, *, read: ReadOptions | None = None, **plan: Any) -> Any:
    extra = {name: plan.pop(name) for name in ("epochs", "damage", "lane_frames", "stall_s", "decode_mode") if name in plan}
    return open_stream(
        root, StreamConfig(plan=PlanSettings(clamp_workers=True, **plan), read=read or ReadOptions(), decode="inline", **extra)
    )


def equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert set(left) == set(right)
    for key, value in right.items():
        if isinstance(value, np.ndarray):
            assert left[key].dtype == value.dtype
            assert left[key].shape == value.shape
            np.testing.assert_array_equal(left[key], value, err_msg=key)
        else:
            assert left[key] == value


def check_rank(description: Any, dataset: Any, rank: int, world: int, **options: Any) -> list[int]:
    """Compares a rank's stream with the oracle; returns the indices it delivered."""
    plan = plan_epoch(description.units, description.with_topology(world_size=world))
    oracle = dataset.iter_batches(plan, rank)
    seen: list[int] = []
    with open_rank(description, rank, world, **options) as stream:
        for batch in stream:
            planned, wanted = next(oracle)
            equal(batch, wanted)
            assert stream.delivery is not None
            assert (stream.delivery.step, stream.delivery.worker) == (planned.step, planned.worker)
            seen += batch["index"][~batch["is_pad"]].tolist()
    assert next(oracle, None) is None
    # Closing freed the memory; before that, every slot had come back.
    assert all(store.free == store.slots for store in stream.stores)
    return seen
