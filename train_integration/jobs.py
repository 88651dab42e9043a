"""``python -m train_integration.jobs NAME … -- OPTIONS``: submits reelray's jobs to a Ray cluster, and waits for them.

A submission is idempotent: its id follows from what is to run, so asking for the same work again joins the job that does
it, or reports what became of it, instead of doing it twice. A job that failed or was stopped is submitted again under the
next number, and goes on where it was: every job here can be resumed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro

from ingest.errors import ReelrayError, ResourceUnavailableError, SettingsError
from train_integration.preemption import EXIT_STOPPED

_LOG = logging.getLogger("reelray.jobs")

JobName = Literal["train", "sidecar", "prefeature", "doctor"]
ENTRY_POINTS: dict[JobName, tuple[str, ...]] = {
    "train": ("python", "-m", "train_integration.train"),
    "sidecar": ("python", "-m", "actors.build_sidecars"),
    "prefeature": ("python", "-m", "reelray.cli", "prefeature", "build"),
    "doctor": ("python", "-m", "reelray.cli", "doctor"),
}
"""What each job runs on the cluster; its options follow."""

MAX_WORKING_DIR_BYTES = 100 << 20
"""Largest working directory that the dashboard's server takes."""

EXCLUDES = (
    ".git/", ".venv/", ".venvs/", "outputs/", "dist/", "build/", "demo_out/",
    "__pycache__/", "*.pyc", ".pytest_cache/", ".hypothesis/", ".ruff_cache/",
    "*.mp4", "*.parquet", "*.safetensors", "*.npz", "*.pt",
)  # fmt: skip
"""What a working directory leaves at home: history, environments, outputs and data, which jobs read from their store."""

_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
_SUBMIT_ATTEMPTS = 6
_SILENT_LOOKS = 30


class ExitStatus(IntEnum):
    """Exit statuses of reelray's jobs and of their submission."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    """The cluster did not take the job, or answers no longer."""
    INTERRUPTED = 130
    STOPPED = EXIT_STOPPED
    """Stopped on request. A training run has saved: run it again with --resume."""


class Client(Protocol):
    """The part of `ray.job_submission.JobSubmissionClient` that is used."""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> str:
        """Submits a job and returns its id."""
        ...

    def get_job_status(self, job_id: str, /) -> Any:
        """Status of a job; RuntimeError when there is none."""
        ...

    def get_job_info(self, job_id: str, /) -> Any:
        """Details of a job, among them ``driver_exit_code``."""
        ...

    def get_job_logs(self, job_id: str, /) -> str:
        """All output so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to submit.

    Attributes:
        name: which job.
        options: what follows its entry point.
        working_dir: what is shipped; None where nodes have reelray installed.
        env: environment variables by name.
    """

    name: JobName
    options: tuple[str, ...]
    working_dir: Path | None = None
    env: tuple[tuple[str, str], ...] = ()

    @property
    def entrypoint(self) -> str:
        """The command line, quoted for the shell that Ray starts it with."""
        return shlex.join([*ENTRY_POINTS[self.name], *self.options])

    def job_id(self, number: int) -> str:
        """Id of the numbered attempt. It follows from the work alone, so that the same work has the same id everywhere."""
        named = json.dumps([self.entrypoint, sorted(self.env)])
        return f"reelray-{self.name}-{hashlib.sha256(named.encode()).hexdigest()[:12]}-{number}"

    def runtime_env(self) -> dict[str, Any]:
        """Ray's description of what the job needs."""
        env: dict[str, Any] = {"env_vars": {"RAY_TRAIN_V2_ENABLED": "1", **dict(self.env)}}
        if self.working_dir is not None:
            env |= {"working_dir": str(self.working_dir), "excludes": list(EXCLUDES)}
        return env


def check_working_dir(folder: Path) -> int:
    """Bytes that a working directory would ship, before compression.

    Raises:
        SettingsError: it is no folder, or holds more than a cluster takes; the largest files are named.
    """
    if not folder.is_dir():
        raise SettingsError(f"{folder} is no folder to ship as a working directory")
    sizes: dict[Path, int] = {}
    for current, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _excluded(f"{name}/")]
        for name in files:
            path = Path(current) / name
            if not _excluded(name) and not path.is_symlink():
                sizes[path] = path.stat().st_size
    total = sum(sizes.values())
    if total > MAX_WORKING_DIR_BYTES:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
        listed = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:.1f} MiB)" for path in largest)
        raise SettingsError(
            f"{folder} holds {total / 2**20:.0f} MiB, and a cluster takes {MAX_WORKING_DIR_BYTES >> 20}: the largest files are {listed}; "
            "move data out of it (jobs read datasets from their own location), or install reelray on the nodes and give no --working-dir"
        )
    return total


def _excluded(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in EXCLUDES)


def submit(
    client: Client, job: Submission, *, again: bool = False, max_attempts: int = 100, sleep: Callable[[float], None] = time.sleep
) -> tuple[str, bool]:
    """Submits a job, or finds the one that does the same work already.

    Args:
        client: of the cluster.
        job: what to run.
        again: run it even where it has succeeded before.
        max_attempts: numbers to try.
        sleep: waits between attempts to reach the cluster's agents.

    Returns:
        The job's id, and whether it was submitted now.

    Raises:
        SettingsError: the working directory is too large.
        ResourceUnavailableError: the cluster does not take the job.
    """
    for number in range(1, max_attempts + 1):
        job_id = job.job_id(number)
        status = _status(client, job_id)
        if status is None:
            if job.working_dir is not None:
                check_working_dir(job.working_dir)
            _submit(client, job, job_id, sleep)
            return job_id, True
        if status not in _ENDED or (status == "SUCCEEDED" and not again):
            return job_id, False
    raise ResourceUnavailableError(f"{job.name} was submitted {max_attempts} times and never succeeded: look at the last job's log")


