"""Cache, lock and identity: the right sidecar is found, built once, and never replaced by half of one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from ingest.errors import (
    AccessDeniedError,
    LockTimeoutError,
    ObjectChangedError,
    ObjectNotFoundError,
    SidecarError,
    StorageError,
    VideoFormatError,
)
from ingest.storage.base import ObjectIdentity
from ingest.storage.local import LocalStore
from ingest.video.files import locked
from ingest.video.index import VideoIndex, probe_table
from ingest.video.sidecar.archive import SidecarArchive, load_sidecar
from ingest.video.sidecar.build import BuildProgress, build_sidecar, index_file
from ingest.video.sidecar.cache import index_path, resolve_sidecar
from ingest.video.sidecar.lookup import open_sidecar_file, open_video_index
from ingest.video.sidecar.parts import PartFolder, pack_part, remove_abandoned_parts
from ingest.video.sidecar.publish import LocalPublisher, publish_sidecar
from ingest.video.sidecar.spec import SidecarSpec, describe_source, mismatch

PINNED = "hf://datasets/me/data@" + "0123456789abcdef" * 2 + "01234567"


@dataclass(frozen=True)
class Remote:
    """A local store that describes itself like another kind of root."""

    inner: LocalStore
    kind: str
    location: str

    @property
    def url(self) -> str:
        return self.location

    def identity(self, path: str) -> ObjectIdentity:
        found = self.inner.identity(path)
        if self.kind == "pinned":
            return ObjectIdentity(path, None, None)
        if self.kind == "unstable":
            return ObjectIdentity(path, found.size, None, stable=False)
        return ObjectIdentity(path, found.size, hashlib.sha256(self.inner.read_all(path)).hexdigest())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def open_it(store: Any, paths: list[str], home: Path, **options: Any) -> Any:
    return open_video_index(store, paths, "me/data", options.pop("revision", "v3.0"), cache_home=home, **options)


def test_names_follow_the_published_rules() -> None:
    spec = SidecarSpec("me/my data!", "refs/convert x" + "y" * 40, "hf://buckets/o/b", {"a.mp4": 1}, {"a.mp4": "h"})
    identity = {"schema_version": 3, "repo_id": spec.repo_id, "revision": spec.revision, "data_root": spec.data_root}
    text = json.dumps({**identity, "source_fingerprints": {"a.mp4": "h"}}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert spec.cache_path(Path("home")) == Path(f"home/streaming-sidecars/me--my--data/mp4-v3-refs-convert-x{'y' * 18}-{digest}.npz")
    bare = replace(spec, fingerprints={}, repo_id="!!!", revision="@@@")
    identity.update(repo_id="!!!", revision="@@@")
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
    assert bare.cache_path(Path("h")) == Path(f"h/streaming-sidecars/dataset/mp4-v3-revision-{digest}.npz")


def test_published_names_use_the_commit_not_its_alias() -> None:
    spec = SidecarSpec("me/data", "main", PINNED, {"a.mp4": None})
    assert spec.published().file_name() == replace(spec, revision=PINNED.partition("@")[2]).file_name()
    assert spec.pinned_commit == PINNED.partition("@")[2]
    for root in ("hf://datasets/me/data@main", "hf://buckets/o/b", "folder", PINNED.upper()):
        assert replace(spec, data_root=root).pinned_commit is None
    assert replace(spec, data_root=PINNED + "/sub/folder").pinned_commit


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"repo_id": "x/y"}, "repo_id"),
        ({"data_root": "elsewhere"}, "data_root"),
        ({"revision": "v9"}, "revision"),
        ({"sizes": {"a.mp4": 2}}, "a.mp4 had 2 bytes, it has 1 now"),
        ({"sizes": {"a.mp4": 1, "b.mp4": 1}}, "1 indexed ones are not in the source"),
        ({"fingerprints": {"a.mp4": "other"}}, "another fingerprint"),
        ({"fingerprints": {}}, "another fingerprint"),
    ],
)
def test_what_makes_descriptions_differ(change: dict[str, Any], found: str) -> None:
    spec = SidecarSpec("me/data", "v3.0", "root", {"a.mp4": 1}, {"a.mp4": "f"})
    assert mismatch(spec, spec) is None
    assert found in (mismatch(spec, replace(spec, **change)) or "")


def test_a_pinned_root_shares_its_index_between_aliases_and_leaves_sizes_open() -> None:
    expected = SidecarSpec("me/data", "main", PINNED, {"a.mp4": None})
    assert mismatch(expected, SidecarSpec("me/data", "v3.0", PINNED, {"a.mp4": 77})) is None


def test_built_once_then_found(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    seen: list[BuildProgress] = []
    first = open_it(source, paths, tmp_path / "home", progress=seen.append)
    assert isinstance(first, VideoIndex)
    assert [(p.done, p.total) for p in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[-1].rate > 0
    assert seen[-1].bytes_read > 0
    assert seen[-1].eta_s == 0
    stamp = first.sidecar.stat()
    again = open_it(source, paths[::-1], tmp_path / "home", progress=lambda _: pytest.fail("built twice"))
    assert (first.origin, again.origin) == ("built", "cache")
    assert again.sidecar.stat().st_mtime_ns == stamp.st_mtime_ns
    for path in paths:
        np.testing.assert_array_equal(again.table(path).offsets, probe_table(source, path).offsets)
        assert again.table(path) is again.table(path)
    assert not first.has_checksums
    with pytest.raises(SidecarError, match="not among its 3 files"):
        again.table("videos/none.mp4")
    left = [str(p.relative_to(tmp_path / "home")) for p in (tmp_path / "home").rglob("*") if p.is_file()]
    assert not [name for name in left if ".tmp" in name]


def test_an_index_pickles_as_paths(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    index = open_it(source, paths, tmp_path / "home")
    data = pickle.dumps(index)
    assert len(data) < 1000
    np.testing.assert_array_equal(pickle.loads(data).table(paths[0]).sizes, index.table(paths[0]).sizes)


def test_a_dataset_without_videos_needs_no_sidecar(source: LocalStore, tmp_path: Path) -> None:
    index = open_it(source, [], tmp_path / "home")
    assert index.sidecar is None
    assert not (tmp_path / "home").exists()
    with pytest.raises(SidecarError, match="no video files"):
        index.table("a.mp4")


def test_a_file_changed_in_place_is_noticed(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    first = open_it(source, paths, tmp_path / "home")
    changed = source.root / paths[0]
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)  # same size
    second = open_it(source, paths, tmp_path / "home")
    assert (first.origin, second.origin) == ("built", "built")
    assert first.sidecar != second.sidecar
    second.check_unchanged(source, paths[0])
    for path in paths[1:]:
        first.check_unchanged(source, path)
    with pytest.raises(
        ObjectChangedError, match=r"file-000\.mp4 was indexed with \d+ bytes and identity .* changed under a running stream"
    ):
        first.check_unchanged(source, paths[0])


def test_unstable_sources_are_indexed_anew_at_every_open(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    store = Remote(source, "unstable", "https://host/data")
    made = [open_it(store, paths, tmp_path / "home") for _ in range(3)]
    assert [index.origin for index in made] == ["built"] * 3
    assert len({index.sidecar for index in made}) == 1
    assert made[-1].table(paths[0]).pictures == 20


def test_a_missing_video_is_named(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"gone\.mp4"):
        open_it(source, [*paths, "videos/gone.mp4"], tmp_path / "home")


def test_a_failed_build_leaves_the_previous_file(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    target = tmp_path / "out" / "s.npz"
    build_sidecar(source, paths, target, repo_id="me/data", revision="v3.0")
    before = target.read_bytes()
    (source.root / paths[2]).write_bytes(b"no video any more")
    with pytest.raises(VideoFormatError, match=r"videos/wrist/chunk-000/file-000\.mp4"):
        build_sidecar(source, paths, target, repo_id="me/data", revision="v3.0")
    assert target.read_bytes() == before
    assert sorted(p.name for p in target.parent.iterdir()) == ["s.npz", "s.npz.lock"]


def test_a_file_that_changes_while_it_is_indexed_is_noticed(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    def spoil(progress: BuildProgress) -> None:
        if progress.done == 1:
            (source.root / paths[0]).touch()

    with pytest.raises(ObjectChangedError, match="changed while it was indexed"):
        build_sidecar(source, paths, tmp_path / "s.npz", repo_id="me/data", revision="v3.0", progress=spoil)
    assert not (tmp_path / "s.npz").exists()


def test_building_is_idempotent_unless_forced_or_checksums_are_missing(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    make = lambda **options: build_sidecar(source, paths, tmp_path / "s.npz", repo_id="a/b", revision="v3.0", **options)  # noqa: E731
    assert [make().reused, make().reused, make(force=True).reused] == [False, True, False]
    report = make(checksums=True)
    assert not report.reused
    assert report.bytes_read > sum(len((source.root / path).read_bytes()) for path in paths) * 0.9
    assert [make(checksums=True).reused, make().reused] == [True, True]
    assert load_sidecar(tmp_path / "s.npz").has_checksums


def test_truncated_files_are_reported(source: LocalStore, paths: list[str], tmp_path: Path, encoded: dict[str, bytes]) -> None:
    from video.forge import Movie

    (source.root / paths[1]).write_bytes(Movie([9] * 10, [512] * 10, sync=[0]).build()[0][:-20])
    report = build_sidecar(source, paths, tmp_path / "s.npz", repo_id="a/b", revision="v3.0")
    assert report.truncated == {paths[1]: 3}


def test_older_schemas_damage_and_foreign_files_are_rebuilt(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    first = open_it(source, paths, tmp_path / "home")
    good = first.sidecar.read_bytes()
    for junk in (b"", b"junk" * 100, good[:-30], good[:200] + bytes(64) + good[264:]):
        first.sidecar.write_bytes(junk)
        index = open_it(source, paths, tmp_path / "home")
        assert index.table(paths[0]).pictures == 20
        assert index.sidecar.read_bytes() == good
        assert index.origin == "built"


@pytest.mark.parametrize("what", ["fifo", "device", "loop"])
def test_what_is_no_file_is_replaced_and_not_waited_for(source: LocalStore, paths: list[str], tmp_path: Path, what: str) -> None:
    first = open_it(source, paths, tmp_path / "home")
    places = (first.sidecar, index_path(first.sidecar, tmp_path / "home"))
    good = first.sidecar.read_bytes()
    for place in places:
        place.unlink()
        if what == "fifo":
            os.mkfifo(place)
        else:
            place.symlink_to("/dev/zero" if what == "device" else place.name)
    index = open_it(source, paths, tmp_path / "home")
    assert index.table(paths[0]).pictures == 20
    assert index.sidecar.read_bytes() == good


def test_lock_held_elsewhere_is_a_named_time_out(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    spec = describe_source(source, paths, repo_id="me/data", revision="v3.0")
    target = spec.cache_path(tmp_path / "home")
    target.parent.mkdir(parents=True)
    with FileLock(f"{target}.lock"), pytest.raises(LockTimeoutError, match=r"Timed out waiting 0\.2 s for MP4 sidecar lock") as caught:
        open_it(source, paths, tmp_path / "home", lock_timeout_s=0.2)
    assert f"{target}.lock" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert open_it(source, paths, tmp_path / "home", lock_timeout_s=0.2).origin == "built"


def test_waiting_for_a_lock_finds_what_the_other_built(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    origins: list[str] = []
    threads = [threading.Thread(target=lambda: origins.append(open_it(source, paths, tmp_path / "home").origin)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(origins) == ["built", *["cache"] * 5]


def test_read_only_and_full_disks_are_reported_as_such(
    source: LocalStore, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, kind in (
        (errno.EACCES, AccessDeniedError),
        (errno.EROFS, AccessDeniedError),
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
    ):

        def full(descriptor: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(kind, match=r"check permissions and free space in HF_LEROBOT_HOME") as caught:
            open_it(source, paths, tmp_path / f"home{code}")
        assert caught.value.errno == code
        assert os.strerror(code) in str(caught.value)
        monkeypatch.undo()
        assert not list((tmp_path / f"home{code}").rglob("*.npz"))


def test_a_read_only_index_folder_is_reported_not_rebuilt(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    resolved = resolve_sidecar(source, paths, repo_id="me/data", revision="v3.0", cache_home=home)
    stamp = resolved.path.stat().st_mtime_ns
    (home / "streaming-indexes").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match=r"cannot read the mapped MP4 index .*Not a directory"):
        open_it(source, paths, home)
    assert resolved.path.stat().st_mtime_ns == stamp


def test_killed_writers_leave_nothing_behind_for_long(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    spec = describe_source(source, paths, repo_id="me/data", revision="v3.0")
    target = spec.cache_path(tmp_path / "home")
    target.parent.mkdir(parents=True)
    leftover = target.with_name(f".{target.name}.0123.tmp.npz")
    leftover.write_bytes(b"half")
    open_it(source, paths, tmp_path / "home")
    assert not leftover.exists()


def test_parts_of_killed_builds_go_with_the_sidecar_or_once_they_are_old(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    target = tmp_path / "out" / "mp4-v3-v3.0-0123456789abcdef.npz"
    spec = describe_source(source, paths, repo_id="a/b", revision="v3.0")
    folder = PartFolder(target, spec, checksums=False)
    folder.keep(paths[0], pack_part(spec, index_file(source, paths[0]).table))
    assert folder.missing() == paths[1:]
    others = {age: PartFolder(target.with_name(f"mp4-v3-v3.0-{age:016d}.npz"), spec, checksums=False).folder for age in (1, 2, 3)}
    for age, other in others.items():
        other.mkdir()
        os.utime(other, (time.time() - age * 10_000,) * 2)
    foreign = target.with_name(".notes.parts")
    foreign.mkdir()
    with locked(target.with_name(others[3].name[1 : -len(".parts")]), 1, "MP4 sidecar"):
        assert remove_abandoned_parts(target, older_than_s=15_000) == 1
    assert [other.exists() for other in others.values()] == [True, False, True]
    assert folder.folder.exists()
    build_sidecar(source, paths, target, repo_id="a/b", revision="v3.0")
    assert not folder.folder.exists()
    assert foreign.exists()


def test_a_published_sidecar_is_used_read_only(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    store = Remote(source, "pinned", PINNED)
    local = tmp_path / "mine.npz"
    build_sidecar(store, paths, local, repo_id="me/data", revision="main")
    publisher = LocalPublisher(tmp_path / "hub")
    placed = publish_sidecar(publisher, local, store, paths)
    assert placed.branch == "lerobot-sidecars"
    assert placed.path.startswith("meta/mp4-sidecars/mp4-v3-0123456789abcdef")
    published = LocalStore.at(publisher.branch_folder(placed.branch))
    fail = lambda _: pytest.fail("was built")  # noqa: E731
    index = open_it(store, paths, tmp_path / "home", revision="v3.0", published=published, progress=fail)
    assert index.origin == "published"
    assert index.table(paths[0]).pictures == 20
    assert open_it(store, paths, tmp_path / "home", revision="v3.0", progress=fail).origin == "cache"


@pytest.mark.parametrize("damage", ["cut", "bits", "other source", "missing", "schema"])
def test_a_bad_published_sidecar_is_ignored(source: LocalStore, paths: list[str], tmp_path: Path, damage: str) -> None:
    store = Remote(source, "pinned", PINNED)
    spec = describe_source(store, paths, repo_id="me/data", revision="main")
    target = tmp_path / "hub" / "meta" / "mp4-sidecars" / spec.published().file_name()
    target.parent.mkdir(parents=True)
    build_sidecar(store, paths[:1] if damage == "other source" else paths, target, repo_id="me/data", revision="main")
    data = target.read_bytes()
    if damage == "missing":
        target.unlink()
    elif damage == "cut":
        target.write_bytes(data[:-100])
    elif damage == "bits":
        target.write_bytes(data[:150] + bytes([data[150] ^ 255]) + data[151:])
    elif damage == "schema":
        target.write_bytes(b"PK\5\6" + bytes(18))
    index = open_it(store, paths, tmp_path / "home", revision="main", published=LocalStore.at(tmp_path / "hub"))
    assert index.origin == "built"
    assert index.table(paths[2]).pictures == 30


def test_a_bucket_sidecar_without_fingerprints_is_rebuilt_once(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    bucket, bare = Remote(source, "bucket", "hf://buckets/o/b"), Remote(source, "pinned", "hf://buckets/o/b")
    spec = describe_source(bucket, paths, repo_id="o/b", revision="v3.0")
    target = tmp_path / "hub" / "meta" / "mp4-sidecars" / spec.published().file_name()
    build_sidecar(bare, paths, target, repo_id="o/b", revision="v3.0")
    published = LocalStore.at(tmp_path / "hub")
    before = target.read_bytes()
    origins = [open_video_index(bucket, paths, "o/b", "v3.0", cache_home=tmp_path / "home", published=published).origin for _ in range(2)]
    assert origins == ["built", "cache"]
    assert target.read_bytes() == before


def test_what_may_not_be_published(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    store, publisher = Remote(source, "pinned", PINNED), LocalPublisher(tmp_path / "hub")
    subset, unpinned, whole = tmp_path / "subset.npz", tmp_path / "unpinned.npz", tmp_path / "whole.npz"
    build_sidecar(store, paths[:2], subset, repo_id="me/data", revision="main")
    build_sidecar(source, paths, unpinned, repo_id="me/data", revision="main")
    build_sidecar(store, paths, whole, repo_id="me/data", revision="main")
    cases = [
        (subset, store, {}, "only a complete dataset sidecar can be published: it has 2 of 3"),
        (unpinned, source, {}, "pinned source commit"),
        (whole, store, {"repo_type": "bucket"}, "needs source fingerprints"),
        (whole, store, {"repo_type": "model"}, "neither 'dataset' nor 'bucket'"),
    ]
    for sidecar, origin, options, message in cases:
        with pytest.raises(SidecarError, match=message):
            publish_sidecar(publisher, sidecar, origin, paths, **options)
    (source.root / paths[0]).touch()
    with pytest.raises(SidecarError, match="does not describe the source as it is now"):
        publish_sidecar(publisher, unpinned, source, paths, repo_type="bucket")
    whole.write_bytes(whole.read_bytes()[:-7])
    with pytest.raises(SidecarError):
        publish_sidecar(publisher, whole, store, paths)
    assert not (tmp_path / "hub").exists()


def test_a_bucket_is_published_without_a_branch(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    store = Remote(source, "bucket", "hf://buckets/o/b")
    build_sidecar(store, paths, tmp_path / "s.npz", repo_id="o/b", revision="v3.0")
    placed = publish_sidecar(LocalPublisher(tmp_path / "hub"), tmp_path / "s.npz", store, paths, repo_type="bucket")
    assert placed.branch is None
    assert (tmp_path / "hub" / placed.path).read_bytes() == (tmp_path / "s.npz").read_bytes()


def test_nothing_written_holds_a_token(source: LocalStore, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecrettoken")
    open_it(source, paths, tmp_path / "home")
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file() and b"verysecret" in p.read_bytes()]


def test_the_environment_names_the_cache(source: LocalStore, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "elsewhere"))
    index = open_video_index(source, paths, "me/data", "v3.0")
    assert tmp_path / "elsewhere" / "streaming-sidecars" in index.sidecar.parents
    assert index_path(index.sidecar, tmp_path / "elsewhere").exists()
    assert open_sidecar_file(index.sidecar).table(paths[1]).pictures == 25


RACER = """
import sys, time
from pathlib import Path
from ingest.storage.local import LocalStore
from ingest.video.sidecar.lookup import open_video_index
root, home, start, *paths = sys.argv[1:]
while not Path(start).exists():
    time.sleep(0.005)
index = open_video_index(LocalStore.at(root), paths, "me/data", "v3.0", cache_home=Path(home), workers=2)
print(index.origin, sum(index.table(path).pictures for path in paths))
"""


def test_eight_racing_processes_build_once(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    start = tmp_path / "start"
    command = [sys.executable, "-c", RACER, str(source.root), str(tmp_path / "home"), str(start), *paths]
    root = Path(__file__).resolve().parents[2]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(8)]
    time.sleep(1.0)
    start.touch()
    answers = sorted(racer.communicate(timeout=120)[0].strip() for racer in racers)
    assert answers == ["built 75", *["cache 75"] * 7]
    home = tmp_path / "home"
    assert len(list(home.rglob("*.npz"))) == len(list(home.rglob("*.bin"))) == 1
    with SidecarArchive(next(home.rglob("*.npz"))) as archive:
        archive.validate()
