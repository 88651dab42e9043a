"""Measure the Ray Train stream against sequential decode: `make bench`.

    python -m benchmarks.stream [--out benchmarks/results/stream.json] [--quick] [--only NAME ...] [--dataset NAME=DIR ...]

Makes H.264 sets of two cameras (one encode per episode, GOP 2, 30 and 250) and measures each one, and every dataset given, with
two ranks, batches of 16, rgb24. Every set holds at least four times as many decoded pictures as may be held at once, generated ones six
times or more, and most take ten CPU seconds to decode: a shorter run would measure how Ray starts. Ceiling and stream alternate; figures
are those of the median round. Ratios of CPU seconds mean something on a busy machine, wall
clock does not.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from actors.manager import PoolSettings
from ingest.engine.spec import ReadOptions
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.benchmarking import run_bench
from train_integration.cluster import ray_session
from train_integration.options import StreamConfig, describe_stream, open_stream
from train_integration.process_usage import machine
from train_integration.unit_sizes import LONGEST_UNIT, that_fits

RANKS, BATCH, ACTORS = 2, 16, 2


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: where the dataset is, or how to make it, and how it is read.

    ``budgets`` is how many times the decoded budgets of all ranks the set holds.
    """

    name: str
    make: MakeOptions | None = None
    place: str | None = None
    strategy: str = "lanes"
    window: int = 1
    budgets: int = 4


def cases(quick: bool) -> Iterator[Case]:
    """The generated sets."""
    episodes, frames = (8, "100:100") if quick else (64, "250:250")
    for gop in (2, 30, 250):
        made = MakeOptions(episodes=episodes, frames=frames, cameras=2, size=(480, 640), gop=gop, video_files=2, pattern="noise")
        yield Case(f"h264_g{gop}_640x480", made, budgets=8 if gop == 250 else 6)
        if gop == 30:
            yield Case("h264_g30_640x480_one_encode", replace(made, encode="file"), budgets=8)
            yield Case("h264_g30_640x480_window4", made, window=4, budgets=8)
            # Every picture takes its whole group with it in this order: a quarter of the set says as much.
            yield Case("h264_g30_640x480_remaining", replace(made, episodes=episodes // 4), strategy="remaining")
            yield Case("h264_g30_640x480_barcode", replace(made, pattern="barcode"), budgets=8)
            yield Case("h264_g30_320x240", replace(made, size=(240, 320), episodes=2 * episodes), budgets=8)


def measure(case: Case, source: str, rounds: int, decode: Any) -> dict[str, Any]:
    """The figures of one case."""
    read = ReadOptions()
    plan: Any = PlanSettings(strategy=case.strategy, world_size=RANKS, batch_size=BATCH)  # type: ignore[arg-type]
    config = StreamConfig(plan=plan, read=read, decode=decode, decode_threads=1)
    description, dataset = open_stream(source, config)
    if case.window > 1:
        offsets = [-step / dataset.fps for step in range(case.window - 1, -1, -1)]
        config = replace(config, read=replace(read, delta_timestamps=dict.fromkeys(dataset.spec.cameras, offsets)))
        description, dataset = open_stream(source, config)
    picture = sum(int(np.prod(dataset.spec.features[camera].picture_shape)) for camera in dataset.spec.cameras)
    decoded = picture * dataset.num_frames
    budget = decoded / case.budgets / RANKS
    config = replace(config, lane_frames=LONGEST_UNIT, decoded_budget_gb=budget / 2**30)
    description = that_fits(dataset, describe_stream(dataset, config), world_size=RANKS, decoded_bytes=int(budget))
    plan = description.config.plan
    pool = PoolSettings(actors=ACTORS) if decode == "pool" else None
    report = run_bench(dataset, description, world_size=RANKS, pool=pool, rounds=rounds, oracle=False)
    stream = report.stream
    print(
        f"{case.name:32s} efficiency {stream.decode_efficiency:.2f} (wall {stream.decode_efficiency_wall:.2f}), "
        f"{stream.camera_frames_per_cpu_s:,.0f} of {report.ceiling_camera_frames_per_cpu_s:,.0f} camera frames per CPU second",
        flush=True,
    )
    return {
        "strategy": case.strategy,
        "window": case.window,
        "decode": decode,
        "decoded_gb": round(decoded / 2**30, 2),
        "decoded_budget_gb_per_rank": round(budget / 2**30, 3),
        "lanes": plan.lane_count(BATCH),
        "longest_unit_frames": int(description.units.frames.max()),
        **rounded(report.to_json()),
    }


def rounded(value: Any) -> Any:
    """The same with floats of four digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Measures and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stream.json"))
    parser.add_argument("--quick", action="store_true", help="small sets, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", choices=("auto", "pool", "inline"), default="auto", help="decode actors, or one thread of each rank")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="cases to measure; the others keep their figures")
    parser.add_argument("--dataset", nargs="*", default=[], metavar="NAME=DIR", help="datasets to measure as well")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    given = [Case(name, place=place) for name, _, place in (text.partition("=") for text in options.dataset)]
    chosen = [case for case in [*given, *cases(options.quick)] if not options.only or case.name in options.only]
    figures: dict[str, Any] = json.loads(options.out.read_text())["cases"] if options.only and options.out.exists() else {}
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with TemporaryDirectory(prefix="reelray-bench-") as folder, ray_session(cpus=RANKS + ACTORS + 1):
        made: dict[MakeOptions, str] = {}
        for case in chosen:
            source = case.place or ""
            if case.make is not None:
                if case.make not in made:
                    made[case.make] = str(Path(folder) / f"set{len(made)}")
                    make_dataset(Path(made[case.make]), case.make)
                source = made[case.make]
            figures[case.name] = measure(case, source, rounds, options.decode)
            report = {
                "machine": machine(),
                "command": "python -m benchmarks.stream",
                "ranks": RANKS,
                "batch": BATCH,
                "decode_actors": ACTORS,
                "cases": figures,
            }
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
