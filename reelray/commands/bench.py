"""``reelray bench``: throughput against the sequential-decode ceiling, in one run on the same files and cores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ingest.errors import SettingsError
from reelray.commands.common import Flat, OrderArguments, ReadArguments, Source, print_json, print_table
from train_integration.options import StreamConfig, StreamDescription, open_stream
from train_integration.unit_sizes import LONGEST_UNIT, that_fits

_SHOWN = (
    "samples_per_s",
    "camera_frames_per_s",
    "camera_frames_per_cpu_s",
    "decode_efficiency",
    "decode_efficiency_wall",
    "decode_amplification",
    "read_amplification",
    "step_wait",
    "first_batch_s",
    "peak_pss_mb",
    "episodes_per_batch",
    "wall_s",
    "cpu_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measure sequential decode, the single-process engine and the Ray Train stream on the same files and cores.

    CPU seconds count every process between ``iter()`` and the last batch: driver, Train workers, decode actors, read tasks,
    raylet, GCS and agents.
    """

    src: Source
    """Location of the dataset."""
    order_options: Flat[OrderArguments] = field(
        default_factory=lambda: OrderArguments(strategy="lanes", batch_size=16, world_size=2, lane_frames=LONGEST_UNIT)
    )
    read: Flat[ReadArguments] = field(default_factory=ReadArguments)
    max_steps: int | None = None
    """Batches per rank, at most; the whole epoch when unset."""
    rounds: int = 1
    """How often everything is measured, alternately; figures are those of the median round."""
    step_s: float = 0.0
    """Seconds that each rank spends on a batch, to imitate training."""
    decode: Literal["auto", "pool", "inline"] = "auto"
    """Decode in the node's actors, in threads of each rank, or in threads where a node has few CPUs for each rank."""
    decode_actors: int | None = None
    """Decode actors per node; the node's free CPUs when unset. With a number, ``auto`` decodes in actors."""
    frame_store: Literal["slab", "object_store"] = "slab"
    """Where decode actors leave pictures: in memory that they share with their ranks, or in Ray's object store."""
    decode_mode: Literal["auto", "once", "on_demand"] = "auto"
    """Decode units whole within the decoded budget and the rest sample by sample, all of them whole, or none."""
    decoded_budget_gb: float | None = None
    """GiB of decoded pictures per rank; a share of the node's memory when unset."""
    prefetch_batches: int = 4
    """Finished batches kept ahead."""
    fit: bool = True
    """Shorten units (--lane-frames is the most), and take fewer lanes, until the decoded budget holds every unit whole."""
    profile: bool = False
    """Say where time goes: CPU by kind of process, seconds by stage, and the engine's functions."""
    address: str | None = None
    """Ray cluster to join; a local one is started when unset."""
    json: bool = False
    """Print the report as JSON."""

    def run(self) -> int:
        """Measures and reports."""
        from actors.manager import PoolSettings
        from train_integration.benchmarking import BenchReport, run_bench
        from train_integration.cluster import ray_session
        from train_integration.config import decoded_bytes_on_node

        if self.max_steps is not None and self.max_steps < 1:
            raise SettingsError(f"max_steps must be 1 or more, found {self.max_steps}")
        order = self.order_options
        if order.dp_rank is not None:
            raise SettingsError("dp_rank has no meaning here: every rank is measured")
        config = StreamConfig(
            plan=order.settings(),
            read=self.read.options(),
            damage=self.read.damage,
            decode=self.decode,
            frame_store=self.frame_store,
            decode_mode=self.decode_mode,
            decoded_budget_gb=self.decoded_budget_gb,
            byte_budget_gb=order.byte_budget_gb,
            prefetch_batches=self.prefetch_batches,
            lane_frames=order.lane_frames,
            episodes=self.read.selected(self.read.episodes),
            exclude_episodes=self.read.selected(self.read.exclude_episodes),
        )
        description, dataset = open_stream(self.src, config, **self.read.keywords())
        with ray_session(cpus=order.ranks + (self.decode_actors or 2), address=self.address):
            if self.fit:
                budget = decoded_bytes_on_node(config, order.ranks)
                description = that_fits(dataset, description, world_size=order.ranks, decoded_bytes=budget)
            report: BenchReport = run_bench(
                dataset,
                description,
                world_size=order.ranks,
                max_steps=self.max_steps,
                pool=PoolSettings(actors=self.decode_actors),
                step_s=self.step_s,
                rounds=self.rounds,
                profile=self.profile,
            )
        units = units_of(description, order.strategy)
        if self.json:
            print_json({"dataset": self.src, "strategy": order.strategy, "world_size": order.ranks} | units | report.to_json())
            return 0
        ceiling = report.ceiling
        print(report.machine)
        print(f"order {order.strategy}, {order.ranks} ranks, batches of {order.batch_size}, {self.rounds} rounds")
        if units:
            print(f"{units['lanes']} lanes of units of up to {units['longest_unit_frames']} frames")
        print(
            f"ceiling: {report.ceiling_camera_frames_per_s:,.0f} camera frames/s with {ceiling.processes} processes, "
            f"{report.ceiling_camera_frames_per_cpu_s:,.0f} per CPU second\n"
        )
        print_table(
            [(name.replace("_", " "), getattr(report.oracle, name), getattr(report.stream, name)) for name in _SHOWN],
            ("", "oracle", "stream"),
        )
        if self.profile:
            print("\nCPU seconds of the stream by process")
            print_table(sorted(report.stream.cpu_by_role.items(), key=lambda item: item[1], reverse=True))
            print("\ntotals of the stream")
            print_table([(name, value) for name, value in report.stream.counters.items() if value])
            print(f"\nfunctions of the single-process engine\n{report.profile}")
        return 0


def units_of(description: StreamDescription, strategy: str) -> dict[str, int]:
    """What was chosen for an order that has lanes."""
    if strategy not in {"lanes", "reservoir"}:
        return {}
    plan = description.config.plan
    return {"lanes": plan.lane_count(plan.batch_size), "longest_unit_frames": int(description.units.frames.max())}
