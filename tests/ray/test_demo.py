"""The demo, and the training job around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingest.errors import SettingsError
from train_integration.demo import DemoSettings, run_demo

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.slow
def test_the_demo_proves_what_it_claims(tmp_path: Path) -> None:
    proof = run_demo(DemoSettings(output=tmp_path / "demo", episodes=8, frames="30:40", cameras=2, epochs=4))
    assert proof.held
    assert proof.killed_pid is not None
    assert proof.result.attempts == 2
    assert not proof.result.rows["committed"].all()
    facts = json.loads((tmp_path / "demo" / "proof.json").read_text())
    assert (facts["missing"], facts["duplicated"]) == (0, 0)
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_the_demo_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(SettingsError, match="not made by the demo"):
        run_demo(DemoSettings(output=tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "keep"
