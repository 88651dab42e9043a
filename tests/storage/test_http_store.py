from __future__ import annotations

import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
from servers.clock import FakeTime, no_sleep
from servers.ranges import Fault, RangeServer, Reply, Request, WebServer, fail_nth, range_reply

from ingest.errors import (
    AccessDeniedError,
    LocationError,
    ObjectChangedError,
    ObjectNotFoundError,
    PlaceholderError,
    ShortReadError,
    StorageError,
    TransientStorageError,
    UnsafeInputError,
)
from ingest.storage.base import Store
from ingest.storage.hosts import check_redirect
from ingest.storage.https import HttpStore
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store
from ingest.storage.together import together
from ingest.storage.traffic import traffic

BODY = Random(1).randbytes(100_000)


def _store(server: WebServer, policy: RetryPolicy, path: str = "") -> Store:
    return open_store(parse_location(f"{server.url}/{path}"), policy=policy)


@pytest.fixture
def server(ranges: RangeServer) -> RangeServer:
    ranges.objects = {
        "set/meta/info.json": b"{}",
        "set/videos/cam/chunk-000/file-000.mp4": BODY,
        "set/meta/episodes/chunk-000/file-000.parquet": b"PAR1",
        "set/odd name+%.bin": b"odd",
    }
    return ranges


def test_bytes_fetched_are_bytes_asked(server: RangeServer, fast: RetryPolicy) -> None:
    store = _store(server, fast, "set")
    wanted = [(10, 20), (50_000, 90_000), (99_999, 100_000), (20, 30), (0, 0)]
    assert store.read_ranges("videos/cam/chunk-000/file-000.mp4", wanted) == [BODY[start:stop] for start, stop in wanted]
    assert server.sent_bytes == 20 + 40_000 + 1
    assert len(server.requests) == 3


def test_whole_objects_sizes_identities_and_odd_names(server: RangeServer, fast: RetryPolicy) -> None:
    store = _store(server, fast, "set/")
    assert store.read_all("meta/info.json") == b"{}"
    assert store.read_all("odd name+%.bin") == b"odd"
    assert store.size("videos/cam/chunk-000/file-000.mp4") == len(BODY)
    identity = store.identity("videos/cam/chunk-000/file-000.mp4")
    assert identity.size == len(BODY)
    assert identity.stable
    assert identity == store.identity("videos/cam/chunk-000/file-000.mp4")
    with store.open("videos/cam/chunk-000/file-000.mp4") as file:
        assert file.seek(-5, 2) == len(BODY) - 5
        assert file.read() == BODY[-5:]
        file.seek(7)
        assert file.read(3) == BODY[7:10]


def test_listing_by_directory_pages(server: RangeServer, fast: RetryPolicy) -> None:
    store = _store(server, fast, "set")
    assert [item.path for item in store.list()] == [
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "odd name+%.bin",
        "videos/cam/chunk-000/file-000.mp4",
    ]
    assert [item.path for item in store.list("meta/episodes")] == ["meta/episodes/chunk-000/file-000.parquet"]


def test_listing_without_pages_follows_the_numbers(server: RangeServer, fast: RetryPolicy) -> None:
    server.pages = False
    for name in ("chunk-000/file-001.parquet", "chunk-001/file-000.parquet", "chunk-003/file-000.parquet"):
        server.objects[f"set/meta/episodes/{name}"] = b"x"
    store = _store(server, fast, "set")
    assert [item.path[14:] for item in store.list("meta/episodes")] == [
        "chunk-000/file-000.parquet",
        "chunk-000/file-001.parquet",
        "chunk-001/file-000.parquet",
    ]
    assert store.list("meta/none") == []


def test_without_etag_nothing_is_stable(fast: RetryPolicy) -> None:
    with RangeServer({"a": b"abc"}, etags=False) as server:
        store = _store(server, fast)
        first, second = store.identity("a"), _store(server, fast).identity("a")
    assert not first.stable
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("status", "error"), [(401, AccessDeniedError), (403, AccessDeniedError), (404, ObjectNotFoundError), (418, StorageError)]
)
def test_permanent_refusals_fail_at_once(server: RangeServer, fast: RetryPolicy, status: int, error: type[StorageError]) -> None:
    server.fault = lambda _: Fault("status", status)
    with pytest.raises(error, match=str(status)):
        _store(server, fast, "set").read_ranges("meta/info.json", [(0, 1)])
    assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["reset", "cut", "short", "wrong_range"])
