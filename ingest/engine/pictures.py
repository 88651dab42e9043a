"""Decoding a unit's pictures into frame slots, and how much memory decoded pictures take."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.engine.spec import SampleSpec
from ingest.engine.unit import Track
from ingest.errors import DamagedDataError, DecodeError
from ingest.lerobot.info import Feature
from ingest.video.backends import PYAV, PictureDecoder
from ingest.video.entries import parse_sample_entries
from ingest.video.pixels import Crop, PictureWriter
from ingest.video.spans import gop_starts, picture_span
from ingest.video.tables import SampleTable

MIN_RUN_PICTURES = 60
"""Pictures of one decode call, at least: short groups of pictures are decoded together to spread the cost of a call."""


@dataclass(frozen=True, slots=True)
class PictureForm:
    """The form in which one camera's pictures are delivered.

    Attributes:
        pixel_format: of `ingest.video.pixels.PictureWriter`.
        size: (height, width) after resizing, or None for the source's own.
        resize_filter: named filter.
        decoder: what decodes.
        crop: part that is delivered, cut out before resizing, or None for all of it.
    """

    pixel_format: str
    size: tuple[int, int] | None
    resize_filter: str
    decoder: PictureDecoder = PYAV
    crop: Crop | None = None

    @classmethod
    def of(cls, spec: SampleSpec, camera: str) -> PictureForm:
        """The form that the options ask for."""
        options = spec.options
        feature = spec.features[camera]
        if not feature.is_depth:
            return cls(options.pixel_format, options.image_size, options.resize_filter, options.decoder, options.image_crop)
        # Depth keeps the bits it was written with: a conversion between grey formats would scale the values.
        stored = str(feature.details.get("video.pix_fmt", "gray16le"))
        return cls(_DEPTH_FORMATS.get(stored, "gray16le"), options.image_size, "point", crop=options.image_crop)

    def writer(self) -> PictureWriter:
        """A converter of this form; one per thread."""
        return _writer(self)

    def shape(self, feature: Feature) -> tuple[int, int, int]:
        """(height, width, channels) that the metadata promise, used to size frame slots."""
        height, width, _ = feature.picture_shape
        if self.crop is not None:
            height, width = self.crop[2:]
        height, width = self.size or (height, width)
        if self.pixel_format == "yuv420p":
            return height * 3 // 2, width, 1
        return height, width, 1 if self.pixel_format.startswith("gray") else 3

    def nbytes(self, feature: Feature) -> int:
        """Bytes of one decoded picture."""
        return int(np.prod(self.shape(feature))) * self.writer().dtype.itemsize


_DEPTH_FORMATS = {
    "gray10le": "gray10le",
    "gray12le": "gray12le",
    "gray16le": "gray16le",
    "yuv420p10le": "gray10le",
    "yuv420p12le": "gray12le",
}
"""Grey format with the same bits, by the format that a depth video is stored in."""

_writers = threading.local()


def _writer(form: PictureForm) -> PictureWriter:
    # A converter keeps its scaling context between pictures and is not thread-safe.
    known: dict[PictureForm, PictureWriter] = _writers.__dict__.setdefault("known", {})
    if form not in known:
        known[form] = PictureWriter(form.pixel_format, form.size, form.resize_filter, form.crop)
    return known[form]


def runs(track: Track, wanted: NDArray[np.int64], min_pictures: int = MIN_RUN_PICTURES) -> list[NDArray[np.int64]]:
    """Splits wanted pictures of a track into runs that decode independently of each other.

    Args:
        track: compressed pictures.
        wanted: picture numbers of the track, ascending.
        min_pictures: a run holds at least that many pictures, wanted or not, where there are so many.
    """
    if not len(wanted):
        return []
    edges = gop_starts(track.table)
    cuts: list[int] = []
    last = 0
    for edge in edges.tolist():
        if edge - last >= min_pictures and track.pictures - edge >= min_pictures:
            cuts.append(edge)
            last = edge
    pieces = np.split(wanted, np.searchsorted(wanted, cuts))
    return [piece for piece in pieces if len(piece)]


def groups(track: Track, wanted: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Splits wanted pictures by the group of pictures they decode with, merging neighbours that share samples."""
    return runs(track, wanted, 1)


def decode_run(track: Track, wanted: NDArray[np.int64], form: PictureForm, out: Sequence[NDArray[Any]]) -> int:
    """Decodes pictures of a track into arrays.

    Args:
        track: compressed pictures.
        wanted: picture numbers of the track, ascending and unique.
        form: form of the pictures.
        out: ``out[i]`` (HWC) receives picture ``wanted[i]``.

    Returns:
        How many pictures the decoder had to produce for it, those that are not wanted included.

    Raises:
        DecodeError: names file, camera, and picture.
    """
    span = picture_span(track.table, wanted)
    payload = [memoryview(track.data)[start:stop] for start, stop in span.ranges]
    try:
        for _ in form.decoder.decode_into(track.table, span, payload, wanted, form.writer(), out):
            pass
    except DamagedDataError as error:
        error.camera = error.camera or track.camera
        raise
    shown = (track.table.presented >= span.first) & (track.table.presented < span.stop)
    return max(int(np.count_nonzero(shown)), span.stop - span.first)


def check_shape(table: SampleTable, form: PictureForm, feature: Feature) -> None:
    """Compares a file's picture size with the declared one before memory is laid out for it.

    Raises:
        DecodeError: they differ and pictures are neither cut nor resized.
        VideoFormatError: pictures of that size cannot have the form.
    """
    if form.size is not None and form.crop is None:
        return
    form.writer().shape(table)
    if form.crop is not None:
        return
    height, width, _ = feature.picture_shape
    # The track header may declare another size to show the pictures at; the coded size is what a decoder returns.
    coded = parse_sample_entries(table.stsd, table.path)[0]
    if (coded.height, coded.width) != (height, width):
        raise DecodeError(
            f"{table.path}: pictures are {coded.width}x{coded.height}, but {feature.key} is declared as {width}x{height}; "
            "correct meta/info.json, or set image_size",
            camera=feature.key,
            file=table.path,
        )


def located(error: DamagedDataError, dataset: str, episode: int, track: Track) -> DamagedDataError:
    """The same error with dataset and episode, and with picture and bytes as they are numbered in the file."""
    picture, byte_range, what = None, None, str(error)
    if error.picture is not None:
        sample = int(track.table.presented[error.picture])
        start = int(track.origin[sample])
        picture, byte_range = int(track.numbers[error.picture]), (start, start + int(track.table.sizes[sample]))
        reason = what.partition("cannot be decoded: ")[2] or what
        what = f"{track.path}: picture {picture} (bytes {byte_range[0]}..{byte_range[1]}) cannot be decoded: {reason}"
    return type(error)(
        f"{dataset}: episode {episode}, {track.camera}: {what}",
        dataset=dataset,
        episode=episode,
        camera=track.camera,
        file=track.path,
        byte_range=byte_range,
        picture=picture,
    )
