"""Dashboard, alerts and scrape configuration: valid, importable, and naming only what is exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from actors.metrics import METRICS, exported_names

from .promql import dashboard_expressions, filled_in, labels_of, metrics_of

BY_EXPORTED = {metric.exported: metric for metric in METRICS.values()}
RAYS_LABELS = {"SessionName", "instance", "GpuIndex", "WorkerId", "NodeAddress"}


@pytest.fixture(scope="module")
def dashboard(manifests: Path) -> dict[str, Any]:
    return json.loads((manifests / "grafana" / "reelray.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rules(manifests: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load((manifests / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _rays_own(names: set[str]) -> set[str]:
    """Those of the names that Ray's own dashboards use."""
    folder = Path(ray.__file__).parent / "dashboard" / "modules" / "metrics" / "dashboards"
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    return {name for name in names if re.search(rf"\b{re.escape(name)}\b", text)}


def _check(expression: str) -> None:
    names = metrics_of(expression)
    assert names, expression
    unknown = names - exported_names()
    assert unknown == _rays_own(unknown), expression
    allowed = RAYS_LABELS | {label for name in names & exported_names() for label in BY_EXPORTED[name].labels}
    assert labels_of(expression) <= allowed, expression
    for name in names & exported_names():
        counted = name in re.sub(r"\b(?:rate|increase)\([^)]*\)", "", expression)
        assert BY_EXPORTED[name].kind == "gauge" or not counted, f"{expression} reads the counter {name} without a rate"


def test_the_reader_of_expressions_finds_every_name() -> None:
    expression = 'sum by (rank, kind) (rate(ray_a_total{x=~"y", z!="sum(ray_c)"}[5m])) / avg(ray_b) > 0.5 and delta(ray_d[3m]) == 0'
    assert metrics_of(expression) == {"ray_a_total", "ray_b", "ray_d"}
    assert labels_of(expression) == {"rank", "kind", "x", "z"}


def test_every_query_names_metrics_and_labels_that_exist(dashboard: dict[str, Any]) -> None:
    for _, expression in dashboard_expressions(dashboard):
        _check(filled_in(expression))


def test_every_metric_is_on_the_dashboard(dashboard: dict[str, Any]) -> None:
    shown = {name for _, expression in dashboard_expressions(dashboard) for name in metrics_of(filled_in(expression))}
    assert exported_names() - shown == set()


def test_the_dashboard_can_be_imported(dashboard: dict[str, Any]) -> None:
    assert dashboard["uid"] == "reelray"
    assert "id" not in dashboard  # an id is the importing Grafana's to give
    assert dashboard["schemaVersion"] >= 30
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"]
            assert [target["refId"] for target in panel["targets"]] == [chr(65 + number) for number in range(len(panel["targets"]))]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {name for _, expression in dashboard_expressions(dashboard) for name in re.findall(r"\$(\w+)", expression)}
    assert used | {"datasource"} == variables
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            assert set(re.findall(r"label_values\((\w+),", variable["definition"])) <= exported_names()


def test_legends_name_labels_of_their_metrics(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            names = metrics_of(filled_in(target["expr"])) & exported_names()
            labels = {label for name in names for label in BY_EXPORTED[name].labels} | RAYS_LABELS
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


def test_alerts_name_what_exists_and_lead_to_advice(rules: list[dict[str, Any]], manifests: Path) -> None:
    advice = (manifests.parent / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        _check(rule["expr"])
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert {"summary", "description", "runbook"} <= set(rule["annotations"])
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/monitoring.md"
        assert anchor == rule["alert"].lower()
        assert f"### {rule['alert']}\n" in advice


def test_the_documentation_lists_every_metric(manifests: Path) -> None:
    text = (manifests.parent / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert exported_names() == set(re.findall(r"`(ray_reelray_\w+)`", text)) & exported_names()
    assert set(re.findall(r"ray_reelray_\w+", text)) <= exported_names()


def test_prometheus_is_told_about_nodes_by_ray(manifests: Path) -> None:
    config = yaml.safe_load((manifests / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
    (job,) = config["scrape_configs"]
    (discovery,) = job["http_sd_configs"]
    assert discovery["url"].endswith("/api/prometheus/sd")
    assert discovery["authorization"]["credentials_file"]
    source = Path(ray.__file__).parent / "dashboard" / "modules" / "reporter" / "reporter_head.py"
    assert '"/api/prometheus/sd"' in source.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus); expressions are checked by name only")
    return found


def test_promtool_accepts_alerts_and_configuration(promtool: str, manifests: Path) -> None:
    for arguments in (
        ["check", "rules", "alerts.yml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        done = subprocess.run([promtool, *arguments], cwd=manifests, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_every_query(promtool: str, dashboard: dict[str, Any], tmp_path: Path) -> None:
    recorded = [{"record": f"r{n}", "expr": filled_in(expression)} for n, (_, expression) in enumerate(dashboard_expressions(dashboard))]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}), encoding="utf-8")
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
