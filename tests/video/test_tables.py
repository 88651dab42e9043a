"""Sample tables: any table that can be written reads back, and bad ones are refused by name."""

from __future__ import annotations

import io
import struct
import tracemalloc

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import UnsupportedTimelineError, VideoFormatError
from ingest.video.boxes import read_sample_table
from ingest.video.index import ProbingIndex, VideoIndex
from ingest.video.tables import MAX_SAMPLES, SampleTable
from video.forge import Movie, box, encode, full, pictures, visual_entry


def table_of(data: bytes, **options: int) -> SampleTable:
    return read_sample_table(lambda start, stop: data[start:stop], len(data), "a.mp4", **options)


@st.composite
def movies(draw: st.DrawFn) -> Movie:
    count = draw(st.integers(1, 40))
    ints = lambda low, high: draw(st.lists(st.integers(low, high), min_size=count, max_size=count))  # noqa: E731
    size_bits = draw(st.sampled_from([4, 8, 16, 32]))
    composition = draw(st.sampled_from(["none", "positive", "signed"]))
    chunks, left = [], count
    while left:
        chunks.append(draw(st.integers(1, left)))
        left -= chunks[-1]
    two = draw(st.booleans())
    described = [draw(st.integers(0, 1)) if two else 0 for _ in chunks]
    constant = draw(st.booleans())
    durations = [512] * count if draw(st.booleans()) else ints(0, 5000)
    untimed = draw(st.integers(0, count - 1)) if composition == "none" else 0
    return Movie(
        sizes=[draw(st.integers(1, 15))] * count
        if constant
        else ints(0 if size_bits == 32 else 1, {4: 15, 8: 255, 16: 300, 32: 300}[size_bits]),
        durations=durations[: count - untimed] + [durations[count - untimed - 1]] * untimed,
        untimed=untimed,
        composition=None if composition == "none" else ints(0 if composition == "positive" else -3000, 3000),
        ctts_version=1 if composition == "signed" else draw(st.integers(0, 1)),
        sync=sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))) if draw(st.booleans()) else None,
        per_chunk=chunks,
        descriptions=[d for d, n in zip(described, chunks, strict=True) for _ in range(n)],
        chunk_gap=draw(st.integers(0, 9)),
        chunk_order=draw(st.permutations(range(len(chunks)))),
        merged_runs=draw(st.booleans()),
        use_co64=draw(st.booleans()),
        size_bits=size_bits,
        faststart=draw(st.booleans()),
        wide_moov=draw(st.booleans()),
        padding=draw(st.sampled_from([0, 0, 700_000])),
        timescale=draw(st.sampled_from([30, 1000, 15360, 90000])),
        entries=[visual_entry(b"png "), visual_entry(b"png ")],
    )


@settings(max_examples=120, deadline=None)
@given(movies())
def test_every_table_reads_back(movie: Movie) -> None:
    data, offsets = movie.build()
    table = table_of(data)
    dts = np.cumsum([0, *movie.durations[:-1]])
    composition = movie.composition or [0] * len(movie.sizes)
    assert table.offsets.tolist() == offsets
    assert table.sizes.tolist() == movie.sizes
    assert table.durations.tolist() == movie.durations
    assert table.untimed == movie.untimed
    assert table.composition.tolist() == composition
    assert table.dts.tolist() == dts.tolist()
    assert table.sync.tolist() == (list(range(len(movie.sizes))) if movie.sync is None else movie.sync)
    assert table.descriptions.tolist() == movie.descriptions
    pts = dts + composition
    assert table.presented.tolist() == np.argsort(pts, kind="stable").tolist()
    np.testing.assert_array_equal(table.sample_pts, pts / movie.timescale)
    assert table.faststart == movie.faststart
    assert (table.file_size, table.codec, table.width, table.height) == (len(data), "png ", 64, 48)
    assert not table.truncated.size
    for array in (table.offsets, table.sizes, table.presented, table.sample_pts, table.composition):
        assert not array.flags.writeable


def _with_times(data: bytes, runs: list[tuple[int, int]]) -> bytes:
    """A file whose index lies behind its payload, with another stts box."""
    at = data.index(b"stts") - 4
    old, new = (
        int.from_bytes(data[at : at + 4], "big"),
        full(b"stts", struct.pack(">I", len(runs)), *(struct.pack(">II", *r) for r in runs)),
    )
    changed = bytearray(data[:at] + new + data[at + old :])
    assert changed.index(b"mdat") < changed.index(b"moov")
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        place = changed.index(kind) - 4
        changed[place : place + 4] = struct.pack(">I", int.from_bytes(changed[place : place + 4], "big") + len(new) - old)
    return bytes(changed)


