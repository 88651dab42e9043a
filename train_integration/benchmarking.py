"""Throughput of the single-process engine and of the Ray stream against sequential decode, in one run on the same files.

Behind `reelray bench`. CPU seconds are those of all processes between ``iter()`` and the last batch: driver, Train
workers, decode actors, read tasks, and Ray's own raylet, GCS and agents.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from actors.causes import raise_typed
from actors.manager import PoolSettings, stop_services
from ingest.engine.counters import Counters
from ingest.engine.dataset import Dataset
from ingest.errors import BenchmarkError, SettingsError
from ingest.plan import EpochPlan, plan_epoch
from ingest.storage.processes import usable_cpus
from train_integration.ceiling import CeilingFigures, measure_ceiling
from train_integration.config import EpisodeDataConfig, RankShard, node_services, placeholder, publish_stream
from train_integration.options import StreamDescription
from train_integration.process_usage import ProcessTree, Usage, machine

_PROFILE_LINES = 25


@dataclass(frozen=True, slots=True)
class Figures:
    """What one way of delivery reached; the keys of the JSON report.

    Attributes:
        samples_per_s: delivered samples per wall second, padding excluded.
        camera_frames_per_s: delivered pictures per wall second, window pictures included.
        camera_frames_per_cpu_s: delivered pictures per CPU second of all processes.
        decode_efficiency: ``camera_frames_per_cpu_s`` over that of the ceiling.
        decode_efficiency_wall: ``camera_frames_per_s`` over that of the ceiling, which runs on all cores.
        decode_amplification: pictures decoded per picture delivered.
        read_amplification: video bytes fetched per byte of the samples that the pictures need.
        step_wait: share of the time from ``iter()`` to the last batch that was spent waiting for batches.
        first_batch_s: seconds from ``iter()`` to the first batch, of the slowest rank.
        peak_pss_mb: most that one process held, in MiB of proportional set size.
        episodes_per_batch: distinct episodes in a batch, on average.
        wall_s: seconds from the first ``iter()`` to the last batch.
        cpu_s: CPU seconds of all processes in that time.
        ray_cpu_s: the part of it that Ray's own processes used.
        cpu_by_role: CPU seconds by kind of process.
        counters: counter totals, for ``--profile``.
        peak_pss_mb_by_role: the same as ``peak_pss_mb`` by kind of process.
    """

    samples_per_s: float
    camera_frames_per_s: float
    camera_frames_per_cpu_s: float
    decode_efficiency: float
    decode_efficiency_wall: float
    decode_amplification: float
    read_amplification: float
    step_wait: float
    first_batch_s: float
    peak_pss_mb: float
    episodes_per_batch: float
    wall_s: float
    cpu_s: float
    ray_cpu_s: float
    cpu_by_role: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    peak_pss_mb_by_role: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run of `run_bench`, medians over its rounds.

    Attributes:
        machine: what it ran on.
        ceiling: sequential decode.
        ceiling_camera_frames_per_s: pictures per wall second of the ceiling.
        ceiling_camera_frames_per_cpu_s: pictures per CPU second of the ceiling.
        oracle: the single-process engine.
        stream: the Ray Train stream.
        rounds: decode efficiency of the stream in every round, to judge the spread.
        profile: where the oracle's time goes, when asked for.
    """

    machine: str
    ceiling: CeilingFigures
    ceiling_camera_frames_per_s: float
    ceiling_camera_frames_per_cpu_s: float
    oracle: Figures
    stream: Figures
    rounds: list[float]
    profile: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(slots=True)
class _Tally:
    """What was delivered in one measurement."""

    samples: int = 0
    pictures: int = 0
    episodes: list[int] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    first_batch_s: float = 0.0
    wait_s: float = 0.0
    wall_s: float = 0.0


