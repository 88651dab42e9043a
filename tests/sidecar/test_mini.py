"""Mini-MP4s: the computed size is the built size, and what is built plays."""

from __future__ import annotations

import io
import itertools
import shutil
import subprocess
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from video.forge import MemoryStore, Movie, encode, linear, pictures
from video.test_decode import CODECS
from video.test_tables import movies, table_of

from ingest.errors import ChecksumError, SelectionError, ShortReadError
from ingest.video.boxes import read_sample_table
from ingest.video.checksums import add_checksums
from ingest.video.mini import build_mini_mp4, export_episode, mini_header, mini_mp4_sizes
from ingest.video.span_table import EpisodeSpans, episode_spans
from ingest.video.tables import SampleTable


def spans_of(table: SampleTable, starts: list[float], ends: list[float]) -> EpisodeSpans:
    return episode_spans(table, np.array(starts), np.array(ends))


def reference_span(table: SampleTable, start_s: float, end_s: float) -> tuple[int, int]:
    """The rules of the span table, sample by sample."""
    pad = max(0.1, 0.05 * (end_s - start_s))
    start, end = max(0.0, start_s - pad), end_s + pad
    pts = table.sample_pts.tolist()
    reordered = bool(np.any(table.composition))
    if reordered:
        inside = [n for n, t in enumerate(pts) if start <= t <= end] or [min(range(len(pts)), key=lambda n: (abs(pts[n] - start_s), n))]
        low, high, earliest = min(inside), max(inside), min(pts[n] for n in inside)
    else:
        low = min(next((n for n, t in enumerate(pts) if t >= start), len(pts) - 1), len(pts) - 1)
        high = max((n for n, t in enumerate(pts) if t <= end), default=0)
        high, earliest = max(high, low), pts[low]
    keys = table.sync.tolist()
    if not keys:
        return 0, len(pts) - 1 if reordered else high
    fit = [k for k in keys if k <= low and pts[k] <= earliest]
    low = fit[-1] if fit else keys[0]
    high = max(high, low)
    if reordered:
        high = next((k for k in keys if k > high), len(pts)) - 1
    return low, high


@settings(max_examples=120, deadline=None)
@given(movies(), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=5))
def test_spans_and_sizes_over_random_tables(movie: Movie, times: list[tuple[float, float]]) -> None:
    data = movie.build()[0]
    table = table_of(data)
    if not np.any(table.composition) and np.any(np.diff(table.sample_pts) < 0):
        return
    spans = spans_of(table, [min(pair) for pair in times], [max(pair) for pair in times])
    sizes = mini_mp4_sizes(table, spans)
    for episode, pair in enumerate(times):
        low, high = reference_span(table, min(pair), max(pair))
        assert (int(spans.sample_lo[episode]), int(spans.sample_hi[episode])) == (low, high)
        at, length = int(spans.mdat_offset[episode]), int(spans.mdat_length[episode])
        assert at == min(table.offsets[low : high + 1].tolist())
        built = build_mini_mp4(table, spans, episode, data[at : at + length])
        assert len(built) == int(sizes[episode])
        again = table_of(built)
        assert again.sizes.tolist() == table.sizes[low : high + 1].tolist()
        assert again.durations.tolist() == table.durations[low : high + 1].tolist()
        for new, old in zip(range(again.samples), range(low, high + 1), strict=True):
            a, b = int(again.offsets[new]), int(table.offsets[old])
            assert built[a : a + int(again.sizes[new])] == data[b : b + int(table.sizes[old])]


@settings(max_examples=60, deadline=None)
@given(st.integers(-300, 300), st.integers(2, 12), st.booleans(), st.booleans())
def test_sizes_around_two_to_the_32(delta: int, count: int, reordered: bool, explicit: bool) -> None:
    gap = 2**32 - 1200 + delta
    movie = Movie(
        [7 + n for n in range(count)] if explicit else [9] * count,
        [512] * count,
        composition=[512 * (n % 2) for n in range(count)] if reordered else None,
        sync=[0],
        per_chunk=[1, 1],
        base_offset=64,
    )
    template, _ = movie.build()
    table = read_sample_table(lambda start, stop: template[start:stop].ljust(stop - start, b"\0"), 2**34, "a.mp4")
    offsets = table.offsets.astype(np.int64).copy()
    offsets[1:] += gap
    table = _with_offsets(table, offsets)
    spans = spans_of(table, [0.0], [10.0])
    length = int(spans.mdat_length[0])
    relative = offsets - int(spans.mdat_offset[0])
    lead = int(table.composition[0])
    header = mini_header(table, 0, count, relative, length, edit=(lead, 1) if lead else None)
    assert int(mini_mp4_sizes(table, spans)[0]) == len(header) + length
    wide_mdat = length + 8 > 2**32 - 1
    assert (b"co64" in header) == (len(header) + int(relative.max()) > 2**32 - 1) or wide_mdat
    assert header.endswith((length + 16).to_bytes(8, "big") if wide_mdat else b"mdat")


def _with_offsets(table: SampleTable, offsets: np.ndarray) -> SampleTable:
    from dataclasses import replace

    return replace(table, offsets=offsets)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "png"])
