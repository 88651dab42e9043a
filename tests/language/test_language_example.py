"""The worked example runs from start to end, and the policy that it trains reads its text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_example_trains_a_policy_that_reads_its_text(tmp_path):
    result = subprocess.run(
        [sys.executable, "examples/language/train.py", "--folder", str(tmp_path), "--epochs", "3"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "nothing to complain about" in result.stdout
    right, wrong = map(float, re.search(r"right text ([\d.]+), with the opposite text ([\d.]+)", result.stdout).groups())
    assert right < wrong / 5
    assert (tmp_path / "frame.html").read_text(encoding="utf-8").startswith("<!doctype html>")
