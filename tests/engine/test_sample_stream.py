"""The stream without Ray (local reads, decoding threads) against the single-process engine, element by element."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streams import PICTURE_BYTES, STRATEGIES, check_rank, config, equal, no_thread_is_left, open_rank

from ingest.engine import ReadOptions
from ingest.errors import BudgetError, CursorError, IngestStalledError, StreamClosedError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import plan_epoch
from train_integration.decoding import InlineDecoding
from train_integration.feed import LocalFeed
from train_integration.state import merged_state
from train_integration.stream import SampleStream


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    with no_thread_is_left():
        yield


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("world", "workers", "batch"), [(1, 0, 4), (2, 3, 1), (3, 0, 7), (2, 3, 4)])
def test_every_rank_equals_the_oracle(small: Path, strategy: str, world: int, workers: int, batch: int) -> None:
    description, dataset = config(small, strategy=strategy, world_size=world, workers=workers, batch_size=batch, lane_frames=4)
    seen = [index for rank in range(world) for index in check_rank(description, dataset, rank, world)]
    assert sorted(seen) == list(range(dataset.num_frames))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pictures", [14, 20, 45])
def test_tiny_budgets_change_nothing(small: Path, strategy: str, pictures: int) -> None:
    description, dataset = config(small, strategy=strategy, batch_size=7)
    assert sorted(check_rank(description, dataset, 0, 1, decoded=pictures * PICTURE_BYTES)) == list(range(dataset.num_frames))


@pytest.mark.parametrize("pictures", [28, 400])
def test_windows_reach_beyond_units(rich: Path, pictures: int) -> None:
    read = ReadOptions(
        cameras=("observation.images.cam0", "observation.images.cam1"),
        delta_timestamps={"observation.images.cam0": [-0.5, 0.0, 0.4], "action": [0.0, 0.1]},
    )
    description, dataset = config(rich, read=read, strategy="lanes", batch_size=7, lane_frames=3)
    check_rank(description, dataset, 0, 1, decoded=pictures * PICTURE_BYTES)


@pytest.mark.parametrize(
    "form", [{"pixel_format": "yuv420p"}, {"image_size": (24, 40)}, {"pixel_format": "yuv420p", "image_size": (24, 40)}]
)
def test_every_form_of_picture_arrives(small: Path, form: dict[str, Any]) -> None:
    description, dataset = config(small, read=ReadOptions(**form), strategy="lanes", batch_size=5, lane_frames=4)
    check_rank(description, dataset, 0, 1)


def test_every_kind_of_feature_arrives(rich: Path) -> None:
    description, dataset = config(rich, strategy="remaining", batch_size=5)
    check_rank(description, dataset, 0, 1)


def test_equal_numbers_of_batches_when_asked(small: Path) -> None:
    description, dataset = config(small, strategy="lanes", world_size=3, batch_size=4, tail="pad", lane_frames=4)
    plan = plan_epoch(description.units, description.with_topology(world_size=3))
    counts = []
    for rank in range(3):
        check_rank(description, dataset, rank, 3)
        counts.append(plan.rank(rank).steps)
    assert len(set(counts)) == 1


def test_no_pictures_no_slots(small: Path) -> None:
    description, dataset = config(small, read=ReadOptions(cameras=()), strategy="lanes", batch_size=4)
    check_rank(description, dataset, 0, 1)


def test_a_budget_below_one_batch_is_refused(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=7)
    with open_rank(description, 0, 1, decoded=13 * PICTURE_BYTES) as stream, pytest.raises(BudgetError, match="decoded_budget_gb"):
        next(iter(stream))


@pytest.mark.parametrize("strategy", ["lanes", "remaining", "sequential"])
def test_resuming_at_every_step_gives_the_rest(small: Path, strategy: str) -> None:
    description, _ = config(small, strategy=strategy, world_size=2, workers=2, batch_size=5, lane_frames=4)
    for rank in (0, 1):
        states: list[dict[str, Any]] = []
        batches: list[list[int]] = []
        with open_rank(description, rank, 2) as stream:
            states.append(stream.state_dict())
            for batch in stream:
                batches.append(batch["index"].tolist())
                states.append(stream.state_dict())
            assert stream.epoch == 1
        with open_rank(description, rank, 2) as stream:
            for step, state in enumerate(states):
                stream.load_state_dict(state)
                if step < len(batches):
                    assert [batch["index"].tolist() for batch in stream] == batches[step:]
        assert len(states[0]["cursor"]) <= 1024


def test_prefetched_batches_do_not_count(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=3)
    with open_rank(description, 0, 1) as stream:
        batches = iter(stream)
        first = [next(batches)["index"].tolist() for _ in range(2)]
        state = stream.state_dict()
        third = next(batches)["index"].tolist()
    assert state["cursor"]["segments"][-1]["batches"] == len(first)
    with open_rank(description, 0, 1) as stream:
        stream.load_state_dict(state)
        assert next(iter(stream))["index"].tolist() == third


def test_epochs_follow_without_a_new_start(small: Path) -> None:
    description, dataset = config(small, strategy="lanes", batch_size=4, epochs=2)
    with open_rank(description, 0, 1) as stream:
        orders = []
        for epoch in (0, 1):
            plan = plan_epoch(description.units, description.with_topology(world_size=1), epoch=epoch)
            oracle = dataset.iter_batches(plan)
            assert stream.epoch == epoch
            order: list[int] = []
            for batch in stream:
                equal(batch, next(oracle)[1])
                order += batch["index"].tolist()
            assert sorted(order) == list(range(dataset.num_frames))
            orders.append(order)
        assert orders[0] != orders[1]
        assert list(stream) == []
        stream.set_epoch(1)
        assert [index for batch in stream for index in batch["index"].tolist()] == orders[1]


def test_a_change_of_topology_delivers_the_rest_once(small: Path) -> None:
    description, dataset = config(small, strategy="lanes", world_size=2, batch_size=4, lane_frames=4)
    seen: list[int] = []
    states = []
    for rank in (0, 1):
        with open_rank(description, rank, 2) as stream:
            batches = iter(stream)
            for _ in range(3):
                seen += next(batches)["index"].tolist()
            states.append(stream.state_dict())
    state = merged_state(states)
    for rank in range(3):
        with open_rank(description, rank, 3) as stream:
            stream.load_state_dict(state)
            seen += [index for batch in stream for index in batch["index"].tolist()]
    assert sorted(seen) == list(range(dataset.num_frames))


def test_foreign_states_are_refused(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=4)
    other, _ = config(small, strategy="lanes", batch_size=4, seed=7)
    with open_rank(description, 0, 1) as stream, open_rank(other, 0, 1) as foreign:
        with pytest.raises(CursorError, match="seed"):
            stream.load_state_dict(foreign.state_dict())
        with pytest.raises(CursorError, match="version"):
            stream.load_state_dict({})
        moved = open_rank(description, 0, 1, max_steps=2)
        list(moved)
        with pytest.raises(CursorError, match="different places"):
            merged_state([stream.state_dict(), moved.state_dict()])


def test_a_limited_run_goes_on_where_it_stopped(small: Path) -> None:
    description, dataset = config(small, strategy="remaining", batch_size=4)
    with open_rank(description, 0, 1, max_steps=3) as stream:
        head = [batch["index"].tolist() for batch in stream]
        state = stream.state_dict()
    assert len(head) == 3
    with open_rank(description, 0, 1) as stream:
        stream.load_state_dict(state)
        rest = [batch["index"].tolist() for batch in stream]
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    assert head + rest == [batch["index"].tolist() for _, batch in dataset.iter_batches(plan)]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_limited_run_gives_every_slot_back(small: Path, steps: int) -> None:
    description, _ = config(small, strategy="lanes", batch_size=4, lane_frames=None)
    with open_rank(description, 0, 1, max_steps=steps) as stream:
        assert len(list(stream)) == steps
    assert all(store.free == store.slots for store in stream.stores)


def test_a_rank_that_is_done_before_the_others_resumes_with_nothing(small: Path) -> None:
    description, _ = config(small, strategy="sequential", world_size=2, batch_size=3)
    plan = plan_epoch(description.units, description.with_topology(world_size=2))
    counts = [plan.rank(rank).steps for rank in (0, 1)]
    assert counts[0] != counts[1]
    cursor = plan.cursor_at(min(counts))
    seen = [0, 0]
    for rank in (0, 1):
        with open_rank(description, rank, 2, cursor=cursor) as stream:
            seen[rank] = len(list(stream))
            assert stream.epoch == 1
    assert seen == [counts[0] - min(counts), counts[1] - min(counts)]


def test_torch_batches_share_channels_last_memory(small: Path) -> None:
    torch = pytest.importorskip("torch")
    description, _ = config(small, strategy="lanes", batch_size=4)
    made = InlineDecoding
    stream = SampleStream(description, 0, 1, LocalFeed(description.job), lambda counters: made(1, "here", counters), decoded_bytes=64 << 20)
    kept = []
    with stream:
        for batch in stream:
            pictures = batch["observation.images.cam0"]
            assert pictures.dtype == torch.uint8
            assert pictures.is_contiguous(memory_format=torch.channels_last)
            kept.append((pictures, pictures.clone(), batch["index"]))
        # Batches that the loop keeps are never overwritten by later ones.
        assert all(torch.equal(pictures, copy) for pictures, copy, _ in kept)
    assert sorted(int(i) for *_, index in kept for i in index) == list(range(description.units.frames.sum()))


def test_abandoned_streams_stop(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=2)
    stream = open_rank(description, 0, 1)
    batches = iter(stream)
    next(batches)
    stream.close()
    assert stream.step == 1
    rest = [batch["index"].tolist() for batch in stream]
    assert len(rest) == -(-int(description.units.frames.sum()) // 2) - 1
    stream.close()


def test_a_feed_that_never_answers_is_reported(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=2, stall_s=0.2)
    release = threading.Event()

    class Silent:
        def units(self, wanted: Any, counters: Any, credits: Any) -> Iterator[Any]:
            release.wait(20)
            yield from ()

    stream = SampleStream(
        description, 0, 1, Silent(), lambda counters: InlineDecoding(1, "here", counters), decoded_bytes=64 << 20, output="numpy"
    )
    with pytest.raises(IngestStalledError, match="has not arrived"):
        next(iter(stream))
    release.set()
    stream.close()


def test_closing_wakes_a_loop_that_waits_for_a_unit(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=2)
    asked, release = threading.Event(), threading.Event()

    class Slow:
        def units(self, wanted: Any, counters: Any, credits: Any) -> Iterator[Any]:
            asked.set()
            release.wait(20)
            yield from ()

    stream = SampleStream(
        description, 0, 1, Slow(), lambda counters: InlineDecoding(1, "here", counters), decoded_bytes=64 << 20, output="numpy"
    )
    woken: list[BaseException] = []

    def loop() -> None:
        try:
            next(iter(stream))
        except StreamClosedError as error:
            woken.append(error)

    waiting, closing = threading.Thread(target=loop), threading.Thread(target=stream.close)
    waiting.start()
    asked.wait(20)
    closing.start()
    waiting.join(5)
    assert woken, "the loop is told at once, also where reading takes long to end"
    release.set()
    closing.join(20)


def test_a_loop_that_goes_on_after_a_jump_gets_nothing_from_before_it(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=2)
    with open_rank(description, 0, 1) as stream:
        batches = iter(stream)
        next(batches)
        producer = stream._producer
        assert producer is not None
        while producer.held()["ready_batches"] < description.config.prefetch_batches:
            time.sleep(0.001)
        stream.set_epoch(0)
        with pytest.raises(StreamClosedError):
            next(batches)
        assert stream.step == 0
        assert len(list(stream)) == -(-int(description.units.frames.sum()) // 2)


def test_preparing_what_cannot_be_held_is_not_waited_for(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=2)
    stream = open_rank(description, 0, 1, decoded=1)
    start = time.monotonic()
    assert not stream.prepare(20)
    assert time.monotonic() - start < 10
    with pytest.raises(BudgetError):
        next(iter(stream))
    stream.close()


MODES = [
    ("auto", 400, None),
    ("once", 400, None),
    ("on_demand", 400, None),
    ("auto", 40, None),
    ("once", 400, [-0.1, 0.0]),
    ("on_demand", 60, [-0.1, 0.0]),
]


@pytest.mark.parametrize(("codec", "gop", "bframes"), [("hevc", 8, 3), ("h264", 250, 2), ("h264", 1, 0)])
@pytest.mark.parametrize(("mode", "pictures", "window"), MODES)
def test_every_mode_of_decoding_delivers_the_same(
    tmp_path: Path, mode: str, pictures: int, window: list[float] | None, codec: str, gop: int, bframes: int
) -> None:
    place = tmp_path / "set"
    make_dataset(place, MakeOptions(episodes=4, frames="12:17", cameras=1, size=(32, 64), codec=codec, gop=gop, bframes=bframes, fps=10))
    read = ReadOptions(delta_timestamps=None if window is None else {"observation.images.cam0": window})
    description, dataset = config(place, read=read, strategy="lanes", lanes=3, batch_size=5, lane_frames=6, decode_mode=mode)
    assert sorted(check_rank(description, dataset, 0, 1, decoded=pictures * PICTURE_BYTES)) == list(range(dataset.num_frames))


def test_a_budget_that_does_not_hold_all_units_is_refused_where_all_shall_be_decoded_whole(small: Path) -> None:
    description, _ = config(small, strategy="remaining", batch_size=7, decode_mode="once")
    with open_rank(description, 0, 1, decoded=20 * PICTURE_BYTES) as stream, pytest.raises(BudgetError, match="decoded_budget_gb"):
        next(iter(stream))


def test_what_cannot_be_held_whole_is_decoded_sample_by_sample_at_its_cost(tmp_path: Path) -> None:
    place = tmp_path / "set"
    make_dataset(place, MakeOptions(episodes=3, frames="24", cameras=1, size=(32, 64), gop=12, fps=10))
    amplification: dict[str, float] = {}
    for mode in ("once", "on_demand"):
        description, _ = config(place, strategy="remaining", batch_size=4, decode_mode=mode)
        with open_rank(description, 0, 1, decoded=100 * PICTURE_BYTES) as stream:
            delivered = sum(len(batch["index"]) for batch in stream)
            amplification[mode] = stream.counters.totals()["reelray_pictures_decoded"] / delivered
    assert amplification["once"] == 1
    assert amplification["on_demand"] > 3


def test_waits_of_the_batch_that_is_due_are_counted_by_what_it_waits_for(small: Path) -> None:
    description, _ = config(small, strategy="lanes", batch_size=4, lane_frames=4)

    class Slow(LocalFeed):
        def units(self, wanted: Any, counters: Any, credits: Any) -> Iterator[Any]:
            for arrival in super().units(wanted, counters, credits):
                time.sleep(0.05)
                yield arrival

    class Lazy(InlineDecoding):
        def submit(self, *call: Any) -> Any:
            self._pool.submit(time.sleep, 0.05)
            return super().submit(*call)

    def waits(feed: LocalFeed, decoding: type[InlineDecoding]) -> tuple[float, float]:
        with SampleStream(description, 0, 1, feed, lambda counters: decoding(1, "here", counters), decoded_bytes=64 << 20) as stream:
            assert sum(len(batch["index"]) for batch in stream)
            totals = stream.counters.totals()
        return totals["reelray_arrival_wait_seconds"], totals["reelray_decode_wait_seconds"]

    # How long is a matter of the machine; that there is a wait, and of which kind, is not.
    assert waits(Slow(description.job), InlineDecoding)[0] > 0
    assert waits(LocalFeed(description.job), Lazy)[1] > 0
