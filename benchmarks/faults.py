"""Kill what a stream consists of, by seed, on a cluster of several nodes, and count what went missing or came twice.

    python -m benchmarks.faults [--kills 20] [--node-losses 2] [--resumes 6] [--seed 0] [--out benchmarks/results/faults.json]

The nodes are real raylets with object stores of their own, all on this machine (`ray.cluster_utils.Cluster`). Each run
delivers an epoch of a small barcoded dataset to Ray Train workers on the worker nodes; the driver is on a head node that
has no CPU to lend. The judge is the ledger: the committed rows of a run, or of a chain of runs, must be the selected
frames, each exactly once, in the order of the plan, with the pictures that one process decodes.

* kills: SIGKILL of decode actors, node actors, read workers and Train workers in turn, ten in each run, when a drawn number
  of samples is on record.
* node losses: the node of a rank, with everything on it, in mid-epoch.
* resumes: the driver gets SIGKILL in mid-training; the next driver goes on from the newest checkpoint with another
  number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.manager import PoolSettings
from benchmarks.nodes import NAMESPACE, Nodes, kill, nodes
from ingest.engine.spec import ReadOptions
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, plan_epoch
from train_integration.delivery import DeliverySummary, deliver_locally, deliver_through_ray
from train_integration.job import JobSettings, coverage, make_plan, run_training
from train_integration.ledger import Rows, start_ledger
from train_integration.options import StreamConfig, StreamDescription, open_stream

RANKS = 2
STEP_S = 0.1
KINDS = ("decode actor", "node actor", "read worker", "train worker")
TITLES = {"decode actor": "ray::Decoder", "node actor": "ray::NodeCache", "read worker": "ray::ReadReelrayEpisodes"}
"""How the processes of a kind call themselves; Train workers are known to the ledger."""


# --- the judge --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verdict:
    """What came of some runs.

    Attributes:
        runs: epochs delivered.
        faults: faults by kind.
        selected: frames selected, over all runs.
        missing: of them, not delivered.
        duplicated: deliveries beyond the first of a frame.
        out_of_order: runs in which a rank's rows differ from the plan.
        wrong_pictures: delivered pictures that differ from what one process decodes.
        worker_groups: worker groups started.
        seconds: wall seconds.
    """

    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    selected: int = 0
    missing: int = 0
    duplicated: int = 0
    out_of_order: int = 0
    wrong_pictures: int = 0
    worker_groups: int = 0
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every frame came exactly once, as planned and as decoded by one process."""
        return not (self.missing or self.duplicated or self.out_of_order or self.wrong_pictures)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "faults": dict(sorted(self.faults.items())),
            "seconds": round(self.seconds, 1),
        }


class Work:
    """A small barcoded dataset and what one process delivers of it.

    Attributes:
        root: its folder.
        place: where runs read it from; the folder, until somebody serves it elsewhere.
        pictures: digest of every picture by camera, episode and frame.
    """

    def __init__(self, folder: Path, seed: int, *, episodes: int = 12) -> None:
        self.root = folder / "dataset"
        self.place = str(self.root)
        make_dataset(
            self.root,
            MakeOptions(episodes=episodes, frames="18:30", cameras=2, size=(48, 64), gop=6, data_files=2, video_files=3, seed=seed),
        )
        self.pictures: dict[tuple[str, int, int], int] = {}
        description, dataset = open_stream(self.root, self.config(seed))
        plan = plan_epoch(description.units, description.with_topology(world_size=1))
        rows = deliver_locally(dataset, description, plan, ranks=[0], max_steps=None, digests=True).rows
        for name in (name for name in rows if name.startswith("digest:")):
            for episode, frame, digest in zip(rows["episode_index"], rows["frame_index"], rows[name], strict=True):
                self.pictures[name, int(episode), int(frame)] = int(digest)

    def config(self, seed: int) -> StreamConfig:
        """Streams of a few compressed bytes at a time, so that reading goes on through the whole epoch."""
        plan = PlanSettings(strategy="lanes", seed=seed, batch_size=4, lanes=4, clamp_workers=True)
        return StreamConfig(plan=plan, decoded_budget_gb=0.05, byte_budget_gb=2.5e-5, lane_frames=12, prefetch_batches=2, stall_s=120)

    def wrong(self, rows: Rows) -> int:
        """Pictures that differ from those of one process."""
        found = 0
        for name in (name for name in rows if name.startswith("digest:")):
            for episode, frame, digest in zip(rows["episode_index"], rows["frame_index"], rows[name], strict=True):
                found += self.pictures[name, int(episode), int(frame)] != int(digest)
        return found


