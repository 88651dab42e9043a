"""How many CPUs and how much memory there is to use: what the machine has, and the limits of the control groups that a process is in."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ingest.storage import processes
from ingest.storage.processes import usable_cpus, usable_memory
from train_integration import options


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
    assert 1 << 20 < usable_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "member", "expected"),
    [
        ({"memory.max": "8589934592\n"}, "0::/\n", 8 << 30),
        ({"memory.max": "max\n"}, "0::/\n", 64 << 30),
        ({"memory.max": "9999999999999\n"}, "0::/\n", 64 << 30),
        ({"memory.max": "plenty\n"}, "0::/\n", 64 << 30),
        ({"jobs/memory.max": "4294967296\n", "jobs/mine/memory.max": "max\n"}, "0::/jobs/mine\n", 4 << 30),
        ({"memory/memory.limit_in_bytes": "2147483648\n"}, "4:memory:/docker/x\n", 2 << 30),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "4:memory:/\n", 64 << 30),
        ({}, "", 64 << 30),
    ],
)
def test_the_memory_limit_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], member: str, expected: int
) -> None:
    monkeypatch.setattr(processes.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30))
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text(member)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert usable_memory(root, membership) == expected
    assert usable_memory(root, tmp_path / "none") == (expected if expected != 4 << 30 else 64 << 30)


def test_the_decoded_budget_follows_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "usable_memory", lambda: 16 << 30)
    assert options.decoded_budget_bytes(options.StreamConfig(), 4) == 1 << 30
    assert options.decoded_budget_bytes(options.StreamConfig(decoded_budget_gb=3.0), 4) == 3 << 30
