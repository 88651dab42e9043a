"""The sidecar file: readable by LeRobot and from LeRobot, deterministic, and closed to bad input."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from video.forge import MemoryStore, Movie, encode, pictures
from video.test_tables import movies

from ingest.errors import SidecarError
from ingest.storage.base import ObjectIdentity
from ingest.storage.local import LocalStore
from ingest.video.boxes import read_sample_table
from ingest.video.sidecar.archive import ArchiveWriter, SidecarArchive, load_sidecar, write_archive
from ingest.video.sidecar.build import build_sidecar, index_files
from ingest.video.sidecar.records import LEROBOT_ARRAYS
from ingest.video.sidecar.spec import SidecarSpec
from ingest.video.tables import SampleTable

FIELDS = [name for name in SampleTable.__dataclass_fields__ if name != "gop_xxh3"]


def assert_same_table(one: SampleTable, two: SampleTable, *, lerobot: bool = False) -> None:
    """Every field equal; ``lerobot`` leaves out what LeRobot's file cannot say."""
    skipped = {"movie_timescale", "timeline", "starts"} if lerobot else set()
    for name in [n for n in FIELDS if n not in skipped]:
        left, right = getattr(one, name), getattr(two, name)
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right, err_msg=name)
        else:
            assert left == right, name
    assert (one.gop_xxh3 is None) == (two.gop_xxh3 is None)
    if one.gop_xxh3 is not None:
        np.testing.assert_array_equal(one.gop_xxh3, two.gop_xxh3)


def table_of(data: bytes, path: str = "a.mp4") -> SampleTable:
    return read_sample_table(lambda start, stop: data[start:stop], len(data), path)


def spec_of(*tables: SampleTable) -> SidecarSpec:
    return SidecarSpec("me/data", "v3.0", "somewhere", {table.path: table.file_size for table in tables})


def archive_of(*tables: SampleTable) -> bytes:
    buffer = io.BytesIO()
    write_archive(buffer, spec_of(*tables), tables)
    return buffer.getvalue()


@settings(max_examples=60, deadline=None)
@given(movies())
def test_tables_round_trip(movie: Movie) -> None:
    table = table_of(movie.build()[0])
    with load_sidecar(archive_of(table)) as archive:
        assert_same_table(archive.table("a.mp4"), table)
        archive.validate()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 2500), st.sampled_from([None, 250]))
def test_timelines_round_trip(media_time: int, duration_ms: int, empty_ms: int | None) -> None:
    edits = ([(empty_ms, -1, 1 << 16)] if empty_ms is not None else []) + [(duration_ms, media_time, 1 << 16)]
    table = table_of(Movie([3] * 40, [512] * 40, composition=[512, 1024] * 20, sync=[0], edits=edits).build()[0])
    with load_sidecar(archive_of(table)) as archive:
        assert_same_table(archive.table("a.mp4"), table)


def test_fragmented_tables_round_trip() -> None:
    table = table_of(encode(pictures(30), options={"g": "10"}, mux_options={"movflags": "frag_keyframe+empty_moov+negative_cts_offsets"}))
    with load_sidecar(archive_of(table)) as archive:
        assert_same_table(archive.table("a.mp4"), table)


def test_numpy_reads_it_as_lerobot_does() -> None:
    table = table_of(encode(pictures(12), options={"g": "5", "bf": "1"}))
    with np.load(io.BytesIO(archive_of(table)), allow_pickle=False) as loaded:
        manifest = json.loads(loaded["manifest_json"].tobytes().rstrip(b"\0"))
        assert loaded["manifest_json"].shape == ()
        assert loaded["manifest_json"].dtype.kind == "S"
        arrays = {name: loaded[f"0/{name}"] for name in LEROBOT_ARRAYS}
    assert [array.dtype for array in arrays.values()] == [np.dtype(np.float64), *[np.dtype(np.int64)] * 5]
    assert all(array.ndim == 1 for array in arrays.values())
    assert list(manifest) == ["version", "sidecar", "files"]
    assert list(manifest["sidecar"]) == ["schema_version", "repo_id", "revision", "data_root", "source_files", "source_fingerprints"]
    assert list(manifest["files"][0]) == ["file_path", "file_size", "mp4"]
    np.testing.assert_array_equal(arrays["sample_pts"], table.sample_pts)
    np.testing.assert_array_equal(arrays["sync_samples"], table.sync)


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for n in range(6):
        (tmp_path / f"v{n}.mp4").write_bytes(encode(pictures(10 + n), options={"g": "4"}))
    store, paths = LocalStore.at(tmp_path), [f"v{n}.mp4" for n in range(6)]
    made = []
    for workers, name in ((1, "one.npz"), (4, "two.npz")):
        build_sidecar(
            store, paths[:: -1 if workers == 4 else 1], tmp_path / name, repo_id="a/b", revision="v3.0", workers=workers, checksums=True
        )
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1]