@pytest.mark.parametrize(
    "runs", [[(40, 512)], [(1, 512)], [(59, 512)], [(30, 512), (10, 1024)], [(30, 512), (10, 0)], [(30, 512), (0, 9)], [(58, 512), (1, 0)]]
)
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_times_that_end_early_go_on_as_the_demuxer_has_them(codec: str, runs: list[tuple[int, int]]) -> None:
    data = _with_times(encode(pictures(60), codec, {"g": "10", "bf": "0"}), runs)
    table = table_of(data)
    with av.open(io.BytesIO(data)) as container:
        assert table.presented_pts.tolist() == [frame.pts for frame in container.decode(video=0)]
    assert table.untimed == 60 - sum(count for count, _ in runs)


@pytest.mark.parametrize(
    ("bf", "runs", "message"),
    [
        ("2", [(40, 512)], "covers 40 samples, the size table has 60: the times of the rest are unknown"),
        ("0", [(61, 512)], "covers 61 samples, the size table has 60: the two do not belong together"),
        ("0", [(0, 512)], "covers 0 samples"),
        ("0", [], "covers 0 samples"),
    ],
)
def test_times_that_cannot_be_known_are_refused(bf: str, runs: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(VideoFormatError, match=message):
        table_of(_with_times(encode(pictures(60), options={"g": "10", "bf": bf}), runs))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**40), st.lists(st.integers(1, 2**20), min_size=2, max_size=9), st.booleans(), st.booleans())
def test_offsets_around_and_beyond_32_bits(base: int, sizes: list[int], near: bool, constant: bool) -> None:
    base = 2**32 - sum(sizes[:2]) if near else base
    sizes = [sizes[0]] * len(sizes) if constant else sizes
    movie = Movie(sizes, [1] * len(sizes), base_offset=base, per_chunk=[1, 1], use_co64=True)
    data, offsets = movie.build()
    table = read_sample_table(lambda start, stop: data[start:stop].ljust(stop - start, b"\0"), len(data) + base + sum(sizes), "a.mp4")
    assert table.offsets.tolist() == offsets


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 40_000), st.integers(0, 2500), st.sampled_from([None, 0, 250, 1000]), st.booleans())
def test_one_media_edit_is_followed(media_time: int, duration_ms: int, empty_ms: int | None, wide: bool) -> None:
    count = 60
    composition = [1024 if n % 3 == 0 else 512 if n % 3 == 1 else 0 for n in range(count)]
    edits = ([(empty_ms, -1, 1 << 16)] if empty_ms is not None else []) + [(duration_ms, media_time, 1 << 16)]
    table = table_of(Movie([3] * count, [512] * count, composition=composition, sync=[0, 30], edits=edits, wide_edits=wide).build()[0])
    pts = 512 * np.arange(count) + composition
    stop = media_time + round(duration_ms * 15360 / 1000)
    expected = [n for n in np.argsort(pts, kind="stable").tolist() if media_time <= pts[n] < stop]
    assert table.presented.tolist() == expected
    offset = (empty_ms or 0) / 1000 - media_time / 15360
    np.testing.assert_allclose(table.sample_pts, pts / 15360 + offset, atol=1e-4)
    if expected:
        assert int(table.presented_pts[0]) <= round((empty_ms or 0) * 15.36) + 1


@pytest.mark.parametrize(
    ("edits", "found"),
    [
        ([(1000, 0, 1 << 16), (1000, 0, 1 << 16)], "2 media edits"),
        ([(1000, 0, 1 << 15)], "rate 0.5"),
        ([(1000, 0, 2 << 16)], "rate 2"),
        ([(1000, 0, -1 << 16)], "rate -1"),
        ([(1000, -1, 1 << 16)], "0 media edits"),
        ([(1000, 0, 1 << 16), (1000, -1, 1 << 16)], "1 media edits and 1 empty"),
        ([(1000, -1, 1 << 16), (1000, -1, 1 << 16), (5, 0, 1 << 16)], "3 edits"),
        ([(1000, -2, 1 << 16)], "media time -2"),
    ],
)
def test_other_timelines_are_refused_by_name(edits: list[tuple[int, int, int]], found: str) -> None:
    with pytest.raises(UnsupportedTimelineError, match=f"a.mp4: unsupported MP4 edit list: .*{found}"):
        table_of(Movie([3, 3], [512, 512], edits=edits).build()[0])


