"""Kills a child at its n-th system call of a kind, with the kernel's own tracing interface.

The child is a fork of the test process, so every attempt costs milliseconds. It asks to be traced and stops; the parent then
lets it run from system call to system call and sends SIGKILL when the wanted one is entered or left. Nothing in the child is
replaced: the calls are those that the builder really makes. Where tracing is forbidden (some sandboxes), the child is killed
after a time that grows from attempt to attempt instead.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

TRACEME, SYSCALL, SETOPTIONS, GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_TRACE_SYSTEM_GOOD = 1
_CALLS = {
    "x86_64": {
        "write": 1, "pwrite64": 18, "writev": 20, "openat": 257, "fsync": 74, "fdatasync": 75, "rename": 82, "renameat": 264,
        "renameat2": 316, "unlink": 87, "unlinkat": 263, "mkdir": 83, "mkdirat": 258, "ftruncate": 77, "flock": 73, "fcntl": 72,
    },
    "aarch64": {
        "write": 64, "pwrite64": 68, "writev": 66, "openat": 56, "fsync": 82, "fdatasync": 83, "renameat": 38, "renameat2": 276,
        "unlinkat": 35, "mkdirat": 34, "ftruncate": 46, "flock": 32, "fcntl": 25,
    },
}  # fmt: skip
_OF_INTEREST = (
    "write",
    "pwrite64",
    "writev",
    "fsync",
    "fdatasync",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "mkdir",
    "mkdirat",
    "ftruncate",
)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Info(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
        ("more", ctypes.c_uint64 * 2),
    ]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: the system call at which it was killed, or None when it ran to its end."""

    killed_at: str | None
    status: int


def _fork(action: Callable[[], None], *, traced: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if traced:
            if _libc.ptrace(TRACEME, 0, None, None) != 0:
                os._exit(77)
            os.kill(os.getpid(), signal.SIGSTOP)
        action()
        os._exit(0)
    except BaseException:
        os._exit(70)


def can_trace() -> bool:
    """Whether this process may trace its children."""
    if platform.machine() not in _CALLS:
        return False
    pid = _fork(lambda: None, traced=True)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        return False
    allowed = _libc.ptrace(SETOPTIONS, pid, None, _TRACE_SYSTEM_GOOD) == 0 and _step(pid) is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return allowed


def _step(pid: int) -> tuple[int, int] | None:
    """Runs to the next system call boundary; (1 entered or 2 left, call number), or None without information."""
    _libc.ptrace(SYSCALL, pid, None, None)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        return None
    info = _Info()
    size = _libc.ptrace(GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.byref(info))
    return (info.op, info.nr) if size > 0 else None


def killed_at(action: Callable[[], None], number: int, *, after: bool) -> Outcome:
    """Runs ``action`` in a child and kills it at its ``number``-th writing system call (from 0), when entered or when left."""
    names = {code: name for name, code in _CALLS[platform.machine()].items() if name in _OF_INTEREST}
    pid = _fork(action, traced=True)
    os.waitpid(pid, 0)
    _libc.ptrace(SETOPTIONS, pid, None, _TRACE_SYSTEM_GOOD)
    seen, inside, passed = -1, "", 0
    while True:
        _libc.ptrace(SYSCALL, pid, None, passed)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return Outcome(None, status)
        passed = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            passed = os.WSTOPSIG(status)
            continue
        info = _Info()
        _libc.ptrace(GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.byref(info))
        if info.op == 1:
            inside = names.get(info.nr, "")
            seen += bool(inside)
        if seen == number and inside and info.op == (2 if after else 1):
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            return Outcome(inside, status)


def killed_after(action: Callable[[], None], delay_s: float) -> Outcome:
    """Runs ``action`` in a child and kills it after a delay; the stand-in where tracing is forbidden."""
    pid = _fork(action, traced=False)
    time.sleep(delay_s)
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        return Outcome(None, status)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return Outcome("a moment", status)
