"""One suite for every decoder. torchcodec runs where it can be loaded; everywhere, its logic runs over a stand-in that PyAV drives."""

from __future__ import annotations

import io
import itertools
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch

from ingest.engine.dataset import open_dataset
from ingest.errors import ChecksumError, DecodeError, ReelrayError, ResourceUnavailableError, SettingsError, ShortReadError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.storage.local import LocalStore
from ingest.video.backends import PYAV, PictureDecoder
from ingest.video.checksums import add_checksums
from ingest.video.index import ProbingIndex
from ingest.video.pixels import PictureWriter
from ingest.video.spans import gop_starts, picture_span
from ingest.video.tables import SampleTable
from train_integration import backends
from train_integration.backends import TorchcodecDecoder, gpu_decodes, open_decoder
from video.forge import MemoryStore, encode, linear, pictures
from video.test_decode import CODECS, table_of


class StandIn:
    """Has the part of torchcodec's ``VideoDecoder`` that is used; PyAV decodes."""

    late_s = 0.0

    def __init__(self, source: bytes, **settings: Any) -> None:
        assert settings["dimension_order"] == "NHWC"
        with av.open(io.BytesIO(source)) as container:
            # Pictures are counted over what the file lists, those included that cannot be shown.
            self._listed = sorted(packet.pts for packet in container.demux(video=0) if packet.pts is not None)
        with av.open(io.BytesIO(source)) as container:
            self._frames = {frame.pts: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}
            self._unit = float(container.streams.video[0].time_base)

    def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
        chosen = [self._listed[index] for index in indices]
        return SimpleNamespace(
            data=torch.from_numpy(np.stack([self._frames[pts] for pts in chosen])),
            pts_seconds=torch.tensor([pts * self._unit + self.late_s for pts in chosen], dtype=torch.float64),
        )