@pytest.mark.parametrize("times", [1, 100])
def test_passing_faults_are_retried_and_end_typed(server: RangeServer, fast: RetryPolicy, kind: str, times: int) -> None:
    server.fault = lambda request: Fault(kind) if request.number <= times else None
    store = _store(server, fast, "set")
    path = "videos/cam/chunk-000/file-000.mp4"
    if times == 1:
        assert store.read_ranges(path, [(5, 5000)]) == [BODY[5:5000]]
        assert len(server.requests) == 2
    else:
        with pytest.raises((TransientStorageError, ShortReadError), match="tries"):
            store.read_ranges(path, [(5, 5000)])
        assert len(server.requests) == fast.attempts


@pytest.mark.parametrize("kind", ["silent", "stall"])
def test_silence_times_out_and_is_retried(server: RangeServer, kind: str) -> None:
    policy = RetryPolicy(timeout_s=0.15, sleep=no_sleep)
    server.fault = lambda request: Fault(kind) if request.number <= 2 else None
    assert _store(server, policy, "set").read_ranges("videos/cam/chunk-000/file-000.mp4", [(5, 5000)]) == [BODY[5:5000]]
    assert [request.fault for request in server.requests[:2]] == [kind, kind]
    assert len(server.requests) >= 3


def test_a_server_that_is_not_there_is_a_typed_error(fast: RetryPolicy) -> None:
    with RangeServer() as gone:
        url = gone.url
    with pytest.raises(TransientStorageError, match="ConnectError"):
        open_store(parse_location(url), policy=fast).read_all("x")


def test_a_crawling_transfer_is_given_up(monkeypatch: pytest.MonkeyPatch, fast: RetryPolicy) -> None:
    monkeypatch.setattr("ingest.storage.http._SLOWEST_BYTES_PER_S", 10**9)
    with RangeServer({"v": BODY}, bytes_per_s=40_000.0) as slow, pytest.raises(TransientStorageError, match="crawls"):
        open_store(parse_location(slow.url), policy=replace(fast, attempts=1, timeout_s=0.8)).read_ranges("v", [(0, 90_000)])


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_passing_statuses(server: RangeServer, fast: RetryPolicy, status: int) -> None:
    server.fault = fail_nth(1, Fault("status", status))
    assert _store(server, fast, "set").read_ranges("meta/info.json", [(0, 2)]) == [b"{}"]


def test_every_nth_request_of_a_read_plan_may_fail(server: RangeServer, fast: RetryPolicy) -> None:
    wanted = [(start, start + 700) for start in range(0, 8000, 1000)]
    for kind in ("reset", "cut", "short", "wrong_range", "status"):
        number = 1
        while True:
            server.forget()
            server.fault = fail_nth(number, Fault(kind))
            assert _store(server, fast, "set").read_ranges("videos/cam/chunk-000/file-000.mp4", wanted) == [BODY[a:b] for a, b in wanted]
            if not any(request.fault for request in server.requests):
                break
            number += 1
        assert number == len(wanted) + 1


def test_ranges_beyond_the_end(server: RangeServer, fast: RetryPolicy) -> None:
    store = _store(server, fast, "set")
    for start, stop in ((99_990, 100_010), (100_000, 100_001), (200_000, 200_001)):
        with pytest.raises(ShortReadError, match="100000"):
            store.read_ranges("videos/cam/chunk-000/file-000.mp4", [(start, stop)])


def test_a_replaced_object_is_noticed_at_equal_size(server: RangeServer, fast: RetryPolicy) -> None:
    store = _store(server, fast, "set")
    path = "videos/cam/chunk-000/file-000.mp4"
    store.read_ranges(path, [(0, 10)])
    server.objects[f"set/{path}"] = BODY[::-1]
    with pytest.raises(ObjectChangedError, match=r"it was 100000 bytes, .* now it is 100000 bytes, "):
        store.read_ranges(path, [(0, 10)])
    with pytest.raises(ObjectChangedError):
        pickle.loads(pickle.dumps(store)).read_ranges(path, [(20, 30)])


