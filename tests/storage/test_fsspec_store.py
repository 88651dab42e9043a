from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ingest.errors import LocationError, ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError, UnsafeInputError
from ingest.storage.base import Store
from ingest.storage.fsspec_store import FsspecStore
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store

BODY = bytes(range(256)) * 40


@pytest.fixture
def memory(fast: RetryPolicy) -> Iterator[Store]:
    files: Any = fsspec.filesystem("memory")
    files.pipe({"/ds/meta/info.json": b"{}", "/ds/videos/a.mp4": BODY, "/other/x": b"x"})
    yield open_store(parse_location("memory://ds"), policy=fast)
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def test_reads_and_lists_below_the_root(memory: Store) -> None:
    assert [item.path for item in memory.list()] == ["meta/info.json", "videos/a.mp4"]
    assert [item.path for item in memory.list("videos")] == ["videos/a.mp4"]
    assert memory.list("none") == []
    assert memory.read_all("meta/info.json") == b"{}"
    assert memory.size("videos/a.mp4") == len(BODY)
    assert memory.read_ranges("videos/a.mp4", [(5, 9), (100, 300), (0, 0)]) == [BODY[5:9], BODY[100:300], b""]
    with memory.open("videos/a.mp4") as file:
        file.seek(-4, 2)
        assert file.read() == BODY[-4:]


def test_no_tag_means_a_new_identity_at_every_opening(memory: Store, fast: RetryPolicy) -> None:
    first = memory.identity("videos/a.mp4")
    assert not first.stable
    assert first == memory.identity("videos/a.mp4")
    assert first.fingerprint != open_store(parse_location("memory://ds"), policy=fast).identity("videos/a.mp4").fingerprint


def test_errors_are_typed(memory: Store) -> None:
    for read in (memory.identity, memory.size, memory.read_all, memory.open, lambda path: memory.read_ranges(path, [(0, 1)])):
        with pytest.raises(ObjectNotFoundError):
            read("videos/none.mp4")
    with pytest.raises(ObjectNotFoundError, match="folder"):
        memory.identity("videos")
    with pytest.raises(ShortReadError, match=str(len(BODY))):
        memory.read_ranges("videos/a.mp4", [(0, len(BODY) + 1)])
    with pytest.raises(UnsafeInputError):
        memory.read_ranges("../other/x", [(0, 1)])


def test_a_change_of_size_is_noticed(memory: Store) -> None:
    memory.read_ranges("videos/a.mp4", [(0, 4)])
    files: Any = fsspec.filesystem("memory")
    files.pipe("/ds/videos/a.mp4", BODY + b"more")
    with pytest.raises(ObjectChangedError):
        memory.read_ranges("videos/a.mp4", [(0, 4)])


def test_a_replacement_of_equal_size_is_noticed(memory: Store) -> None:
    memory.read_ranges("videos/a.mp4", [(0, 4)])
    again = pickle.loads(pickle.dumps(memory))
    files: Any = fsspec.filesystem("memory")
    files.pipe("/ds/videos/a.mp4", BODY[::-1])
    with pytest.raises(ObjectChangedError, match=r"videos/a\.mp4: changed .* made at .* made at"):
        memory.read_ranges("videos/a.mp4", [(0, 4)])
    assert again.read_ranges("videos/a.mp4", [(0, 4)]) == [BODY[::-1][:4]], "a store that had not read it yet takes it as it is"


class _Counting(MemoryFileSystem):
    """Counts the bytes that the file system is asked for, and fails on demand."""

    protocol = "counting"
    asked: ClassVar[list[tuple[str, object]]] = []
    failures = 0

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        type(self).asked.append((path, kwargs.get("cache_type")))
        if type(self).failures > 0:
            type(self).failures -= 1
            raise ConnectionResetError("reset by peer")
        return super()._open(path, mode, **kwargs)


def test_read_ahead_is_off_and_connection_errors_are_retried(monkeypatch: pytest.MonkeyPatch, memory: Store, fast: RetryPolicy) -> None:
    files = _Counting()
    _Counting.asked, _Counting.failures = [], 2
    monkeypatch.setattr("ingest.storage.fsspec_store._url_to_fs", lambda _: (files, "/ds"))
    store = FsspecStore(parse_location("memory://ds"), policy=fast)
    assert store.read_ranges("videos/a.mp4", [(1, 3)]) == [BODY[1:3]]
    assert _Counting.asked == [("/ds/videos/a.mp4", "none")] * 3
    _Counting.failures = 100
    with pytest.raises(StorageError, match="reset by peer"):
        store.read_ranges("videos/a.mp4", [(1, 3)])


def test_stores_pickle(memory: Store) -> None:
    assert isinstance(memory, Store)
    assert pickle.loads(pickle.dumps(memory)).read_all("meta/info.json") == b"{}"


def test_files_in_memory_travel_to_another_process(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = pickle.dumps(memory)
    files: Any = fsspec.filesystem("memory")
    files.store.clear()
    again = pickle.loads(carried)
    assert again.read_ranges("videos/a.mp4", [(5, 9)]) == [BODY[5:9]]
    assert [item.path for item in again.list()] == ["meta/info.json", "videos/a.mp4"]
    assert not files.exists("/other/x"), "only what is below the root"
    monkeypatch.setattr("ingest.storage.fsspec_store._MEMORY_LIMIT", 100)
    with pytest.raises(StorageError, match="too many to send"):
        pickle.dumps(again)


def test_a_missing_package_says_what_to_install(fast: RetryPolicy) -> None:
    with pytest.raises((StorageError, LocationError), match="install"):
        open_store(parse_location("oci://bucket/x"), policy=fast).read_all("a")
