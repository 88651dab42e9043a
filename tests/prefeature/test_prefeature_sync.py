"""Sync and restore: by hash, in order, never deleting, never believing an unfinished upload."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from servers.s3 import S3Server, find_moto
from tinydata import SHORT, STEP, tree_digest

from ingest.errors import DamagedDataError, LocationError, MetadataError, SettingsError, StorageError
from ingest.prefeature import layout
from ingest.prefeature import sync as sync_module
from ingest.prefeature.build import build_local
from ingest.prefeature.config import fingerprint_of
from ingest.prefeature.durable import FileDigest, write_tensors
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.merge import merge
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.remote import Remote
from ingest.prefeature.sync import ensure, sync
from ingest.prefeature.tensorfile import read_header
from ingest.prefeature.validate import validate


@pytest.fixture
def copy(tmp_path: Path) -> Remote:
    """An empty durable copy in a folder."""
    return Remote(f"file://{tmp_path / 'durable' / 'v4'}")


class Watched:
    """A file system that records uploads and may misbehave once per path."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.opened: list[str] = []
        self.lose: set[str] = set()
        self.spoil: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        assert "rm" not in name.split("_"), "a delete was asked for"
        assert name not in ("delete", "mv", "move"), "a delete was asked for"
        return getattr(self.real, name)

    def open(self, path: str, mode: str, **options: Any) -> Any:
        if mode != "wb":
            return self.real.open(path, mode, **options)
        relative = path.split("/v4/", 1)[1]
        self.opened.append(relative)
        if relative in self.lose:
            self.lose.discard(relative)
            return self.real.open(path + ".lost", mode, **options)
        if relative in self.spoil:
            self.spoil.discard(relative)
            return Spoiler(self.real.open(path, mode, **options))
        return self.real.open(path, mode, **options)


