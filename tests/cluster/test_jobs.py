"""Jobs: the same options as the command line, idempotent submission, clear exit statuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingest.errors import ResourceUnavailableError, SettingsError
from train_integration import jobs
from train_integration.jobs import ENTRY_POINTS, ExitStatus, Submission, check_working_dir, submit, wait_for

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class FakeClient:
    """A cluster: jobs by id, with scripted states."""

    jobs: dict[str, list[str]] = field(default_factory=dict)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    silent: int = 0
    exit_code: int = 1
    logs: list[str] = field(default_factory=list)

    def submit_job(self, **job: Any) -> str:
        if self.refusals:
            raise RuntimeError(self.refusals.pop(0))
        self.submitted.append(job)
        self.jobs[job["submission_id"]] = ["PENDING", "RUNNING", "SUCCEEDED"]
        return job["submission_id"]

    def get_job_status(self, job_id: str, /) -> Any:
        if self.silent:
            self.silent -= 1
            raise RuntimeError("Request failed with status code 503: gone.")
        if job_id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {job_id} does not exist.")
        states = self.jobs[job_id]
        return SimpleNamespace(value=states.pop(0) if len(states) > 1 else states[0])

    def get_job_logs(self, job_id: str, /) -> str:
        self.logs.append(f"line {len(self.logs)}\n")
        return "".join(self.logs)

    def get_job_info(self, job_id: str, /) -> Any:
        return SimpleNamespace(driver_exit_code=self.exit_code)


JOB = Submission(name="train", options=("--dataset.repo_id", "lerobot/pusht", "--delta_timestamps", '{"action": [0.0, 0.1]}'))


def test_the_command_survives_the_shell() -> None:
    done = subprocess.run(
        ["sh", "-c", JOB.entrypoint.replace("python -m train_integration.train", 'printf "%s\\n"')],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == list(JOB.options)


def test_the_same_work_is_submitted_once() -> None:
    client = FakeClient()
    first, fresh = submit(client, JOB)
    assert fresh
    again, fresh = submit(client, JOB)
    assert (again, fresh) == (first, False)
    assert len(client.submitted) == 1
    assert client.submitted[0]["entrypoint"].startswith("python -m train_integration.train --dataset.repo_id lerobot/pusht")


def test_other_work_has_another_id() -> None:
    assert Submission(name="train", options=("--steps", "1")).job_id(1) != Submission(name="train", options=("--steps", "2")).job_id(1)
    assert Submission(name="train", options=(), env=(("A", "1"),)).job_id(1) != Submission(name="train", options=()).job_id(1)


@pytest.mark.parametrize("ended", ["FAILED", "STOPPED"])
def test_what_did_not_succeed_is_submitted_again(ended: str) -> None:
    client = FakeClient(jobs={JOB.job_id(1): [ended]})
    assert submit(client, JOB) == (JOB.job_id(2), True)


def test_success_is_repeated_on_request_only() -> None:
    client = FakeClient(jobs={JOB.job_id(1): ["SUCCEEDED"]})
    assert submit(client, JOB) == (JOB.job_id(1), False)
    assert submit(client, JOB, again=True) == (JOB.job_id(2), True)


def test_a_cluster_that_has_just_started_is_waited_for() -> None:
    waits: list[float] = []
    client = FakeClient(refusals=["No available agent to submit job, please try again later."] * 3)
    assert submit(client, JOB, sleep=waits.append)[1]
    assert waits == [2.0, 4.0, 8.0]


@pytest.mark.parametrize("refusal", [["No available agent to submit job"] * 9, ["pip install failed"]])
def test_a_refusal_is_named(refusal: list[str]) -> None:
    with pytest.raises(ResourceUnavailableError, match=refusal[0]):
        submit(FakeClient(refusals=refusal), JOB, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("states", "code", "expected"),
    [
        (["PENDING", "RUNNING", "SUCCEEDED"], 0, ExitStatus.DONE),
        (["RUNNING", "FAILED"], 1, ExitStatus.FAILED),
        (["RUNNING", "FAILED"], 143, ExitStatus.STOPPED),
        (["STOPPED"], 0, ExitStatus.STOPPED),
    ],
)
def test_exit_statuses(states: list[str], code: int, expected: ExitStatus) -> None:
    client = FakeClient(jobs={"job": list(states)}, exit_code=code)
    written: list[str] = []
    assert wait_for(client, "job", write=written.append, sleep=lambda _: None) is expected
    assert "".join(written) == "".join(client.logs)


def test_a_silent_cluster_is_given_time_and_then_named() -> None:
    client = FakeClient(jobs={"job": ["SUCCEEDED"]}, silent=20)
    assert wait_for(client, "job", write=lambda _: None, sleep=lambda _: None) is ExitStatus.DONE
    with pytest.raises(ResourceUnavailableError, match="answers no longer"):
        wait_for(FakeClient(jobs={"job": ["RUNNING"]}, silent=99), "job", write=lambda _: None, sleep=lambda _: None)


def test_the_command_line_submits_and_waits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.time, "sleep", lambda _: None)
    client = FakeClient()
    assert jobs.main(["doctor", "--", "hf://datasets/a/b", "--json"], connect=lambda _: client) == 0
    assert client.submitted[0]["entrypoint"] == "python -m reelray.cli doctor hf://datasets/a/b --json"
    assert jobs.main(["sidecar", "--no-wait", "--env", "HF_HOME", "/cache", "--", "a/b"], connect=lambda _: client) == 0
    assert client.submitted[1]["runtime_env"]["env_vars"]["HF_HOME"] == "/cache"
    assert client.submitted[1]["submission_id"] in capsys.readouterr().out


def test_an_unreachable_cluster_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    def connect(address: str | None) -> FakeClient:
        raise ResourceUnavailableError(f"no dashboard answers at {address}")

    assert jobs.main(["train", "--address", "http://127.0.0.1:1"], connect=connect) == ExitStatus.UNREACHABLE
    assert "no dashboard answers" in capsys.readouterr().err


def test_the_working_directory_is_weighed_before_it_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_bytes(b"x" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "pack").write_bytes(b"x" * 1000)
    (tmp_path / "episode.mp4").write_bytes(b"x" * 1000)
    assert check_working_dir(tmp_path) == 100
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(101 << 20)
    with pytest.raises(SettingsError, match=r"weights\.bin \(101\.0 MiB\)"):
        submit(FakeClient(), Submission(name="train", options=(), working_dir=tmp_path))
    with pytest.raises(SettingsError, match="no folder"):
        check_working_dir(tmp_path / "code.py")


def test_this_repository_is_small_enough_to_ship() -> None:
    assert check_working_dir(ROOT) < 20 << 20


@pytest.mark.parametrize("name", sorted(ENTRY_POINTS))
def test_every_entry_point_starts(name: str) -> None:
    command = [sys.executable, *ENTRY_POINTS[name][1:], "--help"]  # type: ignore[index]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_the_training_job_has_the_options_of_the_command() -> None:
    helps = [
        subprocess.run([sys.executable, "-m", *module, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True).stdout
        for module in (["train_integration.train"], ["reelray.cli", "train"])
    ]
    assert helps[0] == helps[1]
    done = subprocess.run(
        [sys.executable, "-m", "train_integration.train", "--policy.type", "none", "--dataset.root", "nowhere"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "SettingsError" in done.stderr
