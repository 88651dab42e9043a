"""A training job submitted to a cluster of three nodes: it survives the loss of one, and proves its coverage."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import Work
from benchmarks.nodes import Nodes, nodes
from train_integration.jobs import ExitStatus, Submission, submit, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("reelray", "train_integration", "actors", "ingest", "recipes")
SAVE_EVERY = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Three worker nodes, and a head with a dashboard that takes jobs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with pytest.MonkeyPatch.context() as patch:
        # A job's command says ``python``, and nodes take their path from whoever starts them.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        # As the image and the manifests say: a job that is asked to stop gets time to save.
        patch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "120")
        with nodes(dashboard_port=port) as made:
            yield made


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A working directory: the packages and nothing else."""
    folder = tmp_path / "ship"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def environment(folder: Path) -> tuple[tuple[str, str], ...]:
    return (("HF_HOME", str(folder / "hub")), ("RAY_AUTH_MODE", "disabled"))


def reported(output: list[str]) -> dict[str, Any]:
    """The report at the end of a job's output."""
    text = "".join(output)
    return json.loads(text[text.rindex("\n{\n") + 1 if "\n{\n" in text else text.index("{") :])


def dashboard(cluster: Nodes, what: str) -> list[dict[str, Any]]:
    from ray.util.state import list_actors, list_tasks

    look: Any = {"actors": list_actors, "tasks": list_tasks}[what]
    return [one if isinstance(one, dict) else one.__dict__ for one in look(address=f"http://{cluster.cluster.webui_url}", limit=1000)]


def take_pictures(cluster: Nodes) -> None:
    """Pictures of the dashboard for the documents, into the folder that REELRAY_SCREENSHOTS names; none otherwise."""
    folder, browser = os.environ.get("REELRAY_SCREENSHOTS"), shutil.which("chromium")
    if folder is None or browser is None:
        return
    for page in ("jobs", "actors", "cluster"):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1500,1300"]
        command += ["--virtual-time-budget=15000", f"--screenshot={folder}/dashboard-{page}.png"]
        subprocess.run([*command, f"http://{cluster.cluster.webui_url}/#/{page}"], check=True, timeout=90, capture_output=True)


def test_a_job_survives_the_loss_of_a_node(cluster: Nodes, work: Work, shipped: Path, tmp_path: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(f"http://{cluster.cluster.webui_url}")
    steps = 2 * -(-len(work.pictures) // 2 // 8)
    options = ["--world_size", 2, "--batch_size", 4, "--dataset.streaming_sampling_strategy", "lanes", "--dataset.root", work.root]
    options += ["--steps", steps, "--save_freq", SAVE_EVERY, "--log_freq", 1, "--step_s", 0.2, "--decode_actors", 1, "--json"]
    options += ["--decoded_budget_gb", 0.05, "--output_dir", tmp_path / "out"]
    job = Submission(
        name="train",
        options=tuple(map(str, options)),
        working_dir=shipped,
        env=(("HF_HOME", str(tmp_path / "hub")), ("RAY_AUTH_MODE", "disabled")),
    )
    job_id, fresh = submit(client, job)
    assert fresh

    deadline = time.monotonic() + 200
    while not list((tmp_path / "out" / "run").glob("checkpoint_*")):
        assert time.monotonic() < deadline, client.get_job_logs(job_id)[-3000:]
        assert client.get_job_status(job_id).value in {"PENDING", "RUNNING"}, client.get_job_logs(job_id)[-3000:]
        time.sleep(0.3)

    # While it runs, a person finds it in the dashboard by names that say what things are.
    living = [one for one in dashboard(cluster, "actors") if one["state"] == "ALIVE"]
    named = {str(one["name"]).rsplit("-", 1)[0] for one in living if one["name"]}
    assert {"reelray-manager", "reelray-ledger", "reelray-stop", "reelray-gate"} <= named
    assert any(name.startswith("reelray-decode-") for name in named)
    assert any("ReadReelrayEpisodes" in one["name"] for one in dashboard(cluster, "tasks"))

    take_pictures(cluster)

    homes = [home for pid in cluster.processes("ray::RayTrainWorker") if (home := cluster.node_of(pid)) is not None]
    assert homes
    cluster.lose(homes[0])

    output: list[str] = []
    assert wait_for(client, job_id, write=output.append, poll_s=0.5) is ExitStatus.DONE, "".join(output)[-3000:]
    report = reported(output)
    assert report["steps"] == steps
    assert report["worker_groups"] == 2
    assert report["epochs"][0]["complete"]
    assert report["epochs"][0]["delivered"] == len(work.pictures) // 2
    assert {(one["missing"], one["duplicated"], one["in_order"]) for one in report["epochs"]} == {(0, 0, True)}
    # The same work is not done twice.
    assert submit(client, job) == (job_id, False)


def test_a_stopped_job_has_saved(cluster: Nodes, work: Work, shipped: Path, tmp_path: Path) -> None:
    """SIGTERM, as `ray job stop` sends it: the step is finished, a checkpoint is there, the status says so, --resume goes on."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(f"http://{cluster.cluster.webui_url}")
    options = ["--dataset.root", work.root, "--dataset.streaming_sampling_strategy", "lanes", "--world_size", 2, "--batch_size", 4]
    options += ["--save_freq", 100_000, "--log_freq", 1, "--step_s", 0.2, "--decode_actors", 1, "--json", "--output_dir", tmp_path / "out"]
    options += ["--decoded_budget_gb", 0.05]

    def job(*more: str) -> Submission:
        return Submission(name="train", options=(*map(str, options), *more), working_dir=shipped, env=environment(tmp_path))

    job_id, _ = submit(client, job("--steps", "4000"))
    deadline = time.monotonic() + 200
    while not cluster.processes("ray::Decoder"):
        assert time.monotonic() < deadline, client.get_job_logs(job_id)[-3000:]
        time.sleep(0.3)
    time.sleep(8)
    assert client.stop_job(job_id)
    output: list[str] = []
    assert wait_for(client, job_id, write=output.append, poll_s=0.5) is ExitStatus.STOPPED, "".join(output)[-3000:]
    report = reported(output)
    assert report["stopped"] is True
    assert 0 < report["steps"] < 4000
    assert report["checkpoint"] is not None
    job_id, _ = submit(client, job("--steps", str(report["steps"] + 5), "--resume"))
    output.clear()
    assert wait_for(client, job_id, write=output.append, poll_s=0.5) is ExitStatus.DONE, "".join(output)[-3000:]
    assert reported(output)["steps"] == report["steps"] + 5
