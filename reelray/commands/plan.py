"""``reelray plan``: who delivers what, in which order and within which budget, without reading a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ingest.engine.damage import DamageReport
from ingest.engine.pictures import PictureForm
from ingest.plan import EpochPlan, PlanReport, RankRun, plan_epoch, report_plan
from reelray.commands.common import (
    Flat,
    OrderArguments,
    ReadArguments,
    RecipeArguments,
    Source,
    check_outputs,
    cursor_of,
    human_bytes,
    language_report,
    print_facts,
    print_json,
    print_language,
    print_table,
)
from train_integration.option_checks import require_non_negative

if TYPE_CHECKING:
    from ingest.engine.dataset import Dataset
    from train_integration.mixtures import Mixture
    from train_integration.options import StreamDescription

_CONSUMERS_SHOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Shares, order, budgets and mixing of an epoch. Reads metadata and the heads of video files only."""

    src: Source
    """Location of the dataset, or a mixture file (.yaml) that names several."""
    order_options: Flat[OrderArguments] = field(default_factory=OrderArguments)
    read: Flat[ReadArguments] = field(default_factory=ReadArguments)
    language: Flat[RecipeArguments] = field(default_factory=RecipeArguments)
    order: Path | None = None
    """Write the planned order to this parquet file, with the columns and step numbers of `reelray stream`."""
    max_steps: int | None = None
    """Plan that many batches per rank, at most: they are the ones written and counted by the cursor."""
    cursor_in: Path | None = None
    """Go on where this cursor file stands."""
    cursor_out: Path | None = None
    """Write the position behind the planned batches to this file."""
    peaks: bool = True
    """Compute the most bytes held at a time; runs through the epoch of every consumer."""
    html: Path | None = None
    """Draw the plan on this page."""
    bandwidth_mbps: float | None = None
    """Simulate the epoch with so many megabits per second for each rank."""
    decode_fps: float = 1000.0
    """Pictures that each rank decodes per second in the simulation."""
    step_s: float = 0.1
    """Seconds of a training step in the simulation."""
    json: bool = False
    """Print the report as JSON."""

    def run(self) -> int:
        """Plans and reports."""
        from train_integration.delivery import write_cursor
        from train_integration.ledger import write_order
        from train_integration.mixtures import open_described
        from train_integration.options import StreamConfig
        from train_integration.plan_page import runs_table, simulated_runs, write_plan_page

        require_non_negative({"max_steps": self.max_steps or 0})
        check_outputs(order=self.order, cursor_out=self.cursor_out, html=self.html)
        order = self.order_options
        config = StreamConfig(
            plan=order.settings(),
            read=self.read.options(),
            damage=self.read.damage,
            recipe=self.language.stage(),
            lane_frames=order.lane_frames,
            episodes=self.read.selected(self.read.episodes),
            exclude_episodes=self.read.selected(self.read.exclude_episodes),
        )
        description, dataset = open_described(self.src, config, **self.read.keywords())
        cursor = cursor_of(self.cursor_in, order.epoch)
        plan = plan_epoch(description.units, description.with_topology(world_size=order.ranks), cursor, epoch=order.epoch)
        report = report_plan(plan, peaks=self.peaks)
        runs: list[RankRun] = []
        if self.bandwidth_mbps is not None:
            runs = simulated_runs(
                plan,
                bandwidth_mbps=self.bandwidth_mbps,
                decode_fps=self.decode_fps,
                step_s=self.step_s,
                cameras=len(dataset.spec.cameras),
            )
        if self.order is not None:
            write_order(self.order, order_columns(plan, description, max_steps=self.max_steps, rank=order.dp_rank))
        if self.cursor_out is not None:
            reached = plan.end if self.max_steps is None else min(plan.end, plan.cursor.batches + self.max_steps)
            write_cursor(self.cursor_out, plan.cursor_at(reached))
        if self.html is not None:
            write_plan_page(self.html, f"Plan of {self.src}", plan, report, runs)
        if self.json:
            print_json(
                _report_json(self.src, plan, report, dataset, description.damage)
                | {"datasets": dataset_shares(plan, description), "simulated": runs_table(runs)}
            )
        else:
            _show(plan, report, dataset, description.damage)
            _show_datasets(dataset_shares(plan, description))
            _show_runs(runs)
        return 0


def _show_runs(runs: list[RankRun]) -> None:
    if not runs:
        return
    print()
    rows = [
        (run.rank, run.steps, f"{run.first_batch_s:.2f}", f"{run.total_s:.1f}", f"{run.stall_s:.1f}", f"{run.stall_share:.1%}")
        for run in runs[:_CONSUMERS_SHOWN]
    ]
    print_table(rows, ("rank", "steps", "first batch s", "total s", "waiting s", "waiting"))


def dataset_shares(plan: EpochPlan, description: StreamDescription) -> list[dict[str, Any]]:
    """What each dataset has, and how many samples of it are still to come."""
    units = plan.units
    pieces = plan.segment.pieces
    sources = description.job.sources
    samples = np.bincount(pieces.dataset, pieces.count, minlength=len(sources)).astype(np.int64)
    frames = np.bincount(units.dataset, units.frames, minlength=len(sources)).astype(np.int64)
    return [
        {"dataset": number, "location": source.store.url, "frames": int(frames[number]), "samples": int(samples[number])}
        for number, source in enumerate(sources)
    ]


