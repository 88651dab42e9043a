"""Measure reelray, LeRobot's streaming loader and ``ray.data.read_lerobot`` on the same files: ``python -m benchmarks.compare``.

Makes two sets of one camera, AV1 with GOP 2 (LeRobot's default) and H.264 with GOP 30, and delivers an epoch of each by every loader.
CPU seconds are those of all processes from the first request to the last sample. LeRobot runs in an environment of its own
(``make .venvs/lerobot/.ready``); without it, only reelray is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from actors.manager import PoolSettings
from benchmarks.stream import rounded
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.benchmarking import run_bench
from train_integration.cluster import ray_session
from train_integration.options import StreamConfig, open_stream
from train_integration.process_usage import ProcessTree, machine

ROOT = Path(__file__).resolve().parents[1]
RANKS, BATCH = 2, 16
SETS = {"AV1 GOP 2": ("av1", 2), "H.264 GOP 30": ("h264", 30)}
RIVALS = {"streaming": "LeRobot 0.6.1 streaming, one process", "read_lerobot": "`ray.data.read_lerobot`, in stored order"}
CEILING = "one process per core, in file order"


def reelray(folder: str) -> dict[str, Any]:
    """The ceiling, the single process and Ray Train, on a connected Ray."""
    plan = PlanSettings(strategy="lanes", lanes=BATCH, world_size=RANKS, batch_size=BATCH)
    description, dataset = open_stream(folder, StreamConfig(plan=plan, decode="inline", decode_threads=1, lane_frames=30))
    report = run_bench(dataset, description, world_size=RANKS, pool=PoolSettings(actors=RANKS))
    wanted = ("camera_frames_per_s", "camera_frames_per_cpu_s", "first_batch_s")
    return {
        CEILING: {"camera_frames_per_s": report.ceiling_camera_frames_per_s, wanted[1]: report.ceiling_camera_frames_per_cpu_s},
        "reelray, one process": {name: getattr(report.oracle, name) for name in wanted},
        f"reelray through Ray Train, {RANKS} ranks": {name: getattr(report.stream, name) for name in wanted},
    }


def _line(stream: IO[str], start: str) -> str:
    for line in stream:
        if line.startswith(start):
            return line
    raise RuntimeError(f"the loader ended without a line that starts with {start!r}")


def rival(python: Path, name: str, folder: str, home: str) -> dict[str, float]:
    """One epoch by another loader."""
    command = [str(python), str(ROOT / "benchmarks" / "rivals.py"), name, folder]
    environment = os.environ | {"HF_HOME": home, "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        _line(process.stdout, "go")
        tree = ProcessTree(process.pid, every_s=0.5)
        tree.start()
        process.stdin.write("\n")
        process.stdin.flush()
        found = json.loads(_line(process.stdout, "{"))
        used = tree.stop()
        process.stdin.write("\n")
        process.stdin.close()
    return {
        "camera_frames_per_s": found["rows"] / found["wall_s"],
        "camera_frames_per_cpu_s": found["rows"] / used.cpu_s,
        "first_batch_s": found["first_batch_s"],
        "rows": found["rows"],
    }


def main() -> None:
    """Measures and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "compare.json")
    parser.add_argument("--episodes", type=int, default=8, help="episodes of 150 pictures in each set")
    parser.add_argument("--lerobot", type=Path, default=ROOT / ".venvs" / "lerobot", help="LeRobot's environment")
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    sets: dict[str, Any] = {}
    with TemporaryDirectory(prefix="reelray-compare-") as folder:
        for name, (codec, gop) in SETS.items():
            place = f"{folder}/{codec}"
            made = MakeOptions(
                episodes=options.episodes, frames="150:150", cameras=1, size=(480, 640), gop=gop, codec=codec, pattern="noise"
            )  # type: ignore[arg-type]
            make_dataset(Path(place), made)
            with ray_session(cpus=RANKS * 2 + 1):
                loaders = reelray(place)
            python = options.lerobot / "bin" / "python"
            for key, label in RIVALS.items() if python.exists() else ():
                loaders[label] = rival(python, key, place, f"{folder}/home")
            sets[name] = {"pictures": 150 * options.episodes, "loaders": rounded(loaders)}
            for label, row in loaders.items():
                print(
                    f"{name:14s} {label:44s} {row['camera_frames_per_s']:8.0f}/s {row['camera_frames_per_cpu_s']:8.0f} per CPU s",
                    flush=True,
                )
            # Each set is kept as soon as it is measured.
            report = {"machine": machine(), "command": "python -m benchmarks.compare", "sets": sets}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
