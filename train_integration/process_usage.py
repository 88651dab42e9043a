"""CPU seconds and memory of a tree of processes, those that end meanwhile included."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

_SYSTEM = ("raylet", "gcs_server", "log_monitor", "dashboard", "runtime_env", "agent.py", "monitor.py")
"""Words in the command lines of Ray's own processes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tree of processes used between two moments.

    Attributes:
        cpu_s: user and system CPU seconds of every process.
        ray_cpu_s: the part of it that Ray's own processes used (raylet, GCS, agents).
        by_role: CPU seconds by kind of process, for profiles.
        peak_pss_mb_by_role: the most that one process of each kind held, in MiB of proportional set size, without
            Ray's own processes.
    """

    cpu_s: float
    ray_cpu_s: float
    by_role: Mapping[str, float]
    peak_pss_mb_by_role: Mapping[str, float]

    @property
    def peak_pss_mb(self) -> float:
        """The most that one process held, in MiB of proportional set size; Ray's own processes do not count."""
        return max(self.peak_pss_mb_by_role.values(), default=0.0)


@dataclass(slots=True)
class _Process:
    role: str
    first_s: float
    last_s: float = 0.0


@dataclass(slots=True, eq=False)
class ProcessTree:
    """Follows a process and everything below it.

    A process that ends between two looks is counted up to the last one before.

    Args:
        root: process id at the top.
        every_s: seconds between two looks.
        exclude: process ids left out, such as that of the observer.
    """

    root: int
    every_s: float = 1.0
    exclude: frozenset[int] = frozenset()
    _seen: dict[int, _Process] = field(default_factory=dict[int, _Process], init=False)
    _peaks: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Counts from now on."""
        self._look(memory=False)
        for process in self._seen.values():
            process.first_s = process.last_s
        self._thread = threading.Thread(target=self._follow, name="reelray-usage", daemon=True)
        self._thread.start()

    def stop(self) -> Usage:
        """What was used since ``start``."""
        self._look(memory=True)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        by_role: dict[str, float] = {}
        for process in self._seen.values():
            by_role[process.role] = by_role.get(process.role, 0.0) + max(0.0, process.last_s - process.first_s)
        return Usage(sum(by_role.values()), by_role.get("ray", 0.0), by_role, dict(self._peaks))

    def _follow(self) -> None:
        while not self._stop.wait(self.every_s):
            self._look(memory=True)

    def _look(self, *, memory: bool) -> None:
        try:
            root = psutil.Process(self.root)
            processes = [root, *root.children(recursive=True)]
        except psutil.Error:
            return
        for process in processes:
            if process.pid in self.exclude:
                continue
            try:
                times = process.cpu_times()
                if process.pid not in self._seen:
                    self._seen[process.pid] = _Process(_role(process, self.root), 0.0)
                seen = self._seen[process.pid]
                seen.last_s = times.user + times.system
                if seen.role.startswith("ray::IDLE"):
                    seen.role = _role(process, self.root)
                if memory and seen.role != "ray":
                    held = process.memory_full_info().pss / 2**20
                    self._peaks[seen.role] = max(self._peaks.get(seen.role, 0.0), held)
            except psutil.Error:
                continue


def _role(process: psutil.Process, root: int) -> str:
    if process.pid == root:
        return "driver"
    line = process.cmdline()
    if line and line[0].startswith("ray::"):
        return line[0].split()[0]
    return "ray" if any(word in part for part in line[:4] for word in _SYSTEM) else "other"


def machine() -> str:
    """One line that says what a figure was measured on."""
    model = "unknown CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    load = psutil.getloadavg()
    memory = psutil.virtual_memory().total / 2**30
    when = time.strftime("%Y-%m-%d")
    return f"{psutil.cpu_count()} CPUs, {model}, {memory:.0f} GiB, load average {load[0]:.1f}, {when}"
