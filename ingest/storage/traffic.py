"""What this process has transferred and what went wrong on the way, for reports and metrics."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals since the process started, or since a ``reset``.

    Attributes:
        requests: requests sent, retries included.
        received_bytes: bytes of bodies that arrived.
        seconds: time spent in requests, summed over threads.
        faults: failed attempts by kind: an HTTP status, or the name of a transport error.
    """

    requests: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict[str, int])


_lock = threading.Lock()
_requests = _bytes = 0
_seconds = 0.0
_faults: Counter[str] = Counter()


def count_request(received_bytes: int, seconds: float) -> None:
    """Adds one finished or failed request."""
    global _requests, _bytes, _seconds
    with _lock:
        _requests += 1
        _bytes += received_bytes
        _seconds += seconds


def count_fault(kind: str) -> None:
    """Adds one failed attempt of a kind."""
    with _lock:
        _faults[kind] += 1


def traffic(*, reset: bool = False) -> Traffic:
    """The totals of this process.

    Args:
        reset: start again from zero.
    """
    global _requests, _bytes, _seconds
    with _lock:
        found = Traffic(_requests, _bytes, _seconds, dict(_faults))
        if reset:
            _requests = _bytes = 0
            _seconds = 0.0
            _faults.clear()
    return found
