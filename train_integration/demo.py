"""The main job, small: make a dataset, train on it with two Ray Train workers, kill one in mid-epoch, prove coverage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray

from actors.manager import PoolSettings
from ingest.engine.spec import ReadOptions
from ingest.errors import SettingsError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.cluster import ray_session
from train_integration.job import Coverage, JobResult, JobSettings, coverage, make_plan, run_training
from train_integration.ledger import start_ledger
from train_integration.options import StreamConfig, open_stream
from train_integration.report import Series, line_plot, table_html, write_page

RANKS = 2
MARKER = ".reelray-demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Size of the demo.

    Attributes:
        output: folder of everything it writes; replaced when an earlier demo made it.
        episodes: episodes of the made dataset.
        frames: range of their lengths.
        cameras: cameras.
        epochs: epochs to train.
        batch_size: samples of a batch, per rank.
        kill: whether to kill a worker.
    """

    output: Path
    episodes: int = 10
    frames: str = "36:52"
    cameras: int = 3
    epochs: int = 4
    batch_size: int = 8
    kill: bool = True


@dataclass(frozen=True, slots=True)
class Proof:
    """What the demo shows.

    Attributes:
        coverage: committed rows against the plan, per epoch.
        result: of the run on pictures that show what is to be learnt.
        noise: of the same run on noise pictures.
        killed_pid: process that was killed, or None.
        kill_rows: rows on record when it was.
        seconds: wall seconds of the run, the loss of the worker included.
        report: path of the HTML report.
    """

    coverage: list[Coverage]
    result: JobResult
    noise: JobResult
    killed_pid: int | None
    kill_rows: int
    seconds: float
    report: Path

    @property
    def held(self) -> bool:
        """Whether everything that the demo claims came out."""
        exact = all(one.missing == 0 and one.duplicated == 0 and one.in_order for one in self.coverage)
        first, last = ends(self.result)
        return exact and last < first and last < ends(self.noise)[1] and (self.killed_pid is None or self.result.attempts > 1)


def ends(result: JobResult) -> tuple[float, float]:
    """Mean loss of the first and of the last tenth of the logged steps."""
    losses = [entry["loss"] for entry in sorted(result.log, key=lambda entry: entry["step"])]
    share = max(1, len(losses) // 10)
    return sum(losses[:share]) / share, sum(losses[-share:]) / share


class _Killer(threading.Thread):
    """Kills one rank's process once enough rows are on record."""

    def __init__(self, ledger: Any, rank: int, at_rows: int) -> None:
        super().__init__(name="demo-killer", daemon=True)
        self._ledger = ledger
        self._rank = rank
        self._at_rows = at_rows
        self.stop = threading.Event()
        self.pid: int | None = None
        self.rows = 0

    def run(self) -> None:
        while not self.stop.wait(0.2):
            progress: Any = ray.get(self._ledger.progress.remote())
            pid = progress["pids"].get(self._rank)
            if progress["rows"] >= self._at_rows and pid is not None:
                self.pid, self.rows = int(pid), int(progress["rows"])
                os.kill(self.pid, signal.SIGKILL)
                return


def run_demo(settings: DemoSettings) -> Proof:
    """Runs the demo and writes its report.

    Raises:
        SettingsError: the output folder holds something that no demo made.
    """
    output = settings.output.resolve()
    _prepare(output)
    made = MakeOptions(episodes=settings.episodes, frames=settings.frames, cameras=settings.cameras, data_files=2, video_files=3)
    print(f"making a dataset of {settings.episodes} episodes with {settings.cameras} cameras, and one of noise pictures with the same rows")
    make_dataset(output / "dataset", made)
    make_dataset(output / "noise", replace(made, pattern="noise"))
    with ray_session(cpus=RANKS + 2):
        print(f"training on {RANKS} Ray Train workers" + ("; one of them will be killed in mid-epoch" if settings.kill else ""))
        start = time.perf_counter()
        result, killer, found = _train(settings, output / "dataset", output / "train", kill=settings.kill)
        seconds = time.perf_counter() - start
        if killer is not None and killer.pid is not None:
            print(f"killed worker process {killer.pid} with SIGKILL after {killer.rows} samples; the run went on from its last checkpoint")
        print("the same training on noise pictures")
        noise, _, _ = _train(settings, output / "noise", output / "train-noise", kill=False)
    proof = Proof(found, result, noise, killer.pid if killer else None, killer.rows if killer else 0, seconds, output / "report.html")
    _write_report(proof, settings)
    return proof


def _prepare(output: Path) -> None:
    if output.exists() and any(output.iterdir()) and not (output / MARKER).exists():
        raise SettingsError(f"{output} is not empty and was not made by the demo: give another --output")
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / MARKER).write_text("made by reelray demo; replaced by the next one\n", encoding="utf-8")


