"""The file container and durable writing."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinydata import SHORT

from ingest.errors import DamagedDataError, DatasetError, StorageError
from ingest.prefeature import layout
from ingest.prefeature.config import read_config
from ingest.prefeature.durable import remove_file, remove_orphans, temporary_name, write_atomic, write_bytes, write_tensors
from ingest.prefeature.journal import JournalWriter
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.tensorfile import TensorSpec, parse_header, read_header

DTYPES = st.sampled_from(["I64", "F32", "BF16", "BOOL", "U8"])
SPECS = st.dictionaries(
    st.text("abcXYZ_0é", min_size=1, max_size=8), st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6
)


@given(SPECS)
@settings(max_examples=40, deadline=None)
def test_files_equal_those_of_the_library(tmp_path_factory: pytest.TempPathFactory, chosen: dict[str, tuple[str, list[int]]]) -> None:
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, (dtype, shape) in chosen.items()]
    tensors = {spec.name: torch.randint(0, 2, spec.shape).to(spec.torch_dtype) for spec in specs}
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    digest = write_tensors(path, specs, tensors, {})
    assert path.read_bytes() == safetensors.torch.save(tensors)
    assert digest.size == path.stat().st_size
    loaded = safetensors.torch.load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_library_reads_metadata_and_zero_length_files(short_built: Path) -> None:
    path = short_built / layout.context_path(layout.RecordKey(0, 0, 0), 1)
    with safetensors.safe_open(path, "pt") as handle:
        assert handle.get_tensor("img_modulated").shape == (1, 0, SHORT.hidden)
        metadata = handle.metadata()
    assert metadata["key"] == "case_0000/action_00/chunk_00/block_01"
    assert metadata["build_fingerprint"] == read_config(short_built).fingerprint


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a":1}',
        b'{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}',
        b'{"a":{"dtype":"BF16","shape":[-1],"data_offsets":[0,2]}}',
        b'{"a":{"dtype":"BF16","shape":[9999999999999999999],"data_offsets":[0,2]}}',
        b'{"a":{"dtype":"BF16","shape":[true],"data_offsets":[0,2]}}',
        b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[2,4]}}',
        b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"b":{"dtype":"BF16","shape":[1],"data_offsets":[1,3]}}',
        b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}',
        b'{"__metadata__":{"x":1}}',
        b'{"__metadata__":[]}',
        b"\xff\xfe",
    ],
)
def test_hostile_headers_are_typed_errors(header: bytes) -> None:
    with pytest.raises(DamagedDataError, match=r"x\.safetensors"):
        parse_header(header, "x.safetensors")


@given(st.binary(max_size=80))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_a_header_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(data)
    with contextlib.suppress(DamagedDataError):
        read_header(path.parent, "x")


def test_a_writer_that_fails_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_bytes(path, b"old")
    with pytest.raises(RuntimeError):
        write_atomic(path, lambda handle: handle.write(b"half") and raise_error())
    assert path.read_bytes() == b"old"

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StorageError, match="write to a local disk, then sync"):
            write_bytes(path, b"new")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="the disk is full"):
            write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_data_reaches_the_disk_before_its_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    replace = os.replace

    def sync(descriptor: int) -> None:
        seen.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"file of {os.fstat(descriptor).st_size} bytes")

    def rename(source: Path, target: Path) -> None:
        seen.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_bytes(tmp_path / "x", b"four")
    assert seen == ["file of 4 bytes", "rename", "folder"]
    seen.clear()
    spec = TensorSpec("a", "BF16", (5,))
    size = write_tensors(tmp_path / "y", [spec], {"a": torch.ones(5, dtype=torch.bfloat16)}, {}).size
    assert seen == [f"file of {size} bytes", f"file of {size} bytes", "rename", "folder"]
    seen.clear()
    remove_file(tmp_path / "x")
    remove_file(tmp_path / "x")
    assert seen == ["folder"]
    journal = JournalWriter(tmp_path, 0, "sha256:x")
    seen.clear()
    journal.append("frozen", {})
    journal.close()
    assert len(seen) == 1


def test_bit_patterns_of_bf16_survive(tmp_path: Path) -> None:
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    write_tensors(tmp_path / "x", [TensorSpec("a", "BF16", (65536,))], {"a": bits.view(torch.bfloat16)}, {})
    read = read_tensors(tmp_path, "x")["a"]
    assert torch.equal(read.view(torch.int16), bits)
    carried = torch.from_numpy(read.view(torch.uint16).numpy().copy()).view(torch.bfloat16)
    assert torch.equal(carried.view(torch.int16), bits)


def raise_error() -> None:
    """Fails in the middle of a write."""
    raise RuntimeError


def test_saving_over_a_file_that_is_mapped_gives_correct_data(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    specs = [TensorSpec("a", "F32", (4000,))]
    write_tensors(path, specs, {"a": torch.ones(4000)}, {})
    mapped = safetensors.torch.load_file(path)
    write_tensors(path, specs, {"a": mapped["a"] * 2}, {"edited": "yes"})
    assert torch.equal(safetensors.torch.load_file(path)["a"], torch.full((4000,), 2.0))
    assert torch.equal(mapped["a"], torch.ones(4000))


def test_only_orphans_of_dead_processes_of_this_host_are_removed(tmp_path: Path) -> None:
    mine = temporary_name(tmp_path / "a.safetensors")
    dead = mine.with_name(mine.name.replace(f".{os.getpid()}.", ".4194303."))
    foreign = dead.with_name(dead.name.replace(mine.name.split(".")[3], "elsewhere"))
    other = tmp_path / ".keep.tmp"
    for path in (mine, dead, foreign, other):
        path.write_bytes(b"half")
    assert remove_orphans(tmp_path, older_s=3600) == []
    assert remove_orphans(tmp_path, older_s=0) == [dead.name]
    assert sorted(tmp_path.iterdir()) == sorted((mine, foreign, other))


def test_wrong_tensors_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "BF16", (2,))]
    for tensors in (
        {},
        {"a": torch.ones(2)},
        {"a": torch.ones(3, dtype=torch.bfloat16)},
        {"a": torch.ones(2).bfloat16(), "b": torch.ones(1)},
    ):
        with pytest.raises(DatasetError):
            write_tensors(tmp_path / "x", specs, tensors, {})
    assert not list(tmp_path.iterdir())
