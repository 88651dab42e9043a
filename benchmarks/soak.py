"""Stream for an hour, or as long as asked, and see whether anything grows: memory, descriptors, threads, object store.

    python -m benchmarks.soak [--minutes 60] [--out benchmarks/results/soak.json] [--report soak.html]

Two Ray Train workers deliver epoch after epoch of a small dataset. Every few seconds all processes of the cluster are
looked at. After the first fifth, in which caches and pools fill, a straight line is laid through each series; its slope per
hour, in per cent of the mean, is the verdict. Beside that, rank 0 counts the objects that the garbage collector knows of
after the first fifth and at the end: what an epoch leaves behind shows there, however little it is.

At the usual pace all processes together take about half a core.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
# As the images of cluster/ do. Otherwise glibc fills eight heaps per core in every process, one after the other, with memory that
# is free, and the first hour shows nothing else.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

import ray
from ray._private.internal_api import get_memory_info_reply
from ray._private.state import state
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from actors.manager import PoolSettings, start_manager, stop_services
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.config import EpisodeDataConfig, get_sample_stream, placeholder, publish_stream
from train_integration.options import StreamConfig, open_stream
from train_integration.process_usage import machine
from train_integration.report import Series, line_plot, table_html, write_page

RANKS = 2
LIMITS = {"memory_bytes": 5.0, "descriptors": 2.0, "threads": 2.0, "object_store_bytes": 5.0}
"""Per cent of the mean by which a series may grow in an hour."""
NOISE = {"memory_bytes": 0.0, "descriptors": 5.0, "threads": 5.0, "object_store_bytes": 3e6}
"""Growth in an hour that is none: the object store is empty but for what is on its way, a hundredth of it at most."""
_OF = "memory of "
"""Begins the names of the series of single kinds of processes."""
_READERS = "readers"
"""Worker processes that run read tasks, or none at the moment."""


def loop(config: dict[str, Any]) -> dict[str, Any]:
    """Takes whole epochs until the time is over; how many samples, how many epochs, and what an epoch leaves behind."""
    until, counted = math.inf, math.inf
    samples = 0
    before: tuple[int, Counter[str]] | None = None
    with get_sample_stream("train", output="numpy") as stream:
        while time.time() < until:
            for batch in stream:
                if until == math.inf:
                    # Processes may take long to start; what is asked for is time of streaming.
                    until, counted = time.time() + config["seconds"], time.time() + config["seconds"] / 5
                samples += len(batch["index"])
                time.sleep(config["step_s"])
            if before is None and time.time() >= counted:
                before = stream.epoch, _objects()
        return {"samples_of_rank_0": samples, "epochs": stream.epoch} | _left_behind(before, stream.epoch)


def _objects() -> Counter[str]:
    """Objects that the garbage collector knows of, by class."""
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def _left_behind(before: tuple[int, Counter[str]] | None, epoch: int) -> dict[str, Any]:
    """Objects that are there for each epoch since, in all and of the project's own classes."""
    if before is None or epoch <= before[0]:
        return {}
    now, epochs = _objects(), epoch - before[0]
    grown = {name: (now[name] - before[1][name]) / epochs for name in now | before[1]}
    own = sum(count for name, count in grown.items() if name.split(".")[0] in {"actors", "ingest", "train_integration"})
    return {"objects_per_epoch": {"all": round(sum(grown.values()), 1), "own": round(own, 1)}}


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
        sums = ("memory_bytes", "descriptors", "threads", "processes", "cpu_s")
        look: dict[str, float] = dict.fromkeys(sums, 0.0)
        own = psutil.Process()
        for process in [own, *own.children(recursive=True)]:
            try:
                kind = "driver" if process.pid == own.pid else _kind(process)
                spent = process.cpu_times()
                found = (_memory(process.pid), process.num_fds(), process.num_threads(), 1, spent.user + spent.system)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
            for name, value in zip(sums, found, strict=True):
                look[name] += value
            look[_OF + kind] = look.get(_OF + kind, 0.0) + found[0]
        used: Any = get_memory_info_reply(state).store_stats
        return look | {"object_store_bytes": float(used.object_store_bytes_used)}


def _memory(pid: int) -> int:
    """Bytes of a process's own and shared memory, in its proportion.

    Pages of files are left out: how many count for a process depends on who else on the machine has the same libraries open.
    """
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:])
    kib = {name: int(value) for name, value, *_ in lines}
    return 1024 * (kib["Pss_Anon:"] + kib["Pss_Shmem:"])


