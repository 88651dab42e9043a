"""Decoded pictures to RGB right in the caller's memory, by the libswscale that PyAV has loaded.

PyAV converts into a frame of its own, which is then copied: a tenth of what an H.264 picture of 640x480 costs. It offers no other
way, but the function that it calls takes any destination. What is called here is libswscale's plain interface, unchanged since
its first version. It is trusted for a kind of picture only after it has given the same bytes as PyAV for noise of that kind,
and has written nothing beyond its last byte; where it does not, and where the library is not found, PyAV converts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

_PIXEL_FORMATS = {"yuv420p": 0, "yuvj420p": 12}
"""AVPixelFormat numbers of the formats that are converted here."""

_RGB24 = 2
_BILINEAR = 2
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
_UNITY = 1 << 16
_GUARD = 256
"""Bytes behind a picture that a conversion on trial must leave alone."""

Kind = tuple[str, int, int, int, int]
"""Pixel format, width, height, colour space and colour range of a frame."""

_Pointers = ctypes.c_void_p * 4
_Strides = ctypes.c_int * 4


def kind_of(frame: av.VideoFrame) -> Kind:
    """What decides how a frame is converted."""
    return frame.format.name, frame.width, frame.height, int(frame.colorspace), int(frame.color_range)


class DirectRgb:
    """Converts frames of one kind to rgb24. Not thread-safe.

    Args:
        library: libswscale.
        kind: the frames.

    Attributes:
        shape: (height, width, channels) of the converted pictures.

    Raises:
        ValueError: the library does not convert frames of that kind.
    """

    def __init__(self, library: Any, kind: Kind) -> None:
        name, width, height, colorspace, color_range = kind
        if name not in _PIXEL_FORMATS:
            raise ValueError(f"{name} is not converted here")
        self._library = library
        source = _PIXEL_FORMATS[name]
        self._context = library.sws_getContext(width, height, source, width, height, _RGB24, _BILINEAR, None, None, None)
        if not self._context:
            raise ValueError(f"libswscale has no conversion from {name} of {width}x{height} to rgb24")
        full = int(name.startswith("yuvj") or color_range == _FULL_RANGE)
        matrix = library.sws_getCoefficients(colorspace)
        if library.sws_setColorspaceDetails(self._context, matrix, full, matrix, full, 0, _UNITY, _UNITY) < 0:
            self._free()
            raise ValueError(f"libswscale has no colour space {colorspace}")
        self.shape = (height, width, 3)
        self._height = height
        self._planes, self._strides = _Pointers(), _Strides()
        self._target, self._target_strides = _Pointers(), _Strides(width * 3)

    def __del__(self) -> None:
        self._free()

    def _free(self) -> None:
        context, self._context = getattr(self, "_context", None), None
        if context:
            self._library.sws_freeContext(context)

    def write(self, frame: av.VideoFrame, out: NDArray[np.uint8]) -> bool:
        """Converts a frame of the kind.

        Args:
            frame: as decoded.
            out: uint8[height, width, 3], contiguous.

        Returns:
            Whether it was done; nothing is written otherwise.
        """
        for number, plane in enumerate(frame.planes):
            stride = plane.line_size
            if stride <= 0:
                return False
            self._planes[number] = plane.buffer_ptr
            self._strides[number] = stride
        self._target[0] = out.__array_interface__["data"][0]
        done = self._library.sws_scale(self._context, self._planes, self._strides, 0, self._height, self._target, self._target_strides)
        return bool(done == self._height)


class DirectWriter:
    """Writes frames of any kind that can be converted directly. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Kind, DirectRgb | None] = {}

    def write(self, frame: av.VideoFrame, out: NDArray[Any]) -> bool:
        """Converts a frame to rgb24 at its own size; returns whether it was done.

        Args:
            frame: as decoded.
            out: [height, width, channels]; nothing is done unless it is uint8, contiguous and as large as the frame.
        """
        if frame.interlaced_frame:
            # PyAV converts the two fields of such a frame apart, each with its own rows of chroma.
            return False
        kind = kind_of(frame)
        try:
            converter = self._known[kind]
        except KeyError:
            converter = self._known[kind] = _converter(kind)
        if converter is None or out.shape != converter.shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            return False
        return converter.write(frame, out)


def _converter(kind: Kind) -> DirectRgb | None:
    return DirectRgb(swscale(), kind) if kind[0] in _PIXEL_FORMATS and _trusted(kind) else None


_TRIALS: dict[Kind, bool] = {}
_TRIAL = threading.Lock()


def _trusted(kind: Kind) -> bool:
    library = swscale()
    if library is None:
        return False
    with _TRIAL:
        if kind not in _TRIALS:
            _TRIALS[kind] = agrees(lambda: DirectRgb(library, kind), kind)
        return _TRIALS[kind]


def agrees(make: Callable[[], DirectRgb], kind: Kind) -> bool:
    """Whether a converter gives PyAV's bytes for noise of a kind, and nothing else."""
    name, width, height, colorspace, color_range = kind
    if width % 2 or height % 2:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (height * 3 // 2, width), dtype=np.uint8)
    frame = av.VideoFrame.from_ndarray(noise, format=name)
    frame.colorspace, frame.color_range = colorspace, color_range
    try:
        plane = VideoReformatter().reformat(frame, format="rgb24", threads=1).planes[0]
        converter = make()
    except (FFmpegError, ValueError):
        return False
    expected = np.frombuffer(memoryview(cast("bytes", plane)), np.uint8).reshape(height, -1)[:, : width * 3]
    size = width * height * 3
    # At an address that is a multiple of nothing, as a picture in the middle of a batch may be.
    memory = np.full(1 + size + _GUARD, 0xA5, np.uint8)
    done = converter.write(frame, memory[1 : 1 + size].reshape(height, width, 3))
    untouched = memory[0] == 0xA5 and bool((memory[1 + size :] == 0xA5).all())
    return done and untouched and np.array_equal(memory[1 : 1 + size].reshape(height, -1), expected)


@cache
def swscale() -> Any | None:
    """The libswscale of PyAV's wheel; None where PyAV was built otherwise."""
    package = Path(av.__file__).parent
    found = [path for folder in (package.parent / "av.libs", package / ".dylibs") for path in sorted(folder.glob("libswscale*"))]
    if not found:
        return None
    try:
        library = ctypes.CDLL(str(found[0]))
        return _declared(library)
    except (OSError, AttributeError):
        return None


def _declared(library: Any) -> Any:
    number, pointer = ctypes.c_int, ctypes.c_void_p
    library.sws_getContext.restype = pointer
    library.sws_getContext.argtypes = [number] * 7 + [pointer] * 3
    library.sws_freeContext.restype = None
    library.sws_freeContext.argtypes = [pointer]
    library.sws_getCoefficients.restype = pointer
    library.sws_getCoefficients.argtypes = [number]
    library.sws_setColorspaceDetails.restype = number
    library.sws_setColorspaceDetails.argtypes = [pointer, pointer, number, pointer, number, number, number, number]
    library.sws_scale.restype = number
    library.sws_scale.argtypes = [pointer, _Pointers, _Strides, number, number, _Pointers, _Strides]
    return library
