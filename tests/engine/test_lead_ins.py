"""Streams whose key pictures need a lead-in stay within the byte budget all the same, and deliver what they should."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import WatchedFeed, described, no_thread_is_left, opened
from video.forge import encode, linear, pictures

from ingest.engine.fetch import UnitRequest
from ingest.errors import BudgetError, ReservationError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, plan_epoch
from ingest.storage.base import ByteRange
from ingest.storage.local import LocalStore
from ingest.video.boxes import read_sample_table
from ingest.video.payload import payload_sizes
from ingest.video.spans import picture_span
from train_integration.feed import LocalFeed
from train_integration.mixtures import Member, open_mixture
from train_integration.options import StreamConfig

CAMERA = "observation.images.cam0"
EPISODES, LENGTH, SIZE = 6, 22, (48, 64)
COUNT = EPISODES * LENGTH


@dataclass(frozen=True, slots=True)
class Refreshed:
    """A dataset, and its pictures as a linear decode gives them."""

    root: Path
    frames: list[np.ndarray] = field(repr=False)


@pytest.fixture(scope="module")
def refreshed(tmp_path_factory: pytest.TempPathFactory) -> Refreshed:
    """A dataset in one file that refreshes its pictures bit by bit, and a linear decode of it."""
    root = tmp_path_factory.mktemp("refreshed") / "ds"
    make_dataset(root, MakeOptions(episodes=EPISODES, frames=str(LENGTH), cameras=1, size=SIZE, gop=5))
    data = encode(pictures(COUNT, *SIZE), "libx264", {"x264-params": "intra-refresh=1:keyint=12:bframes=0"})
    (root / f"videos/{CAMERA}/chunk-000/file-000.mp4").write_bytes(data)
    return Refreshed(root, linear(data))


class Metered:
    """A local store that knows how many bytes of video are read at a time, at most."""

    def __init__(self, root: Path) -> None:
        self._inner = LocalStore(root)
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        size = sum(stop - start for start, stop in ranges) if path.endswith(".mp4") else 0
        with self._lock:
            self._now += size
            self.most = max(self.most, self._now)
        try:
            time.sleep(0.0005)
            return self._inner.read_ranges(path, ranges)
        finally:
            with self._lock:
                self._now -= size


def held_bytes(description: Any, dataset: Any, *, alone: bool = False) -> list[int]:
    """What each unit holds: by itself, or when all begin as far back as the one that has to begin furthest."""
    units, reader = description.units, dataset.reader()
    requests = [UnitRequest(0, *map(int, row)) for row in zip(units.episode, units.lo, units.hi, strict=True)]
    if alone:
        return [dataset.reader().read(request).payload_bytes for request in requests]
    for request in requests:
        reader.read(request)
    return [reader.read(request).payload_bytes for request in requests]


@pytest.mark.parametrize("lane_frames", [3, 7, None])
def test_sizes_with_a_lead_in_are_those_of_spans_with_it(refreshed: Refreshed, lane_frames: int | None) -> None:
    data = (refreshed.root / f"videos/{CAMERA}/chunk-000/file-000.mp4").read_bytes()
    table = read_sample_table(lambda start, stop: data[start:stop], len(data), "a.mp4")
    first = np.arange(0, COUNT - LENGTH, lane_frames or LENGTH)
    stop = first + (lane_frames or LENGTH)
    for lead in (0, 1, 3, 100):
        expected = [picture_span(table, range(lo, hi), lead=lead).nbytes for lo, hi in zip(first.tolist(), stop.tolist(), strict=True)]
        assert payload_sizes(table, first, stop, lead=lead).tolist() == expected


def test_reading_never_holds_more_than_it_may(refreshed: Refreshed) -> None:
    description, dataset = described(refreshed.root, strategy="lanes", batch_size=4, lane_frames=4)
    units, actual = description.units, held_bytes(description, dataset, alone=True)
    grown = [row for row, reserved in enumerate(description.unit_bytes.tolist()) if actual[row] > reserved]
    assert grown, "the file needs a lead-in, which its index does not tell"
    for row in grown:
        store = Metered(refreshed.root)
        job = replace(description.job, source=replace(dataset.source, store=store))
        request = UnitRequest(0, int(units.episode[row]), int(units.lo[row]), int(units.hi[row]), int(description.unit_bytes[row]))
        with pytest.raises(
            ReservationError, match=rf"episode {request.episode}: {CAMERA}: .* more than the {request.limit_bytes} bytes"
        ) as caught:
            job.reader(dataset.counters).read(request)
        assert store.most <= description.unit_bytes[row]
        assert dict(caught.value.leads)[CAMERA] > 0
        enough = replace(request, limit_bytes=actual[row])
        assert job.reader(dataset.counters).read(enough).payload_bytes == actual[row]
        assert store.most <= actual[row]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strategy=st.sampled_from(["lanes", "reservoir", "sequential", "episode_sequential", "remaining", "round_robin"]),
    lane_frames=st.sampled_from([2, 5, 9, None]),
    workers=st.integers(0, 2),
    tail=st.sampled_from(["exact", "pad", "loop"]),
    room=st.sampled_from([0, 1, 500, 5000]),
    decoded=st.sampled_from([10, 60, 2000]),
    seed=st.integers(0, 99),
)
def test_any_stream_keeps_within_the_budget(
    refreshed: Refreshed,
    strategy: str,
    lane_frames: int | None,
    workers: int,
    tail: str,
    room: int,
    decoded: int,
    seed: int,
) -> None:
    root, expected = refreshed.root, refreshed.frames
    plan = {"strategy": strategy, "batch_size": 5, "workers": workers, "tail": tail, "seed": seed, "pool_size": 2, "lanes": 3}
    description, dataset = described(root, lane_frames=lane_frames, **plan)
    least = max(*held_bytes(description, dataset), *description.unit_bytes.tolist())
    budget = (least + room) * max(1, workers) * (3 if decoded < 2000 else 1)
    description, dataset = described(root, budget=budget, lane_frames=lane_frames, **plan)
    store = Metered(root)
    description = replace(description, job=replace(description.job, source=replace(description.job.source, store=store)))
    rng = random.Random(seed)
    feed = WatchedFeed(LocalFeed(description.job), lambda _: time.sleep(rng.random() * 0.002), [])
    planned = plan_epoch(description.units, description.with_topology(world_size=1))
    order = [batch["index"].tolist() for _, batch in dataset.iter_batches(planned, max_steps=planned.rank(0).steps)]
    got: list[list[int]] = []
    refusals: list[str] = []
    with no_thread_is_left(), opened(description, feed=feed, decoded_bytes=decoded * SIZE[0] * SIZE[1] * 3) as stream:
        try:
            for batch in stream:
                got.append(batch["index"].tolist())
                for index, picture in zip(batch["index"].tolist(), batch[CAMERA], strict=True):
                    np.testing.assert_array_equal(np.asarray(picture).transpose(1, 2, 0), expected[index])
            assert got == order
        except BudgetError as error:
            # Units that are decoded on demand stay open; together they may need more than there is.
            assert decoded < 2000 or strategy in {"remaining", "round_robin"}
            refusals.append(str(error))
            assert got == order[: len(got)]
    assert all("episode" in refusal and "byte_budget_gb" in refusal for refusal in refusals)
    assert store.most <= budget
    assert all(credits.ledger.peak_bytes <= budget for credits in feed.credits)
    assert all(credits.ledger.held_bytes == 0 for credits in feed.credits)


def test_an_episode_that_its_lead_in_makes_too_large_is_refused_by_name(refreshed: Refreshed) -> None:
    description, dataset = described(refreshed.root, strategy="lanes", batch_size=4, lane_frames=4)
    actual = held_bytes(description, dataset)
    most = int(np.argmax(actual))
    budget = actual[most] - 1
    assert budget >= description.unit_bytes.max()
    description, _ = described(refreshed.root, budget=budget, strategy="lanes", batch_size=4, lane_frames=4)
    store = Metered(refreshed.root)
    description = replace(description, job=replace(description.job, source=replace(description.job.source, store=store)))
    with opened(description) as stream, pytest.raises(BudgetError, match=rf"episode \d+ requires {actual[most]} bytes.*byte_budget_gb"):
        for _ in stream:
            pass
    assert store.most <= budget


def test_lead_ins_of_one_member_of_a_mixture_are_its_own(refreshed: Refreshed, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    make_dataset(plain, MakeOptions(episodes=3, frames="9", cameras=1, size=SIZE, gop=3, seed=5))
    members = [
        Member(source=str(plain), rename={CAMERA: "observation.images.front"}),
        Member(source=str(refreshed.root), rename={CAMERA: "observation.images.front"}),
    ]
    config = StreamConfig(plan=PlanSettings(strategy="lanes", batch_size=5), decode="inline", lane_frames=4)
    description, mixture = open_mixture(members, config)
    with opened(description) as stream:
        found = sorted(
            zip(
                *(
                    np.concatenate(column).tolist()
                    for column in zip(*((stream.delivery.dataset, batch["index"]) for batch in stream), strict=True)
                ),
                strict=True,
            )
        )  # type: ignore[union-attr]
    assert found == [(0, index) for index in range(27)] + [(1, index) for index in range(COUNT)]
    assert mixture.num_frames == 27 + COUNT
