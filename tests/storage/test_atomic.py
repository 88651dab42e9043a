"""Files that replace others never follow a link that somebody planted where they go."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from ingest.prefeature import durable
from ingest.storage import atomic


@pytest.mark.parametrize(
    "write", [atomic.write_atomic, lambda path, data: durable.write_atomic(path, lambda file: file.write(data))], ids=["storage", "durable"]
)
def test_a_planted_link_is_replaced_and_its_target_left_alone(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    target = tmp_path / "somebody's"
    target.write_bytes(b"precious")
    place = tmp_path / "cache" / "entry"
    place.parent.mkdir()
    place.symlink_to(target)
    write(place, b"new")
    assert target.read_bytes() == b"precious"
    assert not place.is_symlink()
    assert place.read_bytes() == b"new"


def test_a_link_at_the_temporary_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "somebody's"
    target.write_bytes(b"precious")
    link = tmp_path / ".entry.tmp"
    link.symlink_to(target)
    monkeypatch.setattr(durable, "temporary_name", lambda path: link)
    with pytest.raises(OSError, match=r"entry"):
        durable.write_atomic(tmp_path / "entry", lambda file: file.write(b"new"))
    assert target.read_bytes() == b"precious"


def test_a_file_that_finds_no_room_is_named_and_leaves_the_old_one(tmp_path: Path) -> None:
    place = tmp_path / "order.parquet"
    place.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"order\.parquet"):
            atomic.write_atomic(place, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["order.parquet"]
    assert place.read_bytes() == b"old"


def test_a_file_may_be_read_by_whom_the_umask_lets_in(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic.write_atomic(tmp_path / "order.parquet", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "order.parquet").stat().st_mode & 0o777 == 0o640
