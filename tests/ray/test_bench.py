"""`reelray bench` over the session's cluster: the report that it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import Run, failure

from actors.manager import PoolSettings
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from reelray.cli import main
from train_integration.benchmarking import run_bench
from train_integration.options import Decode, StreamConfig, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

KEYS = {
    "samples_per_s",
    "camera_frames_per_s",
    "camera_frames_per_cpu_s",
    "decode_efficiency",
    "decode_amplification",
    "read_amplification",
    "step_wait",
    "first_batch_s",
    "peak_pss_mb",
    "episodes_per_batch",
}


def test_one_run_reports_ceiling_engine_and_stream(streamed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = json.dumps({"observation.images.cam0": [-0.1, 0.0]})
    arguments = ["--world-size", "2", "--batch-size", "4", "--delta-timestamps", windows, "--decode-actors", "1", "--json"]
    assert main(["bench", str(streamed), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ceiling_camera_frames_per_s"] > 0
    assert (report["lanes"], report["longest_unit_frames"]) == (16, 28), "whole episodes fit the budget"
    for way in ("oracle", "stream"):
        figures = report[way]
        assert set(figures) >= KEYS
        assert figures["decode_efficiency"] > 0
        assert figures["read_amplification"] == pytest.approx(1.0, abs=0.1)
        assert 0 < figures["decode_amplification"] < 1.5
        assert 1 <= figures["episodes_per_batch"] <= 4
        assert 0 <= figures["step_wait"] <= 1
        assert figures["first_batch_s"] > 0
    samples = [report[way]["counters"]["reelray_samples_delivered"] for way in ("oracle", "stream")]
    assert samples[0] == samples[1] > 0
    roles = report["stream"]["cpu_by_role"]
    assert any("RayTrainWorker" in role for role in roles)
    assert any("reelray-decode" in role or "Decoder" in role for role in roles)


@pytest.mark.slow
def test_what_ends_a_rank_is_told_in_one_line(run: Run, streamed: Path) -> None:
    told = failure(run("bench", streamed, "--batch-size", 4, "--decoded-budget-gb", 1e-6))
    assert "BudgetError: one batch needs" in told


@pytest.mark.slow
def test_the_table_shows_where_time_goes(streamed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(streamed), "--batch-size", "4", "--max-steps", "3", "--decode-actors", "1", "--profile"]) == 0
    printed = capsys.readouterr().out
    for expected in ("ceiling:", "decode efficiency", "CPU seconds of the stream by process", "functions of the single-process engine"):
        assert expected in printed


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("decode", ["pool", "inline"])
def test_no_process_holds_more_than_its_budgets_over_a_long_epoch(tmp_path: Path, decode: Decode) -> None:
    place = tmp_path / "long"
    make_dataset(place, MakeOptions(episodes=16, frames="120", cameras=2, size=(240, 320), gop=30, video_files=2))
    plan = PlanSettings(strategy="lanes", batch_size=16, lanes=4)
    config = StreamConfig(plan=plan, decode=decode, decode_threads=1, lane_frames=30, decoded_budget_gb=0.15)
    description, dataset = open_stream(place, config)
    measured = run_bench(dataset, description, world_size=2, pool=PoolSettings(actors=1), oracle=False).stream
    picture = 240 * 320 * 3
    decoded = 2 * dataset.num_frames * picture
    assert decoded > 4 * 0.15 * 2**30
    finished = (config.prefetch_batches + 3) * 2 * 16 * picture
    allowed = 0.15 * 2**30 + measured.counters["reelray_compressed_bytes_peak"] + finished + 400 * 2**20
    # The driver is the process of the tests, which holds what all tests before have left in it.
    held = {role: pss for role, pss in measured.peak_pss_mb_by_role.items() if role != "driver"}
    assert any("RayTrainWorker" in role for role in held)
    assert {role: pss for role, pss in held.items() if pss * 2**20 > allowed} == {}
    assert measured.counters["reelray_decoded_bytes_peak"] <= 2 * 0.15 * 2**30
    assert measured.decode_amplification <= 1.05
    assert measured.read_amplification <= 1.1
