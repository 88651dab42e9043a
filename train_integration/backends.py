"""Decoders beside PyAV: torchcodec on the CPU, and NVDEC through torchcodec on nodes with a GPU.

torchcodec is optional. It reads containers, so the samples of a span become a small MP4 in memory; every picture that comes
back is known by its time in it, and one that is not the picture asked for is never taken: PyAV decodes it instead.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import av
import numpy as np
from numpy.typing import NDArray

from ingest.errors import DecodeError, ReelrayError, ResourceUnavailableError, SettingsError
from ingest.video.backends import PYAV, PictureDecoder
from ingest.video.checksums import verify_payload
from ingest.video.decode import Payload, payload_buffers
from ingest.video.entries import parse_sample_entries
from ingest.video.mini import mini_header
from ingest.video.pixels import PictureWriter
from ingest.video.spans import PictureSpan
from ingest.video.tables import SampleTable

_LOG = logging.getLogger("reelray.backends")

VideoBackend = Literal["pyav", "torchcodec", "nvdec"]

_GPU_CODECS = frozenset({"h264", "hevc", "vp9", "av1"})
_AV1_CAPABILITIES = frozenset({(8, 6), (8, 7), (8, 9)})
"""Compute capabilities below 10 whose NVDEC decodes AV1; GA100 (8.0) and Hopper (9.0) do not, Blackwell (10 and up) does."""
_PER_SECOND = 30
"""Pictures in a second of the small files; any number will do."""
_TOGETHER = 4
"""Pictures taken from torchcodec at a time: it makes a new tensor of them, and with 64 fresh memory costs as much as decoding."""


def open_decoder(name: VideoBackend) -> PictureDecoder:
    """The decoder of a name.

    Raises:
        ResourceUnavailableError: torchcodec is not installed, or there is no GPU.
        SettingsError: there is no such back end.
    """
    if name == "pyav":
        return PYAV
    if name == "torchcodec":
        _torchcodec()
        return TorchcodecDecoder()
    if name == "nvdec":
        _torchcodec()
        if _capability() is None:
            raise ResourceUnavailableError("video_backend nvdec needs an NVIDIA GPU that torch can use; use pyav on this node")
        return TorchcodecDecoder(device="cuda")
    raise SettingsError(f"video_backend is {name!r}, expected pyav, torchcodec or nvdec")


def gpu_decodes(codec: str, capability: tuple[int, int]) -> bool:
    """Whether NVDEC of a GPU decodes a codec.

    Args:
        codec: decoder name as libavcodec knows it.
        capability: compute capability of the GPU.
    """
    if codec != "av1":
        return codec in _GPU_CODECS
    return capability >= (10, 0) or capability in _AV1_CAPABILITIES


def _torchcodec() -> Any:
    try:
        return importlib.import_module("torchcodec.decoders")
    except (ImportError, RuntimeError, OSError) as error:
        raise ResourceUnavailableError(
            f"torchcodec cannot be loaded ({type(error).__name__}): install reelray[torchcodec] and FFmpeg's shared libraries, or use pyav"
        ) from error


def _capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    _LOG.warning("%s", message)


@dataclass(frozen=True, slots=True)
class TorchcodecDecoder:
    """torchcodec, on the CPU or through NVDEC. PyAV decodes what it cannot, and every form but ``rgb24``, with one warning.

    It shows most damaged pictures as if they were whole, where PyAV's decoder says that they are damaged. So damage is sure to be
    found only where the index has checksums; without them one warning says so.

    Attributes:
        device: ``cpu`` or ``cuda``.
    """

    device: str = "cpu"

    @property
    def name(self) -> str:
        return "torchcodec" if self.device == "cpu" else "nvdec"

    @property
    def exact(self) -> bool:
        """Its decoder and colour conversion are those of the FFmpeg or GPU of the machine: pictures may differ by rounding."""
        return False

    def decode_into(
        self,
        table: SampleTable,
        span: PictureSpan,
        payload: Payload,
        wanted: NDArray[np.integer] | Sequence[int],
        writer: PictureWriter,
        out_slots: Sequence[NDArray[Any]] | NDArray[Any],
    ) -> Iterator[tuple[int, int]]:
        done = 0
        numbers = np.unique(np.asarray(wanted, np.int64))
        if writer.pixel_format == "rgb24" and self._takes(table):
            buffers = payload_buffers(table, span, payload)
            verify_payload(table, span, buffers)
            if table.gop_xxh3 is None:
                _warn_once(
                    f"{self.name} shows damaged pictures as if they were whole: record checksums (reelray sidecar build --checksums)"
                )
            try:
                for pixels in self._decode(table, span, buffers, numbers):
                    self._write(table, int(numbers[done]), pixels, writer, out_slots[done])
                    yield done, int(numbers[done])
                    done += 1
            except ReelrayError:
                raise
            except Exception as error:  # whatever a library of others raises
                _warn_once(f"{table.path}: {self.name} failed, PyAV decodes what is left: {error}")
        if done < len(numbers):
            for place, picture in PYAV.decode_into(table, span, payload, numbers[done:], writer, out_slots[done:]):
                yield done + place, picture

    def _takes(self, table: SampleTable) -> bool:
        if self.device == "cpu":
            return True
        codec = parse_sample_entries(table.stsd, table.path)[0].decoder
        capability = _capability()
        if capability is not None and gpu_decodes(codec, capability):
            return True
        gpu = "no GPU" if capability is None else f"the GPU (compute capability {capability[0]}.{capability[1]})"
        _warn_once(f"{gpu} decodes {codec}: PyAV decodes it on the CPU")
        return False

    def _decode(
        self, table: SampleTable, span: PictureSpan, buffers: list[memoryview], numbers: NDArray[np.int64]
    ) -> Iterator[NDArray[np.uint8]]:
        """The pictures of these numbers, each [height, width, 3]; whatever the library raises where it has not got one."""
        rank = _ranks(table, span)
        shift = int((np.arange(len(rank)) - rank).max())
        places = rank[table.presented[numbers] - span.first]
        decoder = _torchcodec().VideoDecoder(
            _small_file(table, span, buffers, rank, shift),
            dimension_order="NHWC",
            num_ffmpeg_threads=1,
            device=self.device,
            seek_mode="exact",
        )
        for first in range(0, len(places), _TOGETHER):
            part = places[first : first + _TOGETHER]
            found = decoder.get_frames_at(indices=part.tolist())
            late = np.abs(found.pts_seconds.cpu().numpy() * _PER_SECOND - (part + shift)) > 0.25
            for pixels, other in zip(found.data.cpu().numpy(), late.tolist(), strict=True):
                if other:
                    raise ValueError("it returned another picture than the one asked for")
                yield pixels

    def _write(self, table: SampleTable, picture: int, pixels: NDArray[np.uint8], writer: PictureWriter, out: NDArray[Any]) -> None:
        if writer.size is None and writer.crop is None and pixels.shape == out.shape:
            np.copyto(out, pixels)
            return
        try:
            writer.write(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24"), out)
        except DecodeError as error:
            raise _failed(table, picture, str(error)) from error


def _ranks(table: SampleTable, span: PictureSpan) -> NDArray[np.int64]:
    """[span] the place of every sample among those of the span in presentation order."""
    ticks = table.dts[span.first : span.stop].astype(np.int64) + table.composition[span.first : span.stop]
    return np.argsort(np.argsort(ticks, kind="stable"), kind="stable")


def _small_file(table: SampleTable, span: PictureSpan, buffers: list[memoryview], rank: NDArray[np.int64], shift: int) -> bytes:
    """An MP4 of a span in which a sample of rank r is shown at tick r + shift: in the file itself two may have one time."""
    composition = np.zeros(table.samples, np.int64)
    composition[span.first : span.stop] = rank - np.arange(len(rank))
    ones = np.ones(table.samples, np.int64)
    timed = replace(table, timescale=_PER_SECOND, durations=ones, dts=np.arange(table.samples), composition=composition)
    chunk, offset = span.chunks_of(table)
    sizes = table.sizes[span.first : span.stop].astype(np.int64)
    data = b"".join(
        bytes(buffers[number][at : at + size]) for number, at, size in zip(chunk.tolist(), offset.tolist(), sizes.tolist(), strict=True)
    )
    return mini_header(timed, span.first, span.stop, np.cumsum(sizes) - sizes, len(data), edit=None, shift=shift) + data


def _failed(table: SampleTable, picture: int, what: str) -> DecodeError:
    sample = int(table.presented[picture])
    start = int(table.offsets[sample])
    byte_range = (start, start + int(table.sizes[sample]))
    return DecodeError(
        f"{table.path}: picture {picture} (sample {sample}, bytes {byte_range[0]}..{byte_range[1]}) cannot be decoded: {what}",
        file=table.path,
        byte_range=byte_range,
        picture=picture,
    )
