"""The mapped index: exact, small, shared, and rebuilt when anything is wrong with it."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from video.forge import Movie
from video.test_tables import movies

from ingest.errors import SidecarError
from ingest.storage.local import LocalStore
from ingest.video.boxes import read_sample_table
from ingest.video.sidecar.cache import index_path, prepare_mapped_index
from ingest.video.sidecar.lookup import open_video_index
from ingest.video.sidecar.mapped import MappedIndex, write_mapped_index
from ingest.video.tables import SampleTable

from .test_archive import assert_same_table, spec_of


def table_of(movie: Movie, path: str = "a.mp4") -> SampleTable:
    data = movie.build()[0]
    return read_sample_table(lambda start, stop: data[start:stop].ljust(stop - start, b"\0"), max(len(data), 1 << 45), path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(movies(), min_size=1, max_size=4), st.booleans())
def test_tables_round_trip(tmp_path: Path, made: list[Movie], checksums: bool) -> None:
    tables = [table_of(movie, f"v{n}.mp4") for n, movie in enumerate(made)]
    if checksums:
        rng = np.random.default_rng(1)
        tables = [replace(t, gop_xxh3=rng.integers(0, 2**64, len(t.gop_bounds) - 1, np.uint64)) for t in tables]
    path = tmp_path / "index.bin"
    write_mapped_index(path, spec_of(*tables), tables)
    index = MappedIndex(path)
    for table in tables:
        assert table.path in index
        loaded = index.table(table.path)
        assert_same_table(loaded, table)
        for name in ("offsets", "sizes", "durations", "composition", "dts", "presented", "sample_pts", "starts"):
            assert not getattr(loaded, name).flags.writeable
        assert loaded.sample_pts.dtype == np.float64
        np.testing.assert_array_equal(loaded.gop_bounds, table.gop_bounds)
        assert loaded.truncated.tolist() == table.truncated.tolist()


def backing(array: np.ndarray) -> object:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def test_integers_are_small_constants_are_stored_once_and_ramps_are_shared(tmp_path: Path) -> None:
    count = 20_000
    tables = [
        table_of(
            Movie([100 + (n * k) % 900 for k in range(count)], [512] * count, sync=list(range(0, count, 2)), base_offset=5000), f"v{n}.mp4"
        )
        for n in range(1, 9)
    ]
    path = tmp_path / "index.bin"
    write_mapped_index(path, spec_of(*tables), tables)
    index = MappedIndex(path)
    loaded = index.table("v3.mp4")
    assert (loaded.sizes.dtype, loaded.offsets.dtype, loaded.durations.dtype) == (np.dtype("u2"), np.dtype("u4"), np.dtype("u2"))
    assert loaded.durations.strides == loaded.composition.strides == (0,)
    assert len(loaded.durations) == len(loaded.composition) == count
    assert isinstance(backing(loaded.sizes), mmap.mmap)
    # Sizes and offsets differ from file to file; numbers, times and key pictures are stored once for all of them.
    assert index.nbytes / (len(tables) * count) < 6 + 26 / len(tables) + 0.2


def test_values_up_to_62_bits_survive(tmp_path: Path) -> None:
    table = table_of(
        Movie([3, 4, 5], [2**31, 2**32 - 1, 0], composition=[-(2**31), 0, 2**31 - 1], ctts_version=1, base_offset=2**44, use_co64=True)
    )
    write_mapped_index(tmp_path / "i.bin", spec_of(table), [table])
    assert_same_table(MappedIndex(tmp_path / "i.bin").table("a.mp4"), table)


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    table = table_of(Movie(list(range(1, 60)), [512] * 59, composition=[n % 3 for n in range(59)], sync=[0, 30]))
    path = tmp_path / "index.bin"
    write_mapped_index(path, spec_of(table), [table])
    good = path.read_bytes()
    rng = np.random.default_rng(3)
    silent = 0
    for bit in rng.choice(8 * len(good), 500, replace=False).tolist():
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            loaded = MappedIndex(path).table("a.mp4")
        except SidecarError:
            continue
        assert_same_table(loaded, table)  # padding between blocks was hit
        silent += 1
    assert silent < 25
    for junk in (b"", b"x" * 10, b"LRIDX001" * 9, good[:-1], good[8:], good + b"1"):
        path.write_bytes(junk)
        with pytest.raises(SidecarError):
            MappedIndex(path)


def test_a_damaged_or_foreign_index_is_derived_anew(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    index = open_video_index(source, paths, "me/data", "v3.0", cache_home=home)
    assert index.sidecar is not None
    path = index_path(index.sidecar, home)
    assert path.name.startswith("reelray-1-")
    assert path.suffix == ".bin"
    good = path.read_bytes()
    for junk in (b"", b"LRIDX001", good[:-24] + bytes(24), bytes(len(good))):
        path.write_bytes(junk)
        assert open_video_index(source, paths, "me/data", "v3.0", cache_home=home).table(paths[0]).pictures == 20
        assert path.read_bytes() == good
    # Damage inside an array shows when its record is made, and heals there.
    path.write_bytes(bytes([good[0] ^ 255]) + good[1:])
    fresh = open_video_index(source, paths, "me/data", "v3.0", cache_home=home)
    assert [fresh.table(p).pictures for p in paths] == [20, 25, 30]
    assert path.read_bytes() == good


def test_live_readers_keep_their_generation(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    index = open_video_index(source, paths, "me/data", "v3.0", cache_home=home)
    assert index.sidecar is not None
    old_path = index_path(index.sidecar, home)
    offsets = index.table(paths[0]).offsets
    expected = offsets.copy()
    index.sidecar.write_bytes(index.sidecar.read_bytes())  # the same content in another version of the file
    prepare_mapped_index(index.sidecar, cache_home=home)
    assert not old_path.exists()
    np.testing.assert_array_equal(offsets, expected)
    assert index.table(paths[1]).pictures == 25


def test_records_are_made_only_for_files_that_are_asked_for(
    source: LocalStore, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = MappedIndex.table
    monkeypatch.setattr(MappedIndex, "table", lambda self, path: made.append(path) or original(self, path))
    index = open_video_index(source, paths, "me/data", "v3.0", cache_home=tmp_path / "home")
    index.table(paths[1])
    index.table(paths[1])
    assert made == [paths[1]]


def test_lerobots_own_files_are_left_alone(source: LocalStore, paths: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    theirs = home / "streaming-indexes" / "mp4-0123456789abcdef01234567.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    open_video_index(source, paths, "me/data", "v3.0", cache_home=home)
    assert theirs.read_bytes() == b"theirs"


def test_the_tables_must_be_those_of_the_source(tmp_path: Path) -> None:
    table = table_of(Movie([3], [512]))
    with pytest.raises(SidecarError, match="0 tables for 1 source files"):
        write_mapped_index(tmp_path / "i.bin", spec_of(table), [])
    assert not list(tmp_path.iterdir())
