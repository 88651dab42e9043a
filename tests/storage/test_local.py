from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from ingest.errors import AccessDeniedError, ObjectNotFoundError, ShortReadError, StorageError, UnsafeInputError
from ingest.storage.atomic import write_atomic
from ingest.storage.base import Store
from ingest.storage.local import LocalStore
from ingest.storage.paths import common_folder


def test_reads_lists_and_identifies(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.bin").write_bytes(b"0123456789")
    (tmp_path / "z").write_bytes(b"")
    store = LocalStore.at(tmp_path)
    assert isinstance(store, Store)
    assert [item.path for item in store.list()] == ["a/b/c.bin", "z"]
    assert [item.path for item in store.list("a/")] == ["a/b/c.bin"]
    assert store.read_ranges("a/b/c.bin", [(2, 5), (0, 1), (9, 10), (4, 4)]) == [b"234", b"0", b"9", b""]
    assert (store.read_all("z"), store.size("a/b/c.bin")) == (b"", 10)
    before = store.identity("a/b/c.bin")
    os.utime(tmp_path / "a" / "b" / "c.bin", ns=(1, 1))
    assert store.identity("a/b/c.bin").fingerprint != before.fingerprint
    assert pickle.loads(pickle.dumps(store)) == store


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    store = LocalStore.at(tmp_path)
    with pytest.raises(ShortReadError, match="ends at 3"):
        store.read_ranges("a", [(1, 9)])
    with pytest.raises(ObjectNotFoundError):
        store.read_all("none")
    for path in ("..", "../a", "/a", "~/a", "x\\y", "a\0b", "c:/x", ""):
        with pytest.raises(UnsafeInputError):
            store.read_all(path)
    with pytest.raises(ObjectNotFoundError, match="not a directory"):
        LocalStore.at(tmp_path / "a")
    if os.geteuid() != 0:
        (tmp_path / "a").chmod(0)
        with pytest.raises(AccessDeniedError):
            store.read_all("a")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "info.json"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    store = LocalStore.at(tmp_path)
    for read in (store.read_all, store.open, lambda path: store.read_ranges(path, [(0, 1)])):
        with pytest.raises(StorageError, match="no regular file" if kind != "folder" else "Is a directory"):
            read("info.json")


def test_metadata_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsafeInputError, match="cannot be read whole"):
        LocalStore.at(tmp_path).read_all("sparse")


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        ([], ""),
        (["a"], ""),
        (["a/b"], "a"),
        (["a/b/c", "a/b/d"], "a/b"),
        (["a/b/c", "a/x"], "a"),
        (["a/b", "c/d"], ""),
        (["ab/c", "a/c"], ""),
    ],
)
def test_common_folder(paths: list[str], folder: str) -> None:
    assert common_folder(paths) == folder


def test_an_atomic_write_that_fails_leaves_the_old_content_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x" / "file"
    write_atomic(target, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, b"new", durable=True)
    assert target.read_bytes() == b"old"
    assert list(target.parent.iterdir()) == [target]
