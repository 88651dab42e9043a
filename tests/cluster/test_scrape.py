"""A real Prometheus scrapes a real Ray node, and every query of the dashboard and of the alerts finds its series."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.build_sidecars import BuildSidecars
from actors.manager import PoolSettings
from actors.metrics import BuildMetrics, exported_names, this_node
from actors.stream_metrics import PoolLoad, RankMetrics, StreamReading
from ingest.engine.counters import COUNTERS
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from ingest.storage.traffic import Traffic
from train_integration.delivery import deliver_through_ray
from train_integration.options import StreamConfig, open_stream

from .promql import dashboard_expressions, filled_in, metrics_of

pytestmark = pytest.mark.ray


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def prometheus(metrics_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that scrapes the node every second; its address."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian: prometheus); names are checked without a scrape")
    folder = tmp_path_factory.mktemp("prometheus")
    target = urllib.parse.urlsplit(metrics_cluster).netloc
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{_free_port()}"
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        yield f"http://{address}"
        process.terminate()
        process.wait(timeout=20)


def _query(address: str, expression: str) -> list[Any]:
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]["result"]


def _publish(metrics: list[RankMetrics], build: BuildMetrics, sent: list[Traffic], tick: int) -> None:
    totals = dict.fromkeys(COUNTERS, 2.0 + tick)
    sent.append(Traffic(requests=5 + tick, received_bytes=100 * (1 + tick), seconds=0.1 * (1 + tick), faults={"503": 1 + tick}))
    for one in metrics:
        reading = StreamReading(
            totals=totals,
            step=tick,
            steps=1000,
            waiting_since=time.monotonic() - 1,
            budget_limit_bytes=100,
            budget_used_bytes=50,
            slots=10,
            slots_used=5,
            units_under_way=1,
            pool=PoolLoad(2, 0, 1),
        )
        one.update(reading, now=True)
    build.update(10 + tick, 1000, 10 * tick, 5.0)


def test_every_query_finds_its_series(prometheus: str, manifests: Path) -> None:
    sent = [Traffic()]
    metrics = [
        RankMetrics("s3://bucket/ds", this_node(), rank, StreamReading(totals={}), traffic=lambda: sent[-1], interval_s=0)
        for rank in range(2)
    ]
    build = BuildMetrics("sidecar", "s3://bucket/ds", this_node(), interval_s=0)
    dashboard = json.loads((manifests / "grafana" / "reelray.json").read_text(encoding="utf-8"))
    queries = [filled_in(expression) for _, expression in dashboard_expressions(dashboard)]
    rules = yaml.safe_load((manifests / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    # An alert that does not fire finds nothing, so what is asked of it is that its metrics are there.
    queries += sorted({name for group in rules for rule in group["rules"] for name in metrics_of(rule["expr"])})
    ours = [query for query in queries if metrics_of(query) <= exported_names()]
    assert len(ours) > 40
    empty = list(ours)
    deadline = time.monotonic() + 90
    tick = 0
    while empty and time.monotonic() < deadline:
        tick += 1
        _publish(metrics, build, sent, tick)
        time.sleep(1)
        if tick % 4 == 0:
            try:
                empty = [query for query in empty if not _query(prometheus, query)]
            except urllib.error.URLError:
                continue
    assert not empty
    series = _query(prometheus, 'count({__name__=~"ray_reelray_.*"})')
    # Two ranks and a build: what one metric may cost is bounded by ranks and by the few kinds and stages.
    assert int(series[0]["value"][1]) <= 2 * (len(exported_names()) + 8)


RUNNING = (
    "samples_delivered_total",
    "camera_frames_delivered_total",
    "pictures_decoded_total",
    "payload_bytes_read_total",
    "fetch_seconds_total",
    "decode_cpu_seconds_total",
    "assemble_seconds_total",
    "wait_seconds_total",
    "compressed_bytes_peak",
    "decoded_bytes_peak",
    "byte_budget_limit_bytes",
    "byte_budget_used_bytes",
    "frame_slots",
    "frame_slots_used",
    "pool_actors",
    "ready_batches",
    "step",
    "segment_steps",
    "segment_progress_ratio",
)


@pytest.mark.slow
def test_a_running_stream_and_a_build_are_seen(prometheus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "ds"
    make_dataset(root, MakeOptions(episodes=6, frames="20:24", cameras=1, size=(48, 64), gop=6, video_files=2, seed=3))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert BuildSidecars(src=str(root)).run() == 0
    description, _ = open_stream(root, StreamConfig(plan=PlanSettings(strategy="lanes", batch_size=2), decoded_budget_gb=0.05))
    done = deliver_through_ray(
        description, world_size=1, cursor=None, epoch=0, max_steps=None, digests=False, pool=PoolSettings(actors=1), step_s=0.15
    )
    assert done.counts["reelray_samples_delivered"] == description.units.frames.sum()
    time.sleep(3)
    label = f'{{dataset="{description.job.location}",rank="0"}}'
    silent = [name for name in RUNNING if not _query(prometheus, f"max_over_time(ray_reelray_{name}{label}[5m]) > 0")]
    assert not silent
    (samples,) = _query(prometheus, f"max_over_time(ray_reelray_samples_delivered_total{label}[5m])")
    assert 0 < float(samples["value"][1]) <= description.units.frames.sum()
    # The stream has ended: it neither waits nor holds anything.
    assert not _query(prometheus, f"ray_reelray_stall_seconds{label} > 0")
    assert not _query(prometheus, f"ray_reelray_frame_slots_used{label} > 0")
    (built,) = _query(
        prometheus, 'max_over_time(ray_reelray_build_done_records{build="sidecar",dataset=~".*/ds",dataset!="s3://bucket/ds"}[5m])'
    )
    assert float(built["value"][1]) == 2
