"""Metrics: exact totals, bounded labels, nothing on the data path, and names that Prometheus really sees."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.metrics import METRICS, WAITING_STAGES, BuildMetrics, dataset_label, exported_names
from actors.stream_metrics import PoolLoad, RankMetrics, StreamReading, Watch, waiting_on, watch_stream
from ingest.engine.counters import COUNTERS, PEAKS, Counters
from ingest.storage.traffic import Traffic


class FakeRegistry:
    """Keeps what was published, and refuses what Ray would refuse or what the catalogue does not allow."""

    def __init__(self) -> None:
        self.added: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self.gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.calls = 0

    def _key(self, name: str, kind: str, labels: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
        self.calls += 1
        assert METRICS[name].kind == kind
        assert set(labels) == set(METRICS[name].labels)
        assert all(isinstance(value, str) for value in labels.values())
        return name, tuple(sorted(labels.items()))

    def add(self, name: str, amount: float, labels: Mapping[str, str]) -> None:
        assert amount > 0
        self.added[self._key(name, "counter", labels)] += amount

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self.gauges[self._key(name, "gauge", labels)] = value

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.added.items() if found == name)

    def gauge(self, name: str, **more: str) -> float:
        (value,) = [v for (found, labels), v in self.gauges.items() if found == name and more.items() <= dict(labels).items()]
        return value


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _metrics(registry: FakeRegistry, clock: Clock, start: StreamReading | None = None, sent: list[Traffic] | None = None) -> RankMetrics:
    traffic = [Traffic()] if sent is None else sent
    return RankMetrics(
        "s3://bucket/ds", "abcd1234", 3, start or StreamReading(totals={}), registry=registry, clock=clock, traffic=lambda: traffic[-1]
    )


def test_every_counter_is_exported_and_named_as_prometheus_expects() -> None:
    assert set(COUNTERS) <= set(METRICS)
    for name in COUNTERS:
        assert METRICS[name].kind == ("gauge" if name in PEAKS else "counter")
    assert "ray_reelray_samples_delivered_total" in exported_names()
    assert "ray_reelray_stall_seconds" in exported_names()
    assert len(exported_names()) == len(METRICS)


def test_labels_are_bounded() -> None:
    allowed = {"dataset", "node", "rank", "kind", "stage", "build"}
    for metric in METRICS.values():
        assert set(metric.labels) <= allowed, metric.name
        assert metric.name.startswith("reelray_")
        assert metric.description.endswith(".")


def test_totals_arrive_whole_whatever_the_rhythm() -> None:
    registry, clock, counters = FakeRegistry(), Clock(), Counters()
    metrics = _metrics(registry, clock)
    for step in range(50):
        counters.add("reelray_samples_delivered", 8)
        clock.now_s += 0.13
        metrics.update(StreamReading(totals=counters.totals(), step=step))
    metrics.finish(StreamReading(totals=counters.totals()))
    assert registry.total("reelray_samples_delivered") == 400


def test_at_most_one_publication_per_interval() -> None:
    registry, clock = FakeRegistry(), Clock()
    metrics = _metrics(registry, clock)
    reading = StreamReading(totals={})
    assert not metrics.update(reading)
    clock.now_s += 0.99
    assert not metrics.update(reading)
    assert registry.calls == 0
    clock.now_s += 0.01
    assert metrics.update(reading)
    assert not metrics.update(reading)


def test_a_stream_that_goes_on_is_not_counted_twice() -> None:
    registry, clock, counters = FakeRegistry(), Clock(), Counters()
    for _ in range(3):
        metrics = _metrics(registry, clock, StreamReading(totals=counters.totals()))
        counters.add("reelray_samples_delivered", 5)
        metrics.finish(StreamReading(totals=counters.totals()))
    assert registry.total("reelray_samples_delivered") == 15


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=4))
def test_totals_that_begin_again_lose_nothing(runs: list[list[int]]) -> None:
    registry, clock = FakeRegistry(), Clock()
    metrics = _metrics(registry, clock)
    for run in runs:
        for total in accumulate([0, *run]):
            clock.now_s += 1
            metrics.update(StreamReading(totals={"reelray_retries": total}))
    assert registry.total("reelray_retries") == sum(map(sum, runs))


def test_waiting_shows_while_it_lasts() -> None:
    registry, clock = FakeRegistry(), Clock()
    metrics = _metrics(registry, clock)
    started = clock.now_s
    for waited in (1, 2, 3):
        clock.now_s = started + waited
        metrics.update(StreamReading(totals={"reelray_wait_seconds": 0.0}, waiting_since=started, units_under_way=4))
        assert registry.gauge("reelray_stall_seconds") == pytest.approx(waited)
        assert registry.gauge("reelray_step_wait_ratio") == pytest.approx(1.0)
        assert registry.gauge("reelray_waiting_on", stage="fetch") == 1
        assert sum(registry.gauge("reelray_waiting_on", stage=stage) for stage in WAITING_STAGES) == 1
    clock.now_s = started + 5
    metrics.update(StreamReading(totals={"reelray_wait_seconds": 3.0}, step=1, steps=4))
    assert registry.gauge("reelray_stall_seconds") == 0
    assert registry.gauge("reelray_step_wait_ratio") == pytest.approx(0.0)
    assert registry.gauge("reelray_segment_progress_ratio") == pytest.approx(0.25)
    assert sum(registry.gauge("reelray_waiting_on", stage=stage) for stage in WAITING_STAGES) == 0


def test_half_waited_is_half() -> None:
    registry, clock = FakeRegistry(), Clock()
    metrics = _metrics(registry, clock)
    clock.now_s += 2
    metrics.update(StreamReading(totals={"reelray_wait_seconds": 1.0}))
    assert registry.gauge("reelray_step_wait_ratio") == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("pool", "under_way", "used", "expected"),
    [
        (PoolLoad(4, 4, 2), 3, 0, "decoders_down"),
        (PoolLoad(4, 0, 9), 3, 0, "decode"),
        (PoolLoad(4, 2, 2), 3, 0, "decode"),
        (PoolLoad(4, 0, 1), 3, 0, "fetch"),
        (PoolLoad(4, 0, 1), 0, 0, "decode"),
        (PoolLoad(4, 0, 0), 0, 100, "budget"),
        (PoolLoad(4, 0, 0), 0, 10, "assemble"),
        (PoolLoad(), 2, 0, "fetch"),
    ],
)
def test_what_is_waited_for(pool: PoolLoad, under_way: int, used: int, expected: str) -> None:
    reading = StreamReading(
        totals={}, waiting_since=1.0, pool=pool, units_under_way=under_way, budget_limit_bytes=100, budget_used_bytes=used
    )
    assert waiting_on(reading) == expected
    assert expected in WAITING_STAGES
    assert waiting_on(StreamReading(totals={}, pool=pool, units_under_way=under_way)) is None


def test_the_end_leaves_no_alarm_behind() -> None:
    registry, clock = FakeRegistry(), Clock()
    metrics = _metrics(registry, clock)
    clock.now_s += 1
    last = StreamReading(
        totals={}, waiting_since=90.0, ready_batches=3, budget_limit_bytes=9, budget_used_bytes=9, step=7, steps=9, pool=PoolLoad(2, 2, 5)
    )
    metrics.finish(last)
    for name in ("reelray_stall_seconds", "reelray_ready_batches", "reelray_byte_budget_used_bytes", "reelray_pool_actors_down"):
        assert registry.gauge(name) == 0, name
    assert registry.gauge("reelray_step") == 7


def test_peaks_are_gauges() -> None:
    registry, clock = FakeRegistry(), Clock()
    metrics = _metrics(registry, clock)
    metrics.finish(StreamReading(totals={"reelray_decoded_bytes_peak": 7e9}))
    assert registry.gauge("reelray_decoded_bytes_peak") == 7e9


def test_faults_by_kind_stay_bounded() -> None:
    registry, clock = FakeRegistry(), Clock()
    sent = [Traffic()]
    metrics = _metrics(registry, clock, sent=sent)
    sent.append(Traffic(requests=90, received_bytes=1 << 20, seconds=2.5, faults={f"kind{number}": 2 for number in range(60)}))
    metrics.finish(StreamReading(totals={}))
    kinds = {dict(labels)["kind"] for name, labels in registry.added if name == "reelray_store_faults"}
    assert len(kinds) <= 25
    assert "other" in kinds
    assert registry.total("reelray_store_faults") == 120
    assert registry.total("reelray_store_requests") == 90


def test_traffic_from_before_is_not_ours() -> None:
    registry, clock = FakeRegistry(), Clock()
    sent = [Traffic(requests=40, faults={"503": 3})]
    metrics = _metrics(registry, clock, sent=sent)
    sent.append(Traffic(requests=41, faults={"503": 4}))
    metrics.finish(StreamReading(totals={}))
    assert registry.total("reelray_store_requests") == 1
    assert registry.total("reelray_store_faults") == 1


def test_unknown_totals_are_left_out() -> None:
    registry, clock = FakeRegistry(), Clock()
    _metrics(registry, clock).finish(StreamReading(totals={"something_else": 3.0}))
    assert not [name for name, _ in registry.added if name == "something_else"]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("hf://datasets/lerobot/pusht", "hf://datasets/lerobot/pusht"),
        ("https://user:hf_TESTTOKEN@host/ds?X-Amz-Signature=abc#frag", "https://host/ds"),
        ("data/local set", "data/local set"),
    ],
)
def test_labels_hold_no_credentials(location: str, expected: str) -> None:
    assert dataset_label(location) == expected


def test_long_labels_keep_their_end() -> None:
    label = dataset_label("s3://bucket/" + "deep/" * 60 + "name")
    assert len(label) == 96
    assert label.endswith("/name")


def test_a_failing_reading_never_reaches_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    registry = FakeRegistry()

    def read() -> StreamReading:
        raise RuntimeError("no stream here")

    watch = Watch(_metrics(registry, Clock()), read, interval_s=0.01)
    time.sleep(0.1)
    watch.close()
    watch.close()
    assert [record.message for record in caplog.records].count(
        "metrics of this stream cannot be published: RuntimeError: no stream here"
    ) == 1


def test_the_watch_publishes_by_itself() -> None:
    registry = FakeRegistry()
    counters = Counters()
    metrics = RankMetrics("ds", "n", 0, StreamReading(totals={}), registry=registry, interval_s=0.01, traffic=Traffic)
    watch = Watch(metrics, lambda: StreamReading(totals=counters.totals()), interval_s=0.01)
    counters.add("reelray_samples_delivered", 4)
    deadline = time.monotonic() + 5
    while registry.total("reelray_samples_delivered") < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert registry.total("reelray_samples_delivered") == 4
    counters.add("reelray_samples_delivered", 1)
    watch.close()
    assert registry.total("reelray_samples_delivered") == 5


def test_without_a_cluster_nothing_runs() -> None:
    import ray

    if ray.is_initialized():
        pytest.skip("another suite of this session holds a Ray cluster")
    watch_stream("ds", 0, lambda: pytest.fail("nothing may be read")).close()


def test_a_build_tells_records_bytes_and_what_is_left() -> None:
    registry, clock = FakeRegistry(), Clock()
    build = BuildMetrics("prefeature", "s3://bucket/ds", "abcd1234", registry=registry, clock=clock)
    assert build.update(40, 100, 0, None)
    assert registry.gauge("reelray_build_eta_seconds") == -1
    assert registry.total("reelray_build_records") == 0
    clock.now_s += 0.5
    assert not build.update(50, 100, 10, 3.0)
    clock.now_s += 0.5
    assert build.update(60, 100, 20, 2.0)
    assert build.update(100, 100, 50, 0.0)
    assert registry.total("reelray_build_records") == 60
    assert registry.total("reelray_build_bytes") == 50
    assert registry.gauge("reelray_build_done_records") == 100
    assert registry.gauge("reelray_build_planned_records") == 100


@pytest.mark.ray
def test_ray_exports_what_the_catalogue_says(metrics_cluster: str) -> None:
    counters = Counters()
    for name in COUNTERS:
        counters.add(name, 2.5)
    watch = watch_stream("s3://bucket/ds", 0, lambda: StreamReading(totals={}, step=1, steps=2))
    watch.close()
    from actors.metrics import this_node

    sent = [Traffic(), Traffic(requests=2, received_bytes=9, seconds=1.0, faults={"503": 1})]
    metrics = RankMetrics("s3://bucket/ds", this_node(), 1, StreamReading(totals={}), traffic=lambda: sent[0])
    sent.reverse()
    metrics.update(StreamReading(totals=counters.totals(), step=1, steps=2), now=True)
    build = BuildMetrics("sidecar", "s3://bucket/ds", this_node(), interval_s=0)
    build.update(0, 4, 0, None)
    build.update(2, 4, 10, 1.0)
    missing: set[str] = set(exported_names())
    deadline = time.monotonic() + 60
    text = ""
    while missing and time.monotonic() < deadline:
        time.sleep(1)
        with urllib.request.urlopen(metrics_cluster, timeout=5) as answer:
            text = answer.read().decode()
        seen = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
        missing = exported_names() - seen
    assert not missing
    (line,) = [one for one in text.splitlines() if one.startswith("ray_reelray_samples_delivered_total{")]
    assert 'rank="1"' in line
    assert 'dataset="s3://bucket/ds"' in line
    assert float(line.rpartition(" ")[2]) == 2.5
