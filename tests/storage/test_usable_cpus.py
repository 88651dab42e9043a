"""How many CPUs there are to use: affinity, and the quotas of the control groups that a process is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingest.storage import processes
from ingest.storage.processes import usable_cpus


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def group(root: Path, path: str, text: str) -> None:
    folder = root / path if path else root
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(text)


def counted(root: Path, member: str) -> int:
    membership = root.parent / "membership"
    membership.write_text(member)
    return usable_cpus(root, membership)


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("limit", "cpus"),
    [
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("250000 100000\n", 3),
        ("50000 100000\n", 1),
        ("1000 100000\n", 1),
        ("9900000 100000\n", 16),
        ("", 16),
        ("max\n", 16),
        ("lots 100000\n", 16),
        ("400000 0\n", 16),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path: Path, limit: str, cpus: int) -> None:
    root = tmp_path / "cgroup"
    group(root, "", limit)
    assert counted(root, "0::/\n") == cpus


@pytest.mark.usefixtures("sixteen")
def test_the_least_quota_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root, "jobs", "300000 100000\n")
    group(root, "jobs/mine", "600000 100000\n")
    group(root, "other", "100000 100000\n")
    assert counted(root, "4:memory:/elsewhere\n0::/jobs/mine\n") == 3
    assert counted(root, "0::/jobs/unknown\n") == 3
    assert counted(root, "0::/../../jobs\n") == 16, "a group outside of the container says nothing about it"
    assert counted(root, "4:cpu:/jobs/mine\n") == 16
    assert usable_cpus(root, tmp_path / "none") == 16


def test_without_quota_it_is_what_the_process_may_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cpus(tmp_path, tmp_path / "none") == 2
    monkeypatch.delattr(processes.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(processes.os, "cpu_count", lambda: None)
    assert usable_cpus(tmp_path, tmp_path / "none") == 1


def test_this_machine_has_some() -> None:
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)
