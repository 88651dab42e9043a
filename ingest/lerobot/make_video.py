"""Encodes pictures into MP4 files the way recorders do: one encode per episode or per file, joined by stream copy."""

# PyAV's signatures are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import av.error
import numpy as np
from av.container import OutputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from ingest.errors import SettingsError

Painter = Callable[[NDArray[np.uint8]], None]
"""Paints one picture into a uint8[H, W] luma plane."""

CODECS = {"h264": "libx264", "hevc": "libx265", "av1": "libsvtav1", "mpeg4": "mpeg4", "vp9": "libvpx-vp9"}


@dataclass(frozen=True, slots=True)
class Encoding:
    """How pictures are encoded.

    Attributes:
        codec: a key of ``CODECS``.
        height, width: picture size, even numbers.
        fps: frames per second.
        gop: pictures from one key picture to the next.
        bframes: pictures between references that are stored out of presentation order.
    """

    codec: str
    height: int
    width: int
    fps: Fraction
    gop: int
    bframes: int

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise SettingsError(f"codec {self.codec!r} is unknown; known are {', '.join(CODECS)}")
        if CODECS[self.codec] not in av.codecs_available:
            usable = ", ".join(name for name, encoder in CODECS.items() if encoder in av.codecs_available)
            raise SettingsError(f"this build of PyAV has no encoder {CODECS[self.codec]} for {self.codec}; it can write {usable}")
        if self.bframes and self.codec in ("av1", "vp9"):
            raise SettingsError(f"bframes is {self.bframes}, but {self.codec} has no B-frames; use 0, or h264, hevc or mpeg4")

    def options(self) -> dict[str, str]:
        """Encoder options: fast, one thread, and a fixed GOP, so that equal input gives equal files."""
        if self.codec == "h264":
            fixed = f"keyint={self.gop}:min-keyint={self.gop}:scenecut=0:b-adapt=0:open-gop=0"
            return {"preset": "ultrafast", "crf": "26", "bf": str(self.bframes), "x264-params": fixed}
        if self.codec == "hevc":
            fixed = f"keyint={self.gop}:min-keyint={self.gop}:scenecut=0:bframes={self.bframes}:b-adapt=0:open-gop=0"
            return {"preset": "ultrafast", "crf": "26", "x265-params": f"log-level=none:pools=none:frame-threads=1:{fixed}"}
        if self.codec == "av1":
            return {"preset": "12", "crf": "32", "svtav1-params": f"lp=1:keyint={self.gop}:scd=0"}
        if self.codec == "vp9":
            return {"deadline": "realtime", "cpu-used": "8", "crf": "30", "b": "0"}
        return {"qmin": "3", "qmax": "5", "bf": str(self.bframes)}


def encode(pictures: Iterable[Painter], encoding: Encoding) -> bytes:
    """One encode of consecutive pictures.

    Returns:
        A complete MP4 file.

    Raises:
        SettingsError: the encoder refuses these settings.
    """
    # SVT-AV1 logs to stderr by itself and reads its level from the environment alone.
    os.environ.setdefault("SVT_LOG", "1")
    buffer = io.BytesIO()
    canvas = np.full((encoding.height * 3 // 2, encoding.width), 128, dtype=np.uint8)
    try:
        with _ordinary_scheduling() as settle, av.open(buffer, "w", format="mp4") as container:
            stream = _add_stream(container, encoding)
            stream.codec_context.open()
            settle()
            for number, paint in enumerate(pictures):
                paint(canvas[: encoding.height])
                frame = av.VideoFrame.from_ndarray(canvas, format="yuv420p")
                frame.pts = number
                frame.time_base = 1 / encoding.fps
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    except (av.error.FFmpegError, ValueError, OverflowError) as error:
        raise SettingsError(
            f"{encoding.codec} at {encoding.width}x{encoding.height}, {encoding.fps} fps cannot be encoded: {error}"
        ) from error
    return buffer.getvalue()


@contextmanager
def _ordinary_scheduling() -> Generator[Callable[[], None]]:
    """Undoes real-time scheduling that an encoder takes for itself, at exit and whenever the function it gives is called.

    SVT-AV1 run by root puts its threads and the one that calls it under the real-time scheduler at the highest priority. Whatever
    that thread starts later inherits it: a Ray cluster started by such a process starves its machine.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield lambda: None
        return

    def settle() -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                if os.sched_getscheduler(int(thread)) == os.SCHED_FIFO:
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))

    try:
        yield settle
    finally:
        settle()


def _add_stream(container: OutputContainer, encoding: Encoding) -> VideoStream:
    stream = cast("VideoStream", container.add_stream(CODECS[encoding.codec], rate=encoding.fps, options=encoding.options()))
    stream.width, stream.height, stream.pix_fmt = encoding.width, encoding.height, "yuv420p"
    stream.codec_context.gop_size = encoding.gop
    stream.codec_context.thread_count = 1
    if encoding.codec == "hevc":
        stream.codec_context.codec_tag = "hvc1"
    return stream


def join(parts: Sequence[tuple[bytes, int]], path: Path, fps: Fraction) -> None:
    """Joins encodes into one file by copying their packets, each part behind the pictures before it.

    Args:
        parts: complete MP4 files made with equal settings, and the pictures in each.
        path: file to write.
        fps: frames per second.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(parts) == 1:
        path.write_bytes(parts[0][0])
        return
    with av.open(str(path), "w", format="mp4") as container:
        out: VideoStream | None = None
        before = 0
        for data, pictures in parts:
            with av.open(io.BytesIO(data), "r") as source:
                stream = source.streams.video[0]
                if out is None:
                    # Opaque: the packets are copied, so no encoder of the source's codec is needed.
                    out = container.add_stream_from_template(stream, opaque=True)
                for packet in source.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue
                    shift = round(before / fps / packet.time_base)
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = out
                    container.mux(packet)
            before += pictures
