"""Sidecars through the command line: processes that race, what is logged, and what a stream says about unchecked payload."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ingest.engine.indexing import log_progress
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.video.sidecar.archive import SidecarArchive
from ingest.video.sidecar.build import BuildProgress
from reelray.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    make_dataset(tmp_path / "ds", MakeOptions(episodes=6, frames="4:6", cameras=1, size=(32, 64), gop=2, video_files=6))
    return tmp_path / "ds"


def test_eight_racing_commands_build_once(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reelray.cli", "sidecar", "build", str(made), "--workers", "1", "--json"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(8)]
    ended = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 8, ended
    reports = [json.loads(out) for out, _ in ended]
    assert sorted(report["reused"] for report in reports) == [False, *[True] * 7]
    (sidecar,) = (tmp_path / "home").rglob("*.npz")
    assert {report["sidecar"] for report in reports} == {str(sidecar)}
    with SidecarArchive(sidecar) as archive:
        archive.validate()


def test_a_stream_says_whether_its_payload_is_checked(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = ["stream", str(made), "--engine", "local"]
    assert main(stream) == 0
    assert "payload unchecked" in capsys.readouterr().out
    assert main(["sidecar", "build", str(made), "--checksums"]) == 0
    capsys.readouterr()
    assert main(stream) == 0
    assert "payload unchecked" not in capsys.readouterr().out
    assert main([*stream, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["payload_checked"] is True


def test_progress_is_logged_with_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    log: Callable[[BuildProgress], None] = log_progress("somewhere")
    with caplog.at_level(logging.INFO, "reelray.engine"):
        for done in range(1, 101):
            log(BuildProgress(done, 100, 0, done / 4, 4.0, (100 - done) / 4))
    assert 10 <= len(caplog.messages) <= 20
    assert caplog.messages[0] == "somewhere: indexed 5 of 100 video files (4.0/s, 24 s left)"
    assert caplog.messages[-1].startswith("somewhere: indexed 100 of 100")