def test_mini_files_play_and_start_at_zero(name: str) -> None:
    codec, options = CODECS[name]
    data = encode(pictures(72), codec, options)
    table, expected = table_of(data), linear(data)
    spans = spans_of(table, [0.0, 0.8, 1.6], [0.8, 1.6, 2.4])
    sizes = mini_mp4_sizes(table, spans)
    for episode in range(3):
        at, length = int(spans.mdat_offset[episode]), int(spans.mdat_length[episode])
        built = build_mini_mp4(table, spans, episode, data[at : at + length])
        assert len(built) == int(sizes[episode])
        low, high = int(spans.sample_lo[episode]), int(spans.sample_hi[episode])
        start = float(spans.source_start_pts[episode])
        assert start == table.sample_pts[low]
        with av.open(io.BytesIO(built)) as container:
            frames = [(frame.pts * frame.time_base, frame.to_ndarray(format="rgb24").copy()) for frame in container.decode(video=0)]
        if name == "h264 intra refresh":  # its points show nothing whole: only its own first group plays from the start
            continue
        by_time = {round(float(t) * 30): pixels for t, pixels in frames}
        assert 0 in by_time
        for sample in range(low, high + 1):
            time = float(table.sample_pts[sample])
            if 0.8 * episode <= time < 0.8 * episode + 0.8:
                picture = int(np.flatnonzero(table.presented == sample)[0])
                np.testing.assert_array_equal(by_time[round((time - start) * 30)], expected[picture])


def test_open_group_keys_inside_are_not_listed() -> None:
    codec, options = CODECS["h264 open GOP with B"]
    data = encode(pictures(72), codec, options)
    table = table_of(data)
    assert len(table.sync) >= 4
    spans = spans_of(table, [0.0], [2.4])
    at, length = int(spans.mdat_offset[0]), int(spans.mdat_length[0])
    built = table_of(build_mini_mp4(table, spans, 0, data[at : at + length]))
    ticks = table.dts + table.composition
    bounds = [*table.sync.tolist(), table.samples]
    closed = [k for k, following in itertools.pairwise(bounds) if k == 0 or ticks[k:following].min() >= ticks[k]]
    assert built.sync.tolist() == closed
    assert len(closed) < len(table.sync)


@pytest.mark.parametrize(
    "name",
    ["h264 GOP 2", "h264 closed GOP with B", "h264 open GOP with B", "h264 one GOP with B", "hevc open GOP, CRA and RASL", "mpeg4 with B"],
)
def test_an_exported_episode_shows_exactly_its_pictures(name: str, tmp_path: Path) -> None:
    codec, options = CODECS[name]
    data = encode(pictures(72), codec, options)
    table, expected, store = table_of(data), linear(data), MemoryStore({"a.mp4": data})
    for first, count in ((0, 24), (24, 31), (55, 17), (30, 1)):
        target = tmp_path / f"{first}.mp4"
        assert export_episode(store, table, first, count, target) == target.stat().st_size
        with av.open(str(target)) as container:
            frames = [(float(frame.time), frame.to_ndarray(format="rgb24").copy()) for frame in container.decode(video=0)]
        assert len(frames) == count
        assert frames[0][0] == 0.0
        np.testing.assert_allclose(np.diff([t for t, _ in frames]), 1 / 30, atol=1e-6)
        for n, (_, pixels) in enumerate(frames):
            np.testing.assert_array_equal(pixels, expected[first + n])
        assert table_of(target.read_bytes()).pictures == count
    with pytest.raises(SelectionError):
        export_episode(store, table, 70, 5, tmp_path / "no.mp4")
    assert not (tmp_path / "no.mp4").exists()


def test_the_whole_payload_is_needed() -> None:
    data = encode(pictures(5))
    table = table_of(data)
    with pytest.raises(ShortReadError, match="payload of 3 bytes"):
        build_mini_mp4(table, spans_of(table, [0.0], [1.0]), 0, b"abc")
    with pytest.raises(SelectionError, match="not all finite"):
        spans_of(table, [float("nan")], [1.0])


def test_other_players_agree_where_they_are_installed(tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    codec, options = CODECS["h264 open GOP with B"]
    data = encode(pictures(72), codec, options)
    table = table_of(data)
    target = tmp_path / "episode.mp4"
    export_episode(MemoryStore({"a.mp4": data}), table, 24, 31, target)
    checked = []
    if shutil.which("ffmpeg"):
        command = ["ffmpeg", "-v", "error", "-i", str(target), "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "yuv420p", "-"]
        played = subprocess.run(command, capture_output=True, check=True).stdout
        with av.open(io.BytesIO(data)) as container:
            whole = [frame.to_ndarray(format="yuv420p").tobytes() for frame in container.decode(video=0)]
        assert played == b"".join(whole[24 : 24 + 31])
        checked.append("ffmpeg")
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, RuntimeError, OSError):
        pass
    else:
        assert VideoDecoder(str(target)).metadata.num_frames in (31, None)
        checked.append("torchcodec")
    record_property("players", ",".join(checked) or "none installed")
    if not checked:
        print("neither ffmpeg nor torchcodec is installed: played by PyAV alone")
    assert len(linear(target.read_bytes())) == 31


def test_export_checks_the_payload_where_the_index_has_checksums(tmp_path: Path) -> None:
    data = encode(pictures(40), options={"g": "10", "bf": "2"})
    table, expected = table_of(data), linear(data)
    table, _ = add_checksums(MemoryStore({"a.mp4": data}), table)
    target = tmp_path / "episode.mp4"
    export_episode(MemoryStore({"a.mp4": data}), table, 12, 15, target)
    exported = linear(target.read_bytes())
    assert len(exported) == 15
    assert all(np.array_equal(a, b) for a, b in zip(exported, expected[12:27], strict=True))
    at = int(table.offsets[15]) + 9
    damaged = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    with pytest.raises(ChecksumError):
        export_episode(MemoryStore({"a.mp4": damaged}), table, 12, 15, target)
    assert len(linear(target.read_bytes())) == 15
