"""Decoded pictures into arrays: one reused converter, no intermediate arrays."""

from __future__ import annotations

from typing import Any, cast

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from ingest.errors import DecodeError, SettingsError, VideoFormatError
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


def check_pixel_format(pixel_format: str, size: tuple[int, int] | None, filter: str) -> None:
    """Checks the settings of a `PictureWriter`.

    Raises:
        SettingsError: unknown pixel format or filter, or a size that is not positive, or odd where chroma is halved.
    """
    if pixel_format not in _FORMATS:
        raise SettingsError(f"pixel format {pixel_format!r} is not one of {sorted(_FORMATS)}")
    if filter not in _FILTERS:
        raise SettingsError(f"filter {filter!r} is not one of {list(_FILTERS)}")
    if size is not None and (len(size) != 2 or min(size) <= 0):
        raise SettingsError(f"size {size} must be (height, width), both positive")
    if size is not None and pixel_format == "yuv420p" and (size[0] % 2 or size[1] % 2):
        raise SettingsError(f"size {size} must be even in both directions for yuv420p, whose chroma planes are half as large")


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

    Raises:
        SettingsError: unknown pixel format or filter, or a size that is not positive.
    """

    def __init__(self, pixel_format: str = "rgb24", size: tuple[int, int] | None = None, filter: str = "bilinear") -> None:
        check_pixel_format(pixel_format, size, filter)
        self.pixel_format = pixel_format
        self.size = size
        self._interpolation = Interpolation[filter.upper()]
        self._type, self._channels = _FORMATS[pixel_format]
        self._reformatter = VideoReformatter()
        self._scaler = VideoReformatter()

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
        height, width = self.size or (entry.height, entry.width)
        if self.pixel_format == "yuv420p" and (height % 2 or width % 2):
            raise VideoFormatError(
                f"{table.path}: pictures of {width}x{height} have no whole yuv420p planes; set image_size, or use rgb24", file=table.path
            )
        return self._laid_out(height, width)

    def frame_shape(self, frame: av.VideoFrame) -> tuple[int, int, int]:
        """(height, width, channels) that ``write`` produces for one frame."""
        return self._laid_out(*(self.size or (frame.height, frame.width)))

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
        height, width, channels = self.frame_shape(frame)
        if out.shape != (height, width, channels) or out.dtype != self._type:
            raise DecodeError(f"a decoded picture is {height}x{width}x{channels} {self.dtype}, the array for it {out.shape} {out.dtype}")
        if self.pixel_format == "yuv420p":
            self._write_planes(frame, out.reshape(-1))
        elif self.pixel_format.startswith("gray") and self.size is not None:
            self._write_nearest(frame, out)
        else:
            converted = self._convert(frame, self.pixel_format)
            if self.size is not None and (converted.height, converted.width) != self.size:
                converted = self._scale(converted, self.pixel_format)
            np.copyto(out.reshape(height, width * channels), self._rows(converted.planes[0], height)[:, : width * channels])

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
        if self.size is not None and (frame.height, frame.width) != self.size:
            frame = self._scale(frame, target)
        elif frame.format.name not in ("yuv420p", "yuvj420p"):
            frame = self._convert(frame, target)
        at = 0
        for plane, half in zip(frame.planes, (1, 2, 2), strict=True):
            height, width = frame.height // half, frame.width // half
            np.copyto(out[at : at + height * width].reshape(height, width), self._rows(plane, height)[:, :width])
            at += height * width

    def _write_nearest(self, frame: av.VideoFrame, out: NDArray[Any]) -> None:
        converted = self._convert(frame, self.pixel_format)
        height, width, _ = self.frame_shape(frame)
        rows, columns = _nearest(height, converted.height), _nearest(width, converted.width)
        np.copyto(out[..., 0], self._rows(converted.planes[0], converted.height)[rows[:, None], columns])

    def picture(self, frame: av.VideoFrame) -> NDArray[Any]:
        """One frame as a new array [height, width, channels]."""
        out = np.empty(self.frame_shape(frame), self._type)
        self.write(frame, out)
        return out


def _nearest(count: int, present: int) -> NDArray[np.int64]:
    """Which of ``present`` lines each of ``count`` lines lies in with its middle."""
    middles: NDArray[np.int64] = np.arange(1, 2 * count, 2, dtype=np.int64)
    return middles * present // (2 * count)
