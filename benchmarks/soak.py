"""Stream for an hour, or as long as asked, and see whether anything grows: memory, descriptors, threads, object store.

    python -m benchmarks.soak [--minutes 60] [--out benchmarks/results/soak.json] [--report soak.html]

Two Ray Train workers deliver epoch after epoch of a small dataset. Every few seconds all processes of the cluster are
looked at. After the first fifth, in which caches and pools fill, a straight line is laid through each series; its slope per
hour, in per cent of the mean, is the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray
from ray._private.internal_api import memory_summary
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from actors.manager import PoolSettings, start_manager, stop_services
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.config import EpisodeDataConfig, get_sample_stream, placeholder, publish_stream
from train_integration.options import StreamConfig, open_stream
from train_integration.report import Series, line_plot, table_html, write_page

RANKS = 2
LIMITS = {"memory_bytes": 5.0, "descriptors": 2.0, "threads": 2.0, "object_store_bytes": 5.0}
"""Per cent of the mean by which a series may grow in an hour."""
_PLASMA = re.compile(r"Plasma memory usage (\d+) MiB")


def loop(config: dict[str, Any]) -> None:
    """Takes batches until the time is over."""
    until = time.time() + config["seconds"]
    samples = 0
    with get_sample_stream("train", output="numpy") as stream:
        while time.time() < until:
            for batch in stream:
                samples += len(batch["index"])
                time.sleep(config["step_s"])
                if time.time() >= until:
                    break
        ray.train.report({"samples": samples, "epoch": stream.epoch})


class Watcher(threading.Thread):
    """Looks at all processes of the cluster from time to time."""

    def __init__(self, every_s: float) -> None:
        super().__init__(name="soak-watcher", daemon=True)
        self.every_s = every_s
        self.stop = threading.Event()
        self.looks: list[dict[str, float]] = []

    def run(self) -> None:
        start = time.monotonic()
        while not self.stop.wait(self.every_s):
            self.looks.append({"minutes": (time.monotonic() - start) / 60} | self._look())

    def _look(self) -> dict[str, float]:
        memory = descriptors = threads = processes = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                found = (process.memory_full_info().pss, process.num_fds(), process.num_threads())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            memory, descriptors, threads, processes = memory + found[0], descriptors + found[1], threads + found[2], processes + 1
        plasma = _PLASMA.search(memory_summary(stats_only=True))
        return {
            "memory_bytes": memory,
            "descriptors": descriptors,
            "threads": threads,
            "processes": processes,
            "object_store_bytes": float(plasma[1]) * 2**20 if plasma else 0.0,
        }


def slopes(looks: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and slope, in per cent of the mean per hour, of each series after its first fifth."""
    steady = looks[len(looks) // 5 :]
    minutes = np.array([look["minutes"] for look in steady])
    found: dict[str, dict[str, float]] = {}
    for name in LIMITS:
        values = np.array([look[name] for look in steady])
        slope = float(np.polyfit(minutes / 60, values, 1)[0]) if len(values) > 1 else 0.0
        mean = float(values.mean())
        found[name] = {"mean": mean, "slope_percent_per_hour": round(100 * slope / mean, 2) if mean else 0.0}
    return found


def soak(minutes: float, step_s: float) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Streams for so long; the figures, and what was seen."""
    with tempfile.TemporaryDirectory(prefix="reelray-soak-") as folder:
        source = Path(folder) / "dataset"
        make_dataset(source, MakeOptions(episodes=16, frames="40:60", cameras=2, size=(96, 128), gop=6, data_files=2, video_files=4))
        plan = PlanSettings(strategy="lanes", seed=3, world_size=RANKS, batch_size=8, tail="pad")
        description, _ = open_stream(source, StreamConfig(plan=plan, epochs=None, decoded_budget_gb=0.2, byte_budget_gb=0.05))
        ray.init(address="local", num_cpus=6, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False)
        manager = start_manager(PoolSettings(actors=2))
        watcher = Watcher(max(1.0, min(10.0, minutes)))
        watcher.start()
        trainer: Any = DataParallelTrainer(
            loop,
            train_loop_config={"seconds": minutes * 60, "step_s": step_s},
            scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
            datasets=placeholder(),
            dataset_config=EpisodeDataConfig(publish_stream(description, manager)),
            run_config=RunConfig(name="soak", storage_path=folder),
        )
        try:
            result = trainer.fit()
        finally:
            watcher.stop.set()
            watcher.join()
            stop_services(manager)
            ray.shutdown()
    metrics: dict[str, Any] = result.metrics or {}
    # The first and the last seconds, in which processes start and end, say nothing about the time between.
    seen = [look for look in watcher.looks if look["processes"] == _usual(watcher.looks)]
    return {"minutes": minutes, "samples_of_rank_0": metrics["samples"], "epochs": metrics["epoch"], "series": slopes(seen)}, seen


def _usual(looks: list[dict[str, float]]) -> float:
    counts = [look["processes"] for look in looks]
    return max(set(counts), key=counts.count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    parser.add_argument("--report", type=Path, default=None, help="an HTML page with the series")
    options = parser.parse_args()
    figures, seen = soak(options.minutes, options.step_s)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    if options.report is not None:
        minutes = [look["minutes"] for look in seen]
        rows = [(name, f"{one['mean']:,.0f}", f"{one['slope_percent_per_hour']:+.2f} %") for name, one in figures["series"].items()]
        plots = {
            name: line_plot([Series(name, minutes, [look[name] for look in seen])], title=name, x_label="minutes", y_label="")
            for name in LIMITS
        }
        write_page(options.report, "reelray soak", {"Slopes": table_html(rows, ("series", "mean", "per hour"))} | plots)
    grown = [name for name, limit in LIMITS.items() if figures["series"][name]["slope_percent_per_hour"] > limit]
    print("grows: " + ", ".join(grown) if grown else "nothing grows")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
