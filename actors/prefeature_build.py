"""The distributed build: a queue of cases, then of trajectories, over workers that may die at any time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError, WorkerCrashedError

from actors.causes import typed_cause
from actors.metrics import BuildMetrics, this_node
from actors.prefeature_worker import Heartbeat, PrefeatureWorker
from ingest.errors import IngestStalledError, PoisonedWorkError, ReelrayError, ResourceUnavailableError, SettingsError
from ingest.prefeature import layout
from ingest.prefeature.build import TrajectoryReport, begin_build
from ingest.prefeature.durable import remove_orphans
from ingest.prefeature.journal import JournalLine, read_journals
from ingest.prefeature.teachers import TeacherChoice

log = logging.getLogger(__name__)
Work = tuple[str, int, int]
"""``(kind, case_id, action_id)`` with kind ``frozen``, ``case`` or ``trajectory`` and -1 where an id does not apply."""

REFERENCE_ENV = {"OMP_NUM_THREADS": "1"}
"""Makes CPU arithmetic independent of the number of cores, so that any number of workers writes the same bytes.

Instruction sets still matter: set ``MKL_CBWR=COMPATIBLE`` in the runtime environment when the nodes' CPUs differ.
"""

_POLL_S = 0.2
_BEAT_S = 1.0
_LAST_BEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How a build is spread over a cluster.

    Attributes:
        workers: trajectory actors.
        num_gpus, num_cpus: reserved by each of them.
        deep: verify contents of existing files against the journals.
        threads: torch threads of a worker; None leaves torch's default.
        start_timeout_s: longest time until a worker has loaded its teacher.
        stall_timeout_s: a worker that finishes nothing for this long is killed and its work retried.
        attempts: how often one piece of work may kill or stall its worker.
        runtime_env: Ray runtime environment of the workers (the real teacher needs its own).
    """

    workers: int = 8
    num_gpus: float = 1.0
    num_cpus: float = 1.0
    deep: bool = False
    threads: int | None = None
    start_timeout_s: float = 1800.0
    stall_timeout_s: float = 1800.0
    attempts: int = 3
    runtime_env: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class BuildState:
    """Progress as given to ``on_progress``.

    Attributes:
        done, total: trajectories.
        chunks: chunks built in this run.
        nbytes: bytes written in this run.
        restarts: workers started again.
        elapsed_s: since the start.
        eta_s: estimate of what is left, or None.
        pids: worker processes by worker number.
    """

    done: int = 0
    total: int = 0
    chunks: int = 0
    nbytes: int = 0
    restarts: int = 0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    pids: dict[int, int] = field(default_factory=dict[int, int])


def require_workers(workers: int, num_gpus: float, num_cpus: float) -> None:
    """Refuses more workers than the cluster can ever hold; they would wait without end.

    Raises:
        SettingsError: no worker at all.
        ResourceUnavailableError: the message names the resource, what is needed and what is there.
    """
    if workers < 1:
        raise SettingsError(f"workers must be at least 1, found {workers}")
    have = ray.cluster_resources()
    for name, each in (("GPU", num_gpus), ("CPU", num_cpus)):
        if workers * each > have.get(name, 0.0) + 1e-9:
            raise ResourceUnavailableError(
                f"{workers} workers need {workers * each:g} {name}, the cluster has {have.get(name, 0.0):g}; "
                f"lower --workers or --num-{name.lower()}s"
            )


class _Slot:
    """One worker place: the actor in it, and what it is doing."""

    def __init__(self, number: int, actor: ActorHandle) -> None:
        self.number = number
        self.actor = actor
        self.work: Work | None = None
        self.ref: ray.ObjectRef[Any] | None = None
        self.beat: ray.ObjectRef[Heartbeat] | None = None
        self.beat_sent = 0.0
        self.alive_at = time.monotonic()
        self.base = (0, 0)
        self.last = (0, 0)


