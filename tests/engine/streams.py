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
from ingest.engine.counters import Counters
from ingest.plan import PlanSettings
from train_integration.credits import UnitCredits
from train_integration.decoding import InlineDecoding
from train_integration.feed import Arrival, Feed, LocalFeed
from train_integration.options import StreamConfig, StreamDescription, open_stream
from train_integration.stream import SampleStream


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
