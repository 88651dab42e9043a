"""Decoded pictures into arrays: one reused converter, no intermediate arrays."""

from __future__ import annotations

from typing import Any, cast

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from ingest.errors import DecodeError, SettingsError, VideoFormatError
from ingest.video.direct_rgb import DirectWriter
from ingest.video.entries import parse_sample_entries
from ingest.video.tables import SampleTable

_FORMATS: dict[str, tuple[type[np.generic], int]] = {
    "rgb24": (np.uint8, 3),
    "yuv420p": (np.uint8, 1),
    "gray": (np.uint8, 1),
    "gray10le": (np.uint16, 1),
    "gray12le": (np.uint16, 1),
    "gray16le": (np.uint16, 1),
    "rgb48le": (np.uint16, 3),
}
_FILTERS = ("fast_bilinear", "bilinear", "bicubic", "area", "lanczos", "point")
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
_PLANAR = ("yuv420p", "yuvj420p")


Crop = tuple[int, int, int, int]
"""Part of a picture: top row, left column, height, width."""


def check_pixel_format(pixel_format: str, size: tuple[int, int] | None, filter: str, crop: Crop | None = None) -> None:
    """Checks the settings of a `PictureWriter`.

    Raises:
        SettingsError: unknown pixel format or filter, or a size or part that is not positive, or odd where chroma is halved.
    """
    if pixel_format not in _FORMATS:
        raise SettingsError(f"pixel format {pixel_format!r} is not one of {sorted(_FORMATS)}")
    if filter not in _FILTERS:
        raise SettingsError(f"filter {filter!r} is not one of {list(_FILTERS)}")
    if size is not None and (len(size) != 2 or min(size) <= 0):
        raise SettingsError(f"size {size} must be (height, width), both positive")
    if size is not None and pixel_format == "yuv420p" and (size[0] % 2 or size[1] % 2):
        raise SettingsError(f"size {size} must be even in both directions for yuv420p, whose chroma planes are half as large")
    if crop is not None and (len(crop) != 4 or min(crop) < 0 or min(crop[2:]) == 0):
        raise SettingsError(f"crop {crop} must be (top, left, height, width), the first two at least 0, the others at least 1")
    if crop is not None and pixel_format == "yuv420p" and any(number % 2 for number in crop):
        raise SettingsError(f"crop {crop} must be even in all numbers for yuv420p, whose chroma planes are half as large")


