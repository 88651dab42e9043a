"""Processes of this machine, and the CPUs that they may use."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def is_alive(pid: int) -> bool:
    """Whether a process is there, also one of another user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, for buffers of some megabytes: fresh pages cost more than what is copied to them.

    For processes that fetch all their life; does nothing where the C library is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def usable_cpus(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """CPUs that this process may use, at least 1: those it may run on, or as many as a container's quota is worth.

    Args:
        cgroups: where the control groups (version 2) are mounted.
        membership: file that names the control group of this process.
    """
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroups, membership)
    return max(1, present if quota == math.inf else min(present, math.ceil(quota)))


def _quota(cgroups: Path, membership: Path) -> float:
    """The least quota of the process' control group and those around it, in CPUs; infinite where there is none."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return math.inf
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    parts = [part for part in own.split("/") if part]
    if ".." in parts:
        # Seen from inside a container, a group outside of it; what limits both is the root that is mounted here.
        parts = []
    return min(_limit(cgroups.joinpath(*parts[:depth]) / "cpu.max") for depth in range(len(parts) + 1))


def _limit(file: Path) -> float:
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
