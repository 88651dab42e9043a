"""Turns: of those that want the same bytes at the same time, one fetches them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import StorageError
from ingest.storage.base import ByteRange
from ingest.storage.disk_cache import CachedStore, PayloadCache
from ingest.storage.local import LocalStore
from ingest.storage.turns import FetchTurns, Turn, without
from ingest.storage.wrapped import WrappedStore

BODY = Random(3).randbytes(4000)

ranges = st.tuples(st.integers(0, 60), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def _numbers(pieces: Sequence[ByteRange]) -> list[int]:
    return [number for start, stop in pieces for number in range(start, stop)]


@settings(deadline=None)
@given(ranges, st.lists(ranges, max_size=6))
def test_a_range_without_others(wish: ByteRange, holes: list[ByteRange]) -> None:
    left = _numbers(without(wish, holes))
    assert left == sorted(set(range(*wish)) - set(_numbers(holes)))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(ranges, max_size=4), st.booleans()), max_size=12))
def test_nothing_is_fetched_by_two_and_nothing_is_forgotten(steps: list[tuple[list[ByteRange], bool]]) -> None:
    turns, open_turns = FetchTurns(), list[Turn]()
    for wanted, end in steps:
        busy = {number for turn in open_turns for number in _numbers(turn.mine)}
        assert turns.busy("v", wanted) == bool(busy & set(_numbers(wanted)))
        turn = turns.take("v", wanted)
        mine, theirs = _numbers(turn.mine), set(_numbers(turn.theirs))
        assert len(mine) == len(set(mine))
        assert not set(mine) & busy
        assert theirs == busy & set(_numbers(wanted))
        assert set(mine) | theirs == set(_numbers(wanted))
        open_turns.append(turn)
        if end:
            turns.done("v", open_turns.pop(0))
    assert turns.take("another", [(0, 90)]).mine == ((0, 90),)


def test_turns_of_a_process_that_died_are_over() -> None:
    turns = FetchTurns()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert turns.take("v", [(0, 10)], other.pid).mine == ((0, 10),)
    assert turns.take("v", [(0, 20)], os.getpid()).theirs == ((0, 10),)
    other.kill()
    other.communicate()
    assert turns.take("v", [(0, 10)], os.getpid()).mine == ((0, 10),)


class _Slow(WrappedStore):
    """Counts how often each byte is fetched, and takes its time."""

    def __init__(self, root: Path, fails: int = 0) -> None:
        super().__init__(LocalStore.at(root))
        self.counts: Counter[int] = Counter()
        self._fails, self._lock = fails, threading.Lock()

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        with self._lock:
            self._fails -= 1
            failing = self._fails >= 0
            self.counts.update(_numbers(ranges))
        time.sleep(0.05)
        if failing:
            raise StorageError("this one fails")
        return super().read_ranges(path, ranges)


def _together(stores: Sequence[CachedStore], wishes: Sequence[list[ByteRange]]) -> list[list[bytes] | StorageError]:
    begin = threading.Barrier(len(stores))

    def read(number: int) -> list[bytes] | StorageError:
        begin.wait()
        try:
            return stores[number].read_ranges("v", wishes[number])
        except StorageError as error:
            return error

    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(read, range(len(stores))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "v").write_bytes(BODY)
    return tmp_path / "ds"


def test_readers_of_one_cache_fetch_each_byte_once(root: Path, tmp_path: Path) -> None:
    store, turns, random = _Slow(root), FetchTurns(), Random(5)
    stores = [CachedStore(store, PayloadCache(tmp_path / "cache", 10**6), turns) for _ in range(6)]
    wishes = [[(start, start + random.randrange(900)) for start in (random.randrange(3000) for _ in range(4))] for _ in stores]
    for wish, found in zip(wishes, _together(stores, wishes), strict=True):
        assert found == [BODY[start:stop] for start, stop in wish]
    assert set(store.counts.values()) == {1}


@pytest.mark.parametrize("keeps", [True, False])
def test_who_waits_for_one_that_fails_or_cannot_keep_it_fetches_itself(root: Path, tmp_path: Path, keeps: bool) -> None:
    store, turns = _Slow(root, fails=1 if keeps else 0), FetchTurns()
    place = tmp_path / "cache" if keeps else root / "v" / "no-folder"
    stores = [CachedStore(store, PayloadCache(place, 10**6), turns) for _ in range(3)]
    found = _together(stores, [[(0, 500)]] * 3)
    assert [one for one in found if not isinstance(one, StorageError)] == [[BODY[:500]]] * (2 if keeps else 3)
    assert max(store.counts.values()) == (2 if keeps else 3)
    assert not turns.busy("v", [(0, 4000)])