class PictureWriter:
    """Converts decoded frames and copies them into arrays that the caller owns.

    Not thread-safe: one writer per decoding thread. For ``rgb24`` at the frame's own size the bytes equal those of
    ``frame.to_ndarray(format="rgb24")``.

    Resizing: ``yuv420p`` is scaled as YUV. ``rgb24`` is converted first and scaled as RGB, three times as dear, because scaling
    before the conversion changes saturated edges of real pictures by 10 to 50 levels. Grey depth pictures take the
    nearest pixel, so that no value arises that was not recorded.

    Args:
        pixel_format: ``rgb24`` (uint8), ``yuv420p`` (uint8; the planes Y, U and V below each other, [height * 3 / 2, width, 1], in
            the range and matrix of the stream), ``gray12le`` and its like (uint16, for depth), and a few more.
        size: (height, width) to scale to, or None for the picture's own size.
        filter: scaling filter.
        crop: part of the picture to take, before it is scaled; None takes all of it.

    Raises:
        SettingsError: unknown pixel format or filter, or a size or part that is not positive.
    """

    def __init__(
        self, pixel_format: str = "rgb24", size: tuple[int, int] | None = None, filter: str = "bilinear", crop: Crop | None = None
    ) -> None:
        check_pixel_format(pixel_format, size, filter, crop)
        self.pixel_format = pixel_format
        self.size = size
        self.crop = crop
        self._interpolation = Interpolation[filter.upper()]
        self._type, self._channels = _FORMATS[pixel_format]
        self._reformatter = VideoReformatter()
        self._scaler = VideoReformatter()
        self._direct = DirectWriter() if pixel_format == "rgb24" and size is None and crop is None else None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the pictures."""
        return np.dtype(self._type)

    def shape(self, table: SampleTable) -> tuple[int, int, int]:
        """(height, width, channels) of the pictures of a file.

        Raises:
            VideoFormatError: the file's sample entries cannot be read, or its pictures cannot have the format.
        """
        # The track header may declare a display size; the sample entry has the size of the coded picture.
        entry = parse_sample_entries(table.stsd, table.path)[0]
        top, left, height, width = self._part(entry.height, entry.width)
        if top + height > entry.height or left + width > entry.width:
            raise VideoFormatError(
                f"{table.path}: pictures of {entry.width}x{entry.height} do not contain the part {self.crop} (top, left, height, width)",
                file=table.path,
            )
        height, width = self.size or (height, width)
        if self.pixel_format == "yuv420p" and (height % 2 or width % 2):
            raise VideoFormatError(
                f"{table.path}: pictures of {width}x{height} have no whole yuv420p planes; set image_size, or use rgb24", file=table.path
            )
        return self._laid_out(height, width)

    def frame_shape(self, frame: av.VideoFrame) -> tuple[int, int, int]:
        """(height, width, channels) that ``write`` produces for one frame."""
        return self._laid_out(*(self.size or self._part(frame.height, frame.width)[2:]))

    def _part(self, height: int, width: int) -> Crop:
        return self.crop or (0, 0, height, width)

    def _laid_out(self, height: int, width: int) -> tuple[int, int, int]:
        return (height * 3 // 2 if self.pixel_format == "yuv420p" else height), width, self._channels

    def write(self, frame: av.VideoFrame, out: NDArray[Any]) -> None:
        """Converts one frame into ``out``.

        Args:
            frame: as decoded.
            out: [height, width, channels] of ``dtype``, rows contiguous.

        Raises:
            DecodeError: the frame has another size than ``out``.
        """
        if self._direct is not None and self._direct.write(frame, out):
            return
        height, width, channels = self.frame_shape(frame)
        if out.shape != (height, width, channels) or out.dtype != self._type:
            raise DecodeError(f"a decoded picture is {height}x{width}x{channels} {self.dtype}, the array for it {out.shape} {out.dtype}")
        if self.pixel_format == "yuv420p":
            self._write_planes(frame, out.reshape(-1))
        elif self.pixel_format.startswith("gray") and self.size is not None:
            self._write_nearest(frame, out)
        else:
            converted = self._convert(frame, self.pixel_format)
            rows = self._cut(converted.planes[0], converted.height, converted.width, channels)
            if self.size is not None and rows.shape != (height, width * channels):
                part = converted if self.crop is None else self._framed(rows.reshape(len(rows), -1, channels), converted)
                rows = self._rows(self._scale(part, self.pixel_format).planes[0], height)[:, : width * channels]
            np.copyto(out.reshape(height, width * channels), rows)

    def _cut(self, plane: Any, height: int, width: int, channels: int = 1, halved: int = 1) -> NDArray[Any]:
        """The wanted part of a plane of a picture: [height / halved, width / halved * channels].

        Args:
            plane: the plane.
            height: rows of the picture.
            width: columns of the picture.
            channels: values for each pixel of the plane.
            halved: pixels of the picture for each of the plane, in both directions.

        Raises:
            DecodeError: the picture does not contain the part.
        """
        top, left, high, wide = self._part(height, width)
        if top + high > height or left + wide > width:
            raise DecodeError(f"a decoded picture is {height}x{width} and does not contain the part {self.crop} (top, left, height, width)")
        top, left, high, wide = (number // halved for number in (top, left, high, wide))
        return self._rows(plane, -(-height // halved))[top : top + high, left * channels : (left + wide) * channels]

    def _framed(self, pixels: NDArray[Any], like: av.VideoFrame) -> av.VideoFrame:
        """Pixels as a frame that is converted by the same rules as another one."""
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=like.format.name)
        frame.colorspace, frame.color_range = like.colorspace, like.color_range
        return frame

    def _convert(self, frame: av.VideoFrame, pixel_format: str) -> av.VideoFrame:
        return self._reformatter.reformat(frame, format=pixel_format, threads=1)

    def _scale(self, frame: av.VideoFrame, pixel_format: str) -> av.VideoFrame:
        assert self.size is not None  # the caller checks
        height, width = self.size
        return self._scaler.reformat(frame, width=width, height=height, format=pixel_format, interpolation=self._interpolation, threads=1)

    def _rows(self, plane: Any, height: int) -> NDArray[Any]:
        lines: NDArray[Any] = np.frombuffer(memoryview(cast("bytes", plane)), self.dtype)
        return lines[: height * (plane.line_size // lines.itemsize)].reshape(height, -1)

    def _write_planes(self, frame: av.VideoFrame, out: NDArray[np.uint8]) -> None:
        # Another range would be converted on the way: full-range pictures keep the format that says so.
        full = frame.format.name.startswith("yuvj") or int(frame.color_range) == _FULL_RANGE
        target = "yuvj420p" if full else "yuv420p"
        if self.crop is not None:
            frame = self._cropped_planes(frame if frame.format.name in _PLANAR else self._convert(frame, target))
        if self.size is not None and (frame.height, frame.width) != self.size:
            frame = self._scale(frame, target)
        elif frame.format.name not in _PLANAR:
            frame = self._convert(frame, target)
        at = 0
        for plane, half in zip(frame.planes, (1, 2, 2), strict=True):
            height, width = frame.height // half, frame.width // half
            np.copyto(out[at : at + height * width].reshape(height, width), self._rows(plane, height)[:, :width])
            at += height * width

    def _cropped_planes(self, frame: av.VideoFrame) -> av.VideoFrame:
        planes = [self._cut(plane, frame.height, frame.width, halved=half) for plane, half in zip(frame.planes, (1, 2, 2), strict=True)]
        width = planes[0].shape[1]
        return self._framed(np.concatenate([plane.reshape(-1) for plane in planes]).reshape(-1, width), frame)

    def _write_nearest(self, frame: av.VideoFrame, out: NDArray[Any]) -> None:
        converted = self._convert(frame, self.pixel_format)
        height, width, _ = self.frame_shape(frame)
        part = self._cut(converted.planes[0], converted.height, converted.width)
        rows, columns = _nearest(height, part.shape[0]), _nearest(width, part.shape[1])
        np.copyto(out[..., 0], part[rows[:, None], columns])

    def picture(self, frame: av.VideoFrame) -> NDArray[Any]:
        """One frame as a new array [height, width, channels]."""
        out = np.empty(self.frame_shape(frame), self._type)
        self.write(frame, out)
        return out


def _nearest(count: int, present: int) -> NDArray[np.int64]:
    """Which of ``present`` lines each of ``count`` lines lies in with its middle."""
    middles: NDArray[np.int64] = np.arange(1, 2 * count, 2, dtype=np.int64)
    return middles * present // (2 * count)
