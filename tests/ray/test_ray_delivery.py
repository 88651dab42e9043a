"""What Ray delivers equals what the single-process engine delivers, also while its processes are killed from outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import ray
from own_processes import workers
from ray._private.internal_api import get_memory_info_reply
from ray._private.state import state

from actors.manager import PoolSettings
from ingest.engine import open_dataset
from ingest.engine.modes import DecodeMode
from ingest.errors import BudgetError, DecodeError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, plan_epoch
from train_integration.delivery import DeliverySummary, deliver_locally, deliver_through_ray
from train_integration.ledger import start_ledger
from train_integration.options import StreamConfig, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280), pytest.mark.usefixtures("ray_cluster")]

COMPARED = ("dataset", "epoch", "rank", "worker", "step", "position", "episode_index", "frame_index", "index", "is_pad")


def config_of(**plan: Any) -> StreamConfig:
    return StreamConfig(plan=PlanSettings(clamp_workers=True, **plan), decoded_budget_gb=0.1, lane_frames=12)


def through_ray(source: Path, config: StreamConfig, world_size: int, **options: Any) -> DeliverySummary:
    description, _ = open_stream(source, config)
    options = {"cursor": None, "epoch": 0, "max_steps": None, "digests": True, "pool": PoolSettings(actors=2)} | options
    return deliver_through_ray(description, world_size=world_size, **options)


def in_process(source: Path, config: StreamConfig, world_size: int, *, epoch: int = 0) -> DeliverySummary:
    description, dataset = open_stream(source, config)
    plan = plan_epoch(description.units, description.with_topology(world_size=world_size), epoch=epoch)
    return deliver_locally(dataset, description, plan, ranks=list(range(world_size)), max_steps=None, digests=True)


def assert_same(found: DeliverySummary, expected: DeliverySummary) -> None:
    kept = found.rows["committed"]
    digests = [name for name in expected.rows if name.startswith("digest:")]
    assert digests
    for name in (*COMPARED, *digests):
        np.testing.assert_array_equal(found.rows[name][kept], expected.rows[name], err_msg=name)


@pytest.mark.parametrize(
    ("world_size", "plan"),
    [
        (2, {"strategy": "lanes", "batch_size": 7, "workers": 0}),
        (3, {"strategy": "remaining", "batch_size": 4, "workers": 3}),
    ],
)
def test_ray_delivers_what_one_process_delivers(streamed: Path, world_size: int, plan: dict[str, Any]) -> None:
    config = config_of(**plan)
    found = through_ray(streamed, config, world_size, epoch=1)
    assert_same(found, in_process(streamed, config, world_size, epoch=1))
    assert found.attempts == 1
    assert found.rows["committed"].all()


def _delivery_pids(ledger: Any) -> dict[int, int]:
    return ray.get(ledger.progress.remote())["pids"]


def _object_store_bytes() -> int:
    return get_memory_info_reply(state).store_stats.object_store_bytes_used  # type: ignore[attr-defined]


def assert_nothing_is_left_of_pictures(used: int) -> None:
    """Waits for the object store to hold no more than before, but for descriptions of streams, which are small."""
    deadline = time.monotonic() + 30
    while (left := _object_store_bytes()) > used + 80_000 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left <= used + 80_000, "what Ray keeps in its store, and not in a message, has 100 kB or more"


class Killer(threading.Thread):
    """Kills one process, chosen when enough rows are on record."""

    def __init__(self, ledger: Any, at_rows: int, choose: Callable[[], list[int]]) -> None:
        super().__init__(daemon=True)
        self.ledger, self.at_rows, self.choose = ledger, at_rows, choose
        self.killed: int | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.05):
            if ray.get(self.ledger.progress.remote())["rows"] >= self.at_rows and (pids := self.choose()):
                self.killed = pids[0]
                os.kill(self.killed, signal.SIGKILL)
                return


def killed_run(
    source: Path, config: StreamConfig, at_rows: int, choose: Callable[[Any], Callable[[], list[int]]]
) -> tuple[DeliverySummary, Killer]:
    ledger = start_ledger()
    killer = Killer(ledger, at_rows, choose(ledger))
    killer.start()
    try:
        return through_ray(source, config, 2, ledger=ledger, step_s=0.05), killer
    finally:
        killer.stop.set()
        killer.join()


def test_a_killed_train_worker_changes_nothing_that_is_committed(streamed: Path) -> None:
    config = config_of(strategy="lanes", batch_size=4)
    found, killer = killed_run(streamed, config, Random(41).randint(24, 72), lambda ledger: lambda: [_delivery_pids(ledger)[1]])
    assert killer.killed is not None
    assert found.attempts == 2
    assert_same(found, in_process(streamed, config, 2))


def test_a_killed_decode_actor_changes_nothing(streamed: Path) -> None:
    config = config_of(strategy="remaining", batch_size=4)
    found, killer = killed_run(streamed, config, Random(42).randint(8, 72), lambda _: lambda: workers("Decoder"))
    assert killer.killed is not None
    assert found.attempts == 1
    assert_same(found, in_process(streamed, config, 2))


@pytest.mark.parametrize("mode", ["auto", pytest.param("on_demand", marks=pytest.mark.slow)])
def test_pictures_may_come_through_the_object_store(streamed: Path, mode: DecodeMode) -> None:
    config = replace(config_of(strategy="lanes", batch_size=7), frame_store="object_store", decoded_budget_gb=0.05, decode_mode=mode)
    used = _object_store_bytes()
    found = through_ray(streamed, config, 2)
    assert_same(found, in_process(streamed, config, 2))
    assert found.counts["reelray_pictures_decoded"] > 0
    assert_nothing_is_left_of_pictures(used)


@pytest.mark.slow
def test_a_killed_rank_leaves_no_picture_in_the_object_store(streamed: Path) -> None:
    config = replace(config_of(strategy="lanes", batch_size=4), frame_store="object_store", decoded_budget_gb=0.05)
    used = _object_store_bytes()
    found, killer = killed_run(streamed, config, 40, lambda ledger: lambda: [_delivery_pids(ledger)[1]])
    assert killer.killed is not None
    assert found.attempts == 2
    assert_same(found, in_process(streamed, config, 2))
    assert_nothing_is_left_of_pictures(used)


@pytest.mark.slow
def test_a_killed_decoder_of_objects_changes_nothing(streamed: Path) -> None:
    config = replace(config_of(strategy="remaining", batch_size=4), frame_store="object_store", decoded_budget_gb=0.05)
    found, killer = killed_run(streamed, config, Random(43).randint(8, 72), lambda _: lambda: workers("Decoder"))
    assert killer.killed is not None
    assert found.attempts == 1
    assert_same(found, in_process(streamed, config, 2))


@pytest.mark.slow
def test_a_decoded_budget_beyond_the_object_store_is_refused(streamed: Path) -> None:
    config = replace(config_of(strategy="lanes", batch_size=4), frame_store="object_store", decoded_budget_gb=64.0)
    with pytest.raises(BudgetError, match=r"64.00 GiB does not fit the object store: .* share is 0\."):
        through_ray(streamed, config, 2, max_steps=1)


@pytest.mark.slow
def test_a_killed_read_worker_changes_nothing(streamed: Path) -> None:
    config = config_of(strategy="sequential", batch_size=4)
    found, killer = killed_run(streamed, config, 0, lambda _: lambda: workers("ReadReelrayEpisodes"))
    assert killer.killed is not None
    assert_same(found, in_process(streamed, config, 2))


@pytest.mark.slow
def test_a_cursor_joins_two_runs_of_different_world_sizes(streamed: Path) -> None:
    config = config_of(strategy="lanes", batch_size=4)
    first = through_ray(streamed, config, 2, max_steps=9)
    second = through_ray(streamed, config, 3, cursor=first.cursor)
    delivered = np.concatenate([first.rows["index"], second.rows["index"]])
    description, _ = open_stream(streamed, config)
    np.testing.assert_array_equal(np.sort(delivered), np.arange(int(description.units.frames.sum())))
    assert second.cursor.epoch == 1


def test_nothing_is_left_after_a_run(streamed: Path) -> None:
    through_ray(streamed, config_of(strategy="lanes", batch_size=8), 2, max_steps=3)
    deadline = time.monotonic() + 30
    while (left := workers("Decoder", "_Manager", "_Ledger", "RayTrainWorker")) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "on_demand"])
def test_a_damaged_group_is_named_by_the_decode_actor_that_meets_it(tmp_path: Path, mode: DecodeMode) -> None:
    root = tmp_path / "set"
    make_dataset(root, MakeOptions(episodes=3, frames="40", cameras=2, size=(96, 128), gop=10, pattern="noise"))
    source = open_dataset(root).source
    camera = source.cameras[1]
    path, first, _ = source.pictures(1, camera)
    table = open_dataset(root).index.table(path)
    sample = int(table.presented[first + 20])
    start, size = int(table.offsets[sample]), int(table.sizes[sample])
    file = root / path
    content = bytearray(file.read_bytes())
    content[start + 5 : start + size] = bytes(size - 5)
    file.write_bytes(content)
    with pytest.raises(DecodeError, match=rf"episode 1, {camera}: .*picture ") as caught:
        through_ray(root, replace(config_of(strategy="lanes", batch_size=8), decode_mode=mode), 2)
    assert (caught.value.episode, caught.value.camera, caught.value.file) == (1, camera, path)
    # Decoded whole, the damaged picture is named; by itself, whichever picture of its group is wanted first.
    assert caught.value.picture in ({first + 20} if mode == "auto" else range(first + 20, first + 30))
    sample = int(table.presented[caught.value.picture])
    start, size = int(table.offsets[sample]), int(table.sizes[sample])
    assert caught.value.byte_range == (start, start + size)
