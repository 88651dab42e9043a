"""An elastic group of Train workers loses a node in mid-epoch and gets one again: every frame once, without a line of user code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("elastic_job.py")


@pytest.mark.parametrize("strategy", ["lanes", pytest.param("remaining", marks=pytest.mark.soak)])
def test_a_lost_node_makes_the_group_smaller_and_a_new_one_larger(tmp_path: Path, strategy: str) -> None:
    # A cluster of several nodes needs a process of its own: the suite's has one node.
    ended = subprocess.run([sys.executable, str(JOB), str(tmp_path), strategy], capture_output=True, text=True, timeout=380, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    sizes = [size for size, before in zip(report["world_sizes"], [0, *report["world_sizes"]], strict=False) if size != before]
    assert sizes == [3, 2, 3]
    assert report["stopped"]
    assert report["steps"] > 0
    whole = [epoch for epoch in report["coverage"] if epoch["complete"]]
    assert whole
    for epoch in report["coverage"]:
        assert epoch["duplicated"] == 0
    for epoch in whole:
        assert (epoch["missing"], epoch["delivered"]) == (0, epoch["selected"])