@pytest.fixture(params=["pyav", "stand-in", "torchcodec"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PictureDecoder:
    if request.param == "pyav":
        return PYAV
    if request.param == "torchcodec":
        try:
            return open_decoder("torchcodec")
        except ResourceUnavailableError as error:
            pytest.skip(f"the conformance of torchcodec is not checked here: {error}")
    monkeypatch.setattr(backends, "_torchcodec", lambda: SimpleNamespace(VideoDecoder=StandIn))
    return TorchcodecDecoder()


@pytest.fixture(scope="module", params=[("h264", 6, 2), ("h264", 1, 0), ("hevc", 5, 1), ("av1", 4, 0)], ids=lambda value: value[0])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalStore, str, list[np.ndarray]]:
    """A file of three episodes, and its pictures by linear decode."""
    codec, gop, bframes = request.param
    root = tmp_path_factory.mktemp("backends") / "ds"
    make_dataset(root, MakeOptions(episodes=3, frames="8:14", cameras=1, size=(64, 96), codec=codec, gop=gop, bframes=bframes, seed=5))
    path = "videos/observation.images.cam0/chunk-000/file-000.mp4"
    with av.open(str(root / path)) as container:
        return LocalStore.at(root), path, [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def decode(decoder: PictureDecoder, made: tuple[LocalStore, str, list[np.ndarray]], wanted: list[int], **settings: Any) -> list[np.ndarray]:
    store, path, _ = made
    table = ProbingIndex(store).table(path)
    span = picture_span(table, wanted)
    writer = PictureWriter(**settings)
    out = np.zeros((len(wanted), *writer.shape(table)), writer.dtype)
    answers = list(decoder.decode_into(table, span, store.read_ranges(path, span.ranges), wanted, writer, out))
    assert answers == list(enumerate(wanted))
    return list(out)


@pytest.mark.parametrize("wanted", [[0], [7], [3, 4, 5, 9], list(range(20))])
def test_every_picture_is_the_one_asked_for(decoder: PictureDecoder, made: Any, wanted: list[int]) -> None:
    for picture, number in zip(decode(decoder, made, wanted), wanted, strict=True):
        difference = np.abs(picture.astype(int) - made[2][number])
        assert difference.max() <= (0 if decoder.exact else 2), number


def test_resized_and_planar_pictures_come_from_every_decoder(decoder: PictureDecoder, made: Any) -> None:
    for settings in ({"size": (32, 48)}, {"pixel_format": "yuv420p"}):
        for got, expected in zip(decode(decoder, made, [2, 6], **settings), decode(PYAV, made, [2, 6], **settings), strict=True):
            assert np.abs(got.astype(int) - expected).max() <= 2


def test_a_short_payload_is_refused(decoder: PictureDecoder, made: Any) -> None:
    store, path, _ = made
    table = ProbingIndex(store).table(path)
    span = picture_span(table, [1])
    out = np.zeros((1, *PictureWriter().shape(table)), np.uint8)
    short = [part[:-1] for part in store.read_ranges(path, span.ranges)]
    with pytest.raises(ShortReadError):
        list(decoder.decode_into(table, span, short, [1], PictureWriter(), out))


def test_decoders_travel(decoder: PictureDecoder) -> None:
    again = pickle.loads(pickle.dumps(decoder))
    assert again == decoder
    assert hash(again) == hash(decoder)


def decode_all(decoder: PictureDecoder, table: SampleTable, store: Any, wanted: list[int]) -> np.ndarray:
    span = picture_span(table, wanted)
    out = np.zeros((len(wanted), *PictureWriter().shape(table)), np.uint8)
    payload = store.read_ranges(table.path, span.ranges)
    assert list(decoder.decode_into(table, span, payload, wanted, PictureWriter(), out)) == list(enumerate(wanted))
    return out


def failures(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Files on which a decoder failed, so that PyAV had to decode what was left."""
    return {record.message.partition(":")[0] for record in caplog.records if "failed, PyAV decodes" in record.message}


@pytest.mark.parametrize("name", [name for name in CODECS if name != "h264 intra refresh"])  # fetched from further back, by the engine
def test_every_shape_of_groups(decoder: PictureDecoder, name: str, caplog: pytest.LogCaptureFixture) -> None:
    codec, options = CODECS[name]
    data = encode(pictures(48), codec, options, pix_fmt="rgb24" if codec == "png" else "yuv420p", fmt="mov" if codec == "png" else "mp4")
    table, expected = table_of(data), np.stack(linear(data))
    backends._warn_once.cache_clear()
    for wanted in ([0], [17], [13, 14, 20, 31, 47], list(range(11, 47)), list(range(48))):
        difference = np.abs(decode_all(decoder, table, MemoryStore({"a.mp4": data}), wanted).astype(int) - expected[wanted])
        assert difference.max() <= (0 if decoder.exact else 2), wanted
    assert not failures(caplog)


@pytest.mark.shared
def test_every_conformance_file_is_decoded_or_refused_alike(
    decoder: PictureDecoder, shared_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore.at(shared_dir / "data" / "mp4")
    index = ProbingIndex(store)

    def attempt(chosen: PictureDecoder, table: SampleTable, wanted: list[int]) -> np.ndarray | str:
        try:
            return decode_all(chosen, table, store, wanted)
        except ReelrayError as error:
            return f"{type(error).__name__} {error}"

    files, refused = 0, set()
    backends._warn_once.cache_clear()
    for truth in sorted((shared_dir / "data" / "mp4").glob("*.truth.json")):
        try:
            table = index.table(truth.name.removesuffix(".truth.json"))
        except ReelrayError:
            continue
        shown = min(table.pictures, 60)
        files += 1
        starts = [number for number in gop_starts(table).tolist() if number < shown][:5]
        for first, stop in itertools.pairwise([*starts, shown]):
            wanted = list(range(first, min(first + 30, stop)))
            got, expected = attempt(decoder, table, wanted), attempt(PYAV, table, wanted)
            if isinstance(expected, str) or isinstance(got, str):
                assert got == expected
                refused.add(table.path)
            else:
                assert np.abs(got.astype(int) - expected).max(initial=0) <= (0 if decoder.exact else 2), (table.path, first)
    assert files >= 90
    # Beside the damaged files: a change of size inside a file, and a lead-in that older versions of FFmpeg lose pictures after.
    assert failures(caplog) - refused <= {"h264_b3_open_g12_bluray.mp4", "hm_two_stsd_res_change.mp4"}


@pytest.mark.parametrize("name", ["h264 closed GOP with B", "hevc closed GOP", "mpeg4 with B"])
def test_damage_is_named(decoder: PictureDecoder, name: str) -> None:
    codec, options = CODECS[name]
    data = encode(pictures(36), codec, options)
    table = table_of(data)
    start, size = int(table.offsets[15]), int(table.sizes[15])
    store = MemoryStore({"a.mp4": data[:start] + bytes(size) + data[start + size :]})
    with pytest.raises(DecodeError) as expected:
        decode_all(PYAV, table, store, list(range(12, 24)))
    with pytest.raises(DecodeError) as caught:
        decode_all(decoder, table, store, list(range(12, 24)))
    assert str(caught.value) == str(expected.value)
    assert caught.value.picture == expected.value.picture != 12


def test_damage_that_a_decoder_conceals_is_found_by_checksums(decoder: PictureDecoder, made: Any, caplog: pytest.LogCaptureFixture) -> None:
    store, path, _ = made
    table, _ = add_checksums(store, ProbingIndex(store).table(path))
    backends._warn_once.cache_clear()
    assert len(decode_all(decoder, table, store, [3, 4])) == 2
    assert not caplog.records
    data = bytearray((Path(store.root) / path).read_bytes())
    data[int(table.offsets[int(table.presented[4])]) + int(table.sizes[int(table.presented[4])]) // 2] ^= 4
    with pytest.raises(ChecksumError, match="picture"):
        decode_all(decoder, table, MemoryStore({path: bytes(data)}), [3, 4])


def test_damage_may_be_concealed_where_there_are_no_checksums_is_said_once(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "_torchcodec", lambda: SimpleNamespace(VideoDecoder=StandIn))
    backends._warn_once.cache_clear()
    for number in (1, 3):
        decode(TorchcodecDecoder(), made, [number])
    assert ["--checksums" in record.message for record in caplog.records] == [True]


def test_a_neighbour_is_never_taken(made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backends, "_torchcodec", lambda: SimpleNamespace(VideoDecoder=StandIn))
    monkeypatch.setattr(StandIn, "late_s", 0.02)
    backends._warn_once.cache_clear()
    for number in (3, 5):
        np.testing.assert_array_equal(decode(TorchcodecDecoder(), made, [number])[0], made[2][number])
    assert ["another picture than the one asked for" in record.message for record in caplog.records[1:]] == [True]


def test_pyav_decodes_what_is_left_after_a_crash_inside_the_library(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(StandIn):
        def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
            if 2 in indices:
                raise RuntimeError("no such picture")
            return super().get_frames_at(indices)

    monkeypatch.setattr(backends, "_torchcodec", lambda: SimpleNamespace(VideoDecoder=Breaking))
    monkeypatch.setattr(backends, "_TOGETHER", 2)
    backends._warn_once.cache_clear()
    for picture, expected in zip(decode(TorchcodecDecoder(), made, [0, 1, 2, 3, 4]), made[2][:5], strict=True):
        np.testing.assert_array_equal(picture, expected)
    assert failures(caplog) == {made[1]}
    assert "no such picture" in caplog.text


@pytest.mark.parametrize(
    ("codec", "capability", "decodes"),
    [
        ("av1", (8, 0), False),
        ("av1", (9, 0), False),
        ("av1", (7, 5), False),
        ("av1", (8, 6), True),
        ("av1", (8, 9), True),
        ("av1", (10, 0), True),
        ("av1", (12, 0), True),
        ("h264", (9, 0), True),
        ("hevc", (8, 0), True),
        ("prores", (9, 0), False),
    ],
)
def test_what_a_gpu_decodes(codec: str, capability: tuple[int, int], decodes: bool) -> None:
    assert gpu_decodes(codec, capability) is decodes


def test_what_the_gpu_cannot_decode_pyav_decodes_with_one_warning(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "_capability", lambda: (9, 0))
    monkeypatch.setattr(backends, "gpu_decodes", lambda *_: False)
    backends._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "reelray.backends"):
        for number in (1, 5):
            np.testing.assert_array_equal(decode(TorchcodecDecoder("cuda"), made, [number])[0], made[2][number])
    assert len(caplog.records) == 1
    assert "9.0" in caplog.text


def test_a_missing_library_or_gpu_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(ResourceUnavailableError, match=r"install reelray\[torchcodec\]"):
        open_decoder("torchcodec")
    monkeypatch.setattr(backends, "_torchcodec", lambda: None)
    monkeypatch.setattr(backends, "_capability", lambda: None)
    with pytest.raises(ResourceUnavailableError, match="GPU"):
        open_decoder("nvdec")
    with pytest.raises(SettingsError, match="video_backend"):
        open_decoder("dxva")  # type: ignore[arg-type]


def test_the_engine_decodes_with_the_decoder_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path / "ds", MakeOptions(episodes=2, frames="5:5", cameras=1, size=(32, 64), gop=3))
    calls: list[int] = []

    class Counting(StandIn):
        def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
            calls.append(len(indices))
            return super().get_frames_at(indices)

    monkeypatch.setattr(backends, "_torchcodec", lambda: SimpleNamespace(VideoDecoder=Counting))
    camera = "observation.images.cam0"
    exact = open_dataset(tmp_path / "ds").sample(1, 3)[camera]
    np.testing.assert_array_equal(open_dataset(tmp_path / "ds", decoder=TorchcodecDecoder()).sample(1, 3)[camera], exact)
    assert calls