@pytest.mark.shared
@pytest.mark.parametrize("name", ["small", "h264b"])
def test_lerobots_sidecars_are_read_and_ours_are_equal(shared_dir: Path, name: str) -> None:
    folder = shared_dir / "data" / "lerobot_written"
    theirs = load_sidecar(folder / f"{name}.npz")
    store = LocalStore.at(folder / name)
    buffer = io.BytesIO()
    tables = [file.table for file in index_files(store, theirs.spec.paths)]
    write_archive(buffer, theirs.spec, tables)
    with np.load(folder / f"{name}.npz", allow_pickle=False) as left, np.load(io.BytesIO(buffer.getvalue()), allow_pickle=False) as right:
        for member in left.files:
            np.testing.assert_array_equal(left[member], right[member], err_msg=member)
            assert left[member].dtype == right[member].dtype
    for table in tables:
        assert_same_table(theirs.table(table.path), table, lerobot=True)
    assert not theirs.made_by_us
    theirs.close()
    with load_sidecar(buffer.getvalue()) as ours:
        assert ours.made_by_us
        assert not ours.has_checksums


def _rewritten(data: bytes, change: dict[str, Any]) -> bytes:
    """The archive with members replaced (array or raw bytes) or, for None, left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            value = change.get(info.filename, info)
            if value is None:
                continue
            if isinstance(value, np.ndarray):
                buffer = io.BytesIO()
                np.save(buffer, value, allow_pickle=True)
                value = buffer.getvalue()
            new.writestr(info.filename, old.read(info) if value is info else value)
    return out.getvalue()


def _manifest(data: bytes, **changes: Any) -> bytes:
    with np.load(io.BytesIO(data)) as loaded:
        document = json.loads(loaded["manifest_json"].tobytes().rstrip(b"\0"))
    for key, value in changes.items():
        target = document
        *path, last = key.split("__")
        for part in path:
            target = target[int(part)] if part.isdigit() else target[part]
        target[last] = value
    return _rewritten(data, {"manifest_json.npy": np.array(json.dumps(document).encode())})


@pytest.fixture(scope="module")
def good() -> bytes:
    return archive_of(table_of(Movie([3, 4, 5], [512] * 3, composition=[0, 1, 2], sync=[0, 2]).build()[0]))


BAD_MEMBERS: list[tuple[dict[str, Any], str]] = [
    ({"0/sample_sizes.npy": None}, "array sample_sizes is missing"),
    ({"manifest_json.npy": None}, "manifest_json.npy is missing"),
    ({"0/sample_sizes.npy": np.zeros((3, 1), np.int64)}, "expected 1-D numbers"),
    ({"0/sample_sizes.npy": np.array(["a", "b", "c"])}, "expected 1-D numbers"),
    ({"0/sample_sizes.npy": np.zeros(2, np.int64)}, "arrays have lengths"),
    ({"0/sample_sizes.npy": np.array([1, None, 3], object)}, "damaged"),
    ({"0/sample_sizes.npy": np.array([1.5, 2, 3])}, "not whole"),
    ({"0/sample_sizes.npy": np.array([np.nan, 2, 3])}, "not whole"),
    ({"0/sample_sizes.npy": np.array([-1, 2, 3])}, "negative"),
    ({"0/sample_pts.npy": np.array([np.inf, 0, 1])}, "not finite"),
    ({"0/sample_offsets.npy": np.array([2**63, 2, 3], np.uint64)}, "holds"),
    ({"0/sync_samples.npy": np.array([2, 0])}, "do not ascend"),
    ({"0/sync_samples.npy": np.array([3])}, "do not ascend"),
    ({"reelray/0/starts.npy": np.array([7])}, "starts do not ascend"),
    ({"0/sample_sizes.npy": b"not an array"}, "damaged"),
    (
        {
            "0/sample_sizes.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999,), }"
            + b" " * 40
            + b"\n"
        },
        "damaged",
    ),
    ({"manifest_json.npy": np.array(b"[]")}, "expected an object"),
    ({"manifest_json.npy": np.array(b"{nonsense")}, "damaged"),
    ({"manifest_json.npy": np.array([b"{}"])}, "expected one string"),
]


@pytest.mark.parametrize(("change", "message"), BAD_MEMBERS)
def test_bad_members_are_refused(good: bytes, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SidecarError, match=message), load_sidecar(_rewritten(good, change)) as archive:
        archive.validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2, expected 3"),
        ({"sidecar__schema_version": 2}, "schema 2, expected 3"),
        ({"sidecar__repo_id": 7}, "repo_id is int"),
        ({"sidecar__source_files": []}, "contradictory|listed as sources"),
        ({"sidecar__source_fingerprints": {"b.mp4": "x"}}, "source_fingerprints cover"),
        ({"sidecar__source_fingerprints": {"a.mp4": ""}}, "or one is empty"),
        ({"files__0__file_size": 1}, "contradictory"),
        ({"files__0__file_path": "../a.mp4"}, "not a plain path"),
        ({"files__0__mp4__stsd_body": "zz"}, "not hexadecimal"),
        ({"files__0__mp4__stsd_body": "00"}, "stsd holds 1 bytes"),
        ({"files__0__mp4__timescale": -5}, "timescale is -5"),
        ({"files__0__mp4__width": True}, "width is True"),
        ({"files": []}, "0 files are indexed"),
    ],
)
def test_bad_manifests_are_refused(good: bytes, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SidecarError, match=message), load_sidecar(_manifest(good, **changes)) as archive:
        archive.validate()


def test_no_flipped_bit_goes_unnoticed_or_unhandled(good: bytes) -> None:
    with load_sidecar(good) as archive:
        expected = archive.table("a.mp4")
    rng = np.random.default_rng(5)
    for bit in rng.choice(8 * len(good), 400, replace=False).tolist():
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            with load_sidecar(bytes(damaged)) as archive:
                archive.validate()
                if "a.mp4" in archive.files and archive.made_by_us:
                    assert_same_table(archive.table("a.mp4"), expected)  # a field that readers ignore was hit
        except SidecarError:
            pass


def test_a_lying_member_size_does_not_inflate_without_bound(good: bytes) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("manifest_json.npy", bytes(1 << 20))
    with pytest.raises(SidecarError):
        load_sidecar(out.getvalue())
    for junk in (b"", b"PK", b"not a zip" * 100, good[: len(good) // 2]):
        with pytest.raises(SidecarError):
            load_sidecar(junk)


def test_files_come_in_order_and_all_of_them() -> None:
    one, two = (table_of(Movie([3], [512]).build()[0], path) for path in ("a.mp4", "b.mp4"))
    writer = ArchiveWriter(io.BytesIO())
    writer.add(two)
    with pytest.raises(SidecarError, match="ascending order"):
        writer.add(one)
    with pytest.raises(SidecarError, match="1 files were indexed, the source has 2"):
        writer.finish(spec_of(one, two))
    writer.abandon()


def test_a_source_with_several_sample_entries_needs_our_members() -> None:
    from video.forge import visual_entry

    table = table_of(Movie([3, 4], [512] * 2, per_chunk=[1, 1], descriptions=[0, 1], entries=[visual_entry(), visual_entry()]).build()[0])
    data = archive_of(table)
    with load_sidecar(data) as archive:
        assert_same_table(archive.table("a.mp4"), table)
    with (
        load_sidecar(_rewritten(data, {"reelray/manifest_json.npy": None})) as archive,
        pytest.raises(SidecarError, match="2 sample entries"),
    ):
        archive.table("a.mp4")


def test_only_what_is_asked_for_is_read(good: bytes) -> None:
    with load_sidecar(_rewritten(good, {"0/sample_sizes.npy": b"damaged"})) as archive:
        assert archive.spec.paths == ["a.mp4"]
        with pytest.raises(SidecarError, match="not among its 1 files"):
            archive.table("b.mp4")
        with pytest.raises(SidecarError, match="damaged"):
            archive.table("a.mp4")


def test_memory_store_is_enough_to_build(tmp_path: Path) -> None:
    class Store(MemoryStore):
        def identity(self, path: str) -> ObjectIdentity:
            return ObjectIdentity(path, len(self.files[path]), "etag")

    store = Store({"a.mp4": Movie([3, 4], [512] * 2, sync=[0]).build()[0]})
    report = build_sidecar(store, ["a.mp4"], tmp_path / "s.npz", repo_id="a/b", revision="main")
    assert (report.files, report.samples, report.reused, report.reads) == (1, 2, False, 1)
    with SidecarArchive(tmp_path / "s.npz") as archive:
        assert dict(archive.spec.fingerprints) == {"a.mp4": "etag"}
