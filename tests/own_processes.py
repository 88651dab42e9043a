"""Processes that this one has started, by title. Another session's on the same machine are not to be counted, let alone killed."""

from __future__ import annotations

import contextlib

import psutil


def workers(*names: str) -> list[int]:
    """Process ids of the session's Ray workers that run something whose name begins with one of these."""
    found: list[int] = []
    for process in psutil.Process().children(recursive=True):
        # Some end while they are looked at.
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(tuple(f"ray::{name}" for name in names)):
                found.append(process.pid)
    return found
