"""Decoding by number: every picture equals a linear decode bit for bit, or a typed error names it."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ingest.errors import DecodeError, LeadInError, SelectionError, SettingsError, ShortReadError, VideoFormatError
from ingest.video.boxes import read_sample_table
from ingest.video.decode import decode_into, decode_pictures
from ingest.video.fetch import read_pictures
from ingest.video.pixels import PictureWriter
from ingest.video.spans import gop_starts, picture_span
from ingest.video.tables import SampleTable
from video.forge import MemoryStore, Movie, encode, linear, pictures, visual_entry

COUNT = 48
CODECS: dict[str, tuple[str, dict[str, str]]] = {
    "h264 GOP 2": ("libx264", {"g": "2", "bf": "0"}),
    "h264 closed GOP with B": ("libx264", {"x264-params": "keyint=12:bframes=3:b-pyramid=2:open-gop=0"}),
    "h264 open GOP with B": ("libx264", {"x264-params": "keyint=12:min-keyint=12:bframes=3:b-pyramid=2:open-gop=1:scenecut=0:b-adapt=0"}),
    "h264 one GOP with B": ("libx264", {"x264-params": "keyint=250:bframes=2"}),
    "h264 intra refresh": ("libx264", {"x264-params": "intra-refresh=1:keyint=12:bframes=0"}),
    "hevc open GOP, CRA and RASL": ("libx265", {"x265-params": "open-gop=1:keyint=12:bframes=3:log-level=none"}),
    "hevc closed GOP": ("libx265", {"x265-params": "open-gop=0:keyint=12:bframes=3:log-level=none"}),
    "vp9 with alt-ref": ("libvpx-vp9", {"g": "20", "auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "realtime", "cpu-used": "8"}),
    "mpeg4 with B": ("mpeg4", {"g": "12", "bf": "2"}),
    "mpeg2 with B": ("mpeg2video", {"g": "12", "bf": "2"}),
    "png": ("png", {}),
}


@pytest.fixture(scope="module", params=list(CODECS))
def coded(request: pytest.FixtureRequest) -> tuple[str, bytes, list[np.ndarray]]:
    codec, options = CODECS[request.param]
    pix_fmt, fmt = ("rgb24", "mov") if codec == "png" else ("yuv420p", "mp4")
    data = encode(pictures(COUNT), codec, options, pix_fmt=pix_fmt, fmt=fmt)
    return request.param, data, linear(data)


def table_of(data: bytes) -> SampleTable:
    return read_sample_table(lambda start, stop: data[start:stop], len(data), "a.mp4")


def test_every_run_equals_a_linear_decode(coded: tuple[str, bytes, list[np.ndarray]]) -> None:
    _, data, expected = coded
    table, store, writer = table_of(data), MemoryStore({"a.mp4": data}), PictureWriter()
    assert table.pictures == len(expected) == COUNT
    for first in range(COUNT):
        wanted = list(range(first, min(first + 3, COUNT)))
        got = [(picture, writer.picture(frame)) for picture, frame in read_pictures(store, table, wanted)]
        assert [picture for picture, _ in got] == wanted
        for picture, pixels in got:
            np.testing.assert_array_equal(pixels, expected[picture])


def test_groups_decode_on_their_own_and_cover_the_file(coded: tuple[str, bytes, list[np.ndarray]]) -> None:
    name, data, expected = coded
    table, writer = table_of(data), PictureWriter()
    starts = gop_starts(table).tolist()
    assert starts[0] == 0
    if name == "h264 intra refresh":  # its points need a lead-in, and starting at one is found out
        span = picture_span(table, [starts[1]])
        with pytest.raises(LeadInError):
            list(decode_pictures(table, span, [data[a:b] for a, b in span.ranges]))
        return
    for first, stop in zip(starts, [*starts[1:], COUNT], strict=True):
        span = picture_span(table, range(first, stop))
        payload = [data[a:b] for a, b in span.ranges]
        for picture, frame in decode_pictures(table, span, payload):
            np.testing.assert_array_equal(writer.picture(frame), expected[picture])


def test_scattered_pictures_arrive_in_order(coded: tuple[str, bytes, list[np.ndarray]]) -> None:
    _, data, expected = coded
    table, writer = table_of(data), PictureWriter()
    wanted = [41, 3, 17, 3, 18]
    got = [(picture, writer.picture(frame)) for picture, frame in read_pictures(MemoryStore({"a.mp4": data}), table, wanted)]
    assert [picture for picture, _ in got] == [3, 17, 18, 41]
    assert all(np.array_equal(pixels, expected[picture]) for picture, pixels in got)


def test_decode_into_fills_the_slots_of_the_caller() -> None:
    data = encode(pictures(20), options={"g": "5"})
    table, writer, expected = table_of(data), PictureWriter(), linear(data)
    span = picture_span(table, range(20))
    slab = np.zeros((6, *writer.shape(table)), writer.dtype)
    wanted = [2, 7, 8, 13, 14, 19]
    progress = list(decode_into(table, span, [data[a:b] for a, b in span.ranges], wanted, writer, slab))
    assert progress == list(enumerate(wanted))
    for position, picture in enumerate(wanted):
        np.testing.assert_array_equal(slab[position], expected[picture])
    with pytest.raises(DecodeError, match=r"a.mp4: picture 2 .*a decoded picture is 48x64x3 uint8, the array for it \(48, 63, 3\)"):
        list(decode_into(table, span, [data[a:b] for a, b in span.ranges], wanted, writer, [np.zeros((48, 63, 3), np.uint8)] * 6))


def test_stops_at_the_last_wanted_picture() -> None:
    data = encode(pictures(60), options={"g": "60", "bf": "2"})
    table = table_of(data)
    span = picture_span(table, [4])
    assert span.first == 0
    assert span.stop <= 8
    assert span.nbytes == span.sample_bytes < sum(table.sizes.tolist())
    assert [picture for picture, _ in decode_pictures(table, span, data[slice(*span.ranges[0])])] == [4]


def test_resolution_may_change_with_the_sample_entry() -> None:
    small, large = encode(pictures(6, 48, 64), options={"g": "3", "bf": "0"}), encode(pictures(6, 96, 128), options={"g": "3", "bf": "0"})
    one, two = table_of(small), table_of(large)
    samples = [
        data[o : o + s] for data, t in ((small, one), (large, two)) for o, s in zip(t.offsets.tolist(), t.sizes.tolist(), strict=True)
    ]
    movie = Movie(
        [len(sample) for sample in samples],
        [512] * 12,
        sync=[0, 3, 6, 9],
        per_chunk=[6, 6],
        descriptions=[0] * 6 + [1] * 6,
        entries=[one.stsd[8:], two.stsd[8:]],
        payload=lambda number, size: samples[number],
    )
    data, expected = movie.build()[0], linear(small) + linear(large)
    table, writer = table_of(data), PictureWriter()
    got = [writer.picture(frame) for _, frame in read_pictures(MemoryStore({"a.mp4": data}), table, range(12))]
    assert [picture.shape for picture in got] == [(48, 64, 3)] * 6 + [(96, 128, 3)] * 6
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def test_key_pictures_that_are_none_are_found_out() -> None:
    data = encode(pictures(30), options={"g": "10", "bf": "0", "sc_threshold": "0"})
    table, expected = table_of(data), linear(data)
    samples = [data[o : o + s] for o, s in zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)]

    def build(sync: list[int] | None) -> bytes:
        entries = [table.stsd[8:]]
        return Movie([len(s) for s in samples], [512] * 30, sync=sync, entries=entries, payload=lambda n, size: samples[n]).build()[0]

    for sync in (None, [], list(range(30))):
        listed = table_of(build(sync))
        assert listed.sync.tolist() == (list(range(30)) if sync is None else sync)
        assert listed.starts.tolist() == [0, 10, 20]
    lying = build([0, 15])
    listed = table_of(lying)
    span = picture_span(listed, [17])
    with pytest.raises(LeadInError, match=r"a.mp4: picture 17 .*sample 15 is declared a key picture and is none"):
        list(decode_pictures(listed, span, lying[slice(*span.ranges[0])]))
    got = [PictureWriter().picture(frame) for _, frame in read_pictures(MemoryStore({"a.mp4": lying}), listed, [17])]
    np.testing.assert_array_equal(got[0], expected[17])


def test_damage_is_named_and_good_pictures_before_it_are_right() -> None:
    data = encode(pictures(30), options={"g": "10", "bf": "0", "sc_threshold": "0"})
    table, expected, writer = table_of(data), linear(data), PictureWriter()
    start, size = int(table.offsets[14]), int(table.sizes[14])
    damaged = data[:start] + bytes(size) + data[start + size :]
    span = picture_span(table, range(30))
    stream = decode_pictures(table, span, damaged[slice(*span.ranges[0])])
    for number in range(14):
        picture, frame = next(stream)
        assert picture == number
        np.testing.assert_array_equal(writer.picture(frame), expected[picture])
    with pytest.raises(DecodeError, match=rf"a.mp4: picture 14 \(sample 14, bytes {start}\.\.{start + size}\)") as caught:
        next(stream)
    assert (caught.value.picture, caught.value.byte_range, caught.value.file) == (14, (start, start + size), "a.mp4")
    later = [picture for picture, _ in read_pictures(MemoryStore({"a.mp4": damaged}), table, range(20, 30))]
    assert later == list(range(20, 30))


def test_colours_that_cannot_be_converted_are_named() -> None:
    data = encode(pictures(3), options={"x264-params": "keyint=3:colormatrix=YCgCo"})
    table, store = table_of(data), MemoryStore({"a.mp4": data})
    span, out = picture_span(table, range(3)), np.zeros((3, 48, 64, 3), np.uint8)
    payload = store.read_ranges("a.mp4", span.ranges)
    with pytest.raises(DecodeError, match=r"picture 0 .* cannot be decoded: .* does not convert it from yuv420p, colour space 8"):
        list(decode_into(table, span, payload, range(3), PictureWriter(), out))


def test_a_missing_picture_is_an_error_not_its_neighbour() -> None:
    data = encode(pictures(12), options={"g": "12", "bf": "0"})
    table = table_of(data)
    samples = [data[o : o + s] for o, s in zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)]
    samples[5] = b"\0\0\0\2\x09\xf0"  # an access unit delimiter and no picture
    data = Movie([len(s) for s in samples], [512] * 12, sync=[0], entries=[table.stsd[8:]], payload=lambda n, size: samples[n]).build()[0]
    table = table_of(data)
    span = picture_span(table, range(12))
    with pytest.raises(DecodeError, match="picture 5 "):
        list(decode_pictures(table, span, data[slice(*span.ranges[0])]))


def test_truncated_files_lose_only_what_is_cut_off() -> None:
    data = encode(pictures(30), options={"g": "10", "bf": "0"}, mux_options={})
    whole = table_of(data)
    samples = [data[o : o + s] for o, s in zip(whole.offsets.tolist(), whole.sizes.tolist(), strict=True)]
    data, offsets = Movie(
        [len(s) for s in samples], [512] * 30, sync=whole.sync.tolist(), entries=[whole.stsd[8:]], payload=lambda n, size: samples[n]
    ).build()
    cut = data[: offsets[23] + 3]
    table = table_of(cut)
    assert table.pictures == 30
    assert table.truncated.tolist() == list(range(23, 30))
    store = MemoryStore({"a.mp4": cut})
    assert [picture for picture, _ in read_pictures(store, table, range(23))] == list(range(23))
    with pytest.raises(ShortReadError, match=r"a.mp4: pictures 20..25 need sample 23 at bytes .* the file ends at byte"):
        list(read_pictures(store, table, range(20, 26)))


def test_hidden_pictures_are_decoded_and_never_shown() -> None:
    data = encode(pictures(40), options={"g": "40", "bf": "0"})
    whole, expected = table_of(data), linear(data)
    samples = [data[o : o + s] for o, s in zip(whole.offsets.tolist(), whole.sizes.tolist(), strict=True)]
    data = Movie(
        [len(s) for s in samples],
        [512] * 40,
        sync=[0],
        edits=[(20 * 100 // 3, 15 * 512, 1 << 16)],
        entries=[whole.stsd[8:]],
        payload=lambda n, size: samples[n],
    ).build()[0]
    table, writer = table_of(data), PictureWriter()
    shown = linear(data)
    assert table.pictures == len(shown) == 20
    got = [writer.picture(frame) for _, frame in read_pictures(MemoryStore({"a.mp4": data}), table, range(20))]
    for n in range(20):
        np.testing.assert_array_equal(got[n], expected[n + 15])
        np.testing.assert_array_equal(got[n], shown[n])


@pytest.mark.parametrize(
    "flags", ["frag_keyframe+empty_moov", "frag_every_frame+empty_moov+default_base_moof", "frag_keyframe+delay_moov", "frag_keyframe"]
)
def test_fragmented_files_are_read_exactly(flags: str) -> None:
    data = encode(pictures(40), options={"g": "12", "bf": "2"}, mux_options={"movflags": flags})
    assert b"moof" in data
    table, expected, writer = table_of(data), linear(data), PictureWriter()
    assert table.fragmented
    assert table.pictures == 40
    for first in (0, 11, 25):
        for picture, frame in read_pictures(MemoryStore({"a.mp4": data}), table, range(first, first + 12)):
            np.testing.assert_array_equal(writer.picture(frame), expected[picture])


def test_depth_keeps_its_bits() -> None:
    import io

    import av

    depth = [(np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 7 + 100 * n) % 4096 for n in range(6)]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx265", rate=30, options={"x265-params": "lossless=1:log-level=none"})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "gray12le"
        for image in depth:
            frame = av.VideoFrame(64, 48, "gray12le")
            plane = np.zeros((48, frame.planes[0].line_size // 2), np.uint16)
            plane[:, :64] = image
            frame.planes[0].update(plane.tobytes())
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = buffer.getvalue()
    table, writer = table_of(data), PictureWriter("gray12le")
    assert writer.dtype == np.uint16
    assert writer.shape(table) == (48, 64, 1)
    got = [writer.picture(frame)[..., 0] for _, frame in read_pictures(MemoryStore({"a.mp4": data}), table, range(6))]
    for seen, image in zip(got, depth, strict=True):
        np.testing.assert_array_equal(seen, image)


def test_scaling_happens_in_the_writer() -> None:
    data = encode(pictures(3))
    table, writer = table_of(data), PictureWriter(size=(24, 32), filter="area")
    got = [writer.picture(frame) for _, frame in read_pictures(MemoryStore({"a.mp4": data}), table, range(3))]
    assert [picture.shape for picture in got] == [(24, 32, 3)] * 3 == [writer.shape(table)] * 3


def test_what_cannot_be_asked_for() -> None:
    data = encode(pictures(5))
    table = table_of(data)
    for wanted in ([], [5], [-1, 2]):
        with pytest.raises(SelectionError, match="the file presents 5"):
            picture_span(table, wanted)
    span = picture_span(table, [0])
    with pytest.raises(ShortReadError, match="payload of"):
        next(decode_pictures(table, span, b"short"))
    for bad in ({"pixel_format": "yuv9"}, {"filter": "magic"}, {"size": (0, 5)}):
        with pytest.raises(SettingsError):
            PictureWriter(**bad)
    unknown = Movie([3, 4], [512, 512], entries=[visual_entry(b"xyz1")]).build()[0]
    table = table_of(unknown)
    with pytest.raises(VideoFormatError, match="no decoder for sample entry 'xyz1'"):
        list(read_pictures(MemoryStore({"a.mp4": unknown}), table, [0]))


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
@pytest.mark.parametrize(("matrix", "full"), [(1, False), (6, True), (9, False)])
def test_colours_that_only_the_container_declares_are_used(codec: str, matrix: int, full: bool) -> None:
    from video.forge import box

    plain = encode(pictures(4), codec, {"g": "2"})
    whole = table_of(plain)
    samples = [plain[o : o + s] for o, s in zip(whole.offsets.tolist(), whole.sizes.tolist(), strict=True)]
    colour = box(b"colr", b"nclx", struct.pack(">HHHB", matrix, matrix, matrix, full << 7))
    entry = whole.stsd[8:]
    while b"colr" in entry:
        entry = entry.replace(b"colr", b"free")
    entry = struct.pack(">I", len(entry) + len(colour)) + entry[4:] + colour
    data = Movie([len(s) for s in samples], [512] * 4, sync=[0, 2], entries=[entry], payload=lambda n, size: samples[n]).build()[0]
    table, expected = table_of(data), linear(data)
    got = [PictureWriter().picture(frame) for _, frame in read_pictures(MemoryStore({"a.mp4": data}), table, range(4))]
    for seen, right in zip(got, expected, strict=True):
        np.testing.assert_array_equal(seen, right)