def _status(client: Client, job_id: str) -> str | None:
    try:
        status = client.get_job_status(job_id)
    except RuntimeError as error:
        if "404" in str(error) or "not exist" in str(error) or "not found" in str(error).lower():
            return None
        raise ResourceUnavailableError(f"the cluster does not tell the status of job {job_id}: {_line(error)}") from error
    return str(getattr(status, "value", status))


def _submit(client: Client, job: Submission, job_id: str, sleep: Callable[[float], None]) -> None:
    for attempt in range(_SUBMIT_ATTEMPTS):
        try:
            client.submit_job(
                entrypoint=job.entrypoint, submission_id=job_id, runtime_env=job.runtime_env(), metadata={"reelray_job": job.name}
            )
            return
        except RuntimeError as error:
            # A cluster that has just started has no agent yet; everything else will not pass by itself.
            if "No available agent" not in str(error) or attempt + 1 == _SUBMIT_ATTEMPTS:
                raise ResourceUnavailableError(f"the cluster did not take job {job_id}: {_line(error)}") from error
            sleep(2.0 * 2**attempt)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[-400:]


def wait_for(
    client: Client, job_id: str, *, write: Callable[[str], object], poll_s: float = 2.0, sleep: Callable[[float], None] = time.sleep
) -> ExitStatus:
    """Copies a job's output until it ends.

    Args:
        client: of the cluster.
        job_id: the job.
        write: receives new output.
        poll_s: seconds between two looks.
        sleep: waits.

    Returns:
        What became of it.

    Raises:
        ResourceUnavailableError: the cluster has not answered for a minute or more of looks.
    """
    shown = silent = 0
    while True:
        try:
            status = _status(client, job_id)
            output = client.get_job_logs(job_id)
            silent = 0
        except (ResourceUnavailableError, OSError, RuntimeError) as error:
            silent += 1
            if silent > _SILENT_LOOKS:
                raise ResourceUnavailableError(f"the cluster of job {job_id} answers no longer: {_line(error)}") from error
            sleep(poll_s)
            continue
        if len(output) > shown:
            write(output[shown:])
            shown = len(output)
        if status is None or status in _ENDED:
            return _exit_status(client, job_id, status)
        sleep(poll_s)


def _exit_status(client: Client, job_id: str, status: str | None) -> ExitStatus:
    if status == "SUCCEEDED":
        return ExitStatus.DONE
    # A run that was asked to stop has ended by itself, which Ray takes for a failure.
    stopped = status == "STOPPED" or (status == "FAILED" and getattr(client.get_job_info(job_id), "driver_exit_code", None) == EXIT_STOPPED)
    return ExitStatus.STOPPED if stopped else ExitStatus.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Submit one of reelray's jobs to a Ray cluster and wait for it. What follows -- is given to the job.

    Status 0: done; 1: the job failed; 2: wrong usage; 3: the cluster did not take it; 143: it was stopped.
    """

    name: Annotated[JobName, tyro.conf.Positional]
    """train, sidecar (build the MP4 index), prefeature (build teacher tensors), or doctor."""
    address: str | None = None
    """The dashboard, http://HOST:8265; RAY_API_SERVER_ADDRESS, or this machine, when unset."""
    working_dir: Path | None = None
    """Source tree to ship; unset where the nodes' image has reelray."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the job. Names only of secrets belong here: Ray shows them in its dashboard."""
    again: bool = False
    """Run it even where the same work has succeeded before."""
    no_wait: bool = False
    """Print the job's id and leave."""

    def run(self, options: Sequence[str], client: Client) -> ExitStatus:
        """Submits and waits.

        Raises:
            ReelrayError: the job cannot be submitted.
        """
        job = Submission(name=self.name, options=tuple(options), working_dir=self.working_dir, env=tuple(self.env.items()))
        job_id, fresh = submit(client, job, again=self.again)
        sys.stderr.write(f"{job_id}: {'submitted' if fresh else 'is there already'}: {job.entrypoint}\n")
        if self.no_wait:
            sys.stdout.write(job_id + "\n")
            return ExitStatus.DONE
        return wait_for(client, job_id, write=sys.stdout.write)


def _connect(address: str | None) -> Client:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise ResourceUnavailableError(f"no dashboard answers at {address or 'the default address'}: {_line(error)}") from error


def main(arguments: Sequence[str] | None = None, *, connect: Callable[[str | None], Client] = _connect) -> int:
    """Entry point.

    Args:
        arguments: the command line; that of the process by default.
        connect: makes the client for an address.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, options = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    jobs = tyro.cli(Jobs, args=own, prog="python -m train_integration.jobs")
    try:
        return int(jobs.run(options, connect(jobs.address)))
    except ResourceUnavailableError as error:
        sys.stderr.write(f"error: {_line(error)}\n")
        return int(ExitStatus.UNREACHABLE)
    except ReelrayError as error:
        sys.stderr.write(f"error: {_line(error)}\n")
        return int(ExitStatus.USAGE)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the job goes on, run the same command to join it again\n")
        return int(ExitStatus.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