def _train(settings: DemoSettings, source: Path, output: Path, *, kill: bool) -> tuple[JobResult, _Killer | None, list[Coverage]]:
    config = StreamConfig(
        plan=PlanSettings(strategy="lanes", seed=7, world_size=RANKS, batch_size=settings.batch_size, tail="pad"),
        read=ReadOptions(action_chunk=4),
        epochs=None,
        decoded_budget_gb=0.5,
    )
    description, dataset = open_stream(source, config)
    per_epoch = -(-dataset.num_frames // (RANKS * settings.batch_size))
    plan = make_plan(
        dataset,
        steps=settings.epochs * per_epoch,
        chunk=4,
        seed=7,
        save_every=max(2, per_epoch // 5),
        learning_rate=3e-3,
        digests=True,
        step_s=0.05,
    )
    ledger = start_ledger()
    killer = _Killer(ledger, rank=1, at_rows=int(1.5 * dataset.num_frames)) if kill else None
    if killer is not None:
        killer.start()
    try:
        result = run_training(
            description, plan, JobSettings(output_dir=output, world_size=RANKS, pool=PoolSettings(actors=2)), ledger=ledger
        )
    finally:
        if killer is not None:
            killer.stop.set()
    return result, killer, coverage(description, result.rows, RANKS)


def proof_rows(proof: Proof, settings: DemoSettings) -> list[tuple[str, object]]:
    """The proof as names and values."""
    whole = [one for one in proof.coverage if one.complete]
    first, last = ends(proof.result)
    noise_first, noise_last = ends(proof.noise)
    samples = sum(one.delivered for one in proof.coverage)
    return [
        ("frames selected", proof.coverage[0].selected),
        ("whole epochs committed", len(whole)),
        ("frames delivered in them", sum(one.delivered for one in whole)),
        ("missing", sum(one.missing for one in whole)),
        ("duplicated", sum(one.duplicated for one in proof.coverage)),
        ("order as planned", all(one.in_order for one in proof.coverage)),
        ("workers killed", int(proof.killed_pid is not None)),
        ("samples replayed after it, not counted", int((~proof.result.rows["committed"]).sum())),
        ("loss first → last", f"{first:.4f} → {last:.4f}"),
        ("on noise pictures", f"{noise_first:.4f} → {noise_last:.4f}"),
        ("camera frames checked by digest", samples * settings.cameras),
        ("samples/s while training", _rate(proof.result)),
        ("time to first batch (s)", proof.result.first_batch_s or 0.0),
        ("wall seconds, start of workers and their loss included", proof.seconds),
    ]


def _rate(result: JobResult) -> float:
    """Samples per second of all ranks over the longest stretch of steps without a restart."""
    best = (0.0, 0.0)
    log = result.log
    start = 0
    for place in range(1, len(log) + 1):
        if place == len(log) or log[place]["step"] <= log[place - 1]["step"]:
            stretch = log[start:place]
            seconds = stretch[-1]["time_s"] - stretch[0]["time_s"]
            samples = (stretch[-1]["samples"] - stretch[0]["samples"]) * RANKS
            if seconds > best[1]:
                best = (samples / seconds, seconds)
            start = place
    return best[0]


def _write_report(proof: Proof, settings: DemoSettings) -> None:
    runs = [("on the disc", proof.result), ("on noise", proof.noise)]
    losses = [
        Series(name, [entry["step"] for entry in log], [entry["loss"] for entry in log])
        for name, log in ((name, sorted(run.log, key=lambda entry: entry["step"])) for name, run in runs)
    ]
    clock = sorted(proof.result.log, key=lambda entry: entry["time_s"])
    timeline = [Series("step reached", [entry["time_s"] - clock[0]["time_s"] for entry in clock], [entry["step"] for entry in clock])]
    epochs = [(one.epoch, one.complete, one.selected, one.delivered, one.missing, one.duplicated, one.in_order) for one in proof.coverage]
    header = ("epoch", "whole", "selected", "delivered", "missing", "duplicated", "order as planned")
    write_page(
        proof.report,
        "reelray demo: every frame exactly once",
        {
            "Proof": table_html(proof_rows(proof, settings)),
            "Coverage by epoch": table_html(epochs, header),
            "Loss": line_plot(losses, title="loss of each step; noise pictures cannot be learnt from", x_label="step", y_label="loss"),
            "Time": line_plot(timeline, title="steps over time; the fall is the killed worker", x_label="seconds", y_label="step"),
        },
    )
    facts = dict(proof_rows(proof, settings)) | {"epochs": [asdict(one) for one in proof.coverage]}
    (proof.report.parent / "proof.json").write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")