class Spoiler:
    """Flips one byte of what is written."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __enter__(self) -> Spoiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.close()

    def write(self, data: bytes) -> int:
        return self.handle.write(bytes([data[0] ^ 1]) + data[1:])


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Watched, Remote]:
    """A watched copy in memory."""
    fs = Watched(fsspec.filesystem("memory"))
    fs.real.store.clear()
    return fs, Remote("memory://bucket/v4", fs=fs)


def test_round_trip(dataset: Path, copy: Remote, tmp_path: Path) -> None:
    dry = sync(dataset, copy, execute=False)
    assert not dry.executed
    assert copy.list() == {}
    sent = sync(dataset, copy, execute=True)
    assert set(dry.uploads) == set(sent.uploads)
    assert sent.success
    assert sync(dataset, copy, execute=True).uploads == ()
    restored = tmp_path / "restored"
    report = ensure(restored, copy, parts="base")
    assert not report.complete
    assert not (restored / layout.TEXT_KV).exists()
    assert not (restored / layout.SUCCESS).exists()
    assert ensure(restored, copy, parts="text-kv").complete
    assert (restored / layout.SUCCESS).exists()
    assert tree_digest(restored) == tree_digest(dataset)
    assert validate(restored).ok
    assert ensure(restored, copy, parts="all", deep=True).restored == ()
    assert not any(report.built for report in build_local(restored, ReferenceTeacher(SHORT)))


def test_order_of_uploads(dataset: Path, watched: tuple[Watched, Remote]) -> None:
    fs, remote = watched
    sync(dataset, remote, execute=True)
    assert fs.opened[0] == layout.CONFIG
    assert fs.opened[-5:] == [layout.INVENTORY, layout.CASES, layout.MANIFEST, layout.TRAIN_MANIFEST, layout.SUCCESS]
    assert not any(path.startswith("logs/") or ".tmp" in path for path in fs.opened)


def test_a_changed_byte_of_equal_size_and_time_is_sent(dataset: Path, copy: Remote) -> None:
    sync(dataset, copy, execute=True)
    path = dataset / STEP
    stat = path.stat()
    with open(path, "r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = sync(dataset, copy, execute=True)
    assert set(report.changed) == {STEP}
    assert STEP in report.uploads
    assert not report.success
    with pytest.raises(MetadataError, match="does not attest"):
        ensure(dataset, copy)


def test_a_lost_upload_is_sent_again(dataset: Path, watched: tuple[Watched, Remote]) -> None:
    fs, remote = watched
    fs.lose, fs.spoil = {STEP}, {layout.case_path(0)}
    assert sync(dataset, remote, execute=True).success
    assert fs.opened.count(STEP) == 2
    assert fs.opened.count(layout.case_path(0)) == 2
    assert remote.digest(STEP).size == (dataset / STEP).stat().st_size


def test_an_upload_that_never_arrives_fails_without_a_success_mark(dataset: Path, watched: tuple[Watched, Remote]) -> None:
    fs, remote = watched

    class Always(set[str]):
        def discard(self, element: str) -> None:
            return None

    fs.spoil = Always({STEP})
    with pytest.raises(StorageError, match="other bytes than were sent"):
        sync(dataset, remote, execute=True)
    assert layout.SUCCESS not in remote.list()
    fs.spoil = set()
    assert sync(dataset, remote, execute=True).success


def test_an_unvalidated_dataset_is_sent_without_the_mark(dataset: Path, copy: Remote, tmp_path: Path) -> None:
    (dataset / layout.SUCCESS).unlink()
    assert not sync(dataset, copy, execute=True).success
    with pytest.raises(StorageError, match="_SUCCESS"):
        ensure(tmp_path / "other", copy)


def test_a_sync_that_breaks_off_goes_on_where_it_stopped(
    dataset: Path, watched: tuple[Watched, Remote], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fs, remote = watched
    monkeypatch.setattr(sync_module, "BATCH_FILES", 16)
    total = len(sync(dataset, remote, execute=False).uploads)
    real, left = Remote.upload, [60]

    def upload(self: Remote, source: Path, path: str) -> FileDigest:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("connection reset")
        return real(self, source, path)

    monkeypatch.setattr(Remote, "upload", upload)
    with pytest.raises(StorageError, match="reset"):
        sync(dataset, remote, execute=True, threads=1)
    monkeypatch.setattr(Remote, "upload", real)
    with pytest.raises(StorageError, match="_SUCCESS"):
        ensure(tmp_path / "elsewhere", remote)
    fs.opened.clear()
    rest = sync(dataset, remote, execute=True, threads=1)
    assert rest.success
    assert total - 60 <= len(rest.uploads) <= total - 48
    assert len(fs.opened) <= len(rest.uploads) + 3
    assert ensure(tmp_path / "elsewhere", remote, parts="all", deep=True).complete
    assert tree_digest(tmp_path / "elsewhere") == tree_digest(dataset)


def test_what_is_being_replaced_is_not_vouched_for(dataset: Path, watched: tuple[Watched, Remote]) -> None:
    """A file changes, its upload breaks off after it arrived, and the file changes back: the old record must not count."""
    _, remote = watched
    sync(dataset, remote, execute=True)
    old = (dataset / STEP).read_bytes()
    (dataset / STEP).write_bytes(old[:-1] + bytes([old[-1] ^ 1]))
    real = Remote.digest

    def digest(self: Remote, path: str) -> FileDigest:
        if path == STEP:
            raise StorageError("connection reset")
        return real(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, "digest", digest)
        with pytest.raises(StorageError, match="reset"):
            sync(dataset, remote, execute=True)
    assert remote.read(STEP) != old
    (dataset / STEP).write_bytes(old)
    merge(dataset)
    validate(dataset)
    assert STEP in sync(dataset, remote, execute=True).uploads
    assert remote.read(STEP) == old


def test_unknown_remote_objects_are_reported_and_kept(dataset: Path, copy: Remote) -> None:
    sync(dataset, copy, execute=True)
    copy.write("steps/notes.txt", b"mine")
    report = sync(dataset, copy, execute=True)
    assert report.unknown == ("steps/notes.txt",)
    assert copy.read("steps/notes.txt") == b"mine"


@pytest.mark.parametrize(
    "url", ["", "s3://", "s3://bucket", "s3://bucket/", "/bucket/x", "ftp://a/b", "memory://a/../b", "file::memory://a/b"]
)
def test_prefixes_that_could_hold_other_things_are_refused(url: str) -> None:
    with pytest.raises(LocationError):
        Remote(url)


def test_the_parent_prefix_and_foreign_data_are_refused(dataset: Path, copy: Remote, tmp_path: Path) -> None:
    sync(dataset, copy, execute=True)
    with pytest.raises(MetadataError, match="wrong prefix"):
        sync(dataset, Remote(f"file://{tmp_path / 'durable'}"), execute=True)


def test_another_builds_prefix_is_refused(dataset: Path, copy: Remote, tmp_path: Path) -> None:
    sync(dataset, copy, execute=True)
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    raw = json.loads((other / layout.CONFIG).read_text(encoding="utf-8"))
    raw["seed"] = 7
    raw["fingerprint"] = fingerprint_of(raw)
    (other / layout.CONFIG).write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(MetadataError, match="holds build"):
        sync(other, copy, execute=True)
    with pytest.raises(MetadataError, match="use another folder"):
        ensure(other, copy)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_ensure_repairs_exactly_the_damaged_file(dataset: Path, copy: Remote, damage: str) -> None:
    sync(dataset, copy, execute=True)
    before = tree_digest(dataset)
    path = dataset / STEP
    inodes = {other: other.stat().st_ino for other in dataset.rglob("*.safetensors") if other != path}
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        os.truncate(path, 5000)
    else:
        data = bytearray(path.read_bytes())
        data[-7] ^= 4
        path.write_bytes(bytes(data))
        assert STEP not in ensure(dataset, copy, parts="all", sample=0.0).restored
    with pytest.raises(DamagedDataError, match="chunk_02"):
        ensure(dataset, copy, parts="all", deep=True, repair=False)
    assert ensure(dataset, copy, parts="all", deep=True).restored == (STEP,)
    assert tree_digest(dataset) == before
    assert {other: other.stat().st_ino for other in inodes} == inodes


@pytest.mark.parametrize("damage", ["gone", "torn", "edited"])
def test_ensure_repairs_the_configuration_itself(dataset: Path, copy: Remote, damage: str) -> None:
    sync(dataset, copy, execute=True)
    before = tree_digest(dataset)
    path = dataset / layout.CONFIG
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:300])
    else:
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"seed": 5}), encoding="utf-8")
    assert ensure(dataset, copy).restored == (layout.CONFIG,)
    assert tree_digest(dataset) == before


def test_a_torn_configuration_does_not_hide_another_build(dataset: Path, copy: Remote) -> None:
    sync(dataset, copy, execute=True)
    header = read_header(dataset, layout.NOISE)
    specs = [entry.spec for entry in header.entries.values()]
    other = dict(header.metadata) | {"build_fingerprint": "sha256:other"}
    write_tensors(dataset / layout.NOISE, specs, read_tensors(dataset, layout.NOISE), other)
    (dataset / layout.CONFIG).write_bytes(b"{")
    with pytest.raises(MetadataError, match="holds build sha256:other"):
        ensure(dataset, copy)


def test_a_sync_that_breaks_off_takes_the_mark_away(dataset: Path, watched: tuple[Watched, Remote], tmp_path: Path) -> None:
    fs, remote = watched
    sync(dataset, remote, execute=True)
    other = dataset / layout.step_path(RecordKey(0, 0, 1))
    for path in (dataset / STEP, other):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    class Broken(set[str]):
        def discard(self, element: str) -> None:
            return None

    fs.spoil = Broken({STEP})
    with pytest.raises(StorageError):
        sync(dataset, remote, execute=True)
    with pytest.raises(MetadataError, match="an upload is unfinished or was not validated"):
        ensure(tmp_path / "elsewhere", remote)
    assert not list((tmp_path / "elsewhere").glob("steps"))


def test_a_damaged_remote_is_never_restored_from(dataset: Path, copy: Remote, tmp_path: Path) -> None:
    sync(dataset, copy, execute=True)
    copy.write(STEP, b"x" * (dataset / STEP).stat().st_size)
    target = tmp_path / "target"
    with pytest.raises(StorageError, match="the inventory says"):
        ensure(target, copy)
    assert not (target / STEP).exists()
    assert not (target / layout.SUCCESS).exists()


def test_an_interrupted_restore_goes_on(dataset: Path, copy: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync(dataset, copy, execute=True)
    target = tmp_path / "target"
    real, left = Remote.download, [20]

    def download(self: Remote, path: str, *rest: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("connection reset")
        real(self, path, *rest)

    monkeypatch.setattr(Remote, "download", download)
    with pytest.raises(StorageError, match="reset"):
        ensure(target, copy, parts="all", threads=1)
    monkeypatch.setattr(Remote, "download", real)
    report = ensure(target, copy, parts="all")
    assert report.complete
    assert len(report.restored) == report.checked - 20


def test_sync_needs_a_merge_and_ensure_a_known_part(dataset: Path, copy: Remote) -> None:
    (dataset / layout.INVENTORY).unlink()
    with pytest.raises(MetadataError, match="_inventory"):
        sync(dataset, copy, execute=True)
    with pytest.raises(SettingsError, match="base, text-kv, all"):
        ensure(dataset, copy, parts="everything")


def test_a_remerge_of_the_same_build_sends_nothing_but_the_mark(dataset: Path, copy: Remote) -> None:
    sync(dataset, copy, execute=True)
    merge(dataset)
    validate(dataset)
    assert sync(dataset, copy, execute=True).uploads == ()


def test_etags_are_never_compared() -> None:
    folder = Path(Remote.__init__.__code__.co_filename).parent
    for path in folder.glob("*.py"):
        assert "etag" not in path.read_text(encoding="utf-8").lower(), path


def _drain(pipe: Any) -> None:
    for _ in pipe:
        pass


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """An S3 server over HTTP in a process of its own."""
    pytest.importorskip("obstore", reason="needs the s3 extra")
    executable = find_moto()
    if executable is None:
        pytest.skip("no S3 test server: install moto[server] into an environment of its own and name it in REELRAY_MOTO_SERVER")
    server = S3Server(executable)
    # the server logs every request to a pipe; one that nobody reads fills up and stops it
    reader = threading.Thread(target=_drain, args=(server.process.stderr,))
    reader.start()
    yield server
    server.process.terminate()
    reader.join(20)
    server.close()


@pytest.mark.slow
def test_round_trip_over_s3(dataset: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3_server.make_bucket("durable")
    remote = Remote("s3://durable/datasets/v4")
    assert sync(dataset, remote, execute=True, threads=4).success
    assert sync(dataset, remote, execute=True, threads=4).uploads == ()
    restored = tmp_path / "restored"
    assert ensure(restored, remote, parts="all", threads=4).complete
    assert tree_digest(restored) == tree_digest(dataset)
    assert validate(restored).ok
