"""What `reelray bench` measures: the ceiling, CPU seconds of process trees, and the single-process engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from ingest.engine.dataset import Dataset, open_dataset
from ingest.errors import BenchmarkError, SettingsError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, plan_epoch
from train_integration.benchmarking import Figures, measure_oracle, profile_oracle, run_bench
from train_integration.ceiling import measure_ceiling
from train_integration.options import StreamConfig, open_stream
from train_integration.process_usage import ProcessTree, machine

ISSUE_KEYS = {
    "samples_per_s",
    "camera_frames_per_s",
    "camera_frames_per_cpu_s",
    "decode_efficiency",
    "decode_amplification",
    "read_amplification",
    "step_wait",
    "first_batch_s",
    "peak_pss_mb",
    "episodes_per_batch",
}
BURN = "import time; end = time.process_time() + 0.6\nwhile time.process_time() < end: pass\ntime.sleep({rest})"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes of two cameras with B-frames, joined in one file each."""
    place = tmp_path_factory.mktemp("bench") / "ds"
    make_dataset(place, MakeOptions(episodes=6, frames="9:20", size=(32, 64), gop=5, bframes=2, seed=2))
    return place


@pytest.fixture(scope="module")
def dataset(root: Path) -> Dataset:
    return open_dataset(root, return_uint8=True)


@pytest.mark.parametrize("processes", [1, 3])
def test_the_ceiling_decodes_every_picture_once(dataset: Dataset, processes: int) -> None:
    figures = measure_ceiling(dataset, processes)
    assert figures.camera_frames == 2 * dataset.num_frames
    assert figures.processes == processes
    assert figures.cpu_s > 0
    assert figures.wall_s > 0


def test_the_ceiling_of_no_camera_is_refused(root: Path) -> None:
    with pytest.raises(SettingsError, match="no camera"):
        measure_ceiling(open_dataset(root, cameras=()), 1)


def test_a_decoding_process_that_dies_is_an_error(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises((BenchmarkError, BrokenPipeError)):
        measure_ceiling(dataset, 1)


def test_cpu_of_child_processes_counts_even_when_they_end() -> None:
    # Other tests of this process may have started a cluster.
    others = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    tree = ProcessTree(os.getpid(), every_s=0.05, exclude=others)
    tree.start()
    running = [subprocess.Popen([sys.executable, "-c", BURN.format(rest=rest)]) for rest in (0.3, 60)]
    running[0].wait(timeout=60)
    burning = psutil.Process(running[1].pid)
    while sum(burning.cpu_times()[:2]) < 0.5:
        time.sleep(0.05)
    usage = tree.stop()
    running[1].kill()
    running[1].wait(timeout=10)
    assert usage.cpu_s >= 0.95
    assert usage.ray_cpu_s == 0.0
    assert usage.peak_pss_mb > 1


def test_work_before_the_start_does_not_count() -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    tree = ProcessTree(os.getpid())
    tree.start()
    assert tree.stop().cpu_s < 0.2


def test_the_engine_delivers_every_sample_while_it_is_measured(dataset: Dataset) -> None:
    plan = plan_epoch(dataset.units(lane_frames=5), PlanSettings(strategy="lanes", world_size=2, batch_size=4, dataset="x"))
    tally, usage = measure_oracle(dataset, plan, max_steps=None)
    assert tally.samples == dataset.num_frames
    assert tally.pictures == 2 * dataset.num_frames
    assert tally.totals["reelray_pictures_decoded"] >= tally.pictures
    assert min(tally.episodes) >= 1
    assert 0 < tally.first_batch_s <= tally.wall_s
    assert set(usage.by_role) == {"driver"}
    assert "decode" in profile_oracle(dataset, plan, 3)


def test_the_report_has_the_keys_promised() -> None:
    assert {item.name for item in fields(Figures)} >= ISSUE_KEYS


def test_no_round_is_refused(root: Path) -> None:
    description, dataset = open_stream(root, StreamConfig())
    with pytest.raises(SettingsError, match="rounds"):
        run_bench(dataset, description, world_size=1, rounds=0)


def test_the_machine_is_named() -> None:
    assert "CPUs" in machine()