def run_bench(
    dataset: Dataset,
    description: StreamDescription,
    *,
    world_size: int,
    max_steps: int | None = None,
    pool: PoolSettings | None = None,
    step_s: float = 0.0,
    rounds: int = 1,
    profile: bool = False,
    oracle: bool = True,
) -> BenchReport:
    """Measures ceiling, oracle and stream alternately. Needs a connected Ray.

    Args:
        dataset: the opened dataset.
        description: the stream over it.
        world_size: Train workers.
        max_steps: batches per rank, at most; None delivers the epoch.
        pool: decode actors per node.
        step_s: seconds that each rank spends on a batch, to imitate a training step.
        rounds: how often each is measured; figures are medians.
        profile: also profile the oracle.
        oracle: whether the single-process engine is measured; if not, its figures are zero.

    Raises:
        SettingsError: no camera is delivered, or fewer than one round asked for.
    """
    if rounds < 1:
        raise SettingsError(f"rounds must be 1 or more, found {rounds}")
    plan = plan_epoch(description.units, description.with_topology(world_size=world_size))
    ceilings: list[CeilingFigures] = []
    oracles: list[Figures] = []
    streams: list[Figures] = []
    for _ in range(rounds):
        ceilings.append(measure_ceiling(dataset, usable_cpus()))
        per_cpu, per_wall = ceilings[-1].camera_frames / ceilings[-1].cpu_s, ceilings[-1].camera_frames / ceilings[-1].wall_s
        if oracle:
            oracles.append(_figures(*measure_oracle(dataset, plan, max_steps=max_steps), 1, per_cpu, per_wall))
        measured = measure_stream(description, world_size=world_size, max_steps=max_steps, pool=pool, step_s=step_s)
        streams.append(_figures(*measured, world_size, per_cpu, per_wall))
    return BenchReport(
        machine(),
        ceilings[-1],
        statistics.median(one.camera_frames / one.wall_s for one in ceilings),
        statistics.median(one.camera_frames / one.cpu_s for one in ceilings),
        _median(oracles) if oracles else _figures(_Tally(), Usage(0.0, 0.0, {}, {}), 1, 0.0, 0.0),
        _median(streams),
        [one.decode_efficiency for one in streams],
        profile_oracle(dataset, plan, max_steps) if profile else None,
    )


