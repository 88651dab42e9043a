"""The whole life of a tiny v4 dataset on local Ray: built under kills, merged, validated, synced, wiped, restored, trained on.

Run as ``python -m train_integration.demo_prefeature``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from actors.prefeature_build import BuildSettings, BuildState, run_build
from actors.prefeature_validate import ray_mapper
from ingest.errors import DatasetError
from ingest.prefeature.cases import prepare_cases
from ingest.prefeature.merge import merge
from ingest.prefeature.remote import Remote
from ingest.prefeature.sizes import TINY, Sizes, resized
from ingest.prefeature.sync import ensure, sync
from ingest.prefeature.teachers import TeacherChoice
from ingest.prefeature.validate import validate
from train_integration.cluster import ray_session
from train_integration.prefeature_stream import PrefeatureStreamConfig
from train_integration.prefeature_training import PrefeatureTraining, train


def make_source(folder: Path, count: int, seed: int = 0) -> Path:
    """Synthetic pictures of different sizes."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for number in range(count):
        small = generator.integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((96 + number, 80), Image.Resampling.BICUBIC).save(folder / f"scene {number:02d} at dusk.png")
    return folder


class Chaos:
    """Kills random workers at random moments of a build."""

    def __init__(self, kills: int, records: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._moments = sorted(self._random.randrange(1, max(2, records * 3 // 4)) for _ in range(kills))
        self.killed: list[int] = []

    def __call__(self, state: BuildState) -> None:
        if len(self.killed) >= len(self._moments) or state.chunks < self._moments[len(self.killed)]:
            return
        alive = [pid for pid in state.pids.values() if pid not in self.killed]
        if alive:
            pid = self._random.choice(alive)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)


def _say(started: float, text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - started:6.1f} s] {text}\n")
    sys.stdout.flush()


def run_demo(folder: Path, sizes: Sizes, *, workers: int, kills: int, remote: str | None, seed: int) -> bool:
    """Every stage once; True when all of them did what they should.

    Args:
        folder: an empty folder.
        sizes: of the dataset.
        workers: build actors.
        kills: workers to kill during the build.
        remote: durable copy; a folder below ``folder`` when None.
        seed: of the kills.

    Raises:
        DatasetError: a stage left something wrong.
    """
    started = time.monotonic()
    torch.set_num_threads(1)
    root = folder / "dataset"
    root.mkdir()
    choice = TeacherChoice("reference", sizes.to_json())
    prepare_cases(make_source(folder / "images", sizes.cases + 4), root, sizes, choice.make().spec)
    records = sizes.cases * 4 * sizes.chunks
    _say(started, f"cases: {sizes.cases} prepared")
    chaos = Chaos(kills, records, seed)
    settings = BuildSettings(workers=workers, num_gpus=0, num_cpus=1, threads=1, stall_timeout_s=120, attempts=5)
    state, _, _ = run_build(root, choice, settings, on_progress=chaos)
    killed = f"{len(chaos.killed)} workers killed, {state.restarts} restarts"
    _say(started, f"build: {state.done} trajectories, {state.nbytes / 1e6:.1f} MB written, {killed}")
    merged = merge(root, verify_hashes=True)
    _say(started, f"merge: {merged.records} records, {merged.train_records} for training")
    report = validate(root, mapper=ray_mapper(root, full=True))
    _say(started, f"validate: {len(report.findings)} findings over {sum(report.checked.values())} checks")
    if not report.ok:
        raise DatasetError(report.to_text())
    durable = Remote(remote or f"file://{folder / 'durable' / 'v4'}")
    sent = sync(root, durable, execute=True)
    shutil.rmtree(root)
    _say(started, f"sync: {len(sent.uploads)} files sent to {durable.url}, local copy wiped")
    base = ensure(root, durable, parts="base")
    text = ensure(root, durable, parts="text-kv")
    again = validate(root, mapper=ray_mapper(root, full=True))
    _say(started, f"restore: {len(base.restored) + len(text.restored)} files, {len(again.findings)} findings")
    plan = PrefeatureTraining(
        stream=PrefeatureStreamConfig(str(root), batch_size=2),
        epochs=2,
        save_every=4,
        crash_step=6,
        crash_marker=str(folder / "crashed"),
    )
    result = train(plan, folder / "training", workers=2)
    _say(
        started,
        f"train: loss {' -> '.join(f'{loss:.3f}' for loss in result.losses)}, one worker killed and resumed: {result.resumed}, "
        f"{len(result.delivered)} records committed exactly {plan.epochs} times each: {result.exact}",
    )
    return again.ok and result.exact and result.losses[-1] < result.losses[0] and len(chaos.killed) == kills


def main() -> int:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--remote", default=None, help="durable copy, e.g. s3://bucket/prefix; a temporary folder by default")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reelray-prefeature-") as folder, ray_session(cpus=options.workers + 4):
        sizes = resized(TINY, cases=options.cases)
        good = run_demo(Path(folder), sizes, workers=options.workers, kills=options.kills, remote=options.remote, seed=options.seed)
    sys.stdout.write("every stage did what it should\n" if good else "something is wrong, see above\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
