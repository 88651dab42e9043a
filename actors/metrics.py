"""Every metric that reelray exports through Ray, and how values get there.

Labels are bounded: dataset, node and rank, and where a kind tells faults, stages or builds apart, that kind; never an
episode, a file or a picture. `actors.stream_metrics` publishes streams, `BuildMetrics` builds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import ray

from ingest.engine.counters import COUNTERS, PEAKS

INTERVAL_S = 1.0
"""Seconds between two publications, at least."""
MAX_LABEL = 96
"""Characters of a label, at most."""

WAITING_STAGES = ("fetch", "decode", "assemble", "budget", "decoders_down")
"""What a stream can wait for."""

_RANK = ("dataset", "node", "rank")
_BUILD = ("dataset", "node", "build")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: name given to Ray, which exports it as ``ray_<name>``, counters as ``ray_<name>_total``.
        kind: what it is.
        description: what it measures.
        labels: its label names.
    """

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    labels: tuple[str, ...]

    @property
    def exported(self) -> str:
        """The name that Prometheus sees."""
        return f"ray_{self.name}_total" if self.kind == "counter" else f"ray_{self.name}"


def _gauge(name: str, description: str, labels: tuple[str, ...] = _RANK) -> Metric:
    return Metric(name, "gauge", description, labels)


def _counter(name: str, description: str, labels: tuple[str, ...] = _RANK) -> Metric:
    return Metric(name, "counter", description, labels)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            *(_gauge(name, text) if name in PEAKS else _counter(name, text) for name, text in COUNTERS.items()),
            _counter("reelray_store_requests", "Requests that this process sent to stores, retries included."),
            _counter("reelray_store_received_bytes", "Bytes that this process received from stores."),
            _counter("reelray_store_request_seconds", "Seconds that this process spent in requests, summed over threads."),
            _counter("reelray_store_faults", "Failed attempts of this process by kind: HTTP status or transport error.", (*_RANK, "kind")),
            _gauge("reelray_byte_budget_limit_bytes", "Compressed bytes that the rank may hold or have under way."),
            _gauge("reelray_byte_budget_used_bytes", "Compressed bytes that the rank holds or has under way."),
            _gauge("reelray_frame_slots", "Slots for decoded pictures."),
            _gauge("reelray_frame_slots_used", "Slots that hold a decoded picture or wait for one."),
            _gauge("reelray_pool_actors", "Decode actors, or inline decoding threads, that serve the rank."),
            _gauge("reelray_pool_actors_down", "Decode actors that do not answer at present."),
            _gauge("reelray_pool_calls", "Decode calls of the rank that run or wait."),
            _gauge("reelray_units_under_way", "Units that may be fetched and have not arrived."),
            _gauge("reelray_ready_batches", "Finished batches that wait for the training loop."),
            _gauge("reelray_epoch", "Epoch that is being delivered."),
            _gauge("reelray_step", "Batches of the epoch's present segment that were handed out."),
            _gauge("reelray_segment_steps", "Batches of the epoch's present segment in all."),
            _gauge("reelray_segment_progress_ratio", "Share of the present segment's batches that were handed out, 0 to 1."),
            _gauge("reelray_step_wait_ratio", "Share of the last interval that the training loop waited for a batch, 0 to 1."),
            _gauge("reelray_stall_seconds", "Seconds that the training loop has been waiting for its present batch; 0 while it trains."),
            _gauge("reelray_waiting_on", "1 for the stage that the training loop waits for, 0 for the others.", (*_RANK, "stage")),
            _counter("reelray_build_records", "Records, or files, that a build finished.", _BUILD),
            _counter("reelray_build_bytes", "Bytes that a build read or wrote.", _BUILD),
            _gauge("reelray_build_done_records", "Records of a build that are there, those of earlier runs included.", _BUILD),
            _gauge("reelray_build_planned_records", "Records of a build in all.", _BUILD),
            _gauge(
                "reelray_build_eta_seconds", "Seconds that a build still takes at its present rate; -1 while that is not known.", _BUILD
            ),
        )
    }
)
"""Every metric that reelray exports, by its name in Ray."""


