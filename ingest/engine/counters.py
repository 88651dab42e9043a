"""Counters with the names under which they are exported.

The engine counts in plain Python; `actors.metrics` mirrors the totals into Ray's metrics where a cluster runs.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from time import perf_counter
from types import MappingProxyType

COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "reelray_samples_delivered": "Samples handed to the training loop, padding excluded.",
        "reelray_samples_padded": "Masked repeats handed to the training loop.",
        "reelray_camera_frames_delivered": "Pictures handed to the training loop, window pictures included.",
        "reelray_pictures_decoded": "Pictures that came out of a decoder.",
        "reelray_payload_bytes_read": "Video bytes fetched from the store.",
        "reelray_payload_bytes_needed": "Video bytes of exactly the samples that the selected pictures need.",
        "reelray_row_bytes_read": "Bytes of tabular values handed on from parquet.",
        "reelray_fetch_seconds": "Seconds spent reading payload and rows.",
        "reelray_decode_cpu_seconds": "CPU seconds spent decoding and converting pictures.",
        "reelray_assemble_seconds": "Seconds spent gathering batches.",
        "reelray_arrival_wait_seconds": "Seconds that the batch which was due waited for a unit to be read.",
        "reelray_decode_wait_seconds": "Seconds that the batch which was due waited for its pictures to be decoded.",
        "reelray_wait_seconds": "Seconds the training loop waited for a batch.",
        "reelray_retries": "Pieces of work done again after a fault.",
        "reelray_quarantined": "Pieces of work given up because they kept killing their worker.",
        "reelray_episodes_skipped": "Episodes dropped by the damage policy.",
        "reelray_compressed_bytes_peak": "Most bytes of compressed pictures that one rank held or had under way at a time.",
        "reelray_decoded_bytes_peak": "Most bytes of decoded pictures that one rank held at a time.",
    }
)
"""Every counter and what it counts."""

PEAKS = frozenset({"reelray_compressed_bytes_peak", "reelray_decoded_bytes_peak"})
"""Counters that hold the largest value of all that are merged, not their sum."""


def merge_counts(totals: dict[str, float], other: Mapping[str, float]) -> None:
    """Adds other totals to ``totals``; of peaks the larger one stays.

    Raises:
        KeyError: a name is no counter.
    """
    for name, amount in other.items():
        totals[name] = max(totals[name], amount) if name in PEAKS else totals[name] + amount


class Counters:
    """Thread-safe running totals. Unknown names are refused, so that no metric is ever misspelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        """Adds to one total."""
        with self._lock:
            self._totals[name] += amount

    def merge(self, other: Mapping[str, float]) -> None:
        """Adds another set of totals, for example one that came from a decode actor."""
        with self._lock:
            merge_counts(self._totals, other)

    def at_least(self, name: str, value: float) -> None:
        """Raises a peak."""
        with self._lock:
            self._totals[name] = max(self._totals[name], value)

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Adds the wall seconds of the block to one total."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - start)

    def totals(self) -> dict[str, float]:
        """A copy of all totals."""
        with self._lock:
            return dict(self._totals)
