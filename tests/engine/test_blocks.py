"""Memory of whole batches: never shared while somebody looks at it, used again afterwards, bounded while batches are open."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.slab import AttachedSlabs, BlockSlab
from ingest.engine import ReadOptions
from ingest.engine.blocks import Block, HeapBlocks, OpenBatches
from ingest.engine.frames import HeapFrames
from ingest.errors import StreamClosedError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.decoding import InlineDecoding
from train_integration.feed import LocalFeed
from train_integration.options import StreamConfig, open_stream
from train_integration.stream import SampleStream

SHAPE = (4, 5, 3)
SIZE = 60
MAKERS: list[Callable[[], Any]] = [lambda: HeapBlocks(SIZE, 3), lambda: BlockSlab(SIZE, 3, 1)]


@pytest.mark.parametrize("make", MAKERS, ids=["heap", "slab"])
def test_a_block_is_used_again_only_when_no_view_of_it_is_left(make: Callable[[], Any]) -> None:
    store = make()
    blocks = [store.take() for _ in range(5)]
    assert len({block.first for block in blocks}) == 5
    for number, block in enumerate(blocks):
        for place in range(3):
            store.view(block.first + place, SHAPE, np.uint8)[:] = 10 * number + place
    pictures = [block.memory.reshape(3, *SHAPE) for block in blocks]
    assert [picture[place].min() for picture in pictures for place in range(3)] == [10 * n + p for n in range(5) for p in range(3)]
    kept = pictures[2][1, :, :, 0]
    first = blocks[2].first
    blocks.clear()
    pictures.clear()
    block = None
    gc.collect()
    again = [store.take() for _ in range(4)]
    assert first not in {block.first for block in again}, "a view of the block is alive"
    assert kept.min() == kept.max() == 21
    del kept
    gc.collect()
    assert store.take().first == first
    store.close()
    with pytest.raises(StreamClosedError):
        store.take()


def test_what_another_process_writes_is_what_the_batch_holds_also_after_growth() -> None:
    store, other = BlockSlab(SIZE, 3, 1), AttachedSlabs()
    other.warm(store.handle)
    blocks = [store.take() for _ in range(4)]
    for block in blocks:
        for place in range(3):
            other.view(store.handle, block.first + place, SHAPE, np.uint8)[:] = block.first + place
    assert [block.memory.reshape(3, -1).max(axis=1).tolist() for block in blocks] == [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(4)]
    held, handle = blocks[0].memory, store.handle
    store.close()
    with pytest.raises(StreamClosedError):
        AttachedSlabs().warm(handle)
    assert held.max() == 2, "a batch that was handed out outlives its store"


def test_a_block_that_a_lost_decoder_may_write_to_is_retired() -> None:
    store = BlockSlab(SIZE, 3, 4)
    lost, whole = store.take(), store.take()
    slots = np.array([lost.first + 1], np.int32)
    assert store.replace_lost(slots).tolist() == slots.tolist(), "the same pictures go to the same places"
    first, second = lost.first, whole.first
    del lost, whole
    gc.collect()
    taken = {store.take().first for _ in range(6)}
    assert first not in taken
    assert second in taken


def test_open_batches_are_bounded_and_waiters_can_be_woken() -> None:
    batches, over = OpenBatches(2), threading.Event()
    batches.open(over.is_set)
    batches.open(over.is_set)
    done: list[str] = []

    def opener() -> None:
        batches.open(over.is_set)
        done.append("opened")
        try:
            batches.open(over.is_set)
        except StreamClosedError:
            done.append("closed")

    thread = threading.Thread(target=opener)
    thread.start()
    thread.join(0.2)
    assert (done, batches.count) == ([], 2)
    batches.shut()
    thread.join(0.2)
    assert (done, batches.peak) == (["opened"], 2)
    over.set()
    batches.wake()
    thread.join(5)
    assert done == ["opened", "closed"]


@pytest.mark.parametrize("fits", [True, False])
def test_batches_that_the_loop_keeps_stay_as_they_were(small: Path, fits: bool) -> None:
    plan = PlanSettings(strategy="lanes", batch_size=4)
    description, dataset = open_stream(small, StreamConfig(plan=plan, decode="inline", lane_frames=4, epochs=2))
    made: list[str] = []

    def backend(counters: Any) -> InlineDecoding:
        decoding = InlineDecoding(2, "here", counters)
        for name in ("make_blocks", "make_frames"):
            inner = getattr(decoding, name)
            setattr(decoding, name, lambda *given, name=name, inner=inner: (made.append(name), inner(*given))[1])
        return decoding

    budget = (64 << 20) if fits else 40 * 32 * 64 * 3
    with SampleStream(description, 0, 1, LocalFeed(description.job), backend, decoded_bytes=budget, output="numpy") as stream:
        kept = [batch for _ in range(2) for batch in stream]
        peak = stream.counters.totals()["reelray_decoded_bytes_peak"]
    assert set(made) == ({"make_blocks"} if fits else {"make_frames"})
    assert peak <= budget
    assert sum(len(batch["index"]) for batch in kept) == 2 * dataset.num_frames
    camera = dataset.spec.cameras[0]
    for batch in kept:
        for picture, episode, frame in zip(batch[camera], batch["episode_index"], batch["frame_index"], strict=True):
            np.testing.assert_array_equal(picture, dataset.sample(int(episode), int(frame))[camera])


def test_the_memory_of_a_batch_is_used_again_as_soon_as_the_loop_has_let_go_of_it(tmp_path: Path) -> None:
    place = tmp_path / "long"
    make_dataset(place, MakeOptions(episodes=3, frames="40:40", cameras=2, size=(32, 64), gop=2))
    # Units of 32 frames contribute to 32 batches each: nothing that outlives a batch may keep its memory as long as that.
    plan = PlanSettings(strategy="lanes", batch_size=2, lanes=2)
    description, dataset = open_stream(place, StreamConfig(plan=plan, decode="inline", lane_frames=32, epochs=1))
    taken: dict[int, set[int]] = {}
    promised: list[int] = []

    def backend(counters: Any) -> InlineDecoding:
        decoding = InlineDecoding(2, "here", counters)

        def make(slot_bytes: int, batch: int, blocks: int) -> HeapBlocks:
            store, number = HeapBlocks(slot_bytes, batch), len(promised)
            promised.append(blocks)
            take = store.take

            def noted() -> Block:
                block = take()
                taken.setdefault(number, set()).add(block.first // batch)
                return block

            store.take = noted  # type: ignore[method-assign]
            return store

        decoding.make_blocks = make  # type: ignore[method-assign]
        return decoding

    with SampleStream(description, 0, 1, LocalFeed(description.job), backend, decoded_bytes=64 << 20, output="numpy") as stream:
        delivered = sum(len(batch["index"]) for batch in stream)
    assert delivered == dataset.num_frames
    assert len(promised) == 2
    assert max(len(numbers) for numbers in taken.values()) <= promised[0] < dataset.num_frames // 2


@pytest.mark.parametrize("decode_mode", ["auto", "on_demand"])
def test_a_prepared_stream_uses_no_slot_that_was_not_warmed(small: Path, decode_mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ReadOptions(delta_timestamps={"observation.images.cam0": [-0.1, 0.0]})
    plan = PlanSettings(strategy="lanes", batch_size=4)
    description, _ = open_stream(small, StreamConfig(plan=plan, decode="inline", lane_frames=4, read=read, decode_mode=decode_mode))
    warmed: dict[HeapFrames, int] = {}
    warm = HeapFrames.warm
    monkeypatch.setattr(HeapFrames, "warm", lambda store, count: (warmed.update({store: count}), warm(store, count)))

    def backend(counters: Any) -> InlineDecoding:
        return InlineDecoding(2, "here", counters)

    with SampleStream(description, 0, 1, LocalFeed(description.job), backend, decoded_bytes=64 << 20, output="numpy") as stream:
        assert stream.prepare(timeout_s=30)
        assert sum(len(batch["index"]) for batch in stream) > 0
        assert stream.counters.totals()["reelray_decoded_bytes_peak"] == sum(store.peak_used * store.slot_bytes for store in warmed)
    assert all(count >= store.peak_used > 0 for store, count in warmed.items())