def _median(runs: Sequence[Figures]) -> Figures:
    ordered = sorted(runs, key=lambda one: one.decode_efficiency)
    # The middle run as a whole, so that its figures belong together.
    return ordered[(len(ordered) - 1) // 2]


def _figures(tally: _Tally, usage: Usage, ranks: int, ceiling_per_cpu_s: float, ceiling_per_s: float) -> Figures:
    def over(amount: float, base: float) -> float:
        return amount / base if base > 0 else 0.0

    totals = tally.totals
    per_cpu, per_wall = over(tally.pictures, usage.cpu_s), over(tally.pictures, tally.wall_s)
    return Figures(
        samples_per_s=over(tally.samples, tally.wall_s),
        camera_frames_per_s=per_wall,
        camera_frames_per_cpu_s=per_cpu,
        decode_efficiency=over(per_cpu, ceiling_per_cpu_s),
        decode_efficiency_wall=over(per_wall, ceiling_per_s),
        decode_amplification=over(totals.get("reelray_pictures_decoded", 0.0), tally.pictures),
        read_amplification=over(totals.get("reelray_payload_bytes_read", 0.0), totals.get("reelray_payload_bytes_needed", 0.0)),
        step_wait=over(tally.wait_s, ranks * tally.wall_s),
        first_batch_s=tally.first_batch_s,
        peak_pss_mb=usage.peak_pss_mb,
        episodes_per_batch=float(np.mean(tally.episodes)) if tally.episodes else 0.0,
        wall_s=tally.wall_s,
        cpu_s=usage.cpu_s,
        ray_cpu_s=usage.ray_cpu_s,
        cpu_by_role=dict(usage.by_role),
        counters=totals,
        peak_pss_mb_by_role=dict(usage.peak_pss_mb_by_role),
    )


def measure_oracle(dataset: Dataset, plan: EpochPlan, *, max_steps: int | None) -> tuple[_Tally, Usage]:
    """Delivers every rank's batches in this process."""
    fresh = replace(dataset, counters=Counters())
    per_sample = _pictures_per_sample(dataset)
    tally = _Tally()
    tree = ProcessTree(os.getpid())
    tree.start()
    start = time.perf_counter()
    for rank in range(plan.settings.world_size):
        for planned, _ in fresh.iter_batches(plan, rank, max_steps=max_steps):
            if not tally.samples:
                tally.first_batch_s = time.perf_counter() - start
            real = int(np.count_nonzero(~planned.is_pad))
            tally.samples += real
            tally.pictures += real * per_sample
            tally.episodes.append(len(np.unique(plan.units.episode[planned.unit])))
    tally.wall_s = time.perf_counter() - start
    usage = tree.stop()
    tally.totals = fresh.counters.totals()
    # One thread does everything, so all of the time is spent waiting for batches.
    tally.wait_s = tally.wall_s
    own = usage.by_role.get("driver", usage.cpu_s)
    return tally, Usage(own, 0.0, {"driver": own}, {"driver": usage.peak_pss_mb})


def profile_oracle(dataset: Dataset, plan: EpochPlan, max_steps: int | None) -> str:
    """Where the single-process engine spends its time, function by function."""
    profiler = cProfile.Profile()
    profiler.enable()
    measure_oracle(dataset, plan, max_steps=max_steps)
    profiler.disable()
    lines: list[str] = []
    entries: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (path, line, name), (_, calls, own, total, _) in sorted(entries.items(), key=lambda item: -item[1][2])[:_PROFILE_LINES]:
        where = f"{os.path.basename(path)}:{line}" if line else path
        lines.append(f"{own:8.3f} s own  {total:8.3f} s with callees  {calls:8d} calls  {where} {name}")
    return "\n".join(lines)


def _pictures_per_sample(dataset: Dataset) -> int:
    return sum(dataset.spec.windows.size(camera) or 1 for camera in dataset.spec.cameras)


class _Gate:
    """Lets all ranks begin at once, and measures from then to the last batch of the last one."""

    def __init__(self, ranks: int, root: int) -> None:
        self._ranks = ranks
        self._tree = ProcessTree(root, exclude=frozenset({os.getpid()}))
        self._waiting = 0
        self._done: list[_Tally] = []
        self._usage: Usage | None = None
        self._start = 0.0
        self._stop = 0.0

    async def begin(self) -> None:
        """Returns once every rank has called it."""
        import asyncio

        self._waiting += 1
        if self._waiting == self._ranks:
            self._tree.start()
            self._start = time.perf_counter()
        while self._waiting < self._ranks:
            await asyncio.sleep(0.002)

    async def end(self, tally: _Tally) -> None:
        """Tells what a rank has got."""
        self._done.append(tally)
        if len(self._done) == self._ranks:
            self._stop = time.perf_counter()
            self._usage = self._tree.stop()

    async def result(self) -> tuple[list[_Tally], Usage | None, float]:
        """The ranks' tallies, what all processes used, and the wall seconds."""
        return self._done, self._usage, self._stop - self._start


def measure_stream(
    description: StreamDescription, *, world_size: int, max_steps: int | None, pool: PoolSettings | None, step_s: float
) -> tuple[_Tally, Usage]:
    """Delivers an epoch to Train workers that do nothing else with it.

    Raises:
        BenchmarkError: a rank ended without telling what it got.
        ReelrayError: what ended a rank.
    """
    settings = description.with_topology(world_size=world_size)
    description, manager = node_services(description, pool)
    shared = replace(description, config=replace(description.config, plan=settings, epochs=1))
    gate: Any = ray.remote(_Gate).options(num_cpus=0).remote(world_size, os.getpid())
    handles = publish_stream(shared, manager, max_steps=max_steps)
    with TemporaryDirectory(prefix="reelray-bench-") as folder:
        trainer: Any = DataParallelTrainer(
            _consume,
            train_loop_config={"gate": gate, "step_s": step_s},
            scaling_config=ScalingConfig(num_workers=world_size, resources_per_worker={"CPU": 1}),
            datasets=placeholder(),
            dataset_config=EpisodeDataConfig(handles),
            run_config=RunConfig(name="reelray-bench", storage_path=folder, failure_config=FailureConfig(max_failures=0)),
        )
        try:
            trainer.fit()
            done, usage, wall_s = ray.get(gate.result.remote())
        except Exception as error:
            raise_typed(error)
        finally:
            stop_services(manager)
            ray.kill(gate)
    if usage is None:
        raise BenchmarkError(f"{world_size - len(done)} of {world_size} ranks ended without a result")
    totals: dict[str, float] = {}
    for tally in done:
        for name, value in tally.totals.items():
            totals[name] = totals.get(name, 0.0) + value
    return (
        _Tally(
            sum(tally.samples for tally in done),
            sum(tally.pictures for tally in done),
            [count for tally in done for count in tally.episodes],
            totals,
            max(tally.first_batch_s for tally in done),
            sum(tally.wait_s for tally in done),
            wall_s,
        ),
        usage,
    )


def _consume(config: dict[str, Any]) -> None:
    """What each Train worker runs."""
    shard: Any = ray.train.get_dataset_shard("train")
    assert isinstance(shard, RankShard)  # made by EpisodeDataConfig
    gate, step_s = config["gate"], config["step_s"]
    tally = _Tally()
    with shard.open(output="numpy") as stream:
        spec = stream.description.job.spec
        per_sample = sum(spec.windows.size(camera) or 1 for camera in spec.cameras)
        # A training job loads its model meanwhile, a measurement has nothing to load.
        stream.prepare(timeout_s=60.0)
        ray.get(gate.begin.remote())
        for _ in stream:
            delivery = stream.delivery
            assert delivery is not None  # set with every batch
            real = int(np.count_nonzero(~delivery.is_pad))
            tally.samples += real
            tally.pictures += real * per_sample
            tally.episodes.append(len(np.unique(delivery.episode)))
            if step_s:
                time.sleep(step_s)
        tally.totals = stream.counters.totals()
        tally.first_batch_s = stream.first_batch_s or 0.0
        tally.wait_s = tally.totals["reelray_wait_seconds"]
        ray.get(gate.end.remote(tally))
