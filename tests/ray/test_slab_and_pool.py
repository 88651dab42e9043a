"""Frame slots between processes, and the pool client's retries."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from actors.pool_client import DecodePoolClient
from actors.slab import AttachedSlabs, BlockSlab, FrameSlab
from ingest.engine.counters import Counters
from ingest.errors import PoisonedWorkError, StreamClosedError

WRITE = """
import pickle, sys
import numpy as np
from actors.slab import AttachedSlabs
handle, slot, value = pickle.loads(bytes.fromhex(sys.argv[1]))
AttachedSlabs().view(handle, slot, (4, 5, 3), np.uint8)[:] = value
"""


def test_another_process_writes_what_the_owner_reads() -> None:
    import pickle

    slab = FrameSlab(4 * 5 * 3, 3)
    slots = slab.reserve(2)
    for value, slot in enumerate(slots.tolist(), start=7):
        argument = pickle.dumps((slab.handle, slot, value)).hex()
        subprocess.run([sys.executable, "-c", WRITE, argument], check=True, cwd=os.getcwd())
    assert [int(slab.view(slot, (4, 5, 3), np.uint8).max()) for slot in slots.tolist()] == [7, 8]
    slab.close()


def test_a_closed_or_foreign_slab_is_refused() -> None:
    slab = FrameSlab(64, 2)
    handle = slab.handle
    with pytest.raises(StreamClosedError):
        AttachedSlabs().view(replace(handle, token=b"x" * 16), 0, (64,), np.uint8)
    slab.close()
    with pytest.raises(StreamClosedError):
        AttachedSlabs().view(handle, 0, (64,), np.uint8)


def test_lost_slots_are_never_handed_out_again() -> None:
    slab = FrameSlab(64, 4)
    lost = slab.reserve(3)
    slab.view(int(lost[0]), (64,), np.uint8)[:] = 9
    fresh = np.concatenate([slab.replace_lost(lost), slab.reserve(1)])
    assert not set(fresh.tolist()) & set(lost.tolist())
    slab.view(int(fresh[-1]), (64,), np.uint8)[:] = 5
    assert slab.view(int(lost[0]), (64,), np.uint8).max() == 9
    slab.close()


def test_a_closed_slab_does_not_touch_the_file_that_got_its_descriptor(tmp_path: Path) -> None:
    slab = FrameSlab(64, 4)
    lost = slab.reserve(2)
    descriptor = slab.handle.descriptor
    slab.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.dup2(other, descriptor)
    try:
        with pytest.raises(StreamClosedError):
            slab.replace_lost(lost)
        slab.close()
        assert os.fstat(descriptor).st_size == 0
    finally:
        for opened in {other, descriptor}:
            os.close(opened)


def test_a_lost_call_that_nobody_wants_any_more_does_not_end_the_others() -> None:
    def unwanted(_: Any) -> Any:
        raise StreamClosedError("closed")

    client = DecodePoolClient([AtOnce(RayActorError(), "up", Answer())], Counters())  # type: ignore[list-item]
    first = client.submit(0, cost=1.0, describe="a lost call", on_lost=unwanted)
    assert isinstance(first.exception(timeout=10), StreamClosedError)
    second = client.submit(1, cost=1.0, describe="another", on_lost=unwanted)
    assert isinstance(second.result(timeout=10), Answer)
    client.close()


def mapped() -> int:
    """Mappings of slabs in this process."""
    return sum("memfd:reelray-frames" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("make", [lambda: FrameSlab(64, 4), lambda: BlockSlab(64, 2, 2)], ids=["frames", "blocks"])
def test_a_closed_slab_is_mapped_by_nobody(make: Callable[[], FrameSlab | BlockSlab]) -> None:
    before = mapped()
    decoder, kept = AttachedSlabs(), []
    for round_number in range(5):
        slab = make()
        kept.append(slab)  # as the stream's back end does, to close them all at its end
        decoder.view(slab.handle, 0, (64,), np.uint8)[:] = round_number
        assert slab.view(0, (64,), np.uint8).max() == round_number
        assert mapped() - before == 2, "once by the owner, once by the decoder, and nothing of the slabs before"
        slab.close()
    assert mapped() - before == 1, "the decoder looks when it maps the next one"
    decoder.drop(kept[-1].handle.token)
    assert mapped() == before


def test_nothing_of_a_slab_has_a_name_in_a_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    slab = FrameSlab(1 << 16, 8)
    slab.view(0, (16,), np.uint8)[:] = 1
    assert set(os.listdir("/dev/shm")) == before
    slab.close()


@dataclass(frozen=True)
class Answer:
    counts: dict[str, float] = field(default_factory=dict)


class Fragile:
    """Dies of the request "die", fails on "fail", answers everything else."""

    def ping(self) -> str:
        return "up"

    def decode(self, request: tuple[str, int]) -> Answer:
        what, _ = request
        if what == "die":
            os._exit(1)
        if what == "fail":
            raise ValueError("broken")
        return Answer({"reelray_pictures_decoded": 1})


class AtOnce:
    """Stands for an actor that answers before it is asked twice: each answer is the one given."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.decode = self.ping = self

    def remote(self, *_: Any) -> AtOnce:
        return self

    def future(self) -> Future[Any]:
        done: Future[Any] = Future()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
        return done


