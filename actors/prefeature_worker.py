"""The trajectory actor: one loaded teacher, one journal, one piece of work at a time."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from ingest.prefeature.build import Known, TrajectoryReport, Workshop
from ingest.prefeature.teachers import TeacherChoice

_LOCK_WAIT_S = 20.0
"""A replaced worker may still be dying when its successor opens the journal."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker is doing.

    Attributes:
        pid: process id on the worker's node.
        idle_s: seconds since the last finished step of any kind.
        work: the present piece of work as text, or None.
        chunks: chunks built so far.
        nbytes: bytes written so far.
    """

    pid: int
    idle_s: float
    work: str | None
    chunks: int
    nbytes: int


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})  # pyright: ignore[reportCallIssue]
class PrefeatureWorker:
    """Builds cases and trajectories; restarted and retried by the driver, never by Ray.

    Args:
        root: dataset root on a disk that this node shares with the driver.
        choice: the teacher.
        worker: journal number.
        deep: verify contents of existing files against the journals.
        threads: torch threads; 1 keeps CPU results equal on every machine.
    """

    def __init__(self, root: str, choice: TeacherChoice, worker: int, deep: bool, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._work: str | None = None
        self._chunks = 0
        self._bytes = 0
        self._make = lambda: Workshop(Path(root), choice.make(), worker, deep=deep, lock_wait_s=_LOCK_WAIT_S)
        self._opened: Workshop | None = None

    def _shop(self) -> Workshop:
        """The workshop, opened at the first call: an error of a constructor would reach callers as a dead actor."""
        if self._opened is None:
            self._opened = self._make()
        return self._opened

    def _progress(self, what: str, nbytes: int) -> None:
        with self._lock:
            self._last = time.monotonic()
            self._bytes += nbytes
            self._chunks += what == "chunk_built"

    def _begin(self, work: str | None) -> None:
        with self._lock:
            self._last, self._work = time.monotonic(), work

    def ready(self) -> int:
        """Returns the process id once the teacher is loaded."""
        self._shop()
        return os.getpid()

    def frozen(self, known: Known) -> None:
        """Writes the frozen weights."""
        self._begin("frozen weights")
        self._shop().build_frozen(known)
        self._begin(None)

    def case(self, case_id: int, known: Known) -> None:
        """Builds one case."""
        self._begin(f"case {case_id}")
        self._shop().build_case(case_id, known, self._progress)
        self._begin(None)

    def trajectory(self, case_id: int, action_id: int, known: Known) -> TrajectoryReport:
        """Builds one trajectory."""
        self._begin(f"case {case_id}, action {action_id}")
        report = self._shop().build_trajectory(case_id, action_id, known, progress=self._progress, should_stop=self._stop.is_set)
        self._begin(None)
        return report

    @ray.method(concurrency_group="control")
    def heartbeat(self) -> Heartbeat:
        """Answers at once, also while the worker is busy."""
        with self._lock:
            return Heartbeat(os.getpid(), time.monotonic() - self._last, self._work, self._chunks, self._bytes)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Asks for an end after the present chunk."""
        self._stop.set()
