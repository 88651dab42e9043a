"""Publishes what a stream does: totals, budgets, position, and what a training loop that waits is waiting for.

Counting stays in plain Python; a thread of the process that counts reads it about once a second and sends differences.
So metrics cost the data path nothing, and a stream that waits is seen to wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ray

from actors.metrics import INTERVAL_S, MAX_LABEL, METRICS, RAY, WAITING_STAGES, Differences, Registry, dataset_label, this_node
from ingest.storage.traffic import Traffic, traffic

_LOG = logging.getLogger("reelray.metrics")
_MAX_KINDS = 24
"""Kinds of faults that get a label of their own; the others are counted as ``other``."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What a decode pool is doing for one rank.

    Attributes:
        actors: actors or threads that decode.
        down: those that do not answer.
        calls: calls that run or wait.
    """

    actors: int = 0
    down: int = 0
    calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReading:
    """One look at a stream.

    Attributes:
        totals: counter totals since the stream began.
        epoch: epoch that is being delivered.
        step: batches of the present segment that were handed out.
        steps: batches of the present segment in all.
        waiting_since: `time.monotonic` since when the loop waits for a batch; None while it trains.
        ready_batches: finished batches kept ahead.
        budget_limit_bytes: compressed bytes that may be held.
        budget_used_bytes: compressed bytes that are held or under way.
        slots: slots for decoded pictures.
        slots_used: slots in use.
        units_under_way: units that may be fetched and have not arrived.
        pool: the decoders.
    """

    totals: Mapping[str, float]
    epoch: int = 0
    step: int = 0
    steps: int = 0
    waiting_since: float | None = None
    ready_batches: int = 0
    budget_limit_bytes: int = 0
    budget_used_bytes: int = 0
    slots: int = 0
    slots_used: int = 0
    units_under_way: int = 0
    pool: PoolLoad = field(default_factory=PoolLoad)


def waiting_on(reading: StreamReading) -> str | None:
    """Which of `WAITING_STAGES` a stream waits for, as far as one look can tell; None while it does not wait."""
    if reading.waiting_since is None:
        return None
    pool = reading.pool
    if pool.actors and pool.down >= pool.actors:
        return "decoders_down"
    # Decoders with a queue are what holds it up; idle ones wait for bytes.
    if pool.calls and pool.calls >= pool.actors - pool.down:
        return "decode"
    if reading.units_under_way:
        return "fetch"
    if pool.calls:
        return "decode"
    if reading.budget_limit_bytes and reading.budget_used_bytes >= 0.95 * reading.budget_limit_bytes:
        return "budget"
    return "assemble"


def describe_wait(reading: StreamReading) -> str:
    """What a stream waits for and what it holds, in words, for the message of a stall."""
    pool = reading.pool
    return (
        f"it waits for {waiting_on(reading) or 'nothing'}; {reading.units_under_way} units under way, {pool.calls} decode calls, "
        f"{pool.down} of {pool.actors} decoders down, {reading.budget_used_bytes} of {reading.budget_limit_bytes} compressed bytes "
        f"and {reading.slots_used} of {reading.slots} frame slots in use"
    )


class RankMetrics:
    """Publishes readings of one rank's stream, at most once per interval.

    Args:
        dataset: location of the dataset; credentials, query and fragment are left out of the label.
        node: short id of the node.
        rank: data-parallel rank.
        start: the first reading; what it counts was there before and is not added again.
        registry: where values go; Ray's metrics by default.
        clock: monotonic seconds.
        interval_s: least seconds between two publications.
        traffic: what this process has transferred.
    """

    def __init__(
        self,
        dataset: str,
        node: str,
        rank: int,
        start: StreamReading,
        *,
        registry: Registry | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
        traffic: Callable[[], Traffic] = traffic,
    ) -> None:
        self.labels = {"dataset": dataset_label(dataset), "node": node, "rank": str(rank)}
        self._registry = RAY if registry is None else registry
        self._clock = clock
        self._interval_s = interval_s
        self._traffic = traffic
        self._totals = Differences(start.totals)
        self._sent = Differences(_flat(traffic()))
        self._kinds: set[str] = set()
        self._last_s = clock()
        self._waited_s = self._waited(start, self._last_s)

    def update(self, reading: StreamReading, *, now: bool = False) -> bool:
        """Publishes a reading when an interval has passed since the last one.

        Args:
            reading: a look at the stream.
            now: publish in any case.

        Returns:
            Whether it was published.
        """
        at = self._clock()
        passed = at - self._last_s
        if passed < self._interval_s and not now:
            return False
        self._publish_totals(reading)
        self._publish_traffic()
        waited = self._waited(reading, at)
        share = min(1.0, max(0.0, waited - self._waited_s) / passed) if passed > 0 else 0.0
        self._last_s, self._waited_s = at, waited
        stall = 0.0 if reading.waiting_since is None else max(0.0, at - reading.waiting_since)
        self._publish_gauges(reading, share, stall, waiting_on(reading))
        return True

    def finish(self, reading: StreamReading) -> None:
        """Publishes the last totals, and gauges that say that nothing waits or is held any more."""
        self.update(reading, now=True)
        ended = StreamReading(totals=reading.totals, epoch=reading.epoch, step=reading.step, steps=reading.steps)
        self._publish_gauges(ended, 0.0, 0.0, None)

    @staticmethod
    def _waited(reading: StreamReading, at: float) -> float:
        under_way = 0.0 if reading.waiting_since is None else max(0.0, at - reading.waiting_since)
        return reading.totals.get("reelray_wait_seconds", 0.0) + under_way

    def _publish_totals(self, reading: StreamReading) -> None:
        for name, total in reading.totals.items():
            if name not in METRICS:
                continue
            if METRICS[name].kind == "gauge":
                self._registry.set(name, total, self.labels)
            elif (added := self._totals.take(name, total)) > 0:
                self._registry.add(name, added, self.labels)

    def _publish_traffic(self) -> None:
        for key, total in _flat(self._traffic()).items():
            added = self._sent.take(key, total)
            if added <= 0:
                continue
            name, _, kind = key.partition("|")
            self._registry.add(name, added, self.labels | ({"kind": self._kind(kind)} if kind else {}))

    def _kind(self, kind: str) -> str:
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            return "other"
        self._kinds.add(kind)
        return kind[:MAX_LABEL]

    def _publish_gauges(self, reading: StreamReading, share: float, stall: float, stage: str | None) -> None:
        values = {
            "reelray_byte_budget_limit_bytes": reading.budget_limit_bytes,
            "reelray_byte_budget_used_bytes": reading.budget_used_bytes,
            "reelray_frame_slots": reading.slots,
            "reelray_frame_slots_used": reading.slots_used,
            "reelray_pool_actors": reading.pool.actors,
            "reelray_pool_actors_down": reading.pool.down,
            "reelray_pool_calls": reading.pool.calls,
            "reelray_units_under_way": reading.units_under_way,
            "reelray_ready_batches": reading.ready_batches,
            "reelray_epoch": reading.epoch,
            "reelray_step": reading.step,
            "reelray_segment_steps": reading.steps,
            "reelray_segment_progress_ratio": reading.step / reading.steps if reading.steps else 0.0,
            "reelray_step_wait_ratio": share,
            "reelray_stall_seconds": stall,
        }
        for name, value in values.items():
            self._registry.set(name, float(value), self.labels)
        for one in WAITING_STAGES:
            self._registry.set("reelray_waiting_on", float(one == stage), self.labels | {"stage": one})


def _flat(found: Traffic) -> dict[str, float]:
    totals: dict[str, float] = {
        "reelray_store_requests": found.requests,
        "reelray_store_received_bytes": found.received_bytes,
        "reelray_store_request_seconds": found.seconds,
    }
    return totals | {f"reelray_store_faults|{kind}": float(count) for kind, count in found.faults.items()}


class Watch:
    """A thread that publishes a stream's readings until it is closed. What goes wrong in it never reaches the stream."""

    def __init__(self, metrics: RankMetrics, read: Callable[[], StreamReading], *, interval_s: float = INTERVAL_S) -> None:
        self._metrics = metrics
        self._read = read
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="reelray-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._guarded(lambda: self._metrics.update(self._read()))

    def _guarded(self, publish: Callable[[], object]) -> None:
        try:
            publish()
        except Exception as error:
            if not self._failed:
                _LOG.warning("metrics of this stream cannot be published: %s: %s", type(error).__name__, error)
            self._failed = True

    def close(self) -> None:
        """Publishes once more and stops. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=5)
        self._guarded(lambda: self._metrics.finish(self._read()))


class _NoWatch:
    def close(self) -> None:
        """Nothing runs."""


def watch_stream(dataset: str, rank: int, read: Callable[[], StreamReading]) -> Watch | _NoWatch:
    """Publishes a stream's readings about once a second for as long as it runs.

    Args:
        dataset: location of the dataset.
        rank: data-parallel rank.
        read: looks at the stream; called from another thread.

    Returns:
        What to close with the stream. Outside a Ray cluster nothing is published.
    """
    if not ray.is_initialized():
        return _NoWatch()
    return Watch(RankMetrics(dataset, this_node(), rank, read()), read)
