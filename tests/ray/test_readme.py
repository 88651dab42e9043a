"""The README's Python runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(found) == 2
    return found


def run(block: str, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dataset.parent)
    exec(compile(block.replace("path/to/dataset", str(dataset)), str(README), "exec"), {"__name__": "readme"})


def test_frame_by_frame(streamed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(blocks()[1], streamed, monkeypatch)


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ray_cluster")
def test_through_ray_train(streamed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The session's cluster is used in place of a new one.
    run(blocks()[0].replace("ray.init()\n", ""), streamed, monkeypatch)