def test_no_edit_list_presents_everything_from_its_own_first_time() -> None:
    table = table_of(Movie([3, 3], [512, 512], composition=[1024, 1024], edits=[]).build()[0])
    assert table.presented.tolist() == [0, 1]
    assert table.presented_pts.tolist() == [1024, 1536]
    assert table.sample_pts.tolist() == [1024 / 15360, 1536 / 15360]


def _patched(data: bytes, kind: bytes, at: int, value: int, width: int = 4) -> bytes:
    position = data.index(kind) + 4 + at
    return data[:position] + value.to_bytes(width, "big") + data[position + width :]


@pytest.mark.parametrize(
    ("kind", "at", "value", "message"),
    [
        (b"stsz", 8, 0x7FFFFFFF, "stsz declares 2147483647 entries and has room for"),
        (b"stts", 4, 0xFFFFFFF0, "stts declares"),
        (b"ctts", 4, 0x10000, "ctts declares"),
        (b"stsc", 4, 0x10000, "stsc declares"),
        (b"stco", 4, 0xFFFFFFFF, "stco declares"),
        (b"stss", 4, 0x0FFFFFFF, "stss declares"),
        (b"stts", 8, 3, "stts covers"),
        (b"stts", 8, 0xFFFFFFFF, "stts covers"),
        (b"ctts", 8, 0xFFFFFFFF, "ctts covers"),
        (b"stsc", 8, 2, "stsc runs do not ascend"),
        (b"stsc", 12, 0xFFFFFFFF, "stsc and the chunk table place"),
        (b"stsc", 16, 0, "name sample entry 0"),
        (b"stsc", 16, 9, "samples name entry 9 of stsd"),
        (b"stss", 8, 0, "stss names samples"),
        (b"stss", 8, 999, "stss names samples"),
        (b"stsd", 4, 0, "stsd declares 0"),
        (b"stsd", 4, 0xFFFF, "stsd declares 65535"),
        (b"elst", 4, 0xFFFF, "elst declares"),
        (b"url ", 0, 0, "data lies in another file"),
        (b"ctts", 0, 2 << 24, "ctts has version 2"),
    ],
)
def test_lying_counts_are_refused_before_anything_is_allocated(kind: bytes, at: int, value: int, message: str) -> None:
    movie = Movie([3, 4, 5, 6], [512, 512, 1, 2], composition=[0, 1, 2, 3], sync=[0], edits=[(1000, 0, 1 << 16)])
    data = _patched(movie.build()[0], kind, at, value)
    tracemalloc.start()
    try:
        with pytest.raises(VideoFormatError, match=message):
            table_of(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_constant_sizes_cannot_claim_more_than_the_file_holds() -> None:
    data = _patched(Movie([5, 5], [1, 1]).build()[0], b"stsz", 8, 1_000_000)
    with pytest.raises(VideoFormatError, match="1000000 samples of 5 bytes in a file of"):
        table_of(data)
    with pytest.raises(VideoFormatError, match=f"limit of {MAX_SAMPLES}"):
        table_of(_patched(data, b"stsz", 8, 0xFFFFFFFF))


@pytest.mark.parametrize("missing", [b"stsz", b"stco", b"stsc", b"stts", b"stsd", b"stbl", b"mdhd", b"tkhd", b"minf", b"trak", b"moov"])
def test_missing_boxes_are_named(missing: bytes) -> None:
    data = Movie([3, 4], [512, 512]).build()[0]
    with pytest.raises(VideoFormatError):
        table_of(data.replace(missing, b"zzzz"))


def test_encrypted_tracks_are_refused() -> None:
    sinf = box(b"sinf", box(b"frma", b"avc1"))
    for entry in (visual_entry(b"encv"), visual_entry(b"avc1", 64, 48, sinf)):
        with pytest.raises(VideoFormatError, match="encrypted"):
            table_of(Movie([3], [512], entries=[entry]).build()[0])


def test_oversized_pictures_are_refused() -> None:
    with pytest.raises(VideoFormatError, match="40000x40000"):
        table_of(Movie([3], [512], entries=[visual_entry(b"avc1", 40000, 40000)]).build()[0])


@pytest.mark.parametrize("size", [0, 4, 8, 23, 24])
def test_files_without_an_index_say_so(size: int) -> None:
    with pytest.raises(VideoFormatError, match="no moov box"):
        table_of(Movie([3], [512]).build()[0][:size])


def test_what_follows_a_complete_file_is_ignored() -> None:
    data, offsets = Movie([3, 4], [512, 512], faststart=False).build()
    moov = data[data.index(b"moov") - 4 :]
    for tail in (b"\xff" * 300, moov.replace(b"stsz", b"zzzz"), b"\0\0\0\4junk"):
        assert table_of(data + tail).offsets.tolist() == offsets


def test_boxes_without_end_do_not_take_for_ever() -> None:
    moov = box(b"moov", *[box(b"free")] * 100_000)
    with pytest.raises(VideoFormatError, match="more than 1024 boxes"):
        table_of(moov)
    with pytest.raises(VideoFormatError, match="no moov"):
        table_of(box(b"free") * 300_000)


def test_two_reads_or_fewer() -> None:
    big = 3 << 20
    payload = lambda number, size: bytes(size)  # noqa: E731
    for movie, reads in (
        (Movie([100] * 9, [512] * 9, sync=[0], payload=payload), 1),
        (Movie([100] * 9, [512] * 9, sync=[0], padding=big, payload=payload), 2),
        (Movie([big, 4], [512] * 2, sync=[0], faststart=False, payload=payload), 2),
        (Movie(list(range(200_000)), [512] * 200_000, sync=[0], base_offset=10**9), 2),
    ):
        data = movie.build()[0]
        seen: list[tuple[int, int]] = []

        def read(start: int, stop: int, data: bytes = data, seen: list[tuple[int, int]] = seen) -> bytes:
            seen.append((start, stop))
            return data[start:stop]

        read_sample_table(read, len(data), "a.mp4")
        assert len(seen) == reads
        assert sum(stop - start for start, stop in seen) <= max(len(data[data.index(b"moov") :]), 512 << 10) + (512 << 10) + 64


def test_the_probe_limit_is_kept() -> None:
    data = Movie(list(range(200_000)), [512] * 200_000, sync=[0], base_offset=10**9).build()[0]
    with pytest.raises(VideoFormatError, match="--max-probe-mb"):
        table_of(data, max_probe_bytes=600_000)
    assert table_of(data, max_probe_bytes=1 << 20).samples == 200_000


def test_a_million_samples_take_well_under_a_second() -> None:
    import time

    count = 1_000_000
    sizes = np.random.default_rng(0).integers(1, 5000, count).astype(">u4")
    stbl_sizes = full(b"stsz", struct.pack(">II", 0, count), sizes.tobytes())
    ctts = np.zeros(count, np.dtype([("n", ">u4"), ("v", ">i4")]))
    ctts["n"], ctts["v"] = 1, np.arange(count) % 3 * 512
    movie = Movie([1], [512], composition=[0], sync=[0])
    data = movie.build()[0]
    small = [
        full(b"stsz", struct.pack(">II", 1, 1)),
        full(b"ctts", struct.pack(">III", 1, 1, 0)),
        full(b"stts", struct.pack(">III", 1, 1, 512)),
        full(b"stsc", struct.pack(">IIII", 1, 1, 1, 1)),
    ]
    large = [
        stbl_sizes,
        full(b"ctts", struct.pack(">I", count), ctts.tobytes()),
        full(b"stts", struct.pack(">III", 1, count, 512)),
        full(b"stsc", struct.pack(">IIII", 1, 1, count, 1)),
    ]
    grown = 0
    for old, new in zip(small, large, strict=True):
        assert data.count(old) == 1
        data = data.replace(old, new)
        grown += len(new) - len(old)
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = data.index(kind) - 4
        data = _patched(data, kind, -8, int.from_bytes(data[at : at + 4], "big") + grown)
    began = time.process_time()
    table = read_sample_table(lambda start, stop: data[start:stop].ljust(stop - start, b"\0"), 1 << 40, "a.mp4")
    assert time.process_time() - began < 1.0
    assert table.samples == table.pictures == count


def test_probing_index_is_a_bounded_cache() -> None:
    from video.forge import MemoryStore

    store = MemoryStore({f"{n}.mp4": Movie([3, 4], [512, 512], sync=[0]).build()[0] for n in range(5)})
    index = ProbingIndex(store, capacity=2)
    assert isinstance(index, VideoIndex)
    first = index.table("0.mp4")
    assert index.table("0.mp4") is first
    for n in range(5):
        index.table(f"{n}.mp4")
    assert index.table("0.mp4") is not first
    assert len({path for path, *_ in store.reads}) == 5
