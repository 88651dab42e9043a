"""``reelray plan`` draws its page and simulates a run."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ingest.lerobot.make import MakeOptions, make_dataset
from reelray.cli import main


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert all(name not in {"src", "href"} for name, _ in attrs)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "a <b> & c"
    make_dataset(folder, MakeOptions(episodes=5, frames="6:20", cameras=1, size=(32, 64), gop=4))
    return folder


def test_the_page_shows_shares_and_stalls(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sub" / "plan.html"
    command = ["plan", str(root), "--world-size", "2", "--strategy", "sequential", "--html", str(page)]
    assert main([*command, "--bandwidth-mbps", "0.05", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["simulated"]) == 2
    assert all(run["stall_s"] > 0 for run in report["simulated"])
    assert all(0 < run["stall_share"] <= 1 for run in report["simulated"])
    text = page.read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(text)
    assert tags.tags.count("svg") == 2
    assert "script" not in tags.tags
    assert "a &lt;b&gt; &amp; c" in text
    assert "distinct episodes" in text
    assert main(command) == 0
    assert "Simulated run" not in page.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main([*command, "--bandwidth-mbps", "500", "--json"]) == 0
    faster = json.loads(capsys.readouterr().out)["simulated"]
    assert all(fast["total_s"] <= slow["total_s"] for fast, slow in zip(faster, report["simulated"], strict=True))


@pytest.mark.parametrize("option", ["--bandwidth-mbps", "--decode-fps", "--step-s"])
def test_figures_must_be_positive(root: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(root), "--bandwidth-mbps", "10", option, "0"]) != 0
    assert option.removeprefix("--").replace("-", "_") in capsys.readouterr().err