@pytest.mark.parametrize("lost_first", [False, True])
def test_nothing_keeps_an_answer_that_its_caller_has_dropped(lost_first: bool) -> None:
    # An answer may be mapped memory of the object store, which is full long before the garbage collector comes.
    answer = Answer()
    gone = weakref.ref(answer)
    before: list[Any] = [RayActorError(), "up"] if lost_first else []
    client = DecodePoolClient([AtOnce(*before, answer)], Counters())  # type: ignore[list-item]
    del answer, before
    gc.disable()
    try:
        future = client.submit(0, cost=1.0, describe="a call", on_lost=lambda request: request)
        assert isinstance(future.result(timeout=10), Answer)
        del future
        deadline = time.monotonic() + 5
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()
        client.close()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_deadly_call_is_quarantined_and_its_neighbours_survive() -> None:
    import ray

    # Workers cannot import a test module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor: Any = ray.remote(Fragile)
    actors = [actor.options(num_cpus=0, max_restarts=-1, max_task_retries=0).remote() for _ in range(2)]
    counters = Counters()
    client = DecodePoolClient(actors, counters)
    moved: list[tuple[str, int]] = []

    def again(request: tuple[str, int]) -> tuple[str, int]:
        moved.append(request)
        return (request[0], request[1] + 100)

    wanted = ["fine"] * 6 + ["die"] + ["fine"] * 6 + ["fail"]
    futures: list[Future[Any]] = [
        client.submit((what, number), cost=1.0, describe=f"call {number}", on_lost=again) for number, what in enumerate(wanted)
    ]
    errors = [future.exception(timeout=120) for future in futures]
    assert isinstance(errors[6], PoisonedWorkError)
    assert "call 6" in str(errors[6])
    assert isinstance(errors[-1], ValueError)
    assert all(error is None for number, error in enumerate(errors) if wanted[number] == "fine")
    assert counters.totals()["reelray_pictures_decoded"] == 12
    assert counters.totals()["reelray_quarantined"] == 1
    assert ("die", 6) in moved
    client.close()
    for handle in actors:
        ray.kill(handle)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_what_the_cluster_cannot_give_is_named() -> None:
    from actors.resources import wait_for_resources
    from ingest.errors import ResourceUnavailableError

    wait_for_resources({"CPU": 1.0}, "one worker")
    with pytest.raises(ResourceUnavailableError, match=r"99 Train workers .*99 CPU wanted, .* free of 6"):
        wait_for_resources({"CPU": 99.0}, "99 Train workers", timeout_s=0.5)
    with pytest.raises(ResourceUnavailableError, match="2 GPU wanted, 0 free of 0"):
        wait_for_resources({"CPU": 1.0, "GPU": 2.0}, "two GPU workers", timeout_s=0.5)
