"""A disk that fills up in mid-training ends the run with an error that says so; with room again, it goes on, exactly."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.manager import PoolSettings
from benchmarks.faults import Work
from benchmarks.nodes import Nodes
from ingest.engine.spec import ReadOptions
from train_integration.job import JobSettings, make_plan, run_training
from train_integration.ledger import start_ledger
from train_integration.options import open_stream

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=False).returncode:
        pytest.skip("needs root and the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_training_goes_on_when_there_is_room_again(cluster: Nodes, work: Work, small_disk: Path) -> None:
    config = replace(work.config(9), epochs=None, read=ReadOptions(action_chunk=2))
    config = replace(config, plan=replace(config.plan, tail="pad", world_size=2))
    description, dataset = open_stream(work.root, config)
    frames = int(description.units.frames.sum())
    plan = make_plan(dataset, steps=-(-frames // 8) + 6, chunk=2, seed=1, save_every=2, digests=True)
    ledger = start_ledger()
    settings: dict[str, Any] = {"output_dir": small_disk / "train", "world_size": 2, "pool": PoolSettings(actors=1, cpus=0.5)}
    with pytest.raises(OSError, match=r"No space left on device|Errno 28|disk"):
        run_training(description, plan, JobSettings(**settings, max_failures=1), ledger=ledger)
    saved = [path for path in (small_disk / "train" / "run").glob("checkpoint_*") if path.is_dir() and any(path.iterdir())]
    assert saved
    # As if the disk had filled up while the list of checkpoints was being written.
    (small_disk / "train" / "run" / "checkpoint_manager_snapshot.json").write_text("")
    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    before: Any = ray.get(ledger.progress.remote())
    done = run_training(description, plan, JobSettings(**settings, resume=True), ledger=ledger)
    # It goes on where the last whole checkpoint was.
    assert len(done.rows["step"]) < before["rows"] + 8 * plan.steps
    rows = done.rows
    mine = (rows["epoch"] == 0) & rows["committed"] & ~rows["is_pad"]
    found = np.stack([rows["episode_index"][mine], rows["frame_index"][mine]], axis=1)
    assert len(found) == len(np.unique(found, axis=0)) == frames
    assert not work.wrong({name: values[mine] for name, values in rows.items()})
    ray.kill(ledger)