def exported_names() -> frozenset[str]:
    """Names of all metrics as Prometheus sees them."""
    return frozenset(metric.exported for metric in METRICS.values())


class Registry(Protocol):
    """Where values go."""

    def add(self, name: str, amount: float, labels: Mapping[str, str]) -> None:
        """Adds to a counter; ``amount`` is positive."""
        ...

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Sets a gauge."""
        ...


class RayRegistry:
    """Sends values to Ray's metrics agent of this node. Ray's objects are made at their first use."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    def _metric(self, name: str) -> Any:
        from ray.util.metrics import Counter, Gauge

        with self._lock:
            if name not in self._made:
                metric = METRICS[name]
                self._made[name] = (Counter if metric.kind == "counter" else Gauge)(name, metric.description, metric.labels)
            return self._made[name]

    def add(self, name: str, amount: float, labels: Mapping[str, str]) -> None:
        self._metric(name).inc(amount, tags=dict(labels))

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._metric(name).set(value, tags=dict(labels))


RAY = RayRegistry()
"""The registry of this process."""


class Differences:
    """Turns running totals into what was added since the last look. A total that went back has begun again."""

    def __init__(self, start: Mapping[str, float]) -> None:
        self._last = dict(start)

    def take(self, name: str, total: float) -> float:
        """What was added to a total."""
        before = self._last.get(name, 0.0)
        self._last[name] = total
        return total - before if total >= before else total


def dataset_label(location: str) -> str:
    """A location as a label: without user, query and fragment, which may hold credentials, and of bounded length."""
    parts = urlsplit(location)
    host = parts.netloc.rpartition("@")[2]
    text = f"{parts.scheme}://{host}{parts.path}" if parts.scheme else parts.path
    return text if len(text) <= MAX_LABEL else f"…{text[1 - MAX_LABEL :]}"


def this_node() -> str:
    """Short id of the node that runs this process, as in the dashboard and in actor names."""
    return str(ray.get_runtime_context().get_node_id())[:8]


class BuildMetrics:
    """Publishes the progress of a build, at most once per interval.

    Args:
        build: which build, ``sidecar`` or ``prefeature``.
        dataset: location of what is built.
        node: short id of the node of the driver.
        registry: where values go; Ray's metrics by default.
        clock: monotonic seconds.
        interval_s: least seconds between two publications.
    """

    def __init__(
        self,
        build: Literal["sidecar", "prefeature"],
        dataset: str,
        node: str,
        *,
        registry: Registry | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.labels = {"dataset": dataset_label(dataset), "node": node, "build": build}
        self._registry = RAY if registry is None else registry
        self._clock = clock
        self._interval_s = interval_s
        self._last_s: float | None = None
        self._added: Differences | None = None

    def update(self, done: int, planned: int, nbytes: int, eta_s: float | None) -> bool:
        """Publishes progress; whether it did. The last record is always published.

        Args:
            done: records that are there; those of the first call count as there before.
            planned: records in all.
            nbytes: bytes read or written by this run.
            eta_s: seconds left, where known.
        """
        totals = {"reelray_build_records": float(done), "reelray_build_bytes": float(nbytes)}
        if self._added is None:
            self._added = Differences({"reelray_build_records": float(done)})
        at = self._clock()
        if self._last_s is not None and at - self._last_s < self._interval_s and done < planned:
            return False
        self._last_s = at
        for name, total in totals.items():
            if (added := self._added.take(name, total)) > 0:
                self._registry.add(name, added, self.labels)
        self._registry.set("reelray_build_done_records", float(done), self.labels)
        self._registry.set("reelray_build_planned_records", float(planned), self.labels)
        self._registry.set("reelray_build_eta_seconds", -1.0 if eta_s is None else eta_s, self.labels)
        return True
