from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from servers.ranges import Fault, RangeServer, Reply, Request, WebServer, fail_nth, range_reply
from servers.s3 import S3Server, find_moto

from ingest.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from ingest.storage.base import Store
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store
from ingest.storage.traffic import traffic

pytest.importorskip("obstore", reason="needs the extra reelray[s3]")

BODY = Random(2).randbytes(50_000)
FILES = {"meta/info.json": b"{}", "videos/cam/file-000.mp4": BODY, "data/odd name+%.parquet": b"odd", "empty": b""}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    executable = find_moto()
    if executable is None:
        pytest.skip("no moto_server: set REELRAY_MOTO_SERVER to one in an environment of its own (pip install 'moto[s3,server]')")
    running = S3Server(executable)
    running.make_bucket("robots")
    # The client library's threads start with its first request and stay.
    running.put("robots", "first", b"")
    yield running
    running.close()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(server: S3Server, keys: None, monkeypatch: pytest.MonkeyPatch, fast: RetryPolicy) -> Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    for path, data in FILES.items():
        server.put("robots", f"sets/a/{path}", data)
    server.put("robots", "sets/ab/x", b"no")
    return open_store(parse_location("s3://robots/sets/a/"), policy=fast)


def test_reads_lists_and_identifies(store: Store) -> None:
    assert set(FILES) <= {item.path for item in store.list()}
    assert [item.path for item in store.list("videos")] == ["videos/cam/file-000.mp4"]
    assert store.list("none") == []
    wanted = [(5, 50), (40_000, 50_000), (0, 0)]
    assert store.read_ranges("videos/cam/file-000.mp4", wanted) == [BODY[start:stop] for start, stop in wanted]
    assert {path: store.read_all(path) for path in FILES} == FILES
    identity = store.identity("videos/cam/file-000.mp4")
    assert (identity.size, identity.stable) == (len(BODY), True)
    with store.open("videos/cam/file-000.mp4") as file:
        file.seek(-3, 2)
        assert file.read() == BODY[-3:]


def test_errors_are_typed(store: Store) -> None:
    for read in (store.size, store.read_all, store.open, lambda path: store.read_ranges(path, [(0, 1)])):
        with pytest.raises(ObjectNotFoundError):
            read("videos/none.mp4")
    with pytest.raises(ShortReadError, match="50000"):
        store.read_ranges("videos/cam/file-000.mp4", [(49_990, 50_001)])


def test_a_replacement_of_equal_size_is_refused_by_the_server(store: Store, server: S3Server) -> None:
    path = "videos/cam/file-000.mp4"
    store.read_ranges(path, [(0, 5)])
    server.put("robots", f"sets/a/{path}", BODY[::-1])
    for reader in (store, pickle.loads(pickle.dumps(store))):
        with pytest.raises(ObjectChangedError, match=r"it was 50000 bytes, \w+, now it is 50000 bytes, \w+"):
            reader.read_ranges(path, [(5, 10)])


def test_keys_from_the_shared_file_and_never_in_pickles(
    store: Store, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fast: RetryPolicy
) -> None:
    (tmp_path / "credentials").write_text("[robot]\naws_access_key_id = test\naws_secret_access_key = planted-secret\n")
    (tmp_path / "config").write_text(f"[profile robot]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "robot")
    again = open_store(parse_location("s3://robots/sets/a"), policy=fast)
    assert again.read_all("meta/info.json") == b"{}"
    assert b"planted" not in pickle.dumps(again)
    assert "planted" not in repr(again)


@pytest.fixture
def flaky(keys: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server that speaks as much S3 as reading one object takes, so that its faults are ours."""

    def answer(request: Request) -> Reply:
        if request.path != "/robots/a":
            return Reply(404, {"content-type": "application/xml"}, b"<Error><Code>NoSuchKey</Code></Error>")
        return range_reply(request, BODY, {"etag": '"abc"', "last-modified": "Mon, 30 Nov 2026 00:00:00 GMT"})

    with WebServer(answer) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


@pytest.mark.parametrize("kind", ["reset", "cut", "status"])
def test_passing_faults_are_retried(flaky: WebServer, fast: RetryPolicy, kind: str) -> None:
    for number in (1, 2, 3):
        flaky.forget()
        flaky.fault = fail_nth(number, Fault(kind))
        store = open_store(parse_location("s3://robots"), policy=fast)
        assert store.read_ranges("a", [(5, 5000), (6000, 7000)]) == [BODY[5:5000], BODY[6000:7000]]
    flaky.fault = lambda _: Fault(kind)
    with pytest.raises(StorageError, match="8 tries"):
        open_store(parse_location("s3://robots"), policy=fast).read_ranges("a", [(5, 10)])


def test_many_identities_cost_one_listing(store: Store, server: S3Server, fast: RetryPolicy) -> None:
    for number in range(12):
        server.put("robots", f"sets/a/videos/many/file-{number:03d}.mp4", bytes(number))
    traffic(reset=True)
    names = [f"videos/many/file-{number:03d}.mp4" for number in range(12)]
    assert [item.size for item in store.identities(names)] == list(range(12))  # type: ignore[attr-defined]
    assert traffic().requests == 1


def test_a_denial_is_final_and_free_of_keys(flaky: WebServer, fast: RetryPolicy) -> None:
    flaky.fault = lambda _: Fault("status", 403)
    with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID") as caught:
        open_store(parse_location("s3://robots"), policy=fast).read_ranges("a", [(0, 5)])
    assert len(flaky.requests) == 1
    assert "planted" not in str(caught.value)


def test_bytes_sent_are_bytes_asked(flaky: WebServer, fast: RetryPolicy) -> None:
    open_store(parse_location("s3://robots"), policy=fast).read_ranges("a", [(5, 25), (100, 110)])
    assert flaky.sent_bytes == 30


def test_without_obstore_fsspec_is_asked_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, fast: RetryPolicy, ranges: RangeServer
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StorageError, match=r"reelray\[s3\]"):
        open_store(parse_location("s3://robots"), policy=fast).read_all("a")
