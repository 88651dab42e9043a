"""Processes of this machine, and the CPUs and the memory that they may use."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path

import psutil

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
    quota = min(_cpus(group / "cpu.max") for group in _groups(cgroups, membership))
    return max(1, present if quota == math.inf else min(present, math.ceil(quota)))


def usable_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Bytes of memory that this process' machine or container has, whichever is less.

    Args:
        cgroups: where the control groups are mounted, of version 2, or of version 1 with the memory controller in ``memory``.
        membership: file that names the control group of this process.
    """
    limits = [_bytes(group / "memory.max") for group in _groups(cgroups, membership)]
    limits.append(_bytes(cgroups / "memory" / "memory.limit_in_bytes"))
    return int(min(psutil.virtual_memory().total, *limits))


def _groups(cgroups: Path, membership: Path) -> list[Path]:
    """The process' control group (version 2) and those around it."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return [cgroups]
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    parts = [part for part in own.split("/") if part]
    if ".." in parts:
        # Seen from inside a container, a group outside of it; what limits both is the root that is mounted here.
        parts = []
    return [cgroups.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _cpus(file: Path) -> float:
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def _bytes(file: Path) -> float:
    try:
        text = file.read_text(encoding="ascii").strip()
        return math.inf if text == "max" else max(1, int(text))
    except (OSError, ValueError):
        return math.inf
