"""The whole life of a tiny v4 dataset on local Ray: built under kills, merged, validated, synced, wiped, restored, trained on.

``make demo-prefeature`` runs it with an S3 server as the durable place; ``python -m train_integration.demo_prefeature`` with a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
import torch
from PIL import Image

from actors.prefeature_build import BuildSettings, BuildState, run_build
from actors.prefeature_validate import ray_mapper
from ingest.errors import DatasetError
from ingest.prefeature import layout
from ingest.prefeature.build import build_local
from ingest.prefeature.cases import prepare_cases
from ingest.prefeature.durable import hash_file
from ingest.prefeature.merge import merge
from ingest.prefeature.remote import Remote
from ingest.prefeature.sizes import TINY, Sizes, resized
from ingest.prefeature.sync import ensure, sync
from ingest.prefeature.teachers import TeacherChoice
from ingest.prefeature.validate import validate
from train_integration.cluster import ray_session
from train_integration.demo_s3 import s3_server
from train_integration.prefeature_stream import PrefeatureStream, PrefeatureStreamConfig
from train_integration.prefeature_training import PrefeatureTraining, train


def make_source(folder: Path, count: int, seed: int = 0) -> Path:
    """Synthetic pictures of different sizes."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for number in range(count):
        small = generator.integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((96 + number, 80), Image.Resampling.BICUBIC).save(folder / f"scene {number:02d} at dusk.png")
    return folder


def digests(root: Path) -> dict[str, str]:
    """Hash of every file of a dataset except what tells how it came about (journals and logs)."""
    found = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    told = (layout.JOURNALS, layout.LOGS, layout.SUCCESS)
    return {place.as_posix(): hash_file(path).sha256 for place, path in found.items() if place.parts[0] not in told}


def committed(root: Path) -> int:
    """Records in the journals."""
    return sum(path.read_bytes().count(b'"kind":"record"') for path in (root / layout.JOURNALS).glob("worker_*.jsonl"))


def kill_a_build(root: Path, records: int, workers: int) -> int:
    """Runs ``reelray prefeature build`` on the connected cluster and kills it, driver and all, once it has committed some records.

    Returns:
        How many records its journals held then.

    Raises:
        DatasetError: the command ended by itself.
    """
    command = [sys.executable, "-m", "reelray.cli", "prefeature", "build", str(root), "--workers", str(workers), "--threads", "1"]
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(  # noqa: S603 (this program itself)
        [*command, "--address", address], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while committed(root) < records:
            if process.poll() is not None:
                raise DatasetError(f"the build ended before it could be killed: {process.stderr.read() if process.stderr else ''}")
            time.sleep(0.05)
        process.kill()
    return committed(root)


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

    The build is killed twice over: first the whole command, then single workers of the one that goes on.

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
    calm = folder / "calm"
    shutil.copytree(root, calm)
    _say(started, f"cases: {sizes.cases} prepared")
    reached = kill_a_build(root, random.Random(seed).randrange(1, max(2, records // 3)), workers)
    _say(started, f"build: killed with {reached} of {records} records")
    chaos = Chaos(kills, records - reached, seed)
    settings = BuildSettings(workers=workers, num_gpus=0, num_cpus=1, threads=1, stall_timeout_s=120, attempts=5)
    state, _, _ = run_build(root, choice, settings, on_progress=chaos)
    killed = f"{len(chaos.killed)} workers killed, {state.restarts} restarts"
    _say(started, f"build: resumed, {state.done} trajectories complete, {state.nbytes / 1e6:.1f} MB written, {killed}")
    merged = merge(root, verify_hashes=True)
    _say(started, f"merge: {merged.records} records, {merged.train_records} for training")
    report = validate(root, mapper=ray_mapper(root, full=True))
    _say(started, f"validate: {len(report.findings)} findings over {sum(report.checked.values())} checks")
    if not report.ok:
        raise DatasetError(report.to_text())
    build_local(calm, choice.make())
    merge(calm)
    same = digests(calm) == digests(root)
    _say(started, f"identical: every byte equals an undisturbed build in one process: {same}")
    durable = Remote(remote or f"file://{folder / 'durable' / 'v4'}")
    sent = sync(root, durable, execute=True)
    before = digests(root)
    shutil.rmtree(root)
    _say(started, f"sync: {len(sent.uploads)} files sent to {durable.url}, local copy wiped")
    base = ensure(root, durable, parts="base")
    text = ensure(root, durable, parts="text-kv")
    again = validate(root, mapper=ray_mapper(root, full=True))
    restored = again.ok and text.complete and digests(root) == before
    _say(started, f"restore: {len(base.restored) + len(text.restored)} files, {len(again.findings)} findings, byte for byte: {restored}")
    stream = PrefeatureStreamConfig(str(root), batch_size=2)
    last_step = PrefeatureStream(stream, world_size=2).steps - 1
    plan = PrefeatureTraining(
        stream=stream,
        epochs=2,
        save_every=max(1, min(4, last_step)),
        crash_step=min(6, last_step),
        crash_marker=str(folder / "crashed"),
    )
    result = train(plan, folder / "training", workers=2)
    _say(
        started,
        f"train: loss {' -> '.join(f'{loss:.3f}' for loss in result.losses)}, one worker killed and resumed: {result.resumed}, "
        f"{len(result.delivered)} records committed exactly {plan.epochs} times each: {result.exact}",
    )
    trained = result.exact and result.resumed and result.losses[-1] < result.losses[0]
    return same and restored and trained and len(chaos.killed) == kills


def main() -> int:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--remote", default=None, help="durable copy, e.g. s3://bucket/prefix; a temporary folder by default")
    place.add_argument("--s3-server", type=Path, default=None, help="a moto_server to run as the durable copy")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    sizes, remote = resized(TINY, cases=options.cases), options.remote
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reelray-prefeature-")))
        if options.s3_server is not None:
            stack.enter_context(s3_server(options.s3_server, "durable"))
            remote = "s3://durable/datasets/v4"
        stack.enter_context(ray_session(cpus=options.workers + 4))
        good = run_demo(folder, sizes, workers=options.workers, kills=options.kills, remote=remote, seed=options.seed)
    sys.stdout.write("every stage did what it should\n" if good else "something is wrong, see above\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
