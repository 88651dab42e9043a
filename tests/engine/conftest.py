"""Datasets that the engine's tests read; made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich_dataset import make_rich

from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.storage.local import LocalStore
from ingest.video.index import ProbingIndex


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything a sample may hold: colour and depth videos, stored pictures, text, booleans, nulls."""
    return make_rich(tmp_path_factory.mktemp("rich") / "ds")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes, the shortest of three frames; two cameras that roll over to new files at different episodes."""
    root = tmp_path_factory.mktemp("small") / "ds"
    make_dataset(root, MakeOptions(episodes=7, frames="3:21", size=(32, 64), fps=10, gop=5, bframes=2, video_files=2, data_files=2, seed=4))
    return root


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """Four episodes, one file each; a camera's file of episode 2 is an episode short, and episode 3's is missing."""
    root = tmp_path / "spoilt"
    make_dataset(root, MakeOptions(episodes=4, frames="6:6", cameras=1, size=(32, 64), gop=3, video_files=4, data_files=2))
    folder = root / "videos/observation.images.cam0/chunk-000"
    other = tmp_path / "short"
    make_dataset(other, MakeOptions(episodes=1, frames="4:4", cameras=1, size=(32, 64), gop=3))
    shutil.copy(other / "videos/observation.images.cam0/chunk-000/file-000.mp4", folder / "file-002.mp4")
    (folder / "file-003.mp4").unlink()
    return root


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, int, int]:
    """A dataset whose episode 3 has an undecodable picture at frame 7; returns root, episode and frame."""
    root = tmp_path / "damaged"
    make_dataset(root, MakeOptions(episodes=8, frames="12:12", cameras=1, size=(32, 64), gop=3))
    store = LocalStore.at(root)
    path, picture = open_source(store).locate(3, 7, "observation.images.cam0")
    table = ProbingIndex(store).table(path)
    sample = int(table.presented[picture])
    with (root / path).open("r+b") as file:
        file.seek(int(table.offsets[sample]))
        file.write(b"\xff" * int(table.sizes[sample]))
    return root, 3, 7
