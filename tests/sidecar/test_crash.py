"""SIGKILL at every write, sync, rename and unlink of a builder: readers see the old file or the new one, never half of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingest.errors import SidecarError
from ingest.storage.local import LocalStore
from ingest.video.sidecar.archive import load_sidecar
from ingest.video.sidecar.build import build_sidecar, partial_writes
from ingest.video.sidecar.cache import index_path, prepare_mapped_index
from ingest.video.sidecar.mapped import MappedIndex

from .tracer import Outcome, can_trace, killed_after, killed_at

_TIMED_ATTEMPTS = 40


def _attempts(action: Callable[[], None]) -> Iterator[Outcome]:
    """Kills ``action`` at every system call of interest in turn, when it is entered and when it is left."""
    if not can_trace():
        yield from (killed_after(action, 0.002 * attempt) for attempt in range(_TIMED_ATTEMPTS))
        return
    for after in (False, True):
        for number in range(500):
            outcome = killed_at(action, number, after=after)
            yield outcome
            if outcome.killed_at is None:
                assert os.waitstatus_to_exitcode(outcome.status) == 0
                break
        else:
            pytest.fail("the builder never came to an end")


def test_readers_see_the_old_sidecar_or_the_new_one(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    target = tmp_path / "out" / "s.npz"

    def build() -> None:
        build_sidecar(source, paths, target, repo_id="a/b", revision="v3.0", workers=1, force=True, checksums=True)

    build()
    new = target.read_bytes()
    build_sidecar(source, paths, target, repo_id="a/b", revision="v3.0", force=True)
    old = target.read_bytes()
    assert old != new
    kinds: dict[str, int] = {}
    states: set[str] = set()
    for outcome in _attempts(build):
        found = target.read_bytes()
        assert found in (old, new), f"torn after {outcome}"
        states.add("old" if found == old else "new")
        with load_sidecar(target) as archive:
            archive.validate()
        assert len(partial_writes(target)) <= 1  # of the one that was just killed: each removes what the one before it left
        kinds[outcome.killed_at or "end"] = kinds.get(outcome.killed_at or "end", 0) + 1
        target.write_bytes(old)
    assert states == {"old", "new"}
    if can_trace():
        assert {"write", "fsync", "end"} <= kinds.keys()
        assert any(kind.startswith("rename") for kind in kinds)
    build()
    assert not partial_writes(target)
    assert target.read_bytes() == new


def test_the_first_build_is_there_whole_or_not_at_all(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    target = tmp_path / "out" / "s.npz"
    for outcome in _attempts(lambda: build_sidecar(source, paths, target, repo_id="a/b", revision="v3.0", workers=2) and None):
        if target.exists():
            with load_sidecar(target) as archive:
                archive.validate()
            target.unlink()
        else:
            assert outcome.killed_at is not None


def test_the_mapped_index_is_there_whole_or_not_at_all(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    sidecar, home = tmp_path / "s.npz", tmp_path / "home"
    build_sidecar(source, paths, sidecar, repo_id="a/b", revision="v3.0")
    target = index_path(sidecar, home)
    for outcome in _attempts(lambda: prepare_mapped_index(sidecar, cache_home=home) and None):
        if target.exists():
            index = MappedIndex(target)
            assert [index.table(path).pictures for path in paths] == [20, 25, 30]
            target.unlink()
        else:
            assert outcome.killed_at is not None
            with pytest.raises((FileNotFoundError, SidecarError)):
                MappedIndex(target)
    assert prepare_mapped_index(sidecar, cache_home=home).table(paths[0]).pictures == 20
    assert not partial_writes(target)
