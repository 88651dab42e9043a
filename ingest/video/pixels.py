"""Decoded pictures into arrays: one reused converter, no intermediate arrays."""

from __future__ import annotations

from typing import Any, cast

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from ingest.errors import DecodeError, SettingsError
from ingest.video.entries import parse_sample_entries
from ingest.video.tables import SampleTable

_FORMATS: dict[str, tuple[type[np.generic], int]] = {
    "rgb24": (np.uint8, 3),
    "gray": (np.uint8, 1),
    "gray10le": (np.uint16, 1),
    "gray12le": (np.uint16, 1),
    "gray16le": (np.uint16, 1),
    "rgb48le": (np.uint16, 3),
}
_FILTERS = ("fast_bilinear", "bilinear", "bicubic", "area", "lanczos", "point")


class PictureWriter:
    """Converts decoded frames and copies them into arrays that the caller owns.

    Not thread-safe: one writer per decoding thread. For ``rgb24`` at the frame's own size the bytes equal those of
    ``frame.to_ndarray(format="rgb24")``.

    Args:
        pixel_format: ``rgb24`` (uint8), ``gray12le`` and its like (uint16, for depth), and a few more.
        size: (height, width) to scale to while still in the source's colour space, or None for the picture's own size.
        filter: scaling filter.

    Raises:
        SettingsError: unknown pixel format or filter, or a size that is not positive.
    """

    def __init__(self, pixel_format: str = "rgb24", size: tuple[int, int] | None = None, filter: str = "bilinear") -> None:
        if pixel_format not in _FORMATS:
            raise SettingsError(f"pixel format {pixel_format!r} is not one of {sorted(_FORMATS)}")
        if filter not in _FILTERS:
            raise SettingsError(f"filter {filter!r} is not one of {list(_FILTERS)}")
        if size is not None and (len(size) != 2 or min(size) <= 0):
            raise SettingsError(f"size {size} must be (height, width), both positive")
        self.pixel_format = pixel_format
        self.size = size
        self._interpolation = Interpolation[filter.upper()]
        self._type, self._channels = _FORMATS[pixel_format]
        self._reformatter = VideoReformatter()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the pictures."""
        return np.dtype(self._type)

    def shape(self, table: SampleTable) -> tuple[int, int, int]:
        """(height, width, channels) of the pictures of a file.

        Raises:
            VideoFormatError: the file's sample entries cannot be read.
        """
        # The track header may declare a display size; the sample entry has the size of the coded picture.
        entry = parse_sample_entries(table.stsd, table.path)[0]
        height, width = self.size or (entry.height, entry.width)
        return height, width, self._channels

    def frame_shape(self, frame: av.VideoFrame) -> tuple[int, int, int]:
        """(height, width, channels) that ``write`` produces for one frame."""
        height, width = self.size or (frame.height, frame.width)
        return height, width, self._channels

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
        converted = self._reformatter.reformat(
            frame, width=width, height=height, format=self.pixel_format, interpolation=self._interpolation, threads=1
        )
        plane = converted.planes[0]
        row = width * channels
        lines: NDArray[Any] = np.frombuffer(memoryview(cast("bytes", plane)), self.dtype)
        lines = lines.reshape(height, plane.line_size // out.itemsize)
        np.copyto(out.reshape(height, row), lines[:, :row])

    def picture(self, frame: av.VideoFrame) -> NDArray[Any]:
        """One frame as a new array [height, width, channels]."""
        out = np.empty(self.frame_shape(frame), self._type)
        self.write(frame, out)
        return out