class _Build:
    def __init__(
        self, root: Path, choice: TeacherChoice, settings: BuildSettings, on_progress: Callable[[BuildState], None] | None
    ) -> None:
        self._root, self._choice, self._settings = root, choice, settings
        self._on_progress = on_progress
        self.config, journals = begin_build(root)
        self._lines: dict[tuple[str, int, int, int], JournalLine] = journals.lines
        self._slots: list[_Slot] = []
        self._tries: dict[Work, int] = {}
        self._started = time.monotonic()
        self.state = BuildState(total=self.config.sizes.cases * len(self.config.actions))
        self.reports: list[TrajectoryReport] = []
        self._metrics = BuildMetrics("prefeature", str(root), this_node())

    def _start(self, number: int) -> ActorHandle:
        settings = self._settings
        environment = dict(settings.runtime_env)
        if self._choice.name == "reference" and self._choice.device == "cpu":
            environment["env_vars"] = REFERENCE_ENV | environment.get("env_vars", {})
        options = {"num_gpus": settings.num_gpus, "num_cpus": settings.num_cpus, "runtime_env": environment or None}
        return PrefeatureWorker.options(**options).remote(  # pyright: ignore[reportAttributeAccessIssue]
            str(self._root), self._choice, number, settings.deep, settings.threads
        )

    def start_workers(self) -> None:
        """Starts every worker and waits for the first heartbeat of each."""
        settings = self._settings
        require_workers(settings.workers, settings.num_gpus, settings.num_cpus)
        self._slots = [_Slot(number, self._start(number)) for number in range(settings.workers)]
        self._await_ready(self._slots)

    def _await_ready(self, slots: Sequence[_Slot]) -> None:
        refs = [slot.actor.ready.remote() for slot in slots]
        deadline = time.monotonic() + self._settings.start_timeout_s
        for slot, ref in zip(slots, refs, strict=True):
            self.state.pids[slot.number] = self._ready(slot, ref, deadline)
            slot.alive_at = time.monotonic()

    def _ready(self, slot: _Slot, ref: ray.ObjectRef[int], deadline: float) -> int:
        """Process id of a worker once its teacher is loaded; one that dies while loading is started again."""
        for left in reversed(range(self._settings.attempts)):
            try:
                return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError as error:
                raise ResourceUnavailableError(
                    f"worker {slot.number} was not ready after {self._settings.start_timeout_s:g} s; "
                    f"free resources: {ray.available_resources()}"
                ) from error
            except (RayActorError, WorkerCrashedError) as error:
                if isinstance(found := typed_cause(error), ReelrayError):
                    raise found from error
                if not left:
                    raise PoisonedWorkError(
                        f"worker {slot.number} died {self._settings.attempts} times while it loaded its teacher (last: {error}); "
                        "is there enough memory?"
                    ) from error
                self.state.restarts += 1
                slot.actor = self._start(slot.number)
                ref = slot.actor.ready.remote()
            except RayTaskError as error:
                raise cause_of(error) from error
        raise SettingsError(f"attempts must be at least 1, found {self._settings.attempts}")

    def run(self, works: list[Work], should_stop: Callable[[], bool]) -> bool:
        """Works through a queue; False when stopped before its end."""
        queue = deque(works)
        stopping = False
        while queue or any(slot.ref is not None for slot in self._slots):
            if not stopping and should_stop():
                stopping = True
                queue.clear()
                for slot in self._slots:
                    slot.actor.stop.remote()
            for slot in self._slots:
                if slot.ref is None and queue:
                    self._assign(slot, queue.popleft())
            busy = {slot.ref: slot for slot in self._slots if slot.ref is not None}
            ready, _ = ray.wait(list(busy), timeout=_POLL_S) if busy else ([], [])
            for ref in ready:
                self._collect(busy[ref], ref, queue, stopping)
            self._watch(queue, stopping)
            self._report()
        return not stopping

    def _assign(self, slot: _Slot, work: Work) -> None:
        kind, case, action = work
        known = {key: line for key, line in self._lines.items() if key[1] == case and (kind == "case" or action in (key[2], -1))}
        slot.work = work
        slot.alive_at = time.monotonic()
        if kind == "frozen":
            slot.ref = slot.actor.frozen.remote(known)
        elif kind == "case":
            slot.ref = slot.actor.case.remote(case, known)
        else:
            slot.ref = slot.actor.trajectory.remote(case, action, known)

    def _collect(self, slot: _Slot, ref: ray.ObjectRef[Any], queue: deque[Work], stopping: bool) -> None:
        try:
            value = ray.get(ref)
        except (RayActorError, WorkerCrashedError) as error:
            self._replace(slot, queue, stopping, f"died ({type(error).__name__})")
            return
        except RayTaskError as error:
            raise cause_of(error) from error
        slot.ref = slot.work = None
        if isinstance(value, TrajectoryReport):
            self.reports.append(value)
            self.state.done += value.finished

    def _replace(self, slot: _Slot, queue: deque[Work], stopping: bool, why: str) -> None:
        work = slot.work
        slot.ref = slot.work = slot.beat = None
        if work is not None:
            self._tries[work] = self._tries.get(work, 0) + 1
            log.warning("worker %d %s during %s (try %d of %d)", slot.number, why, work, self._tries[work], self._settings.attempts)
            if self._tries[work] >= self._settings.attempts:
                raise PoisonedWorkError(
                    f"{work[0]} case {work[1]} action {work[2]} ended its worker {self._tries[work]} times (last: {why}); "
                    "see the worker's log; everything finished so far is kept"
                )
            if not stopping:
                queue.appendleft(work)
        with contextlib.suppress(Exception):
            ray.kill(slot.actor)
        slot.base = (slot.base[0] + slot.last[0], slot.base[1] + slot.last[1])
        slot.last = (0, 0)
        self.state.restarts += 1
        slot.actor = self._start(slot.number)
        self._await_ready([slot])
        # what the dead worker committed is in its journal by now
        self._lines = read_journals(self._root, self.config.fingerprint).lines

    def _watch(self, queue: deque[Work], stopping: bool) -> None:
        """Heartbeats: counters for the dashboard, and an end for workers that hang."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.beat is None and slot.ref is not None and now - slot.beat_sent >= min(_BEAT_S, self._settings.stall_timeout_s / 4):
                slot.beat, slot.beat_sent = slot.actor.heartbeat.remote(), now
            if slot.beat is not None:
                self._take_beat(slot, now)
            if slot.ref is not None and now - slot.alive_at > self._settings.stall_timeout_s:
                self._replace(slot, queue, stopping, f"finished nothing for {self._settings.stall_timeout_s:g} s")

    def _take_beat(self, slot: _Slot, now: float) -> None:
        ready, _ = ray.wait([slot.beat], timeout=0)
        if not ready:
            return
        try:
            beat = ray.get(ready[0])
        except (RayActorError, RayTaskError, WorkerCrashedError):
            slot.beat = None  # the work's own reference reports the death
            return
        slot.beat = None
        slot.alive_at = max(slot.alive_at, now - beat.idle_s)
        slot.last = (beat.chunks, beat.nbytes)

    def _report(self) -> None:
        state = self.state
        state.elapsed_s = time.monotonic() - self._started
        state.chunks = sum(slot.base[0] + slot.last[0] for slot in self._slots)
        state.nbytes = sum(slot.base[1] + slot.last[1] for slot in self._slots)
        state.eta_s = state.elapsed_s / state.done * (state.total - state.done) if state.done else None
        self._metrics.update(state.done, state.total, state.nbytes, state.eta_s)
        if self._on_progress is not None:
            self._on_progress(state)

    def count(self) -> None:
        """Takes a last heartbeat of every worker, so that the totals are complete."""
        for slot in self._slots:
            with contextlib.suppress(RayActorError, RayTaskError, GetTimeoutError):
                beat: Any = ray.get(slot.actor.heartbeat.remote(), timeout=_LAST_BEAT_S)
                slot.last = (beat.chunks, beat.nbytes)
        self._report()

    def close(self) -> None:
        """Ends every worker."""
        for slot in self._slots:
            with contextlib.suppress(Exception):
                ray.kill(slot.actor)


def cause_of(error: RayTaskError) -> BaseException:
    """The worker's own exception, so that callers see the same types as in a single process."""
    found = typed_cause(error)
    return found if isinstance(found, ReelrayError) or not isinstance(error.cause, BaseException) else error.cause


