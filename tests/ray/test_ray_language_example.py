"""The worked example trains through Ray Train and leaves checkpoints that hold its recipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ingest.language import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.ray
@pytest.mark.slow
def test_the_example_trains_through_ray(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "examples/language/ray_train.py", "--folder", str(tmp_path), "--epochs", "2"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "720 frames, 0 without supervision" in result.stdout
    assert re.search(r"epoch 1: text loss [\d.]+, action loss [\d.]+", result.stdout)
    (checkpoint,) = re.findall(r"checkpoint with its recipe: (.+)", result.stdout)
    assert load_recipe(Path(checkpoint) / "recipe.yaml") == load_recipe("subtask")
