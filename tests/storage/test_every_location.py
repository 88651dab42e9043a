"""One dataset, every kind of location: the same listing, the same bytes, and the same decoded samples in the same order."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import numpy as np
import pytest
from servers.hub import HubEmulator
from servers.ranges import Fault, RangeServer
from servers.s3 import S3Server, find_moto

from ingest.engine.dataset import iter_samples, open_dataset
from ingest.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
    TransientStorageError,
    UnsafeInputError,
)
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.storage.base import Store
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store

KINDS = ["local", "hub", "bucket", "http", "http-without-pages", "memory", "s3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "set"
    make_dataset(root, MakeOptions(episodes=3, frames="6:9", cameras=1, size=(32, 64), gop=3, video_files=2))
    return root


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server | None]:
    executable = find_moto()
    server = S3Server(executable) if executable else None
    if server:
        server.make_bucket("robots")
        server.put("robots", "first", b"")
    yield server
    if server:
        server.close()


Opener = Callable[[], Store]


@pytest.fixture(params=KINDS)
def opener(
    request: pytest.FixtureRequest, made: Path, moto: S3Server | None, monkeypatch: pytest.MonkeyPatch, fast: RetryPolicy
) -> Iterator[Opener]:
    kind: str = request.param
    files = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    placed = {f"a/set/{path}": data for path, data in files.items()}
    if kind == "local":
        yield lambda: open_store(parse_location(made), policy=fast)
    elif kind in {"hub", "bucket"}:
        with HubEmulator() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
            hub.add_dataset("o/n", placed)
            hub.add_bucket("o/b", placed)
            text = "hf://datasets/o/n@main/a/set" if kind == "hub" else "hf://buckets/o/b/a/set"
            yield lambda: open_store(parse_location(text), policy=fast)
            assert hub.leaked == []
    elif kind.startswith("http"):
        with RangeServer(placed, pages=kind == "http") as server:
            yield lambda: open_store(parse_location(f"{server.url}/a/set"), policy=fast)
    elif kind == "memory":
        memory: Any = fsspec.filesystem("memory")
        memory.pipe({f"/{path}": data for path, data in placed.items()})
        yield lambda: open_store(parse_location("memory://a/set"), policy=fast)
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
    else:
        if moto is None:
            pytest.skip("no moto_server: set REELRAY_MOTO_SERVER")
        pytest.importorskip("obstore")
        for name, value in {
            "ACCESS_KEY_ID": "test",
            "SECRET_ACCESS_KEY": "test",
            "REGION": "us-east-1",
            "ENDPOINT_URL": moto.endpoint,
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        for path, data in placed.items():
            moto.put("robots", path, data)
        yield lambda: open_store(parse_location("s3://robots/a/set"), policy=fast)


def _digests(store: Store) -> list[str]:
    dataset = open_dataset(store, return_uint8=True)
    found: list[str] = []
    for sample in iter_samples(dataset):
        digest = hashlib.sha256()
        for key in sorted(sample):
            value = sample[key]
            digest.update(f"{key}:".encode())
            digest.update(np.ascontiguousarray(value).tobytes() if not isinstance(value, str) else value.encode())
        found.append(digest.hexdigest())
    return found


def test_samples_are_those_of_the_local_directory(opener: Opener, made: Path) -> None:
    local = open_store(made)
    store = opener()
    assert _digests(store) == _digests(local)
    assert _digests(pickle.loads(pickle.dumps(store))) == _digests(local)


def test_bytes_and_names_are_those_of_the_local_directory(opener: Opener, made: Path) -> None:
    store, local = opener(), open_store(made)
    assert isinstance(store, Store)
    assert "://" in store.url or store.url == str(made)
    for prefix in ("meta/episodes", "data"):
        names = [item.path for item in local.list(prefix)]
        assert [item.path for item in store.list(prefix)] == [item.path for item in store.list(f"{prefix}/")] == names
        for name in names:
            assert store.size(name) == local.size(name)
            assert store.identity(name).path == name
            assert store.read_all(name) == local.read_all(name)
            with store.open(name) as mine, local.open(name) as theirs:
                assert mine.read(10) == theirs.read(10)
                assert mine.seek(-8, 2) == theirs.seek(-8, 2)
                assert mine.read() == theirs.read()
    assert store.list("none") == []
    names = [item.path for item in local.list() if item.path.endswith((".mp4", ".parquet"))]
    bulk = getattr(store, "identities", None)
    if bulk is not None:
        assert [item.path for item in bulk(names)] == names
        assert len({item.fingerprint for item in bulk(names)}) == len(names)
        with pytest.raises(ObjectNotFoundError):
            bulk([*names, "videos/none.mp4"])
    video = "videos/observation.images.cam0/chunk-000/file-000.mp4"
    wanted = [(100, 200), (0, 1), (150, 400), (7, 7)]
    assert store.read_ranges(video, wanted) == local.read_ranges(video, wanted)


def test_errors_are_those_of_the_local_directory(opener: Opener, made: Path) -> None:
    store = opener()
    for read in (store.size, store.identity, store.read_all, lambda path: store.read_ranges(path, [(0, 1)])):
        with pytest.raises(ObjectNotFoundError):
            read("videos/none.mp4")
        for path in ("../outside", "/etc/passwd", "a/../../b", "", "s3://bucket/x"):
            with pytest.raises(UnsafeInputError):
                read(path)
    size = store.size("meta/info.json")
    with pytest.raises(ShortReadError):
        store.read_ranges("meta/info.json", [(0, size + 1)])


def _faulty_epoch(server: RangeServer, expected: list[str], plan: dict[int, str], policy: RetryPolicy) -> int:
    """One epoch with faults at some request numbers; how many were injected."""
    server.forget()
    server.fault = lambda request: Fault(plan[request.number]) if request.number in plan else None
    assert _digests(open_store(parse_location(f"{server.url}/a/set"), policy=policy)) == expected
    return sum(bool(request.fault) for request in server.requests)


def test_an_epoch_through_faults_delivers_the_same_samples_in_the_same_order(made: Path, fast: RetryPolicy) -> None:
    files = {f"a/set/{path.relative_to(made).as_posix()}": path.read_bytes() for path in made.rglob("*") if path.is_file()}
    expected = _digests(open_store(made))
    kinds = ("reset", "cut", "short", "wrong_range", "status")
    with RangeServer(files) as server:
        assert _faulty_epoch(server, expected, {}, fast) == 0
        total = len(server.requests)
        for number in range(1, total + 1):
            _faulty_epoch(server, expected, {number: kinds[number % len(kinds)]}, fast)
        random = Random(11)
        injected = 0
        while injected < 100:
            plan = {number: random.choice(kinds) for number in random.sample(range(1, total + 10), 10)}
            injected += _faulty_epoch(server, expected, plan, fast)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("status", 403), AccessDeniedError),
        (Fault("status", 503), TransientStorageError),
        (Fault("cut"), TransientStorageError),
        (Fault("wrong_range"), ShortReadError),
    ],
)
def test_an_epoch_that_cannot_be_completed_ends_with_the_right_error(
    made: Path, fast: RetryPolicy, fault: Fault, error: type[StorageError]
) -> None:
    files = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with RangeServer(files) as server:
        dataset = open_dataset(open_store(parse_location(server.url), policy=fast), return_uint8=True)
        samples = iter_samples(dataset)
        next(samples)
        server.fault = lambda _: fault
        with pytest.raises(error, match=r"videos/|data/"):
            for _ in samples:
                pass


def test_no_video_byte_is_read_beyond_the_admitted_spans(made: Path, fast: RetryPolicy) -> None:
    files = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with RangeServer(files) as server:
        dataset = open_dataset(open_store(parse_location(server.url), policy=fast), episodes=[1], return_uint8=True)
        server.forget()
        assert sum(1 for _ in iter_samples(dataset)) == dataset.num_frames
        sent = sum(request.sent_bytes for request in server.requests if request.path.endswith(".mp4"))
        needed = dataset.counters.totals()["reelray_payload_bytes_needed"]
        assert needed <= sent <= 1.02 * needed