def test_a_truncated_object_is_noticed(server: RangeServer, fast: RetryPolicy) -> None:
    store = _store(server, fast, "set")
    path = "videos/cam/chunk-000/file-000.mp4"
    store.read_ranges(path, [(0, 10)])
    server.objects[f"set/{path}"] = BODY[:50]
    with pytest.raises(ObjectChangedError, match="100000"):
        store.read_ranges(path, [(60, 70)])


def test_a_web_page_instead_of_the_file(server: RangeServer, fast: RetryPolicy) -> None:
    server.fault = lambda _: Fault("html")
    store = _store(server, fast, "set")
    for read in (lambda: store.read_ranges("meta/info.json", [(0, 1)]), lambda: store.read_all("meta/info.json")):
        with pytest.raises(PlaceholderError, match="web page"):
            read()
    assert len(server.requests) == 2


def test_a_git_lfs_pointer_instead_of_the_file(server: RangeServer, fast: RetryPolicy, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n"
    server.objects["set/v.mp4"] = pointer
    (tmp_path / "v.mp4").write_bytes(pointer)
    for store in (_store(server, fast, "set"), open_store(tmp_path)):
        with pytest.raises(PlaceholderError, match="git lfs pull"):
            store.read_ranges("v.mp4", [(0, len(pointer))])
        with pytest.raises(PlaceholderError, match="git lfs pull"):
            store.read_all("v.mp4")


def test_a_server_that_ignores_ranges(fast: RetryPolicy) -> None:
    with WebServer(lambda _: Reply(200, {"content-type": "video/mp4"}, BODY)) as server:
        store = _store(server, fast)
        assert store.read_ranges("v", [(0, len(BODY))]) == [BODY]
        with pytest.raises(StorageError, match="ignores ranges"):
            store.read_ranges("v", [(0, 50)])
        with pytest.raises(StorageError, match="ignores ranges"):
            store.read_ranges("v", [(50, 99_000)])


def test_compressed_replies_are_refused(fast: RetryPolicy) -> None:
    with WebServer(lambda request: range_reply(request, BODY, {"content-encoding": "gzip"})) as server:
        with pytest.raises(StorageError, match="compresses"):
            _store(server, fast).read_ranges("v", [(0, 50)])
        assert server.requests[0].headers["accept-encoding"] == "identity"


def test_head_not_allowed_falls_back_to_a_byte(fast: RetryPolicy) -> None:
    def answer(request: Request) -> Reply:
        return Reply(405) if request.method == "HEAD" else range_reply(request, BODY, {"etag": '"a"'})

    with WebServer(answer) as server:
        assert _store(server, fast).size("v") == len(BODY)


METADATA_SERVICE = [
    "169.254.169.254", "169.254.169.254.", "2852039166", "0xA9FEA9FE", "0251.0376.0251.0376", "169.254.43518", "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]", "[64:ff9b::169.254.169.254]", "[::a9fe:a9fe]", "[fe80::1%25eth0]", "[fd00:ec2::254]", "100.100.100.200", "0",
    "0.0.0.0", "[::]", "224.0.0.1", "metadata.google.internal", "METADATA.google.internal.",
]  # fmt: skip


@pytest.mark.parametrize(
    "target", ["ftp://127.0.0.1/x", "file:///etc/passwd", *(f"http://{host}/x" for host in METADATA_SERVICE if "0251" not in host)]
)
def test_redirects_stay_on_the_web(fast: RetryPolicy, target: str) -> None:
    with WebServer(lambda _: Reply(302, {"location": target})) as server, pytest.raises(StorageError, match="redirects to"):
        _store(server, fast).read_ranges("v", [(0, 5)])


@pytest.mark.parametrize("host", METADATA_SERVICE)
def test_no_location_names_a_metadata_service_in_whatever_spelling(host: str) -> None:
    with pytest.raises(LocationError, match=r"metadata service|'::'"):
        parse_location(f"http://{host}/latest")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "10.0.0.8", "[::1]", "[::ffff:10.0.0.8]", "localhost", "a.localhost."]
)
def test_a_public_host_sends_nobody_to_a_private_one(host: str) -> None:
    assert check_redirect("http://127.0.0.1/a", f"http://{host}/x") == f"http://{host}/x"
    with pytest.raises(StorageError, match="private address"):
        check_redirect("https://data.example/a", f"https://{host}/x")
    assert check_redirect("https://data.example/a", "../b") == "https://data.example/b"


