"""Measure planning: large plans, resume far into an epoch, re-sharing, mixing, and a simulated 100 TB epoch.

    python -m benchmarks.plan [--out benchmarks/results/plan.json] [--quick] [--dataset NAME=DIR ...]

Seconds are given by wall and by CPU; on a busy machine only the latter means much. Of a dataset, a LeRobotDataset v3
directory, only the metadata and the index of its videos are used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ingest.engine import open_dataset
from ingest.engine.dataset import Dataset
from ingest.plan import Hardware, Pieces, PlanSettings, Units, measure_mixing, plan_epoch, report_plan, simulate
from ingest.video.spans import picture_span

T = TypeVar("T")
OFFSET = 10_000_000
BATCH = 16


def timed(work: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """The result, and its wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, {"wall_s": round(time.perf_counter() - wall, 3), "cpu_s": round(time.process_time() - cpu, 3)}


def large_plans(episodes: int) -> dict[str, Any]:
    """A plan for many episodes and 1,024 ranks, and the same re-shared over 960."""
    lengths = np.random.default_rng(0).integers(50, 600, episodes)
    units, made = timed(lambda: Units.from_lengths(lengths))
    figures: dict[str, Any] = {"episodes": episodes, "frames": int(lengths.sum()), "unit_table": made}

    def settings(world: int, workers: int = 0) -> PlanSettings:
        return PlanSettings(strategy="lanes", world_size=world, workers=workers, batch_size=BATCH, tail="pad")

    plan, figures["plan_1024_ranks"] = timed(lambda: plan_epoch(units, settings(1024)))
    steps, figures["common_steps"] = timed(lambda: plan.steps)
    _, figures["first_batch_of_a_rank"] = timed(lambda: next(plan.rank(17).batches()))
    _, figures["plan_and_steps_1024_ranks_4_workers"] = timed(lambda: plan_epoch(units, settings(1024, 4)).steps)
    cursor = plan.cursor_at(steps // 2)
    again, figures["reshare_1024_to_960"] = timed(lambda: plan_epoch(units, settings(960), cursor))
    figures["frames_left"] = int(again.segment.pieces.count.sum())
    return figures


def far_resume(quick: bool) -> dict[str, Any]:
    """First batch at sample 10 million of one rank with 26 million, in every order."""
    lengths = np.random.default_rng(1).integers(50, 600, 80_000)
    units = Units.from_lengths(lengths)
    figures: dict[str, Any] = {"offset": OFFSET, "frames": int(lengths.sum())}
    step = OFFSET // BATCH
    for strategy in ("lanes", "reservoir", "sequential", "episode_sequential", "remaining", "round_robin"):
        settings = PlanSettings(strategy=strategy, batch_size=BATCH)
        plan = plan_epoch(units, settings)
        cursor = plan.cursor_at(step)
        if strategy in ("remaining", "round_robin"):
            if quick:
                continue
            rank = plan_epoch(units, settings, cursor).rank(0)
            expected, figures[f"{strategy}_without_state"] = timed(lambda rank=rank: next(rank.batches()))
            state = rank.pool_state(0, step)
            assert state is not None
            figures[f"{strategy}_state_bytes"] = len(state)

            def restored(settings: PlanSettings = settings, cursor: Any = cursor, state: bytes = state) -> Any:
                fresh = plan_epoch(units, settings, cursor).rank(0)
                fresh.load_pool_state(0, state)
                return next(fresh.batches())

            found, figures[f"{strategy}_with_state"] = timed(restored)
            assert (found.unit == expected.unit).all()
            assert (found.frame == expected.frame).all()
        else:
            work = lambda settings=settings, cursor=cursor: next(plan_epoch(units, settings, cursor).rank(0).batches())  # noqa: E731
            _, figures[strategy] = timed(work)
    figures["mixture of two datasets, lanes"] = far_mixture(units, step)
    return figures


def far_mixture(units: Units, step: int) -> dict[str, float]:
    """The same of two datasets that are mixed one to three."""
    both = Units(**{name: getattr(units, name) for name in Units.__slots__} | {"dataset": np.arange(len(units)) % 2})
    settings = PlanSettings(strategy="lanes", weights=(1.0, 3.0), batch_size=BATCH)
    cursor = plan_epoch(both, settings).cursor_at(step)
    _, figures = timed(lambda: next(plan_epoch(both, settings, cursor).rank(0).batches()))
    return figures


def reshare_by_mode() -> dict[str, Any]:
    """What a change from 8 to 6 ranks in mid-epoch costs each order, for 20,000 episodes (6.5 million frames)."""
    units = Units.from_lengths(np.random.default_rng(3).integers(50, 600, 20_000))
    figures: dict[str, Any] = {"episodes": len(units), "frames": int(units.frames.sum())}
    for strategy in ("lanes", "reservoir", "sequential", "episode_sequential", "remaining", "round_robin"):
        plan = plan_epoch(units, PlanSettings(strategy=strategy, world_size=8, batch_size=BATCH))
        cursor = plan.cursor_at(plan.steps // 2)
        narrow = PlanSettings(strategy=strategy, world_size=6, batch_size=BATCH)
        _, figures[strategy] = timed(lambda narrow=narrow, cursor=cursor: plan_epoch(units, narrow, cursor))
    return figures


def hundred_terabytes(quick: bool) -> dict[str, Any]:
    """A simulated epoch of 100 TB over 1,024 ranks."""
    episodes = 100_000 if quick else 1_000_000
    rng = np.random.default_rng(2)
    lengths = rng.integers(100, 900, episodes)
    nbytes = np.rint(lengths * (100e12 / lengths.sum())).astype(np.int64)
    units = Units.from_lengths(lengths, nbytes=nbytes)
    settings = PlanSettings(strategy="lanes", world_size=1024, batch_size=BATCH, tail="pad")
    plan, planned = timed(lambda: plan_epoch(units, settings))
    hardware = Hardware(bandwidth_bytes_s=1.5e9, decode_cost_s=4000, step_s=0.02, latency_s=0.05, byte_budget=64 << 30)
    runs, simulated = timed(lambda: simulate(plan, hardware))
    return {
        "episodes": episodes,
        "bytes": int(nbytes.sum()),
        "plan": planned,
        "simulation": simulated,
        "epoch_s": round(max(run.total_s for run in runs), 1),
        "stall_share_mean": round(float(np.mean([run.stall_share for run in runs])), 4),
        "stall_share_worst": round(max(run.stall_share for run in runs), 4),
        "first_batch_s_worst": round(max(run.first_batch_s for run in runs), 2),
        "peak_bytes_worst": max(run.peak_bytes for run in runs),
    }


def mixing(directory: Path) -> dict[str, Any]:
    """Orders of one dataset at equal decoded pictures: distinct episodes per batch, and pictures decoded per picture."""
    dataset = open_dataset(directory)
    whole = dataset.units()
    figures: dict[str, Any] = {"episodes": dataset.num_episodes, "frames": dataset.num_frames, "cameras": len(dataset.spec.cameras)}

    def row(name: str, table: Units, **options: Any) -> int:
        plan = plan_epoch(table, PlanSettings(batch_size=BATCH, **options))
        report = report_plan(plan)
        figures[name] = {
            "decoded_frames_held": int(report.peak_frames[0]),
            "episodes_per_batch_of_16": round(report.mixing.distinct_episodes, 2),
            "neighbour_frames": report.mixing.neighbour_frames,
            "uniform_distance": round(report.mixing.uniform_distance, 3),
            "decode_amplification": round(decode_amplification(dataset, plan.rank(0).orders[0].pieces), 4),
        }
        return int(report.peak_frames[0])

    runs = dataset.units(lane_frames=30)
    row("lanes, whole episodes", whole, strategy="lanes")
    row("lanes, runs of 30 frames", runs, strategy="lanes")
    held = row("reservoir, runs of 30 frames", runs, strategy="reservoir")
    pool = 1
    while row("remaining, at the reservoir's decoded frames", whole, strategy="remaining", pool_size=pool) < held:
        pool += 1
    row("remaining, pool of 32", whole, strategy="remaining")
    row("round_robin, pool of 32", whole, strategy="round_robin")
    mixed = measure_mixing(plan_epoch(whole, PlanSettings(strategy="episode_sequential", batch_size=BATCH)).rank(0))
    figures["episode_sequential"] = {"episodes_per_batch_of_16": round(mixed.distinct_episodes, 2)}
    return figures


def decode_amplification(dataset: Dataset, pieces: Pieces) -> float:
    """Pictures that are fed to decoders over pictures that are delivered, when each piece is decoded once."""
    fed = shown = 0
    for camera in dataset.spec.cameras:
        for episode, lo, hi in zip(pieces.episode.tolist(), pieces.lo.tolist(), pieces.hi.tolist(), strict=True):
            path, first, _ = dataset.source.pictures(episode, camera)
            span = picture_span(dataset.index.table(path), range(first + lo, first + hi))
            fed += span.stop - span.first
            shown += hi - lo
    return fed / shown if shown else 1.0


def recordings() -> list[str]:
    """The two recordings that mixing is measured on, where they are at hand."""
    shared = os.environ.get("REELRAY_SHARED")
    names = {"act_55ep": "v30_chenfei_act_55ep_synthvideo", "pusht_206ep": "v30_pusht_206ep_synthvideo"}
    return [] if shared is None else [f"{name}={Path(shared) / 'data/datasets' / folder}" for name, folder in names.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plan.json")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, and no replay of pool orders")
    parser.add_argument(
        "--dataset",
        action="append",
        metavar="NAME=DIR",
        help="measure mixing on a dataset; two recordings in $REELRAY_SHARED when not given",
    )
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()},
        "large_plans": large_plans(1_000_000 if options.quick else 10_000_000),
        "resume_at_10_million": far_resume(options.quick),
        "reshare_8_to_6_ranks": reshare_by_mode(),
        "simulated_100_tb": hundred_terabytes(options.quick),
        "mixing": {},
    }
    for given in recordings() if options.dataset is None else options.dataset:
        name, directory = given.split("=", 1)
        figures["mixing"][name] = mixing(Path(directory))
    figures["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
