"""Small local sources for the sidecar suites."""

from __future__ import annotations

from pathlib import Path

import pytest
from video.forge import encode, pictures

from ingest.storage.local import LocalStore

PATHS = ["videos/cam/chunk-000/file-000.mp4", "videos/cam/chunk-000/file-001.mp4", "videos/wrist/chunk-000/file-000.mp4"]


@pytest.fixture(scope="session")
def encoded() -> dict[str, bytes]:
    return {path: encode(pictures(20 + 5 * n, seed=n), options={"g": "6", "bf": str(n)}) for n, path in enumerate(PATHS)}


@pytest.fixture
def source(tmp_path: Path, encoded: dict[str, bytes]) -> LocalStore:
    root = tmp_path / "dataset"
    for path, data in encoded.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return LocalStore.at(root)


@pytest.fixture
def paths() -> list[str]:
    return list(PATHS)