def _kind(process: psutil.Process) -> str:
    """What a process is: the class of its actor, or its program. Between two read tasks a worker process is idle."""
    title = " ".join(process.cmdline())
    if not title.startswith("ray::"):
        return process.name()
    # Between two calls an actor's name comes before its class.
    kind = title.removeprefix("ray::").partition(".")[0].partition(" ")[0].rpartition(":")[2]
    return _READERS if kind in {"IDLE", "ReadReelrayEpisodes"} else kind


def slopes(looks: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and slope, in per cent of the mean per hour, of each series after its first fifth."""
    steady = looks[len(looks) // 5 :]
    minutes = np.array([look["minutes"] for look in steady])
    found: dict[str, dict[str, float]] = {}
    for name in [*LIMITS, *sorted({name for look in steady for name in look if name.startswith(_OF)})]:
        values = np.array([look.get(name, 0.0) for look in steady])
        slope = float(np.polyfit(minutes / 60, values, 1)[0]) if len(values) > 1 else 0.0
        mean = float(values.mean())
        percent = round(100 * slope / mean, 2) if mean else 0.0
        found[name] = {"mean": mean, "slope_per_hour": slope, "slope_percent_per_hour": percent}
    return found


def growing(series: dict[str, dict[str, float]]) -> list[str]:
    """Names of the series that grow by more than they may."""
    return [
        name
        for name, limit in LIMITS.items()
        if series[name]["slope_percent_per_hour"] > limit and series[name]["slope_per_hour"] > NOISE[name]
    ]


def soak(minutes: float, step_s: float) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Streams for so long; the figures, and what was seen."""
    with tempfile.TemporaryDirectory(prefix="reelray-soak-") as folder:
        source = Path(folder) / "dataset"
        make_dataset(source, MakeOptions(episodes=64, frames="40:60", cameras=2, size=(96, 128), gop=6, data_files=2, video_files=4))
        plan = PlanSettings(strategy="lanes", seed=3, world_size=RANKS, batch_size=8, tail="pad")
        config = StreamConfig(plan=plan, epochs=None, decode="pool", decoded_budget_gb=0.2, byte_budget_gb=0.05)
        description, _ = open_stream(source, config)
        # Ray remembers so many tasks for its dashboard; with its default of 100,000 it would go on growing for hours.
        remembered = {"task_events_max_num_task_in_gcs": 1000}
        ray.init(
            address="local",
            num_cpus=6,
            object_store_memory=300_000_000,
            include_dashboard=False,
            log_to_driver=False,
            _system_config=remembered,
        )
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
            delivered: dict[str, Any] = trainer.fit().return_value
        finally:
            watcher.stop.set()
            watcher.join()
            stop_services(manager)
            ray.shutdown()
    # The first and the last seconds, in which processes start and end, say nothing about the time between.
    working = [look for look in watcher.looks if all(_OF + kind in look for kind in ("Decoder", "RayTrainWorker"))]
    seen = [look for look in working if look["processes"] == _usual(working)]
    looks = {"all": len(watcher.looks), "used": len(seen)}
    how = {"machine": machine(), "minutes": minutes, "looks": looks, "cpu_cores": _cores(seen)}
    return how | delivered | {"series": slopes(seen)}, seen


def _usual(looks: list[dict[str, float]]) -> float:
    counts = [look["processes"] for look in looks]
    return max(set(counts), key=counts.count)


def _cores(looks: list[dict[str, float]]) -> float:
    """CPU seconds per second of all processes together."""
    first, last = looks[len(looks) // 5], looks[-1]
    passed = 60 * (last["minutes"] - first["minutes"])
    return round((last["cpu_s"] - first["cpu_s"]) / passed, 2) if passed else 0.0


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
        rows = [
            (name, f"{one['mean']:,.0f}", f"{one['slope_per_hour']:+,.0f}", f"{one['slope_percent_per_hour']:+.2f} %")
            for name, one in figures["series"].items()
        ]
        plots = {
            name: line_plot([Series(name, minutes, [look[name] for look in seen])], title=name, x_label="minutes", y_label="")
            for name in LIMITS
        }
        write_page(options.report, "reelray soak", {"Slopes": table_html(rows, ("series", "mean", "per hour", "of the mean"))} | plots)
    grown = growing(figures["series"])
    print("grows: " + ", ".join(grown) if grown else "nothing grows")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