def _show_datasets(shares: list[dict[str, Any]]) -> None:
    if len(shares) > 1:
        print()
        total = max(1, sum(share["samples"] for share in shares))
        rows = [
            (share["dataset"], share["location"], share["frames"], share["samples"], f"{share['samples'] / total:.1%}") for share in shares
        ]
        print_table(rows, ("dataset", "location", "frames", "samples", "share"))


def order_columns(
    plan: EpochPlan, description: StreamDescription, *, max_steps: int | None = None, rank: int | None = None
) -> dict[str, NDArray[Any]]:
    """The planned order with the columns of an order file, times and digests left out.

    Args:
        plan: the epoch's plan.
        description: what it was planned for.
        max_steps: batches of each rank, at most.
        rank: this rank only; None for all.
    """
    from train_integration.ledger import ORDER_SCHEMA

    table = plan.order_table(max_steps=max_steps)
    rows = np.arange(len(table)) if rank is None else np.flatnonzero(table.rank == rank)
    columns: dict[str, NDArray[Any]] = {name: getattr(table, name)[rows] for name in ORDER_SCHEMA if hasattr(table, name)}
    columns["index"] = description.global_index(columns["dataset"], columns["episode_index"], columns["frame_index"])
    columns["committed"] = np.ones(len(rows), dtype=np.bool_)
    return {name: columns[name].astype(dtype) for name, dtype in ORDER_SCHEMA.items() if name in columns}


def _report_json(src: str, plan: EpochPlan, report: PlanReport, dataset: Dataset | Mixture, damage: DamageReport) -> dict[str, Any]:
    return {
        "dataset": src,
        "selected_episodes": dataset.num_episodes,
        "selected_frames": dataset.num_frames,
        "epoch": plan.epoch,
        "strategy": plan.settings.strategy,
        "seed": plan.settings.seed,
        "world_size": plan.world_size,
        "workers": plan.settings.workers,
        "batch_size": plan.settings.batch_size,
        "start_step": plan.cursor.batches,
        "units": len(plan.units),
        "rank_peak_bytes": report.rank_peak_bytes.tolist(),
        "peak_decoded_bytes": _peak_decoded(report, dataset),
        "skipped": damage.to_json(),
        "language": language_report(dataset),
        **report.to_dict(),
    }


def _peak_decoded(report: PlanReport, dataset: Dataset | Mixture) -> int | None:
    """Bytes of pictures of the frames that a consumer has open at a time, at most; None where that was not computed."""
    if bool(np.any(report.peak_frames < 0)):
        return None
    spec = dataset.spec
    frame = sum(PictureForm.of(spec, camera).nbytes(spec.features[camera]) for camera in spec.cameras)
    return int(report.peak_frames.max(initial=0)) * frame


def _show(plan: EpochPlan, report: PlanReport, dataset: Dataset | Mixture, damage: DamageReport) -> None:
    mixing, settings = report.mixing, plan.settings
    peak = int(report.rank_peak_bytes.max(initial=0))
    computed = bool(np.all(report.peak_bytes >= 0))
    decoded = _peak_decoded(report, dataset)
    apart = "no" if mixing.neighbour_frames is None else f"{mixing.neighbour_frames:g}"
    print_facts(
        {
            "selected": f"{dataset.num_episodes:,} episodes, {dataset.num_frames:,} frames, {len(plan.units):,} units",
            "order": f"{settings.strategy}, seed {settings.seed}, epoch {plan.epoch}",
            "topology": f"{plan.world_size} ranks × {settings.consumers} workers, batches of {settings.batch_size}",
            "steps": f"{int(report.steps.min()):,}..{int(report.steps.max()):,} per rank, from step {plan.cursor.batches}",
            "balance": f"frames {report.frame_balance:.3f}, decode cost {report.cost_balance:.3f} (largest rank / mean)",
            "tail": f"{settings.tail}: {report.padded:,} repeats, {report.dropped:,} frames left out",
            "peak payload": f"{human_bytes(peak)} on the largest rank" if computed else "not computed",
            "peak decoded": f"{human_bytes(decoded)} of the largest consumer; a smaller decoded budget decodes some pictures more than once"
            if decoded is not None
            else "not computed",
            "mixing": f"{mixing.distinct_episodes:.3g} episodes in {mixing.batch_size} samples, {apart} frames between neighbours",
            "unevenness": f"{mixing.uniform_distance:.3g} (0 is even, 0.94 the order of the data)",
        }
    )
    print()
    shown = slice(0, _CONSUMERS_SHOWN)
    rows = zip(
        report.rank[shown].tolist(),
        report.worker[shown].tolist(),
        report.episodes[shown].tolist(),
        report.frames[shown].tolist(),
        map(human_bytes, report.bytes[shown].tolist()),
        ("-" if peak < 0 else human_bytes(peak) for peak in report.peak_bytes[shown].tolist()),
        ("-" if peak < 0 else f"{peak:,}" for peak in report.peak_frames[shown].tolist()),
        strict=True,
    )
    print_table(list(rows), ("rank", "worker", "episodes", "frames", "payload", "peak payload", "peak frames"))
    if len(report.rank) > _CONSUMERS_SHOWN:
        print(f"… {len(report.rank) - _CONSUMERS_SHOWN} more consumers (--json lists all)")
    for record in damage.records:
        print(f"skipped episode {record.episode} ({record.frames} frames): {record.message}")
    print_language(language_report(dataset))
