"""Measure planning: large plans, resume far into an epoch, re-sharing, mixing, and a simulated 100 TB epoch.

    python benchmarks/plan.py [--out benchmarks/results/plan.json] [--quick] [--dataset NAME=DIR ...]

Seconds are given by wall and by CPU; on a busy machine only the latter means much. A dataset is a LeRobotDataset v3
directory, of which only the episode table and the GOP length (``NAME=DIR:GOP``) are used.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.plan import Hardware, PlanSettings, Units, cut_units, measure_mixing, plan_epoch, report_plan, simulate

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


def mixing(directory: Path, gop: int) -> dict[str, Any]:
    """Orders of one dataset at equal decoded frames: distinct episodes per batch, and pictures decoded per picture."""
    files = sorted((directory / "meta" / "episodes").rglob("*.parquet"))
    table = pa.concat_tables([pq.read_table(file) for file in files])
    lengths = table["length"].to_numpy()
    key = next(name.split("/")[1] for name in table.column_names if name.startswith("videos/"))
    video = table[f"videos/{key}/chunk_index"].to_numpy() * 1000 + table[f"videos/{key}/file_index"].to_numpy()
    # Place of each episode in its own file: a GOP begins at every multiple of ``gop`` there.
    begin = np.concatenate([np.cumsum(lengths[video == name]) - lengths[video == name] for name in dict.fromkeys(video.tolist())])
    units = Units.from_lengths(lengths)
    boundaries = {row: np.arange(-int(begin[row]) % gop, int(lengths[row]), gop) for row in range(len(units))}
    figures: dict[str, Any] = {"episodes": len(units), "frames": int(lengths.sum()), "gop": gop}

    def row(name: str, table: Units, **options: Any) -> int:
        plan = plan_epoch(table, PlanSettings(batch_size=BATCH, **options))
        report, pieces = report_plan(plan), plan.rank(0).orders[0].pieces
        lead = (begin[pieces.episode] + pieces.lo) % gop
        lead = np.minimum(lead, begin[pieces.episode] + pieces.lo)
        figures[name] = {
            "decoded_frames_held": int(report.peak_frames[0]),
            "episodes_per_batch_of_16": round(report.mixing.distinct_episodes, 2),
            "neighbour_frames": report.mixing.neighbour_frames,
            "uniform_distance": round(report.mixing.uniform_distance, 3),
            "decode_amplification": round(float((pieces.hi - pieces.lo + lead).sum() / lengths.sum()), 4),
        }
        return int(report.peak_frames[0])

    runs = cut_units(units, boundaries, max_frames=max(30, gop))
    row("lanes, whole episodes", units, strategy="lanes")
    row("lanes, runs of 30 frames", runs, strategy="lanes")
    held = row("reservoir, runs of 30 frames", runs, strategy="reservoir")
    pool = 1
    while row("remaining, at the reservoir's decoded frames", units, strategy="remaining", pool_size=pool) < held:
        pool += 1
    row("remaining, pool of 32", units, strategy="remaining")
    row("round_robin, pool of 32", units, strategy="round_robin")
    mixed = measure_mixing(plan_epoch(units, PlanSettings(strategy="episode_sequential", batch_size=BATCH)).rank(0))
    figures["episode_sequential"] = {"episodes_per_batch_of_16": round(mixed.distinct_episodes, 2)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plan.json")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, and no replay of pool orders")
    parser.add_argument("--dataset", action="append", default=[], metavar="NAME=DIR:GOP", help="measure mixing on a dataset")
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()},
        "large_plans": large_plans(1_000_000 if options.quick else 10_000_000),
        "resume_at_10_million": far_resume(options.quick),
        "reshare_8_to_6_ranks": reshare_by_mode(),
        "simulated_100_tb": hundred_terabytes(options.quick),
        "mixing": {},
    }
    for given in options.dataset:
        name, rest = given.split("=", 1)
        directory, gop = rest.rsplit(":", 1)
        figures["mixing"][name] = mixing(Path(directory), int(gop))
    figures["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
