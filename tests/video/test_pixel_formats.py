"""Planes, resizing and depth: what decoded pictures become."""

from __future__ import annotations

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorRange, Interpolation, VideoReformatter

from ingest.errors import DecodeError, SettingsError
from ingest.video.pixels import PictureWriter
from train_integration.pixels import Colour, planes_to_rgb


def frame_of(height: int, width: int, *, pixel_format: str = "yuv420p", seed: int = 0, busy: bool = True) -> av.VideoFrame:
    """A frame of smooth gradients, or with saturated noise, whose planes are set directly."""
    rng = np.random.default_rng(seed)
    frame = av.VideoFrame(width, height, pixel_format)
    for number, plane in enumerate(frame.planes):
        rows, columns = plane.height, plane.width
        smooth = 60 + 90 * np.linspace(0, 1, rows)[:, None] + 60 * np.linspace(0, 1, columns)[None, :]
        values = rng.integers(16, 236, (rows, columns)) if busy else (smooth if number == 0 else 118 + smooth / 20)
        padded = np.zeros((rows, plane.line_size), np.uint8)
        padded[:, :columns] = values
        plane.update(padded)
    return frame


def planes_of(frame: av.VideoFrame, **settings: object) -> torch.Tensor:
    return torch.from_numpy(np.moveaxis(PictureWriter("yuv420p", **settings).picture(frame), -1, 0).copy())  # type: ignore[arg-type]


def test_planes_equal_those_of_the_frame() -> None:
    frame = frame_of(48, 70)
    np.testing.assert_array_equal(PictureWriter("yuv420p").picture(frame)[..., 0], frame.to_ndarray(format="yuv420p"))


@pytest.mark.parametrize("code", [1, 2, 5, 9])
@pytest.mark.parametrize("full", [False, True])
def test_the_device_converts_like_the_exact_path(code: int, full: bool) -> None:
    frame = frame_of(64, 96, seed=code)
    frame.colorspace = code
    frame.color_range = ColorRange.JPEG if full else ColorRange.MPEG
    matrix = {1: "bt709", 2: "bt601", 5: "bt601", 9: "bt2020"}[code]
    exact = np.moveaxis(PictureWriter().picture(frame), -1, 0).astype(int)
    converted = planes_to_rgb(planes_of(frame), Colour(matrix, full)).numpy().astype(int)  # type: ignore[arg-type]
    assert np.abs(converted - exact).max() <= 3
    assert np.abs(converted - exact).mean() <= 1.5


def test_batches_windows_and_floats_convert_alike() -> None:
    planes = torch.stack([planes_of(frame_of(16, 24, seed=seed)) for seed in range(6)]).reshape(3, 2, 1, 24, 24)
    levels = planes_to_rgb(planes)
    assert levels.shape == (3, 2, 3, 16, 24)
    assert levels.dtype == torch.uint8
    np.testing.assert_array_equal(levels[1, 1], planes_to_rgb(planes[1, 1]))
    floats = planes_to_rgb(planes, dtype=torch.float32)
    assert (floats * 255 - levels).abs().max() <= 0.51


@pytest.mark.parametrize("bad", [torch.zeros(24, 24, dtype=torch.uint8), torch.zeros(1, 25, 24, dtype=torch.uint8), torch.zeros(1, 24, 24)])
def test_what_is_no_planes_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(SettingsError, match="planes"):
        planes_to_rgb(bad)


@pytest.mark.parametrize("filter", ["fast_bilinear", "bilinear", "bicubic", "area", "lanczos", "point"])
@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv422p", "yuv444p"])
def test_resized_pictures_equal_the_rgb_resize(filter: str, pixel_format: str) -> None:
    frame = frame_of(96, 128, pixel_format=pixel_format)
    convert, scale = VideoReformatter(), VideoReformatter()
    rgb = convert.reformat(frame, format="rgb24", threads=1)
    expected = scale.reformat(rgb, width=56, height=42, format="rgb24", interpolation=Interpolation[filter.upper()], threads=1).to_ndarray()
    difference = np.abs(PictureWriter(size=(42, 56), filter=filter).picture(frame).astype(int) - expected)
    assert difference.max() <= 2
    assert difference.mean() <= 0.5


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "area"])
def test_planes_are_resized_as_planes(filter: str) -> None:
    """Smooth pictures, whose chroma has no edges to lose, stay within rounding of the mean of the RGB pixels."""
    frame = frame_of(96, 128, busy=False)
    resized = planes_of(frame, size=(48, 64), filter=filter)
    assert resized.shape == (1, 72, 64)
    expected = torch.nn.functional.avg_pool2d(planes_to_rgb(planes_of(frame), dtype=torch.float32) * 255, 2)
    difference = (planes_to_rgb(resized).to(torch.float32) - expected).abs()
    # Three planes, each rounded before the matrix instead of after it.
    assert difference.max() <= 4
    assert difference.mean() <= 0.7


def test_full_range_planes_keep_their_values_when_resized() -> None:
    frame = frame_of(32, 32, pixel_format="yuvj420p", busy=False)
    for plane in frame.planes:
        plane.update(np.full((plane.height, plane.line_size), 250, np.uint8))
    assert np.unique(PictureWriter("yuv420p", (16, 16)).picture(frame)).tolist() == [250]


@pytest.mark.parametrize("size", [(3, 4), (4, 3)])
def test_planes_need_even_sizes(size: tuple[int, int]) -> None:
    with pytest.raises(SettingsError, match="even"):
        PictureWriter("yuv420p", size)


def test_an_array_of_another_size_is_refused() -> None:
    with pytest.raises(DecodeError, match="decoded picture"):
        PictureWriter("yuv420p").write(frame_of(16, 16), np.empty((16, 16, 1), np.uint8))


@pytest.mark.parametrize("pixel_format", ["gray12le", "gray16le"])
@pytest.mark.parametrize("size", [(12, 20), (7, 9), (48, 80)])
def test_depth_is_resized_to_values_that_were_recorded(pixel_format: str, size: tuple[int, int]) -> None:
    bits = 12 if pixel_format == "gray12le" else 16
    values = np.random.default_rng(3).integers(0, 1 << bits, (24, 40)).astype(np.uint16)
    frame = av.VideoFrame.from_ndarray(values, format=pixel_format)
    resized = PictureWriter(pixel_format, size).picture(frame)
    rows, columns = (np.arange(size[0]) + 0.5) * 24 / size[0], (np.arange(size[1]) + 0.5) * 40 / size[1]
    np.testing.assert_array_equal(resized[..., 0], values[rows.astype(int)[:, None], columns.astype(int)])