@pytest.mark.parametrize(
    "target",
    ["", "http://", "http://[", "http://[::1", "http://h:99999/", "http://h:x/", f"http://{'a' * 5000}/", "http://xn--/", "http://a b/",
     "http://\xe2\x91\xa0.example/", "javascript:x", "//", "http://127.0.0.1:0/"],
)  # fmt: skip
@pytest.mark.parametrize("read", ["read_ranges", "size", "list"])
def test_redirects_to_nowhere_are_typed(fast: RetryPolicy, target: str, read: str) -> None:
    with WebServer(lambda _: Reply(302, {"location": target})) as server:
        store = _store(server, fast)
        with pytest.raises(StorageError):
            store.read_ranges("v", [(0, 5)]) if read == "read_ranges" else store.size("v") if read == "size" else store.list("meta")


def test_links_that_are_no_addresses_are_no_files(fast: RetryPolicy) -> None:
    page = b'<html><a href="http://[">x</a><a href="a.parquet">a</a><a href="http://h:99999/">y</a></html>'

    def answer(request: Request) -> Reply:
        return (
            Reply(200, {"content-type": "text/html"}, page) if request.path.endswith("/") else range_reply(request, BODY, {"etag": '"a"'})
        )

    with WebServer(answer) as server:
        assert [item.path for item in _store(server, fast).list("meta")] == ["meta/a.parquet"]


def test_directory_pages_without_end_are_left(fast: RetryPolicy) -> None:
    with WebServer(lambda _: Reply(200, {"content-type": "text/html"}, b'<html><a href="deeper/">x</a></html>')) as server:
        with pytest.raises(StorageError, match="nest deeper than 16 levels"):
            open_store(parse_location(server.url), policy=fast).list("meta")
        assert len(server.requests) < 20


def test_a_server_that_has_every_name_is_left(fast: RetryPolicy) -> None:
    with WebServer(lambda request: range_reply(request, BODY, {"etag": '"a"', "content-type": "application/json"})) as server:
        with pytest.raises(StorageError, match="a file of every name"):
            _store(server, fast).list("meta/episodes")
        assert len(server.requests) < 40
    names = [f"meta/episodes/chunk-00{chunk}/file-0{number:02d}.parquet" for chunk in range(2) for number in range(30)]
    with RangeServer(dict.fromkeys(names, b"x"), pages=False) as server:
        assert [item.path for item in _store(server, fast).list("meta/episodes")] == names


def test_a_size_beyond_belief_is_refused_before_anything_is_planned(fast: RetryPolicy) -> None:
    with WebServer(lambda _: Reply(200, {"content-length": "9" * 17}, b"")) as server:
        store = open_store(parse_location(server.url), policy=fast)
        assert store.size("meta/info.json") == int("9" * 17)
        with pytest.raises(UnsafeInputError, match="cannot be read whole"):
            store.read_all("meta/info.json")
        assert [request.method for request in server.requests] == ["HEAD"]


def test_redirect_loops_end(fast: RetryPolicy) -> None:
    with WebServer(lambda request: Reply(302, {"location": request.path})) as server, pytest.raises(StorageError, match="redirects"):
        _store(server, fast).read_ranges("v", [(0, 5)])


def test_a_429_storm_waits_as_long_as_it_is_told(server: RangeServer) -> None:
    fake = FakeTime()
    server.fault = lambda request: Fault("status", 429, (("retry-after", "30"),)) if request.number <= 5 else None
    assert _store(server, fake.policy(), "set").read_ranges("meta/info.json", [(0, 2)]) == [b"{}"]
    assert len(fake.waits) == 5
    assert all(30 <= wait <= 31 for wait in fake.waits)
    assert len(set(fake.waits)) == 5, "jitter keeps ranks from returning in step"


