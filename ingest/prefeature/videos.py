"""The reference videos: H.264 4:2:0, exact picture count, verified by decoding before they get their name."""

# pyright: reportUnknownMemberType=false
# (PyAV leaves packets generic)
from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from ingest.errors import DamagedDataError, DatasetError
from ingest.prefeature.durable import temporary_name, write_atomic
from ingest.prefeature.sizes import Sizes

_EXACT = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT | Interpolation.FULL_CHR_H_INT
"""Without these flags the colour conversion's rounding depends on how memory happens to be aligned."""


_ENCODER = {"crf": "18", "preset": "medium", "x264-params": "threads=1:lookahead-threads=1:rc-lookahead=0:mbtree=0:bframes=0"}
"""With its look-ahead on, this encoder gives other bytes for the same pictures once in some runs."""


def count_pictures(path: Path, name: str) -> tuple[int, int, int]:
    """Decodes a video.

    Args:
        path: the file.
        name: named in errors.

    Returns:
        Pictures decoded, width, height. The container's own count is not trusted.

    Raises:
        DamagedDataError: it cannot be opened or decoded, has no video, or changes its size.
    """
    count, shapes = 0, set[tuple[int, int]]()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DamagedDataError(f"{name}: holds no video stream", file=name)
            for picture in container.decode(container.streams.video[0]):
                count += 1
                shapes.add((picture.width, picture.height))
    except (FFmpegError, OSError, ValueError) as error:
        if isinstance(error, DamagedDataError):
            raise
        raise DamagedDataError(f"{name}: cannot be decoded ({error})", file=name) from error
    if not count:
        raise DamagedDataError(f"{name}: cannot be decoded, no picture came out", file=name)
    if len(shapes) != 1:
        raise DamagedDataError(f"{name}: pictures of several sizes, {sorted(shapes)}", file=name)
    width, height = shapes.pop()
    return count, width, height


def check_video(path: Path, name: str, sizes: Sizes) -> None:
    """Checks a reference video.

    Raises:
        DamagedDataError: another number or size of pictures.
    """
    count, width, height = count_pictures(path, name)
    if count != sizes.video_frames:
        raise DamagedDataError(f"{name}: {count} pictures decoded, expected {sizes.video_frames}", file=name, picture=count)
    if (width, height) != (sizes.width, sizes.height):
        raise DamagedDataError(f"{name}: {width}x{height}, expected {sizes.width}x{sizes.height}", file=name)


def _checked(pictures: Iterable[NDArray[np.uint8]], sizes: Sizes) -> Iterator[NDArray[np.uint8]]:
    made = 0
    for picture in itertools.islice(pictures, sizes.video_frames + 1):
        if picture.shape != (sizes.height, sizes.width, 3):
            raise DatasetError(f"picture {made} is {picture.shape}, expected {(sizes.height, sizes.width, 3)}")
        made += 1
        yield picture
    if made != sizes.video_frames:
        raise DatasetError(f"the teacher decoded {made} pictures, expected {sizes.video_frames}")


def write_video(path: Path, pictures: Iterable[NDArray[np.uint8]], sizes: Sizes) -> None:
    """Encodes and puts a video in place once it decodes to the right number of pictures.

    One thread and no look-ahead keep the bytes equal from run to run with the same codec build.

    Raises:
        DatasetError: the teacher gave another number or shape of pictures.
        DamagedDataError: the encoded file does not decode to what went in.
        StorageError: the file system failed.
    """
    scratch = temporary_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with av.open(str(scratch), "w", format="mp4", options={"movflags": "+faststart", "fflags": "+bitexact"}) as container:
            stream = container.add_stream("libx264", rate=sizes.fps, options=_ENCODER)
            stream.width, stream.height, stream.pix_fmt = sizes.width, sizes.height, "yuv420p"
            stream.codec_context.thread_count = 1
            reformatter = VideoReformatter()
            for picture in _checked(pictures, sizes):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                container.mux(stream.encode(reformatter.reformat(frame, format="yuv420p", interpolation=_EXACT, threads=1)))
            container.mux(stream.encode(None))
        data = scratch.read_bytes()
    except FFmpegError as error:
        raise DatasetError(f"{path.name}: cannot be encoded ({error})") from error
    finally:
        scratch.unlink(missing_ok=True)
    write_atomic(path, lambda handle: handle.write(data), verify=lambda made: check_video(made, path.name, sizes))
