"""Just enough PromQL to say which metrics and labels an expression names."""

from __future__ import annotations

import re
from typing import Any

_WORDS = {
    "sum", "max", "min", "avg", "rate", "increase", "delta", "avg_over_time", "by", "and", "or", "unless", "on", "ignoring", "without",
}  # fmt: skip
_MATCHERS = re.compile(r"\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_WINDOW = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def metrics_of(expression: str) -> set[str]:
    """Names of the metrics that an expression reads."""
    bare = _WINDOW.sub("", _MATCHERS.sub("", _GROUPING.sub("", expression)))
    return set(_NAME.findall(bare)) - _WORDS


def labels_of(expression: str) -> set[str]:
    """Names of the labels that an expression selects or groups by."""
    matched = {part.strip() for body in _MATCHERS.findall(expression) for part in re.findall(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)", body)}
    return matched | {part.strip() for body in _GROUPING.findall(expression) for part in body.split(",")}


def dashboard_expressions(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Title and expression of every query of a dashboard."""
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]


def filled_in(expression: str) -> str:
    """A dashboard's expression with its variables filled in, as Grafana sends it."""
    return expression.replace("$window", "1m").replace("$SessionName", ".*").replace("$dataset", ".*")
