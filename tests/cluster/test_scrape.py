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

from actors.metrics import BuildMetrics, exported_names, this_node
from actors.stream_metrics import PoolLoad, RankMetrics, StreamReading
from ingest.engine.counters import COUNTERS
from ingest.storage.traffic import Traffic

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
