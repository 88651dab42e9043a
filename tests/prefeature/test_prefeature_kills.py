"""A process that ends between any two system calls of a build, and one whose disk is full at any of them."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tinydata import prepare, tree_digest

from ingest.errors import StorageError
from ingest.prefeature import layout
from ingest.prefeature.build import build_local
from ingest.prefeature.durable import remove_orphans
from ingest.prefeature.reference import ReferenceTeacher

PAIR = [(0, 1)]
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.chmod", "os.truncate"}
KILLED = 137


class Calls:
    """Counts the calls that change something below a folder, and acts before one of them. There is one in a process."""

    def __init__(self, root: Path, act_at: int, act: Callable[[], None]) -> None:
        self.count = 0
        self._root, self._at, self._act = str(root), act_at, act
        sys.addaudithook(self._audit)
        for name in ("fsync", "write"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            self._tick()
            return real(*args)

        return call

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if str(path).startswith(self._root) and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self._tick()
        elif event in CHANGES and (isinstance(args[0], int) or str(args[0]).startswith(self._root)):
            self._tick()

    def _tick(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._act()


def in_a_child(work: Callable[[], int]) -> int:
    """Runs something in a forked process and returns its exit status; hooks stay behind in the child."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_calls(root: Path, teacher: ReferenceTeacher, log: Path) -> int:
    """Changing calls of a whole build."""

    def work() -> int:
        calls = Calls(root, -1, lambda: None)
        build_local(root, teacher, only=PAIR)
        log.write_text(str(calls.count), encoding="utf-8")
        return 0

    assert in_a_child(work) == 0
    return int(log.read_text(encoding="utf-8"))


@pytest.fixture
def start(tmp_path: Path) -> tuple[Path, ReferenceTeacher, dict[str, str], int]:
    """A prepared dataset, its teacher, the digests of a finished build of it, and how many calls that takes."""
    torch.set_num_threads(1)
    root, teacher = prepare(tmp_path)
    whole = tmp_path / "whole"
    shutil.copytree(root, whole)
    total = count_calls(whole, teacher, tmp_path / "count")
    return root, teacher, tree_digest(whole), total


def killed_and_resumed(start: tuple[Path, ReferenceTeacher, dict[str, str], int], number: int, folder: Path) -> None:
    """A build killed before its ``number``-th changing call, then finished."""
    prepared, teacher, expected, _ = start
    root = folder / f"kill-{number}"
    shutil.copytree(prepared, root)

    def work() -> int:
        Calls(root, number, lambda: os._exit(KILLED))
        build_local(root, teacher, only=PAIR)
        return 0

    assert in_a_child(work) == KILLED, number
    build_local(root, teacher, only=PAIR)
    remove_orphans(root, older_s=0.0)
    found = tree_digest(root)
    assert not [path for path in found if layout.is_temporary(path)], number
    assert found == expected, number
    shutil.rmtree(root)


def test_kills_between_some_system_calls(start: tuple[Path, ReferenceTeacher, dict[str, str], int], tmp_path: Path) -> None:
    total = start[3]
    assert total > 120
    for number in sorted(random.Random(7).sample(range(1, total + 1), 8)):
        killed_and_resumed(start, number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_kills_between_all_system_calls(start: tuple[Path, ReferenceTeacher, dict[str, str], int], tmp_path: Path, part: int) -> None:
    for number in range(1 + part, start[3] + 1, 3):
        killed_and_resumed(start, number, tmp_path)


@pytest.mark.parametrize(("call", "passing"), [("fsync", (0, 3, 9)), ("write", (0, 1, 2))])
def test_a_disk_that_fills_up_ends_the_build_and_more_space_lets_it_go_on(
    start: tuple[Path, ReferenceTeacher, dict[str, str], int], monkeypatch: pytest.MonkeyPatch, call: str, passing: tuple[int, ...]
) -> None:
    root, teacher, expected, _ = start
    real: Callable[..., object] = getattr(os, call)
    for allowed in passing:
        left = [allowed]

        def full(*args: object, left: list[int] = left) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StorageError, match="the disk is full"):
                build_local(root, teacher, only=PAIR)
        assert not list(root.rglob("*.tmp"))
    build_local(root, teacher, only=PAIR)
    assert tree_digest(root) == expected
