"""One suite for every decoder. torchcodec runs where it is installed; everywhere, its logic runs over a stand-in that PyAV drives."""

from __future__ import annotations

import importlib.util
import io
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
from ingest.errors import DecodeError, ResourceUnavailableError, SettingsError, ShortReadError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.storage.local import LocalStore
from ingest.video.backends import PYAV, PictureDecoder
from ingest.video.index import ProbingIndex
from ingest.video.pixels import PictureWriter
from ingest.video.spans import picture_span
from train_integration import backends
from train_integration.backends import TorchcodecDecoder, gpu_decodes, open_decoder


class StandIn:
    """Has the part of torchcodec's ``VideoDecoder`` that is used; PyAV decodes."""

    late_s = 0.0

    def __init__(self, source: bytes, **settings: Any) -> None:
        assert settings["dimension_order"] == "NHWC"
        with av.open(io.BytesIO(source)) as container:
            frames = sorted(container.decode(video=0), key=lambda frame: frame.pts)
            self._frames = [(float(frame.pts * frame.time_base), frame.to_ndarray(format="rgb24")) for frame in frames]

    def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
        chosen = [self._frames[index] for index in indices]
        return SimpleNamespace(
            data=torch.from_numpy(np.stack([picture for _, picture in chosen])),
            pts_seconds=torch.tensor([at + self.late_s for at, _ in chosen], dtype=torch.float64),
        )


@pytest.fixture(params=["pyav", "stand-in", "torchcodec"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PictureDecoder:
    if request.param == "pyav":
        return PYAV
    if request.param == "torchcodec":
        if importlib.util.find_spec("torchcodec") is None:
            pytest.skip("torchcodec is not installed: its conformance is not checked here")
        return open_decoder("torchcodec")
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


def test_a_neighbour_is_never_taken(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_torchcodec", lambda: SimpleNamespace(VideoDecoder=StandIn))
    monkeypatch.setattr(StandIn, "late_s", 0.02)
    with pytest.raises(DecodeError, match=r"picture 3 .*returned the picture at"):
        decode(TorchcodecDecoder(), made, [3])


def test_a_crash_inside_the_library_names_the_picture(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such stream")

    monkeypatch.setattr(backends, "_torchcodec", lambda: SimpleNamespace(VideoDecoder=broken))
    with pytest.raises(DecodeError, match=r"picture 4 .*no such stream"):
        decode(TorchcodecDecoder(), made, [4])


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
    with pytest.raises(ResourceUnavailableError, match="install torchcodec"):
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