def run_build(
    root: Path,
    choice: TeacherChoice,
    settings: BuildSettings,
    *,
    cases_only: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[BuildState], None] | None = None,
) -> tuple[BuildState, list[TrajectoryReport], bool]:
    """Builds what is missing of a dataset on the connected cluster, without merge.

    Args:
        root: dataset root after the cases stage, on a disk that all workers share.
        choice: the teacher.
        settings: how to spread the work.
        cases_only: only frozen weights, case tensors and text K/V.
        should_stop: polled; True lets every worker finish its chunk and returns.
        on_progress: called several times a second.

    Returns:
        The final state, one report per trajectory, and whether the end was reached.

    Raises:
        ResourceUnavailableError: the cluster cannot hold the workers.
        PoisonedWorkError: one piece of work ended its worker too often.
        IngestStalledError: workers finished but pieces are missing.
        ReelrayError: whatever a worker raised.
    """
    build = _Build(root, choice, settings, on_progress)
    sizes, actions = build.config.sizes, len(build.config.actions)
    try:
        build.start_workers()
        finished = build.run([("frozen", -1, -1)], should_stop)
        finished = finished and build.run([("case", case, -1) for case in range(sizes.cases)], should_stop)
        if finished and not cases_only:
            finished = build.run([("trajectory", case, action) for case, action in layout.trajectories(sizes, actions)], should_stop)
            if finished and build.state.done != build.state.total:
                raise IngestStalledError(f"{build.state.total - build.state.done} trajectories are unfinished; run the build again")
        build.count()
        return build.state, build.reports, finished
    finally:
        build.close()
        remove_orphans(root, older_s=0.0)
