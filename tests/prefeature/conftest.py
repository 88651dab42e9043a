"""Tiny datasets, built once per session and copied per test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tinydata import SHORT, prepare

from ingest.prefeature.build import build_local
from ingest.prefeature.merge import merge
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.validate import validate


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads would make tiny kernels slower and their sums depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only processes die in these tests, never the machine; what is synced when has a test of its own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def short_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short dataset, merged and validated; copy before changing it."""
    torch.set_num_threads(1)
    root, teacher = prepare(tmp_path_factory.mktemp("short"))
    build_local(root, teacher)
    merge(root)
    report = validate(root)
    assert report.ok, report.to_text()
    return root


@pytest.fixture
def dataset(short_built: Path, tmp_path: Path) -> Path:
    """A private copy of the short dataset."""
    root = tmp_path / "copy"
    shutil.copytree(short_built, root)
    return root


@pytest.fixture(scope="session")
def short_teacher() -> ReferenceTeacher:
    """The teacher of the short dataset."""
    return ReferenceTeacher(SHORT)
