from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest
from servers.hub import HubEmulator
from servers.ranges import Fault, Reply, Request

from ingest import settings
from ingest.errors import (
    AccessDeniedError,
    LocationError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
    TransientStorageError,
)
from ingest.storage.base import Store
from ingest.storage.hub import HubBucketStore, HubDatasetStore, pin
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store

VIDEO = Random(1).randbytes(60_000)
FILES = {
    "meta/info.json": b'{"fps": 30}',
    "meta/episodes/chunk-000/file-000.parquet": b"PAR1episodesPAR1",
    "data/chunk-000/file-000.parquet": b"PAR1data" + bytes(500) + b"PAR1",
    "videos/cam/chunk-000/file-000.mp4": VIDEO,
    "videos/cam/chunk-000/file-001.mp4": VIDEO[::-1],
}
PATH = "videos/cam/chunk-000/file-000.mp4"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubEmulator]:
    with HubEmulator() as emulator:
        emulator.tokens = {"hf_PLANTEDREAD": "read", "hf_PLANTEDWRITE": "write"}
        monkeypatch.setenv("HF_ENDPOINT", emulator.endpoint)
        yield emulator


def _open(text: str, policy: RetryPolicy) -> Store:
    return open_store(parse_location(text), policy=policy)


class TestDataset:
    def test_reads_exactly_and_never_shows_the_token_to_the_storage_host(
        self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDREAD")
        commit = hub.add_dataset("o/n", FILES, private=True)
        store = _open("o/n", fast)
        assert store.url == f"hf://datasets/o/n@{commit}"
        wanted = [(10, 20), (30_000, 40_000), (59_999, 60_000)]
        assert store.read_ranges(PATH, wanted) == [VIDEO[start:stop] for start, stop in wanted]
        assert hub.storage.sent_bytes == 10 + 10_000 + 1
        assert all("authorization" in request.headers for request in hub.hub.requests)
        assert hub.leaked == []

    def test_one_redirect_resolution_per_object(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_dataset("o/n", FILES)
        store = _open("o/n", fast)
        hub.forget()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: store.read_ranges(PATH, [(number * 100, number * 100 + 50)]), range(32)))
        assert len(hub.hub.requests) == 1
        assert len(hub.storage.requests) == 32
        assert not any(request.method == "HEAD" for request in hub.hub.requests)

    def test_a_redirect_within_the_hub_with_an_etag_of_its_own_is_followed(
        self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDREAD")
        commit = hub.add_dataset("o/n", FILES, private=True)
        honest = hub.hub.answer

        def answer(request: Request) -> Reply:
            if "/resolve/" in request.path and "cached" not in request.query:
                return Reply(
                    307, {"location": f"{quote(request.path)}?cached=1", "etag": f'W/"redirect-{request.number}"'}, b"Temporary Redirect"
                )
            return honest(request)

        monkeypatch.setattr(hub.hub, "answer", answer)
        store = _open(f"hf://datasets/o/n@{commit}", fast)
        assert [store.read_ranges(PATH, [(at, at + 9)])[0] for at in (0, 50, 99)] == [VIDEO[at : at + 9] for at in (0, 50, 99)]
        assert store.read_all("meta/info.json") == FILES["meta/info.json"]
        assert all("authorization" in request.headers for request in hub.hub.requests)

    def test_a_branch_that_moves_is_invisible(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        first = hub.add_dataset("o/n", FILES)
        store = _open("hf://datasets/o/n@main", fast)
        hub.add_dataset("o/n", {PATH: b"moved" * 12_000, "meta/info.json": b"{}"})
        assert store.url.endswith(first)
        assert store.read_ranges(PATH, [(0, 5)]) == [VIDEO[:5]]
        assert store.read_all("meta/info.json") == FILES["meta/info.json"]
        assert pickle.loads(pickle.dumps(store)).read_ranges(PATH, [(5, 9)]) == [VIDEO[5:9]]
        assert _open("hf://datasets/o/n@main", fast).read_ranges(PATH, [(0, 5)]) == [b"moved"]

    def test_a_tag_that_moves_is_invisible(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        repo_commit = hub.add_dataset("o/n", FILES)
        hub.repos["o/n"].tags["v1"] = repo_commit
        store = _open("hf://datasets/o/n@v1", fast)
        hub.repos["o/n"].tags["v1"] = hub.add_dataset("o/n", {PATH: b"x"})
        assert store.size(PATH) == len(VIDEO)
        assert store.read_ranges(PATH, [(100, 200)]) == [VIDEO[100:200]]

    def test_without_revision_the_version_tag_wins_over_main(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        tagged = hub.add_dataset("o/n", FILES)
        assert pin(parse_location("o/n"), fast).revision == tagged
        hub.repos["o/n"].tags["v3.0"] = tagged
        hub.add_dataset("o/n", {"new": b"x"})
        assert pin(parse_location("o/n"), fast).revision == tagged

    def test_subfolder(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_dataset("o/n", {f"sets/a/{path}": data for path, data in FILES.items()} | {"sets/b/meta/info.json": b"b"})
        store = _open("hf://datasets/o/n/sets/a", fast)
        assert [item.path for item in store.list()] == sorted(FILES)
        assert store.size(PATH) == len(VIDEO)
        assert store.read_ranges(PATH, [(0, 3)]) == [VIDEO[:3]]
        assert store.read_all("meta/info.json") == FILES["meta/info.json"]

    def test_an_expired_signature_is_renewed_once(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_dataset("o/n", FILES)
        store = _open("o/n", fast)
        store.read_ranges(PATH, [(0, 5)])
        hub.expire_signatures()
        hub.forget()
        assert store.read_ranges(PATH, [(5, 10)]) == [VIDEO[5:10]]
        assert [request.status for request in hub.storage.requests] == [403, 206]
        assert [("_refresh=" in request.query, request.status) for request in hub.hub.requests] == [(True, 302)]

    def test_concurrent_expiry_keeps_payloads_apart(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_dataset("o/n", FILES)
        store = _open("o/n", fast)
        store.read_ranges(PATH, [(0, 5)])
        hub.expire_signatures()
        hub.forget()
        barrier = threading.Barrier(8)

        def read(number: int) -> bool:
            barrier.wait()
            return store.read_ranges(PATH, [(number * 1000, number * 1000 + 100)]) == [VIDEO[number * 1000 : number * 1000 + 100]]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(8)))
        assert len(hub.hub.requests) <= 8

    def test_a_permanent_denial_is_refreshed_once_and_then_final(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_dataset("o/n", FILES)
        store = _open("o/n", fast)
        hub.forget()
        hub.storage.fault = lambda _: Fault("status", 403)
        with pytest.raises(AccessDeniedError, match="403"):
            store.read_ranges(PATH, [(0, 5)])
        assert len(hub.storage.requests) == 2
        assert len(hub.hub.requests) == 2

    @pytest.mark.parametrize("token", [None, "hf_UNKNOWN"])
    def test_a_refusal_by_the_hub_is_not_retried_and_says_what_to_do(
        self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch, token: str | None
    ) -> None:
        hub.add_dataset("o/n", FILES, private=True)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(AccessDeniedError, match="hf auth login") as caught:
            _open("o/n", fast)
        assert len(hub.hub.requests) == 1
        assert "UNKNOWN" not in str(caught.value)

    def test_missing_things(self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add_dataset("o/n", FILES)
        store = _open("o/n", fast)
        for read in (store.size, store.identity, store.read_all, store.open, lambda path: store.read_ranges(path, [(0, 1)])):
            with pytest.raises(ObjectNotFoundError, match="none"):
                read("videos/none.mp4")
        assert store.list("none") == []
        with pytest.raises(ShortReadError):
            store.read_ranges(PATH, [(59_990, 60_010)])
        with pytest.raises(ObjectNotFoundError):
            _open("hf://datasets/o/n@nobranch", fast)
        monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDREAD")
        with pytest.raises(ObjectNotFoundError, match="check the name"):
            _open("o/none", fast)

    def test_gated(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_dataset("o/n", FILES, gated=True)
        with pytest.raises(AccessDeniedError, match="restricted"):
            _open("o/n", fast)

    def test_an_unpinned_store_cannot_be_made(self) -> None:
        with pytest.raises(LocationError, match="not pinned"):
            HubDatasetStore(parse_location("o/n"))

    def test_the_pages_of_a_listing_are_joined(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.page = 3
        hub.add_dataset("o/n", FILES)
        assert [item.path for item in _open("o/n", fast).list()] == sorted(FILES)

    def test_429_at_every_fifth_request_is_waited_out(self, hub: HubEmulator) -> None:
        waits: list[float] = []
        hub.add_dataset("o/n", FILES)
        hub.set_fault(lambda request: Fault("status", 429, (("retry-after", "7"),)) if request.number % 5 == 0 else None)
        store = _open("o/n", RetryPolicy(sleep=waits.append, random=Random(0)))
        for start in range(0, 6000, 200):
            assert store.read_ranges(PATH, [(start, start + 100)]) == [VIDEO[start : start + 100]]
        assert waits
        assert all(wait >= 7 for wait in waits)


class TestColdStart:
    def test_requests_do_not_grow_with_files_and_are_made_once_per_host(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        many = dict(FILES)
        for number in range(1000):
            many[f"videos/cam/chunk-{number // 500:03d}/file-{number:03d}.mp4"] = b"v"
        hub.add_dataset("o/n", many)

        def start() -> None:
            store = _open("o/n", fast)
            names = [item.path for item in store.list("meta")]
            for name in names:
                store.read_all(name)
            for item in store.list("videos"):
                store.size(item.path)

        start()
        # Version tag, main, two listings (one of two pages), two metadata files of which one is redirected.
        assert len(hub.hub.requests) <= 8
        assert len(hub.storage.requests) <= 1
        assert not any(request.path.endswith(".mp4") for request in hub.hub.requests), "no video is touched before it is admitted"
        hub.forget()
        start()
        assert len(hub.hub.requests) == 2, "only the revision is asked for again"
        assert hub.storage.requests == []

    def test_sizes_of_many_files_take_one_listing_per_folder(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        many = {f"videos/cam/chunk-{number // 50:03d}/file-{number:03d}.mp4": bytes(number) for number in range(150)}
        store = _open(f"hf://datasets/o/n@{hub.add_dataset('o/n', many)}", fast)
        hub.forget()
        assert all(store.size(path) == len(data) and store.identity(path).stable for path, data in many.items())
        assert len(hub.hub.requests) == 3

    def test_concurrent_processes_ask_once(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        commit = hub.add_dataset("o/n", FILES)
        hub.forget()
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda _: _open(f"hf://datasets/o/n@{commit}", fast).list("meta"), range(6)))
        assert len(hub.hub.requests) == 1

    def test_offline_mode_works_from_the_caches(self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = hub.add_dataset("o/n", FILES)
        store = _open("hf://datasets/o/n@main", fast)
        names = [item.path for item in store.list("meta")]
        for name in names:
            store.read_all(name)
        hub.forget()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        for text in ("hf://datasets/o/n@main", f"hf://datasets/o/n@{commit}", "o/n"):
            offline = _open(text, fast)
            assert [item.path for item in offline.list("meta")] == names
            assert [offline.read_all(name) for name in names] == [FILES[name] for name in names]
        for read in (lambda: offline.read_ranges(PATH, [(0, 1)]), lambda: offline.list("videos"), lambda: _open("o/other", fast)):
            with pytest.raises(StorageError, match="HF_HUB_OFFLINE"):
                read()
        assert hub.hub.requests == []

    def test_a_snapshot_of_the_hubs_own_tools_is_used(self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = hub.add_dataset("o/n", FILES)
        for root in ("hub", "lerobot/hub"):
            snapshot = settings.hf_home() / root / "datasets--o--n" / "snapshots" / commit
            (snapshot / PATH).parent.mkdir(parents=True)
            (snapshot / PATH).write_bytes(VIDEO)
            store = _open(f"hf://datasets/o/n@{commit}", fast)
            hub.forget()
            assert store.read_ranges(PATH, [(9, 99), (0, 2)]) == [VIDEO[9:99], VIDEO[:2]]
            assert store.size(PATH) == len(VIDEO)
            assert hub.hub.requests == []
            (snapshot / PATH).unlink()

    def test_caches_may_vanish_or_be_damaged_at_any_time(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        commit = hub.add_dataset("o/n", FILES)
        _open(f"hf://datasets/o/n@{commit}", fast).list("meta")
        for path in settings.lerobot_home().rglob("*"):
            if path.is_file():
                path.write_bytes(b"garbage")
        assert len(_open(f"hf://datasets/o/n@{commit}", fast).list("meta")) == 2

    def test_a_home_that_cannot_be_written_is_only_slower(
        self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_bytes(b"")
        monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "file" / "x"))
        hub.add_dataset("o/n", FILES)
        store = _open("o/n", fast)
        assert [item.path for item in store.list("meta")] == ["meta/episodes/chunk-000/file-000.parquet", "meta/info.json"]
        assert store.read_all("meta/info.json") == FILES["meta/info.json"]


class TestBucket:
    def test_reads_lists_and_identifies(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_bucket("o/b", {f"sets/a/{path}": data for path, data in FILES.items()} | {"sets/ab/x": b"no"})
        store = _open("hf://buckets/o/b/sets/a", fast)
        assert [item.path for item in store.list()] == sorted(FILES)
        identity = store.identity(PATH)
        assert (identity.size, identity.fingerprint, identity.stable) == (
            len(VIDEO),
            hub.buckets["o/b"].objects[f"sets/a/{PATH}"].xet_hash,
            True,
        )
        assert store.read_ranges(PATH, [(5, 50)]) == [VIDEO[5:50]]
        assert store.read_all("meta/info.json") == FILES["meta/info.json"]
        assert store.open("meta/info.json").read() == FILES["meta/info.json"]
        with pytest.raises(ObjectNotFoundError):
            store.read_ranges("videos/none.mp4", [(0, 1)])

    def test_metadata_is_cached_by_content(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_bucket("o/b", FILES)
        _open("hf://buckets/o/b", fast).read_all("meta/info.json")
        hub.forget()
        assert _open("hf://buckets/o/b", fast).read_all("meta/info.json") == FILES["meta/info.json"]
        assert ["/tree" in request.path for request in hub.hub.requests] == [True]
        hub.add_bucket("o/b", {"meta/info.json": b'{"fps": 31}'})
        assert _open("hf://buckets/o/b", fast).read_all("meta/info.json") == b'{"fps": 31}'

    def test_a_replacement_of_equal_size_is_noticed_and_names_both(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_bucket("o/b", FILES)
        store = _open("hf://buckets/o/b", fast)
        before = store.identity(PATH).fingerprint
        hub.add_bucket("o/b", {PATH: VIDEO[1:] + b"x"})
        after = hub.buckets["o/b"].objects[PATH].xet_hash
        for reader in (store, pickle.loads(pickle.dumps(store))):
            with pytest.raises(ObjectChangedError, match=f"{before}.*{after}"):
                reader.read_ranges(PATH, [(0, 5)])
        assert _open("hf://buckets/o/b", fast).identity(PATH).fingerprint == after

    def test_a_replacement_during_reading_is_noticed_at_the_next_resolution(self, hub: HubEmulator, fast: RetryPolicy) -> None:
        hub.add_bucket("o/b", FILES)
        store = _open("hf://buckets/o/b", fast)
        assert store.read_ranges(PATH, [(0, 5)]) == [VIDEO[:5]]
        hub.add_bucket("o/b", {PATH: VIDEO[1:] + b"x"})
        assert store.read_ranges(PATH, [(5, 10)]) == [VIDEO[5:10]], "the signed address still serves the old content"
        hub.expire_signatures()
        with pytest.raises(ObjectChangedError):
            store.read_ranges(PATH, [(10, 15)])

    def test_offline(self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add_bucket("o/b", FILES)
        store = _open("hf://buckets/o/b", fast)
        store.list("meta")
        store.read_all("meta/info.json")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        offline = _open("hf://buckets/o/b", fast)
        assert offline.read_all("meta/info.json") == FILES["meta/info.json"]
        with pytest.raises(StorageError, match="HF_HUB_OFFLINE"):
            offline.list("videos")

    def test_private_and_missing_buckets(self, hub: HubEmulator, fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add_bucket("o/b", FILES, private=True)
        with pytest.raises(AccessDeniedError, match="hf auth login"):
            _open("hf://buckets/o/b", fast).list()
        monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDREAD")
        assert isinstance(_open("hf://buckets/o/b", fast), HubBucketStore)
        assert len(_open("hf://buckets/o/b", fast).list()) == len(FILES)
        with pytest.raises(ObjectNotFoundError):
            _open("hf://buckets/o/none", fast).list()


FAULT_KINDS = ("reset", "cut", "short", "wrong_range", "status")


def _epoch(store: Store) -> list[bytes]:
    """A small read plan: metadata, then ranges of both videos."""
    found = [store.read_all(item.path) for item in store.list("meta")]
    for start in range(0, 3000, 1000):
        for name in ("file-000.mp4", "file-001.mp4"):
            found += store.read_ranges(f"videos/cam/chunk-000/{name}", [(start, start + 400), (start + 500, start + 700)])
    return found


@pytest.mark.parametrize("kind", ["hf://datasets/o/n@main", "hf://buckets/o/b"])
def test_any_single_failing_request_changes_nothing(hub: HubEmulator, fast: RetryPolicy, kind: str) -> None:
    hub.add_dataset("o/n", FILES)
    hub.add_bucket("o/b", FILES)
    expected = _epoch(_open(kind, fast))
    total = _count(hub)
    for number in range(1, total + 1):
        _clear_caches()
        seen = _fail_at(hub, {number: FAULT_KINDS[number % len(FAULT_KINDS)]})
        assert _epoch(_open(kind, fast)) == expected
        assert seen
    assert hub.leaked == []


def _random_faults(hub: HubEmulator, fast: RetryPolicy, seed: int, faults: int) -> None:
    hub.add_dataset("o/n", FILES)
    expected = _epoch(_open("hf://datasets/o/n@main", fast))
    random = Random(seed)
    injected = 0
    while injected < faults:
        _clear_caches()
        plan = {number: random.choice(FAULT_KINDS) for number in random.sample(range(1, 40), 8)}
        seen = _fail_at(hub, plan)
        assert _epoch(_open("hf://datasets/o/n@main", fast)) == expected
        injected += len(seen)


def test_four_hundred_random_faults(hub: HubEmulator, fast: RetryPolicy) -> None:
    _random_faults(hub, fast, seed=6, faults=400)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_thousand_random_faults(hub: HubEmulator, fast: RetryPolicy) -> None:
    _random_faults(hub, fast, seed=7, faults=20_000)


def _count(hub: HubEmulator) -> int:
    return len(hub.hub.requests) + len(hub.storage.requests)


def _clear_caches() -> None:
    for path in settings.lerobot_home().rglob("*"):
        if path.is_file():
            path.unlink()


def _fail_at(hub: HubEmulator, plan: dict[int, str]) -> list[str]:
    """Fails requests by their number over both servers; the list fills with what was injected."""
    hub.forget()
    seen: list[str] = []
    lock = threading.Lock()
    counter = [0]

    def rule(_: Request) -> Fault | None:
        with lock:
            counter[0] += 1
            kind = plan.get(counter[0])
        if kind is None:
            return None
        seen.append(kind)
        return Fault(kind)

    hub.set_fault(rule)
    return seen


def test_a_mistyped_path_is_no_long_wait(fast: RetryPolicy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    # Nobody listens there any more. Every way of asking says where it looked for a directory.
    with pytest.raises(TransientStorageError, match=rf"after 2 tries .* no directory {tmp_path}/data/pusth$"):
        open_store("data/pusth", policy=fast)
    with pytest.raises(TransientStorageError, match=rf"after {fast.attempts} tries") as caught:
        open_store("hf://datasets/data/pusth", policy=fast)
    assert "directory" not in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StorageError, match=rf"HF_HUB_OFFLINE .* no directory {tmp_path}/data/pusth$"):
        open_store("data/pusth", policy=fast)


def test_a_mistyped_path_that_the_hub_does_not_know_either(hub: HubEmulator, fast: RetryPolicy) -> None:
    with pytest.raises((AccessDeniedError, ObjectNotFoundError), match="taken for a dataset on the Hub"):
        open_store("data/pusth", policy=fast)