def judge(verdict: Verdict, work: Work, description: StreamDescription, done: DeliverySummary, world_size: int) -> None:
    """Adds a whole epoch to a verdict."""
    (epoch,) = coverage(description, done.rows, world_size)
    verdict.runs += 1
    verdict.selected += epoch.selected
    verdict.missing += epoch.missing if epoch.complete else epoch.selected - epoch.delivered
    verdict.duplicated += epoch.duplicated
    verdict.out_of_order += not epoch.in_order
    verdict.wrong_pictures += work.wrong(done.rows)
    verdict.worker_groups += done.attempts


# --- kills ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault that is due.

    Attributes:
        at_rows: samples on record when it strikes.
        kind: what it strikes.
        choice: which of those that are there, as a share.
    """

    at_rows: int
    kind: str
    choice: float


class Executioner(threading.Thread):
    """Strikes when it is time. A blow whose victim is not there waits for one."""

    def __init__(self, ledger: Any, blows: list[Blow], strike: Callable[[Blow, dict[int, int]], bool]) -> None:
        super().__init__(name="executioner", daemon=True)
        self.ledger, self.strike = ledger, strike
        self.left = sorted(blows, key=lambda blow: blow.at_rows)
        self.struck: list[Blow] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while self.left and not self.stop.wait(0.03):
            progress: Any = ray.get(self.ledger.progress.remote())
            due = [blow for blow in self.left if progress["rows"] >= blow.at_rows]
            for blow in due:
                if self.strike(blow, progress["pids"]):
                    self.left.remove(blow)
                    self.struck.append(blow)
                    break


def run_under(
    work: Work, seed: int, blows: list[Blow], strike: Callable[[Blow, dict[int, int]], bool], verdict: Verdict, *, ranks: int = RANKS
) -> list[Blow]:
    """Delivers an epoch under blows, judges it, and returns those that struck."""
    start = time.perf_counter()
    description, _ = open_stream(work.place, work.config(seed))
    ledger = start_ledger()
    executioner = Executioner(ledger, blows, strike)
    executioner.start()
    try:
        done = deliver_through_ray(
            description,
            world_size=ranks,
            cursor=None,
            epoch=0,
            max_steps=None,
            digests=True,
            pool=PoolSettings(actors=2, cpus=0.5),
            max_failures=60,
            step_s=STEP_S,
            ledger=ledger,
        )
    finally:
        executioner.stop.set()
        executioner.join()
        ray.kill(ledger)
    judge(verdict, work, description, done, ranks)
    verdict.seconds += time.perf_counter() - start
    return executioner.struck


def kill_processes(cluster: Nodes, work: Work, kills: int, seed: int, *, per_run: int = 10) -> Verdict:
    """SIGKILL for decode actors, node actors, read workers and Train workers in turn."""
    verdict = Verdict()
    draw = random.Random(seed)
    rows = len(work.pictures) // 2
    owed = [KINDS[number % len(KINDS)] for number in range(kills)]
    while owed:
        # Reading runs ahead of the samples, so its workers are struck as soon as they are there.
        blows = [Blow(0 if kind == "read worker" else draw.randrange(4, rows - rows // 5), kind, draw.random()) for kind in owed[:per_run]]
        begun: set[int] = set()

        def strike(blow: Blow, pids: dict[int, int], begun: set[int] = begun) -> bool:
            found = sorted(pids.values()) if blow.kind == "train worker" else cluster.processes(TITLES[blow.kind])
            found = [pid for pid in found if pid not in begun]
            if not found:
                return False
            victim = found[int(blow.choice * len(found))]
            begun.add(victim)
            return kill(victim)

        struck = run_under(work, draw.randrange(1 << 30), blows, strike, verdict)
        if not struck:
            raise RuntimeError(f"none of {[blow.kind for blow in blows]} was there to be killed")
        # Whoever was not there in this run is struck in the next one.
        for blow in struck:
            owed.remove(blow.kind)
            verdict.faults[blow.kind] += 1
        _say("kills", verdict)
    return verdict


def lose_nodes(cluster: Nodes, work: Work, losses: int, seed: int) -> Verdict:
    """Loses the node of a rank in mid-epoch, and gives the cluster a new one afterwards."""
    verdict = Verdict()
    draw = random.Random(seed)
    rows = len(work.pictures) // 2
    while verdict.faults.total() < losses:

        def strike(blow: Blow, pids: dict[int, int]) -> bool:
            homes = [home for rank in sorted(pids) if (home := cluster.node_of(pids[rank])) is not None]
            if not homes:
                return False
            cluster.lose(homes[int(blow.choice * len(homes))])
            return True

        blows = [Blow(draw.randrange(rows // 8, rows // 2), "node", draw.random())]
        struck = run_under(work, draw.randrange(1 << 30), blows, strike, verdict)
        verdict.faults.update(blow.kind for blow in struck)
        cluster.add()
        _say("node losses", verdict)
    return verdict


# --- resumes ----------------------------------------------------------------------------------------


def resume_elsewhere(cluster: Nodes, work: Work, resumes: int, seed: int) -> Verdict:
    """Chains of training drivers: each gets SIGKILL, and the next goes on with another number of ranks."""
    verdict = Verdict()
    draw = random.Random(seed)
    while (left := resumes - verdict.faults["restart at another world size"]) > 0:
        with tempfile.TemporaryDirectory(prefix="reelray-faults-") as folder:
            _chain(cluster, work, draw, min(6, left), Path(folder), verdict)
        _say("resumes", verdict)
    return verdict


def _chain(cluster: Nodes, work: Work, draw: random.Random, restarts: int, folder: Path, verdict: Verdict) -> None:
    start = time.perf_counter()
    seed, world = draw.randrange(1 << 30), draw.randint(1, 3)
    name = f"ledger-{seed}"
    ledger = start_ledger(name)
    epoch = len(work.pictures) // 2
    kills = sorted(draw.randrange(epoch // 10, epoch * 9 // 10) for _ in range(restarts))
    for number in range(restarts + 1):
        with _driver(cluster, work, seed, world, folder, name, resume=number > 0) as alive:
            before = _groups(ledger)

            def reached(number: int = number, before: int = before) -> bool:
                if number == restarts:
                    return _committed(ledger, 1) > 0
                # Only a driver whose ranks have begun is killed; rows that they deliver again count as well.
                return _groups(ledger) > before and _committed(ledger, 0) >= kills[number]

            _until(reached, alive)
        print(f"driver {number + 1} of {restarts + 1} with {world} ranks: killed after {time.perf_counter() - start:.0f} s", flush=True)
        if number < restarts:
            verdict.faults["driver"] += 1
            verdict.faults["restart at another world size"] += 1
            world = draw.choice([one for one in (1, 2, 3) if one != world])
    rows: Rows = ray.get(ledger.columns.remote())
    verdict.worker_groups += _groups(ledger)
    ray.kill(ledger)
    mine = (rows["epoch"] == 0) & rows["committed"] & ~rows["is_pad"]
    rows = {name: values[mine] for name, values in rows.items()}
    distinct = len(np.unique(np.stack([rows["episode_index"], rows["frame_index"]], axis=1), axis=0))
    verdict.runs += 1
    verdict.selected += epoch
    verdict.missing += epoch - distinct
    verdict.duplicated += len(rows["step"]) - distinct
    verdict.wrong_pictures += work.wrong(rows)
    verdict.seconds += time.perf_counter() - start


def _groups(ledger: Any) -> int:
    return int(ray.get(ledger.progress.remote())["attempts"])


def _committed(ledger: Any, epoch: int) -> int:
    rows: Rows = ray.get(ledger.columns.remote())
    return int(((rows["epoch"] == epoch) & rows["committed"] & ~rows["is_pad"]).sum())


def _until(reached: Callable[[], bool], alive: Callable[[], None], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        alive()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no progress within {timeout_s:.0f} s")
        time.sleep(0.1)


@contextmanager
def _driver(cluster: Nodes, work: Work, seed: int, world: int, folder: Path, ledger: str, *, resume: bool) -> Iterator[Callable[[], None]]:
    """A training driver in a process of its own, which gets SIGKILL at the end of the block."""
    arguments = [cluster.cluster.address, work.root, seed, world, folder / "train", ledger, int(resume)]
    path = folder / "driver.log"
    with (
        path.open("w") as log,
        subprocess.Popen([sys.executable, "-m", "benchmarks.faults", "--driver", *map(str, arguments)], stdout=log, stderr=log) as process,
    ):

        def alive() -> None:
            if process.poll() is not None:
                raise RuntimeError(f"the driver ended with status {process.returncode}: {path.read_text()[-3000:]}")

        try:
            yield alive
        finally:
            process.kill()


def drive(address: str, root: str, seed: str, world: str, output: str, ledger: str, resume: str) -> None:
    """The driver of `resume_elsewhere`: trains until it is killed."""
    ray.init(address=address, log_to_driver=False, logging_level="error", namespace=NAMESPACE)
    plan = PlanSettings(strategy="lanes", seed=int(seed), world_size=int(world), batch_size=4, lanes=4, clamp_workers=True, tail="pad")
    config = StreamConfig(plan=plan, epochs=None, decoded_budget_gb=0.05, lane_frames=12, read=ReadOptions(action_chunk=2))
    description, dataset = open_stream(root, config)
    training = make_plan(dataset, steps=100_000, chunk=2, seed=1, save_every=3, digests=True, step_s=STEP_S)
    settings = JobSettings(output_dir=Path(output), world_size=int(world), pool=PoolSettings(actors=1, cpus=0.5), resume=bool(int(resume)))
    run_training(description, training, settings, ledger=ray.get_actor(ledger))


# --- the command ------------------------------------------------------------------------------------


def _say(what: str, verdict: Verdict) -> None:
    print(what, json.dumps(verdict.to_json()), flush=True)


def measure(kills: int, losses: int, resumes: int, seed: int, folder: Path) -> dict[str, Any]:
    """All three, one after another, on one cluster."""
    work = Work(folder, seed)
    with nodes() as cluster:
        return {
            "kills": kill_processes(cluster, work, kills, seed).to_json(),
            "node_losses": lose_nodes(cluster, work, losses, seed).to_json(),
            "resumes": resume_elsewhere(cluster, work, resumes, seed).to_json(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--node-losses", type=int, default=2)
    parser.add_argument("--resumes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    parser.add_argument("--driver", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.driver:
        # Whatever runs in the background of a shell has it ignored, and its children too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        drive(*options.driver)
        return 0
    with tempfile.TemporaryDirectory(prefix="reelray-faults-") as folder:
        found = measure(options.kills, options.node_losses, options.resumes, options.seed, Path(folder))
    found = {"machine": {"python": platform.python_version(), "cpus": os.cpu_count(), "ray": ray.__version__}, "seed": options.seed} | found
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    exact = all(
        not any(one[what] for what in ("missing", "duplicated", "out_of_order", "wrong_pictures")) for one in list(found.values())[2:]
    )
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
