"""Versions that one process of a host asked for: the others do not ask again, and nothing stale outlives its discovery."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.ranges import RangeServer

from ingest import settings
from ingest.engine.dataset import iter_samples, open_dataset
from ingest.errors import ObjectChangedError, ObjectNotFoundError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.storage.locations import parse_location
from ingest.storage.retry import RetryPolicy
from ingest.storage.stores import open_store

EPOCH = """
import sys
from ingest.engine.dataset import iter_samples, open_dataset
print(sum(1 for _ in iter_samples(open_dataset(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("made") / "set"
    make_dataset(root, MakeOptions(episodes=6, frames="4", cameras=2, size=(32, 64), gop=2, video_files=6, data_files=3))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[RangeServer]:
    with RangeServer(files) as server:
        yield server


def heads(server: RangeServer) -> Counter[str]:
    return Counter(request.path.strip("/") for request in server.requests if request.method == "HEAD" and "/meta/" not in request.path)


def frames(url: str) -> int:
    return sum(1 for _ in iter_samples(open_dataset(url)))


def test_processes_of_a_host_ask_for_each_file_once(server: RangeServer) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", EPOCH, server.url], stdout=subprocess.PIPE, env={**os.environ}) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == [b"24"] * 3
    asked = heads(server)
    assert sum(path.endswith(".mp4") for path in asked) == 12
    assert set(asked.values()) == {1}
    server.forget()
    assert frames(server.url) == 24
    assert heads(server) == Counter()


def test_metadata_that_was_published_anew_ends_what_is_kept(server: RangeServer, files: dict[str, bytes]) -> None:
    assert frames(server.url) == 24
    server.forget()
    server.objects = {**files, "meta/info.json": files["meta/info.json"] + b"\n"}
    assert frames(server.url) == 24
    assert sum(path.endswith(".mp4") for path in heads(server)) == 12


def test_a_replaced_video_is_an_error_once_and_indexed_anew_by_the_next_start(
    server: RangeServer, files: dict[str, bytes], fast: RetryPolicy
) -> None:
    assert frames(server.url) == 24
    video = "videos/observation.images.cam1/chunk-000/file-002.mp4"
    flipped = bytearray(files[video])
    flipped[-1] ^= 1
    server.objects = {**files, video: bytes(flipped)}
    with pytest.raises(ObjectChangedError, match=r"file-002\.mp4: changed while it was in use: it was .* now it is"):
        for _ in iter_samples(open_dataset(open_store(parse_location(server.url), policy=fast))):
            pass
    server.forget()
    assert frames(server.url) == 24
    assert sum(path.endswith(".mp4") for path in heads(server)) == 12


def test_the_versions_of_a_few_files_are_asked_for_at_every_opening(server: RangeServer, files: dict[str, bytes]) -> None:
    few = {name: data for name, data in files.items() if "cam1" not in name}
    names = [name for name in files if name.endswith(".mp4")][:4]
    for data in (files, few | {name: files[name][::-1] for name in names}):
        server.forget()
        server.objects = data
        store = open_store(server.url)
        store.read_all("meta/info.json")
        found = store.identities(names)  # pyright: ignore[reportAttributeAccessIssue]
        assert len(heads(server)) == 4
        assert len({one.fingerprint for one in found}) == 4


def test_what_is_kept_ends_after_a_while(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frames(server.url) == 24
    (kept,) = [path for path in (settings.lerobot_home() / "streaming-metadata" / "heads").iterdir() if path.suffix != ".lock"]
    now = time.time()
    for later, asked in ((500, 0), (700, 12), (900, 0), (-5000, 12)):
        server.forget()
        monkeypatch.setattr("ingest.storage.host_heads.time.time", lambda later=later: now + later)
        open_dataset(server.url)
        assert sum(path.endswith(".mp4") for path in heads(server)) == asked, later
    assert kept.exists()


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"1e999\n[1]\n", b"\xff" * 50, b"[" * 100_000])
def test_damage_only_costs_requests(server: RangeServer, damage: bytes) -> None:
    assert frames(server.url) == 24
    (kept,) = [path for path in (settings.lerobot_home() / "streaming-metadata" / "heads").iterdir() if path.suffix != ".lock"]
    whole = kept.read_bytes()
    for content in (damage, whole[:15] + damage, whole.splitlines(keepends=True)[0] + damage, whole[:-7]):
        kept.write_bytes(content)
        assert frames(server.url) == 24
    server.forget()
    assert frames(server.url) == 24
    assert heads(server) == Counter()


def test_a_host_that_cannot_keep_it_asks_each_time(server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "file" / "none"))
        server.forget()
        store = open_store(parse_location(server.url))
        store.read_all("meta/info.json")
        names = [f"videos/observation.images.cam0/chunk-000/file-00{number}.mp4" for number in range(6)]
        assert [one.path for one in store.identities(names)] == names  # pyright: ignore[reportAttributeAccessIssue]
        assert len(heads(server)) == 6


def test_servers_without_versions_and_missing_files_are_never_kept(files: dict[str, bytes]) -> None:
    with RangeServer(files, etags=False) as server:
        for _ in range(2):
            server.forget()
            store = open_store(parse_location(server.url))
            store.read_all("meta/info.json")
            assert not store.identity("data/chunk-000/file-000.parquet").stable
            assert len(heads(server)) == 1
    with RangeServer(files) as server:
        for _ in range(2):
            store = open_store(parse_location(server.url))
            store.read_all("meta/info.json")
            with pytest.raises(ObjectNotFoundError):
                store.identity("videos/none.mp4")
