from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers.ranges import RangeServer

from ingest.errors import SettingsError
from ingest.storage.base import Store
from ingest.storage.disk_cache import CachedStore, PayloadCache
from ingest.storage.local import LocalStore
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store
from ingest.storage.wrapped import WrappedStore


def _on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("??/*"))


def test_round_trip_and_absence(tmp_path: Path) -> None:
    cache = PayloadCache(tmp_path, 10_000)
    assert cache.get("a") is None
    assert cache.put("a", b"abc")
    assert cache.put("empty", b"")
    assert (cache.get("a"), cache.get("empty"), cache.hits, cache.misses) == (b"abc", b"", 2, 1)
    assert pickle.loads(pickle.dumps(cache)).get("a") == b"abc"
    with pytest.raises(SettingsError):
        PayloadCache(tmp_path, 0)


def test_damage_counts_as_absence(tmp_path: Path) -> None:
    cache = PayloadCache(tmp_path, 10_000)
    for harm in (lambda data: data[:-1], lambda data: data[:-1] + b"!", lambda _: b"", lambda data: b"x" + data[1:]):
        cache.put("a", b"payload")
        (file,) = tmp_path.glob("??/*")
        file.write_bytes(harm(file.read_bytes()))
        assert cache.get("a") is None
        assert list(tmp_path.glob("??/*")) == []


def test_foreign_files_in_it_are_no_payload(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "v").write_bytes(BODY)
    cache = PayloadCache(tmp_path / "c", 10**6)
    store = CachedStore(LocalStore.at(tmp_path / "ds"), cache)
    assert store.read_ranges("v", [(0, 100)]) == [BODY[:100]]
    (kept,) = (tmp_path / "c").glob("??/*")
    name = kept.name.split("-")[0]
    for foreign in ("0-" + "9" * 30, "50-20", "0-100-7", "a-b", "-5-10", "0-4096", "\u0661-\u0669", "200-300 "):
        kept.with_name(f"{name}-{foreign}").write_bytes(b"x")
    kept.with_name(f"{name}-100-2000").mkdir()
    os.mkfifo(kept.with_name(f"{name}-2000-3000"))
    kept.with_name(f"{name}-3000-3500").symlink_to(kept.with_name(f"{name}-3000-3500"))
    for total in (b"9" * 5000, b"-7", b"x", b"9" * 15):
        (tmp_path / "c" / "total").write_bytes(total)
        assert store.read_ranges("v", [(0, 4096)]) == [BODY[:4096]]
    assert cache.put("more", b"abc"), "a total that is wrong is counted anew"


def test_the_bound_holds_and_the_oldest_goes_first(tmp_path: Path) -> None:
    cache = PayloadCache(tmp_path, 1000)
    for number in range(20):
        assert cache.put(str(number), bytes(100))
        for at, path in enumerate(sorted(tmp_path.glob("??/*"), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, (at, at))
        if number > 0:
            assert cache.get("0") == bytes(100), "what is used stays"
        assert _on_disk(tmp_path) <= 1000
    assert not cache.put("huge", bytes(2000))


def test_several_caches_on_one_directory_keep_one_bound(tmp_path: Path) -> None:
    caches = [PayloadCache(tmp_path, 5000) for _ in range(4)]

    def work(number: int) -> None:
        random = Random(number)
        for _ in range(40):
            key = str(random.randrange(60))
            found = caches[number % 4].get(key)
            assert found in (None, key.encode() * 50)
            caches[number % 4].put(key, key.encode() * 50)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert _on_disk(tmp_path) <= 5000


def test_deleting_it_at_any_time_is_safe(tmp_path: Path) -> None:
    cache = PayloadCache(tmp_path / "cache", 1000)
    cache.put("a", b"abc")
    shutil.rmtree(tmp_path / "cache")
    assert cache.get("a") is None
    assert cache.put("a", b"abc")
    for path in (tmp_path / "cache").glob("??/*"):
        path.unlink()
    for number in range(30):
        assert cache.put(str(number), bytes(100)), "a total that counts deleted files is corrected"
    assert _on_disk(tmp_path / "cache") <= 1000


def test_a_directory_that_cannot_be_written_only_costs_the_saving(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = PayloadCache(tmp_path / "file" / "x", 1000)
    assert not cache.put("a", b"abc")
    assert cache.get("a") is None


BODY = Random(9).randbytes(50_000)


def test_a_second_epoch_needs_no_network_and_a_new_version_is_never_mixed_up(
    ranges: RangeServer, fast: RetryPolicy, tmp_path: Path
) -> None:
    ranges.objects = {"v.mp4": BODY}
    cache = PayloadCache(tmp_path, 200_000)
    wanted = [(0, 1000), (20_000, 40_000), (5, 5)]

    def epoch() -> list[bytes]:
        return CachedStore(open_store(parse_location(ranges.url), policy=fast), cache).read_ranges("v.mp4", wanted)

    expected = [BODY[start:stop] for start, stop in wanted]
    assert epoch() == expected
    ranges.forget()
    assert epoch() == expected
    assert ranges.sent_bytes == 0
    assert [request.method for request in ranges.requests] == ["HEAD"]
    ranges.objects = {"v.mp4": BODY[::-1]}
    assert epoch() == [BODY[::-1][start:stop] for start, stop in wanted]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 120)), min_size=1, max_size=4), min_size=1, max_size=12), st.data())
def test_any_part_of_what_was_read_needs_no_network(reads: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    body, asked = BODY[:520], set[int]()

    class Counting(WrappedStore):
        def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            for start, stop in ranges:
                asked.update(range(start, stop))
            return super().read_ranges(path, ranges)

    with TemporaryDirectory() as folder:
        (Path(folder) / "ds").mkdir()
        (Path(folder) / "ds" / "v").write_bytes(body)
        store = CachedStore(Counting(LocalStore(Path(folder) / "ds")), PayloadCache(Path(folder) / "cache", 10**6))
        for read in reads:
            before, wanted = set(asked), [(start, start + count) for start, count in read]
            asked.clear()
            assert store.read_ranges("v", wanted) == [body[start:stop] for start, stop in wanted]
            assert not asked & before, "nothing is fetched twice"
            asked |= before
            if data.draw(st.booleans()):
                for path in list(Path(folder).glob("cache/??/*"))[:1]:
                    path.write_bytes(path.read_bytes()[:-1])
                    asked.clear()


def test_unstable_objects_are_not_kept(fast: RetryPolicy, tmp_path: Path) -> None:
    with RangeServer({"v": BODY}, etags=False) as server:
        store = CachedStore(open_store(parse_location(server.url), policy=fast), PayloadCache(tmp_path, 10**6))
        assert isinstance(store, Store)
        assert store.read_ranges("v", [(0, 5)]) == [BODY[:5]]
    assert _on_disk(tmp_path) == 0


def test_it_is_a_store(ranges: RangeServer, fast: RetryPolicy, tmp_path: Path) -> None:
    ranges.objects = {"meta/info.json": b"{}", "v": BODY}
    store = CachedStore(open_store(parse_location(ranges.url), policy=fast), PayloadCache(tmp_path, 10**6))
    assert store.read_all("meta/info.json") == b"{}"
    assert [item.path for item in store.list()] == ["meta/info.json", "v"]
    assert store.size("v") == len(BODY)
    with store.open("v") as file:
        assert file.read(7) == BODY[:7]
    assert pickle.loads(pickle.dumps(store)).url == store.url
