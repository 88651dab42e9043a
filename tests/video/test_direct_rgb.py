"""Conversion into the caller's memory: the same bytes as PyAV, and none beside the picture."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.video import direct_rgb
from ingest.video.direct_rgb import DirectRgb, DirectWriter, Kind, agrees, kind_of, swscale
from ingest.video.pixels import PictureWriter

GUARD = 512


def noise(
    width: int, height: int, pixel_format: str = "yuv420p", colorspace: int = 2, color_range: int = 0, seed: int = 1
) -> av.VideoFrame:
    pixels = np.random.default_rng(seed).integers(0, 256, (height * 3 // 2, width), dtype=np.uint8)
    frame = av.VideoFrame.from_ndarray(pixels, format=pixel_format)
    frame.colorspace, frame.color_range = colorspace, color_range
    return frame


def guarded(shape: tuple[int, ...], offset: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture's memory at an odd address, and all that lies around it."""
    memory = np.full(GUARD + offset + int(np.prod(shape)) + GUARD, 0x5A, np.uint8)
    return memory[GUARD + offset : -GUARD].reshape(shape), memory


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 90).map(lambda number: 2 * number),
    height=st.integers(1, 40).map(lambda number: 2 * number),
    pixel_format=st.sampled_from(["yuv420p", "yuvj420p"]),
    colorspace=st.sampled_from([0, 1, 2, 4, 5, 6, 7, 9]),
    color_range=st.sampled_from([0, 1, 2]),
    offset=st.integers(0, 33),
)
def test_any_picture_has_the_bytes_of_pyav_and_nothing_else_is_written(
    width: int, height: int, pixel_format: str, colorspace: int, color_range: int, offset: int
) -> None:
    frame = noise(width, height, pixel_format, colorspace, color_range)
    out, memory = guarded((height, width, 3), offset)
    PictureWriter().write(frame, out)
    assert np.array_equal(out, frame.to_ndarray(format="rgb24"))
    around = np.concatenate([memory[: GUARD + offset], memory[-GUARD:]])
    assert (around == 0x5A).all()


@pytest.mark.skipif(swscale() is None, reason="PyAV was built without a library of its own: every picture takes PyAV's way")
@pytest.mark.parametrize("size", [(640, 480), (320, 240), (1280, 720), (224, 224), (96, 96)])
def test_common_sizes_are_converted_directly(size: tuple[int, int]) -> None:
    frame = noise(*size)
    out = np.zeros((size[1], size[0], 3), np.uint8)
    assert DirectWriter().write(frame, out)
    assert np.array_equal(out, frame.to_ndarray(format="rgb24"))


def test_what_cannot_be_written_directly_is_left_alone() -> None:
    writer = DirectWriter()
    frame = noise(64, 32)
    for out in (
        np.zeros((32, 64, 3), np.uint16),
        np.zeros((32, 66, 3), np.uint8),
        np.zeros((32, 128, 3), np.uint8)[:, ::2],
    ):
        assert not writer.write(frame, out)
        assert not out.any()
    grey = av.VideoFrame.from_ndarray(np.full((32, 64), 9, np.uint8), format="gray")
    assert not writer.write(grey, np.zeros((32, 64, 3), np.uint8))


def test_interlaced_pictures_have_the_bytes_of_pyav() -> None:
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30, width=96, height=64, pix_fmt="yuv420p")
        assert isinstance(stream, av.VideoStream)
        stream.options = {"x264-params": "keyint=2:interlaced=1:tff=1"}
        for seed in range(3):
            container.mux(stream.encode(noise(96, 64, seed=seed)))
        container.mux(stream.encode())
    writer = PictureWriter()
    with av.open(io.BytesIO(data.getvalue())) as container:
        frames = list(container.decode(video=0))
    assert [frame.interlaced_frame for frame in frames] == [True] * 3
    for frame in frames:
        assert np.array_equal(writer.picture(frame), frame.to_ndarray(format="rgb24"))


def test_a_library_that_converts_otherwise_is_not_trusted() -> None:
    kind = kind_of(noise(64, 32))

    class Converter:
        shape = (32, 64, 3)

        def __init__(self, change: int, beyond: int) -> None:
            self.change, self.beyond = change, beyond

        def write(self, frame: av.VideoFrame, out: np.ndarray) -> bool:
            out[:] = frame.to_ndarray(format="rgb24")
            out[-1, -1, -1] ^= self.change
            end = out.__array_interface__["data"][0] + out.size
            import ctypes

            ctypes.memset(end, 0, self.beyond)
            return True

    def tried(change: int, beyond: int) -> bool:
        return agrees(lambda: Converter(change, beyond), kind)  # type: ignore[arg-type, return-value]

    assert tried(0, 0)
    assert not tried(1, 0)
    assert not tried(0, 1)


def test_without_the_library_pictures_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = noise(64, 32)
    with_it = PictureWriter().picture(frame)
    monkeypatch.setattr(direct_rgb, "swscale", lambda: None)
    monkeypatch.setattr(direct_rgb, "_TRIALS", {})
    assert not DirectWriter().write(frame, np.zeros((32, 64, 3), np.uint8))
    assert np.array_equal(PictureWriter().picture(frame), with_it)


def test_formats_of_other_layout_are_refused() -> None:
    library = swscale()
    kind: Kind = ("yuv422p", 64, 32, 2, 0)
    with pytest.raises(ValueError, match="yuv422p"):
        DirectRgb(library, kind)
