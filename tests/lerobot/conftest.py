"""Datasets of a few rows, made once and copied for every test that spoils one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from spoilable import Dataset

from ingest.lerobot.make import MakeOptions, make_dataset


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five episodes, one camera, two data files and two video files."""
    root = tmp_path_factory.mktemp("made") / "dataset"
    make_dataset(root, MakeOptions(episodes=5, frames="6:9", cameras=1, size=(32, 64), fps=10, data_files=2, video_files=2, seed=3))
    return root


@pytest.fixture
def dataset(made: Path, tmp_path: Path) -> Dataset:
    """A copy that may be spoilt."""
    shutil.copytree(made, tmp_path / "dataset")
    return Dataset(tmp_path / "dataset")