def test_a_wait_beyond_the_deadline_is_not_begun(server: RangeServer) -> None:
    fake = FakeTime()
    server.fault = lambda _: Fault("status", 429, (("retry-after", "3600"),))
    with pytest.raises(TransientStorageError, match=r"429, which asked to wait 3600 s, after 1 tries"):
        _store(server, fake.policy(deadline_s=60), "set").read_ranges("meta/info.json", [(0, 2)])
    assert fake.waits == []


def test_the_deadline_bounds_the_whole_call(server: RangeServer) -> None:
    fake = FakeTime()
    server.fault = lambda _: Fault("status", 503)
    with pytest.raises(TransientStorageError):
        _store(server, fake.policy(deadline_s=10, attempts=1000), "set").read_ranges("meta/info.json", [(0, 2)])
    assert 5 < fake.now <= 10


def test_the_failure_log_has_every_attempt_and_no_secret(
    server: RangeServer, fast: RetryPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "failures.jsonl"
    monkeypatch.setenv("LEROBOT_HTTP_FAILURE_LOG", str(log))
    monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDTOKEN")
    server.fault = lambda request: Fault("status", 503) if request.number <= 2 else None
    _store(server, fast, "set").read_ranges("meta/info.json", [(0, 2)])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["attempt"], line["range"], line["host"], line["path"]) for line in lines] == [
        (1, [0, 2], "127.0.0.1", "/set/meta/info.json"),
        (2, [0, 2], "127.0.0.1", "/set/meta/info.json"),
    ]
    assert "503" in lines[0]["error"]
    assert "PLANTED" not in log.read_text()
    assert not any("authorization" in request.headers for request in server.requests)


def test_traffic_is_counted_and_faults_by_kind(server: RangeServer, fast: RetryPolicy) -> None:
    traffic(reset=True)
    server.fault = lambda request: {1: Fault("status", 503), 2: Fault("reset"), 3: Fault("short"), 4: Fault("cut")}.get(request.number)
    _store(server, fast, "set").read_ranges("videos/cam/chunk-000/file-000.mp4", [(0, 1000)])
    found = traffic()
    assert (found.requests, found.received_bytes >= 1500) == (5, True)
    assert set(found.faults) >= {"503", "unusable reply"}
    assert sum(found.faults.values()) == 4
    assert found.seconds > 0
    assert traffic(reset=True).requests == 5
    assert traffic().requests == 0


def test_many_threads_share_one_client(server: RangeServer, fast: RetryPolicy) -> None:
    store = _store(server, fast, "set")
    barrier = threading.Barrier(8)

    def read(number: int) -> bool:
        barrier.wait()
        return store.read_ranges("videos/cam/chunk-000/file-000.mp4", [(number * 100, number * 100 + 50)]) == [
            BODY[number * 100 : number * 100 + 50]
        ]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_a_store_is_small_and_picklable(server: RangeServer, fast: RetryPolicy) -> None:
    store = HttpStore(parse_location(f"{server.url}/set"))
    assert isinstance(store, Store)
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    assert len(pickle.dumps(store)) < 1500


def test_reads_together_overlap_and_the_first_error_in_order_wins(server: RangeServer, fast: RetryPolicy, tmp_path: Path) -> None:
    barrier, order = threading.Barrier(3), []
    store = _store(server, fast)

    def read(number: int, *, meets: bool) -> int:
        order.append(number)
        if meets:
            barrier.wait(10)
        if number == 7:
            raise StorageError("seven")
        return number

    assert together(store, [partial(read, number, meets=True) for number in range(3)]) == [0, 1, 2]
    with pytest.raises(StorageError, match="seven"):
        together(store, [partial(read, number, meets=False) for number in (1, 7, 2)])
    order.clear()
    assert together(open_store(tmp_path), [partial(read, number, meets=False) for number in range(5)]) == order == [0, 1, 2, 3, 4]
