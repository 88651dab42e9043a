"""Every how-to page runs from top to bottom as printed: against servers on this machine, with a thousandth of the steps."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.hub import HubEmulator
from servers.s3 import S3Server, find_moto

from ingest.lerobot.make import MakeOptions, make_dataset
from train_integration.demo_prefeature import make_source

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "how-to").glob("*.md") if path.name != "README.md")
TOKEN = "hf_PLANTEDWRITE"
SMALLER = (
    (re.compile(r"(--steps|--save_freq)=(\d+)000\b"), r"\1=\2"),
    (re.compile(r"--batch_size=\d+"), "--batch_size=4"),
)
"""What is smaller here than on the page: a step stands for a thousand."""
NEEDS_A_CLUSTER = ("python -m train_integration.jobs ",)
"""Commands that are submitted to a cluster; `test_jobs` submits them."""


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each block, in order."""
    yield from re.findall(r"^```(bash|python|yaml)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def files_below(root: Path, prefix: str = "") -> dict[str, bytes]:
    return {prefix + path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def pusht(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset that the pages call ``pusht``."""
    root = tmp_path_factory.mktemp("made") / "pusht"
    make_dataset(root, MakeOptions(episodes=6, frames="20:30", cameras=1, size=(96, 96), gop=5, video_files=2))
    return root


@pytest.fixture(scope="module")
def s3(pusht: Path) -> Iterator[dict[str, str]]:
    """A server with the bucket ``robots``; the variables that lead there."""
    executable = find_moto()
    if executable is None:
        pytest.skip("no moto_server: set REELRAY_MOTO_SERVER")
    server = S3Server(executable)
    server.make_bucket("robots")
    for path, data in files_below(pusht, "pusht/").items():
        server.put("robots", path, data)
    names = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1", "ENDPOINT_URL": server.endpoint}
    yield {f"AWS_{name}": value for name, value in names.items()}
    server.close()


@pytest.fixture
def hub(pusht: Path) -> Iterator[dict[str, str]]:
    """A Hub with the dataset ``lerobot/pusht`` and the bucket ``acme/robots``; the variables that lead there."""
    with HubEmulator() as emulator:
        emulator.tokens = {TOKEN: "write"}
        emulator.add_dataset("lerobot/pusht", files_below(pusht))
        emulator.add_bucket("acme/robots", files_below(pusht, "pusht/"))
        yield {"HF_ENDPOINT": emulator.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        assert emulator.leaked == []


def lay_out(page: Path, folder: Path, pusht: Path) -> None:
    """What a page takes for granted: the dataset, annotations, images, and the manifests of the checkout."""
    shutil.copytree(pusht, folder / "pusht")
    (folder / "cluster").symlink_to(ROOT / "cluster")
    if page.stem == "recipes":
        spec = importlib.util.spec_from_file_location("example_data", ROOT / "examples" / "language" / "data.py")
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        example.make_annotated(folder / "annotated", episodes=4, frames=30)
    if page.stem == "prefeature":
        make_source(folder / "images", 3)


def run(arguments: list[str], folder: Path, environment: dict[str, str], text: str | None = None) -> None:
    done = subprocess.run(
        arguments,
        input=text,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert TOKEN not in done.stdout + done.stderr


def command(line: str, folder: Path, environment: dict[str, str]) -> None:
    """Runs one line of a page, if this machine can."""
    for pattern, smaller in SMALLER:
        line = pattern.sub(smaller, line)
    if line.startswith(NEEDS_A_CLUSTER) or not line.startswith(("reelray ", "python -m ", "promtool ")):
        return
    if line.startswith("promtool ") and shutil.which("promtool") is None:
        return
    for name, module in (("reelray ", "-m reelray.cli "), ("python ", "")):
        line = re.sub(rf"^{name}", f"{sys.executable} {module}", line)
    run(["bash", "-euo", "pipefail", "-c", line], folder, environment)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(
    page: Path, pusht: Path, hub: dict[str, str], s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(page, tmp_path, pusht)
    local = {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    environment = {**local, **hub, **s3}
    ran = 0
    for language, block in steps(page):
        if language == "yaml":
            (tmp_path / "mixture.yaml").write_text(block, encoding="utf-8")
        elif language == "python":
            run([sys.executable, "-"], tmp_path, environment, block.replace("ray.init()", "ray.init(address='local', num_cpus=4)"))
            ran += 1
        else:
            for line in block.replace("\\\n", " ").splitlines():
                command(line, tmp_path, environment)
                ran += 1
    assert ran


def test_every_page_is_listed_and_says_what_can_go_wrong() -> None:
    listed = (ROOT / "docs" / "how-to" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"({page.name})" in listed
        text = page.read_text(encoding="utf-8")
        assert "\nGoal: " in text
        assert "| what goes wrong | what to do |" in text
