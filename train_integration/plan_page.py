"""A plan drawn on one page: shares, balance, peaks, mixing, and the stalls of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SettingsError
from ingest.plan import EpochPlan, Hardware, PlanReport, RankRun, simulate
from train_integration.report import Series, line_plot, table_html, write_page

_CONSUMERS_SHOWN = 256


def simulated_runs(
    plan: EpochPlan, *, bandwidth_mbps: float, decode_fps: float, step_s: float, cameras: int, latency_s: float = 0.05
) -> list[RankRun]:
    """Runs every rank of a plan on imagined hardware.

    Args:
        plan: the epoch's plan.
        bandwidth_mbps: megabits that each rank fetches per second.
        decode_fps: pictures that each rank's decoders make per second.
        step_s: seconds of a training step without waiting.
        cameras: cameras that are decoded.
        latency_s: seconds from a transfer's end to its arrival.

    Raises:
        SettingsError: a figure is not positive.
        BudgetError: what one step needs at a time exceeds the byte budget.
    """
    for name, value in (("bandwidth_mbps", bandwidth_mbps), ("decode_fps", decode_fps), ("step_s", step_s)):
        if not value > 0:
            raise SettingsError(f"{name} must be positive, found {value!r}")
    units = plan.units
    pictures = max(1, int(units.frames.sum()) * max(1, cameras))
    hardware = Hardware(
        bandwidth_bytes_s=bandwidth_mbps * 1e6 / 8,
        decode_cost_s=decode_fps * float(units.cost.sum()) / pictures,
        step_s=step_s,
        latency_s=latency_s,
        byte_budget=plan.settings.byte_budget,
    )
    return simulate(plan, hardware)


def runs_table(runs: Sequence[RankRun]) -> list[dict[str, float]]:
    """Simulated runs as plain numbers, one row for each rank."""
    return [
        {
            "rank": run.rank,
            "steps": run.steps,
            "first_batch_s": round(run.first_batch_s, 4),
            "total_s": round(run.total_s, 4),
            "stall_s": round(run.stall_s, 4),
            "stall_share": round(run.stall_share, 6),
            "fetched_bytes": run.fetched_bytes,
            "peak_bytes": run.peak_bytes,
        }
        for run in runs
    ]


def write_plan_page(path: Path, title: str, plan: EpochPlan, report: PlanReport, runs: Sequence[RankRun] = ()) -> Path:
    """Writes the page.

    Args:
        path: file to write.
        title: heading.
        plan: the epoch's plan.
        report: of the plan.
        runs: simulated runs; without them the page has no section on stalls.
    """
    mixing, settings = report.mixing, plan.settings
    apart = "none" if mixing.neighbour_frames is None else mixing.neighbour_frames
    facts = [
        ("order", f"{settings.strategy}, seed {settings.seed}, epoch {plan.epoch}"),
        ("topology", f"{plan.world_size} ranks, {settings.consumers} workers each, batches of {settings.batch_size}"),
        ("units", len(plan.units)),
        ("frames", int(plan.units.frames.sum())),
        ("steps of the shortest and longest rank", f"{int(report.steps.min())} and {int(report.steps.max())}"),
        ("frames of the largest rank over the mean", report.frame_balance),
        ("decode cost of the largest rank over the mean", report.cost_balance),
        ("repeats that pad batches", report.padded),
        ("frames left out", report.dropped),
        ("most bytes held by a rank", int(report.rank_peak_bytes.max(initial=0)) if (report.peak_bytes >= 0).all() else "not computed"),
    ]
    sections = {
        "Plan": table_html(facts),
        "Shares": _shares(report) + _consumers(report),
        "Mixing": table_html(
            [
                (f"distinct episodes in {mixing.batch_size} samples", mixing.distinct_episodes),
                ("frames between neighbours of one episode in a batch", apart),
                ("unevenness: 0 is even, 0.94 the order of the data", mixing.uniform_distance),
            ]
        ),
    }
    if runs:
        sections["Simulated run"] = _runs(runs)
    return write_page(path, title, sections)


def _shares(report: PlanReport) -> str:
    ranks = np.arange(int(report.rank.max(initial=0)) + 1)
    series: list[tuple[str, NDArray[Any]]] = [
        ("frames", np.bincount(report.rank, report.frames, minlength=len(ranks))),
        ("bytes", np.bincount(report.rank, report.bytes, minlength=len(ranks))),
        ("decode cost", np.bincount(report.rank, report.cost, minlength=len(ranks))),
    ]
    lines = [Series(name, ranks.tolist(), (values / max(float(values.mean()), 1e-12)).tolist()) for name, values in series]
    return line_plot(lines, title="Share of each rank over the mean of all ranks", x_label="rank", y_label="share / mean")


def _consumers(report: PlanReport) -> str:
    names = ("rank", "worker", "episodes", "pieces", "frames", "bytes", "peak_bytes", "peak_open", "peak_frames")
    columns = [getattr(report, name)[:_CONSUMERS_SHOWN].tolist() for name in names]
    rows = [["-" if value == -1 else value for value in row] for row in zip(*columns, strict=True)]
    more = len(report.rank) - _CONSUMERS_SHOWN
    return table_html(rows, [name.replace("_", " ") for name in names]) + (f"<p>{more} more consumers</p>" if more > 0 else "")


def _runs(runs: Sequence[RankRun]) -> str:
    numbers = [float(run.rank) for run in runs]
    plot = line_plot(
        [
            Series("waiting after the first batch", numbers, [run.stall_s for run in runs]),
            Series("first batch", numbers, [run.first_batch_s for run in runs]),
        ],
        title="Seconds that each rank waits",
        x_label="rank",
        y_label="seconds",
    )
    rows = [list(row.values()) for row in runs_table(runs[:_CONSUMERS_SHOWN])]
    return plot + table_html(rows, [name.replace("_", " ") for name in runs_table(runs[:1])[0]])
