"""Measure how long a stream takes to its first batch at sample 10 million, in every order, planning alone.

    python -m benchmarks.resume [--out benchmarks/results/resume.json] [--quick]

The dataset is made up (80,000 episodes, 26 million frames, GOP runs of 64 frames for the native orders) and its rows
cost nothing to read, so that what is measured is everything between ``load_state_dict`` and the first batch that is not
I/O: the plan, the share, the stretch of work, and for pool orders the pool. Each resume runs in a fresh process; seconds are the best
of three, for other work on the machine only ever slows one down.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ingest.datasource import UnitList
from ingest.engine.counters import Counters
from ingest.engine.damage import DamageReport
from ingest.engine.spec import ReadOptions, SampleSpec
from ingest.engine.unit import UnitData, UnitRows
from ingest.lerobot.windows import Windows
from ingest.plan import PlanSettings, Units, cut_units, plan_epoch
from train_integration.credits import UnitCredits
from train_integration.decoding import InlineDecoding
from train_integration.options import StreamConfig, StreamDescription
from train_integration.stream import SampleStream
from train_integration.worklist import EpisodeLengths

OFFSET = 10_000_000
BATCH = 16
RUN = 64
PASSES = 3


class MadeUpFeed:
    """Units whose rows are numbers alone."""

    def units(self, wanted: UnitList, _: Counters, credits: UnitCredits) -> Iterator[tuple[int, UnitData]]:
        """Every unit at once, without I/O."""
        for row in range(len(wanted)):
            credits.wait(row)
            lo, hi = int(wanted.lo[row]), int(wanted.hi[row])
            numbers = {"index": np.arange(lo, hi), "task_index": np.zeros(hi - lo, dtype=np.int64)}
            rows = UnitRows(lo, hi - lo, numbers, pa.table({}), {0: "go"})
            yield row, UnitData(0, int(wanted.episode[row]), lo, hi, hi, rows, {})


def describe(strategy: str, episodes: int) -> StreamDescription:
    """A stream over the made-up dataset."""
    lengths = np.random.default_rng(1).integers(50, 600, episodes)
    units = Units.from_lengths(lengths)
    if strategy in {"lanes", "reservoir"}:
        units = cut_units(units, {row: np.arange(0, int(lengths[row]), RUN) for row in range(episodes)}, max_frames=RUN)
    config = StreamConfig(plan=PlanSettings(strategy=strategy, batch_size=BATCH), decode="inline")  # type: ignore[arg-type]
    spec = SampleSpec(ReadOptions(), {}, (), (), (), Windows({}), 30.0)
    job: Any = _Job(spec)
    return StreamDescription(config, job, units, EpisodeLengths((np.arange(episodes),), (lengths,)), DamageReport())


class _Job:
    """Stands for a read job: the stream itself only asks it for the form of a sample."""

    def __init__(self, spec: SampleSpec) -> None:
        self.spec = spec
        self.source = self
        self.sources = self.jobs = (self,)
        self.store = None
        self.location = "made up"

    def decoding_saved(self, units: UnitList) -> np.ndarray[Any, Any]:
        """Nothing is decoded."""
        return np.zeros(len(units))


def open_stream(description: StreamDescription) -> SampleStream:
    """The only rank's stream."""
    return SampleStream(
        description, 0, 1, MadeUpFeed(), lambda counters: InlineDecoding(1, "made up", counters), decoded_bytes=1 << 20, output="numpy"
    )


def resume(strategy: str, episodes: int, offset: int, state: dict[str, Any], pools: bytes | None, out: Any) -> None:
    """Sends the seconds from ``load_state_dict`` to the first batch, and that batch."""
    description = describe(strategy, episodes)
    wall, cpu = time.perf_counter(), time.process_time()
    with open_stream(description) as stream:
        stream.load_state_dict(state, pool_state=pools)
        first = next(iter(stream))
        figures = {"wall_s": round(time.perf_counter() - wall, 3), "cpu_s": round(time.process_time() - cpu, 3)}
        assert stream.delivery is not None
        assert stream.step == offset // BATCH + 1
        out.send((figures, stream.delivery.episode.tolist(), first["is_pad"].tolist()))


def in_fresh_processes(*arguments: Any) -> tuple[dict[str, float], list[int]]:
    """The least seconds of `resume` in processes of its own, and the episodes of the first batch."""
    context = multiprocessing.get_context("spawn")
    figures, episodes = [], []
    for _ in range(PASSES):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=resume, args=(*arguments, sender))
        process.start()
        seconds, found, _ = receiver.recv()
        process.join()
        figures.append(seconds)
        episodes.append(found)
    assert episodes[1:] == episodes[:-1]
    return {key: min(row[key] for row in figures) for key in figures[0]}, episodes[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "resume.json")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the size")
    options = parser.parse_args()
    episodes, offset = (800, 100_000) if options.quick else (80_000, OFFSET)
    figures: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()},
        "offset_samples": offset,
        "episodes": episodes,
    }
    for strategy in ("lanes", "reservoir", "sequential", "episode_sequential", "remaining", "round_robin"):
        description = describe(strategy, episodes)
        plan = plan_epoch(description.units, description.with_topology(world_size=1))
        with open_stream(description) as stream:
            state = stream.state_dict()
        state["cursor"] = json.loads(plan.cursor_at(offset // BATCH).to_json())
        row: dict[str, Any] = {"units": len(description.units), "cursor_bytes": len(json.dumps(state["cursor"]))}
        if strategy in {"remaining", "round_robin"}:
            pools = _pools_at(description, state)
            row["pool_state_bytes"] = len(pools)
            row["with_pool_state"], with_state = in_fresh_processes(strategy, episodes, offset, state, pools)
            row["without_pool_state"], without = in_fresh_processes(strategy, episodes, offset, state, None)
            assert with_state == without
        else:
            row["first_batch"], _ = in_fresh_processes(strategy, episodes, offset, state, None)
        figures[strategy] = row
        print(strategy, json.dumps(row))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _pools_at(description: StreamDescription, state: dict[str, Any]) -> bytes:
    """The pool state that a checkpoint at the position of ``state`` holds."""
    with open_stream(description) as stream:
        stream.load_state_dict(state)
        next(iter(stream))
        from train_integration.poolstate import dump_pool_state

        plan = plan_epoch(description.units, description.with_topology(world_size=1), stream.cursor())
        pools = dump_pool_state(plan.rank(0), plan.cursor.batches - 1)
    assert pools is not None
    return pools


if __name__ == "__main__":
    main()
