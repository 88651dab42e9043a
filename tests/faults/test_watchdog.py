"""A rank whose decoders stand still says so in time, and no other rank waits for it for ever."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.manager import PoolSettings
from benchmarks.faults import Work
from benchmarks.nodes import Nodes
from ingest.engine.spec import ReadOptions
from ingest.errors import IngestStalledError
from train_integration.delivery import deliver_through_ray
from train_integration.job import JobSettings, make_plan, run_training
from train_integration.ledger import start_ledger
from train_integration.options import StreamConfig, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

STALL_S = 25.0
"""Longer than decoders take to start on a busy machine."""


@pytest.fixture
def frozen_decoders(cluster: Nodes) -> Iterator[Any]:
    """Stops the decode actors of one rank's node once rows are on record; lets them go at the end."""
    stopped: list[int] = []
    over = threading.Event()

    def watch(ledger: Any) -> None:
        while not over.wait(0.05):
            progress: Any = ray.get(ledger.progress.remote())
            home = cluster.node_of(progress["pids"][0]) if progress["rows"] >= 24 and 0 in progress["pids"] else None
            here = [] if home is None else [pid for pid in cluster.processes("ray::Decoder") if cluster.node_of(pid) is home]
            if here:
                for pid in here:
                    psutil.Process(pid).send_signal(signal.SIGSTOP)
                stopped.extend(here)
                return

    def start(ledger: Any) -> list[int]:
        threading.Thread(target=watch, args=(ledger,), daemon=True).start()
        return stopped

    yield start
    over.set()
    for pid in stopped:
        if psutil.pid_exists(pid):
            psutil.Process(pid).send_signal(signal.SIGCONT)


def config(work: Work, **changes: Any) -> StreamConfig:
    return replace(work.config(3), stall_s=STALL_S, **changes)


def check(error: IngestStalledError, started: float) -> None:
    text = str(error)
    # Where it stands, what is under way, and how the actors are.
    assert re.search(rf"no batch for {STALL_S:.0f} s at step \d+ of epoch 0: a decode call of episode \d+ has not answered", text), text
    assert re.search(r"[1-9]\d* of \d+ units resident, \d+ on their way, [1-9]\d* decode calls, \d+ of \d+ compressed bytes held", text), (
        text
    )
    assert re.search(r"actor \w{8}: up, [1-9]\d* calls, last answer \d+ s ago", text), text
    assert time.monotonic() - started < 150


@pytest.mark.slow
def test_delivery_ends_by_name(work: Work, frozen_decoders: Any) -> None:
    description, _ = open_stream(work.root, config(work))
    ledger = start_ledger()
    stopped = frozen_decoders(ledger)
    started = time.monotonic()
    with pytest.raises(IngestStalledError) as caught:
        deliver_through_ray(
            description,
            world_size=2,
            cursor=None,
            epoch=0,
            max_steps=None,
            digests=False,
            pool=PoolSettings(actors=1, cpus=0.5),
            step_s=0.3,
            ledger=ledger,
        )
    assert stopped
    check(caught.value, started)
    ray.kill(ledger)


@pytest.mark.slow
def test_peers_in_a_collective_do_not_hang(work: Work, frozen_decoders: Any, tmp_path: Path) -> None:
    """The other rank waits for gradients when the first one stops; it is stopped with it, long before a collective times out."""
    settings = config(work, epochs=None, read=ReadOptions(action_chunk=2))
    settings = replace(settings, plan=replace(settings.plan, tail="pad", world_size=2))
    description, dataset = open_stream(work.root, settings)
    plan = make_plan(dataset, steps=400, chunk=2, seed=1, save_every=1000, step_s=0.1)
    ledger = start_ledger()
    stopped = frozen_decoders(ledger)
    started = time.monotonic()
    with pytest.raises(IngestStalledError) as caught:
        run_training(
            description,
            plan,
            JobSettings(output_dir=tmp_path / "train", world_size=2, max_failures=0, pool=PoolSettings(actors=1, cpus=0.5)),
            ledger=ledger,
        )
    assert stopped
    check(caught.value, started)
    ray.kill(ledger)
