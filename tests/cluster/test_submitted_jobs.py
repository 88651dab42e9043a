"""Every kind of job but training, submitted to a cluster by the commands that the documents print; training is in ``tests/faults``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.lerobot.make import MakeOptions, make_dataset
from train_integration.demo_prefeature import make_source

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address of a small cluster that takes jobs."""
    from ray.cluster_utils import Cluster

    with socket.socket() as one, socket.socket() as other, pytest.MonkeyPatch.context() as patch:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        ports = {"dashboard_port": int(one.getsockname()[1]), "dashboard_agent_listen_port": int(other.getsockname()[1])}
        one.close()
        other.close()
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # A job's command says ``python``, and nodes take their path from whoever starts them.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        cluster = Cluster()
        cluster.add_node(num_cpus=4, object_store_memory=100_000_000, include_dashboard=True, **ports)
        yield f"http://{cluster.webui_url}"
        cluster.shutdown()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "ds", MakeOptions(episodes=3, frames="6:9", cameras=1, size=(32, 64), gop=3, video_files=2))
    return tmp_path / "ds"


def said(*command: object, status: int = 0) -> str:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def submitted(dashboard: str, home: Path, *job: object, status: int = 0) -> str:
    """What a job printed, by way of ``train_integration.jobs``."""
    name, *options = job
    own = ("--address", dashboard, "--working-dir", ".", "--env", "HF_HOME", home)
    return said(sys.executable, "-m", "train_integration.jobs", name, *own, "--", *options, status=status)


def test_a_doctor_job_says_what_is_wrong_by_its_status(dashboard: str, made: Path, tmp_path: Path) -> None:
    assert "no fault found" in submitted(dashboard, tmp_path / "home", "doctor", made)
    # The same work is not done twice: its answer is that of the job that was there already.
    assert "is there already" in submitted(dashboard, tmp_path / "home", "doctor", made)
    next((made / "videos").rglob("*.mp4")).unlink()
    report = submitted(dashboard, tmp_path / "home", "doctor", made, "--json", status=1)
    assert json.loads(report[report.index("{") : report.rindex("}") + 1])["findings"]


def test_rays_own_command_runs_it_too(dashboard: str, made: Path) -> None:
    words = ("job", "submit", "--address", dashboard, "--working-dir", ".", "--", "python", "-m", "reelray.cli", "doctor", made)
    assert "no fault found" in said(Path(sys.executable).parent / "ray", *words)


def test_a_sidecar_job_leaves_an_index_and_does_nothing_the_second_time(dashboard: str, made: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "built from 2 files" in submitted(dashboard, home, "sidecar", made)
    (index,) = home.rglob("*.npz")
    written = index.stat().st_mtime_ns
    submitted(dashboard, home, "sidecar", made, "--tasks", 1)
    assert index.stat().st_mtime_ns == written


def test_a_prefeature_job_builds_a_dataset_that_validates(dashboard: str, tmp_path: Path) -> None:
    reelray = (sys.executable, "-m", "reelray.cli", "prefeature")
    said(*reelray, "cases", make_source(tmp_path / "images", 3), "--root", tmp_path / "v4", "--preset", "tiny", "--cases", 1)
    submitted(dashboard, tmp_path / "home", "prefeature", tmp_path / "v4", "--workers", 1)
    said(*reelray, "validate", tmp_path / "v4", "--no-ray")
    assert (tmp_path / "v4" / "_SUCCESS.json").is_file()
