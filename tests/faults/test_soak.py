"""The long run: its measure finds growth, and nothing of a stream grows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import LIMITS, growing, slopes

ROOT = Path(__file__).resolve().parents[2]


def looks(growth: float) -> list[dict[str, float]]:
    """An hour of looks at processes that grow by a share of what they had, after a start that says nothing."""
    found: list[dict[str, float]] = []
    for minute in range(60):
        level = 100.0 * (1 + growth * minute / 60) * (0.2 if minute < 10 else 1.0)
        found.append({"minutes": float(minute), "processes": 9.0} | dict.fromkeys(LIMITS, level))
    return found


@pytest.mark.parametrize(("growth", "least", "most"), [(0.0, -0.1, 0.1), (0.2, 15, 20), (-0.1, -11, -9)])
def test_growth_is_found(growth: float, least: float, most: float) -> None:
    for one in slopes(looks(growth)).values():
        assert least <= one["slope_percent_per_hour"] <= most


def test_growth_is_named_beyond_what_is_noise() -> None:
    flat = slopes(looks(0.0))
    assert growing(flat) == []
    found = {name: one | {"slope_percent_per_hour": 20.0, "slope_per_hour": 1e6} for name, one in flat.items()}
    assert growing(found) == ["memory_bytes", "descriptors", "threads"]


@pytest.mark.ray
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("minutes", [pytest.param(0.7, marks=pytest.mark.slow), pytest.param(60.0, marks=pytest.mark.soak)])
def test_a_long_run(tmp_path: Path, minutes: float) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.soak",
        "--minutes",
        minutes,
        "--out",
        tmp_path / "soak.json",
        "--report",
        tmp_path / "soak.html",
    ]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (tmp_path / "soak.json").is_file(), done.stdout[-2000:] + done.stderr[-4000:]
    figures: dict[str, Any] = json.loads((tmp_path / "soak.json").read_text())
    assert figures["samples_of_rank_0"] > 0
    assert figures["cpu_cores"] > 0
    assert figures["looks"]["used"] > 0.5 * figures["looks"]["all"] or minutes < 1
    assert set(figures["series"]) >= {*LIMITS, "memory of Decoder", "memory of RayTrainWorker"}
    assert figures["series"]["memory_bytes"]["mean"] > 1e8
    assert (tmp_path / "soak.html").read_text().count("<svg") == len(LIMITS)
    # Slopes of a run this short are noise; an hour has to hold its limits.
    assert minutes < 1 or done.returncode == 0, done.stdout[-2000:]
