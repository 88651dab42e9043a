"""Slots for decoded pictures: bounded, never shared, free again after their release, whatever memory they are in."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.object_frames import ObjectFrames
from actors.slab import FrameSlab
from ingest.engine.frames import HeapFrames
from ingest.errors import BudgetError, StreamClosedError

Make = Callable[[int, int], Any]
MAKERS: list[Make] = [HeapFrames, FrameSlab, ObjectFrames]
everywhere = pytest.mark.parametrize("make", MAKERS, ids=["heap", "slab", "object_store"])


def write(store: Any, slots: NDArray[np.int32], pictures: NDArray[Any]) -> None:
    """What a decoder does with the slots of one call."""
    if isinstance(store, ObjectFrames):
        arrived = pictures.copy()
        arrived.flags.writeable = False
        store.land(slots, arrived)
    else:
        for slot, picture in zip(slots.tolist(), pictures, strict=True):
            store.view(slot, picture.shape, picture.dtype)[...] = picture


@everywhere
def test_slots_are_bounded_and_wake_waiters(make: Make) -> None:
    store = make(8, 4)
    taken = store.reserve(3)
    assert (store.slots, store.free, store.peak_used, len(set(taken.tolist()))) == (4, 1, 3, 3)
    with pytest.raises(BudgetError, match="holds 4"):
        store.reserve(5)
    with pytest.raises(TimeoutError):
        store.reserve(2, timeout_s=0.01)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.extend(store.reserve(2).tolist()))
    waiter.start()
    store.release(taken[:1])
    waiter.join(5)
    assert len(got) == 2
    closed: list[BaseException] = []

    def wait() -> None:
        try:
            store.reserve(4)
        except StreamClosedError as error:
            closed.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    store.close()
    store.close()
    waiter.join(5)
    assert len(closed) == 1
    with pytest.raises(StreamClosedError):
        store.view(0, (8,), np.uint8)


@everywhere
def test_slots_hold_what_their_call_decoded_until_they_are_released(make: Make) -> None:
    store = make(12, 6)
    random = np.random.default_rng(3)
    held: dict[int, NDArray[Any]] = {}
    calls: list[NDArray[np.int32]] = []
    for number in range(200):
        if calls and (store.free < 3 or random.random() < 0.4):
            call = calls.pop(int(random.integers(len(calls))))
            store.release(call)
            for slot in call.tolist():
                del held[slot]
        else:
            slots = store.reserve(int(random.integers(1, 4)))
            assert not held.keys() & set(slots.tolist())
            pictures = np.full((len(slots), 2, 3), number, np.uint16) + np.arange(len(slots), dtype=np.uint16)[:, None, None] * 1000
            write(store, slots, pictures)
            held |= dict(zip(slots.tolist(), pictures, strict=True))
            calls.append(slots)
        for slot, picture in held.items():
            np.testing.assert_array_equal(store.view(slot, (2, 3), np.uint16), picture)
        assert store.free == 6 - len(held)
    store.close()


@everywhere
def test_slots_of_a_call_that_failed_come_free(make: Make) -> None:
    store = make(4, 4)
    for _ in range(5):
        store.release(store.reserve(4))
    assert store.free == 4
    store.close()


@pytest.mark.parametrize("make", [HeapFrames, FrameSlab], ids=["heap", "slab"])
def test_slots_that_were_warmed_are_the_first_to_be_used(make: Make) -> None:
    size = 1 << 16
    store = make(size, 256)
    store.warm(64)
    before = getrusage(RUSAGE_SELF).ru_minflt
    for slot in store.reserve(64).tolist():
        store.view(slot, (size,), np.uint8)[:] = 1
    assert getrusage(RUSAGE_SELF).ru_minflt - before < 64, "each slot has sixteen pages"
    assert store.free == 192
    store.close()


def test_the_memory_of_an_object_goes_with_the_last_slot_of_its_call() -> None:
    store = ObjectFrames(4, 6)
    slots = store.reserve(3)
    arrived = np.arange(12, dtype=np.uint8).reshape(3, 4)
    gone = weakref.ref(arrived)
    store.land(slots, arrived)
    del arrived
    store.release(slots[:2])
    assert store.free == 3, "the memory of all three is still taken"
    assert store.view(int(slots[2]), (4,), np.uint8).tolist() == [8, 9, 10, 11]
    store.release(slots[2:])
    gc.collect()
    assert gone() is None
    assert store.free == 6
    late = store.reserve(1)
    store.close()
    store.land(late, np.zeros((1, 4), np.uint8))  # its call was under way when the stream was closed
    with pytest.raises(ValueError, match="2 pictures of 8 bytes arrived for 1 slots"):
        store.land(late, np.zeros((2, 4), np.uint8))


def test_slots_for_a_lost_call_are_not_taken_by_who_waits() -> None:
    slab = FrameSlab(8, 2)
    lost = slab.reserve(2)

    def wait() -> None:
        with pytest.raises(StreamClosedError):
            slab.reserve(1)

    waiter = threading.Thread(target=wait)
    waiter.start()
    for number in range(1, 20):
        lost = slab.replace_lost(lost)
        assert lost.tolist() == [2 * number, 2 * number + 1]
        assert slab.free == 0
        assert slab.peak_used == slab.slots == 2 * number + 2
    assert waiter.is_alive()
    slab.close()
    waiter.join(5)
