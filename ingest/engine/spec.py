"""What a sample consists of: features, windows and the form of its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.engine.depth import DepthUnit
from ingest.errors import SelectionError, SettingsError
from ingest.lerobot.info import Feature, Info
from ingest.lerobot.windows import DEFAULT_TOLERANCE_S, Windows
from ingest.video.backends import PYAV, PictureDecoder
from ingest.video.pixels import Crop, check_pixel_format

_COLOUR_FORMATS = ("rgb24", "yuv420p", "gray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a dataset is read. Everything here is part of the plan's fingerprint.

    Attributes:
        cameras: video features to deliver; None delivers all. The others are neither fetched nor decoded.
        columns: stored features to deliver; None delivers all.
        delta_timestamps: window offsets in seconds by feature.
        tolerance_s: most that an offset may lie beside the frame grid, and that a picture's time may deviate.
        strict_time: a picture time off by more than ``tolerance_s`` is an error instead of a warning.
        action_chunk: window of that many frames for ``action`` where ``delta_timestamps`` names none; None adds none.
        image_crop: ``(top, left, height, width)``, the part of every video picture that is delivered, cut out before it is
            resized; None takes all of it.
        image_size: ``(height, width)`` to which pictures are resized while they are decoded; None keeps them.
        resize_filter: a filter of `ingest.video.pixels.PictureWriter`; depth pictures take the nearest pixel.
        pixel_format: of colour cameras: ``rgb24``, or ``yuv420p`` for planes that the device converts
            (`train_integration.pixels`); those are uint8 always.
        depth_output_unit: ``mm`` delivers depth as uint16 millimetres, ``m`` as float32 metres; see `ingest.engine.depth`.
        decoder: what decodes colour cameras (`train_integration.backends`); depth is always PyAV's.
    """

    cameras: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    delta_timestamps: Mapping[str, Sequence[float]] | None = None
    tolerance_s: float = DEFAULT_TOLERANCE_S
    strict_time: bool = False
    action_chunk: int | None = None
    image_crop: Crop | None = None
    image_size: tuple[int, int] | None = None
    resize_filter: str = "bilinear"
    pixel_format: str = "rgb24"
    depth_output_unit: DepthUnit = "mm"
    decoder: PictureDecoder = PYAV

    def __post_init__(self) -> None:
        for name in ("cameras", "columns"):
            if isinstance(getattr(self, name), str):
                raise SettingsError(f"{name} is {getattr(self, name)!r}, expected a sequence of names")
        _check_mapping("delta_timestamps", self.delta_timestamps)
        if self.image_size is not None and (len(self.image_size) != 2 or min(self.image_size) < 1):
            raise SettingsError(f"image_size is {self.image_size}, expected (height, width) with both at least 1")
        if self.pixel_format not in _COLOUR_FORMATS:
            raise SettingsError(f"pixel_format is {self.pixel_format!r}, expected one of {', '.join(_COLOUR_FORMATS)}")
        check_pixel_format(self.pixel_format, self.image_size, self.resize_filter, self.image_crop)
        if self.depth_output_unit not in ("mm", "m"):
            raise SettingsError(f"depth_output_unit is {self.depth_output_unit!r}, expected mm or m")


def _check_mapping(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise SettingsError(f"{name} is {value!r}, expected lists of seconds by feature")


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """The features of a sample, resolved against a dataset.

    Attributes:
        options: as given.
        features: every feature of the dataset.
        cameras: video features that are delivered.
        images: delivered features whose pictures are stored in parquet.
        columns: delivered features with other values.
        windows: frame offsets by feature.
        fps: frames per second.
    """

    options: ReadOptions
    features: Mapping[str, Feature]
    cameras: tuple[str, ...]
    images: tuple[str, ...]
    columns: tuple[str, ...]
    windows: Windows
    fps: float

    @classmethod
    def resolve(cls, info: Info, options: ReadOptions) -> SampleSpec:
        """Checks the options against the dataset.

        Raises:
            SelectionError: a camera, column or window that the dataset does not have.
            SettingsError: a window off the frame grid.
        """
        delta = dict(options.delta_timestamps or {})
        if options.action_chunk is not None and "action" in info.features:
            delta.setdefault("action", [frame / info.fps for frame in range(options.action_chunk)])
        windows = Windows.from_delta_timestamps(delta, info.fps, options.tolerance_s, info=info)
        cameras = _chosen("cameras", options.cameras, info.cameras)
        stored = tuple(key for key, feature in info.features.items() if not feature.is_video)
        chosen = _chosen("columns", options.columns, stored)
        images = tuple(key for key in chosen if info.features[key].is_image)
        columns = tuple(key for key in chosen if not info.features[key].is_image)
        delivered = {*cameras, *images, *columns}
        return cls(
            options,
            info.features,
            cameras,
            images,
            columns,
            Windows({key: value for key, value in windows.deltas.items() if key in delivered}),
            info.fps,
        )

    @property
    def stored_keys(self) -> tuple[str, ...]:
        """Parquet columns that must be read: those delivered, and those that name the row and its task."""
        needed = ("episode_index", "frame_index", "index", "task_index")
        return tuple(dict.fromkeys((*self.columns, *self.images, *(key for key in needed if key in self.features))))

    def reach(self, keys: Sequence[str], lo: int, hi: int, length: int) -> tuple[int, int]:
        """Frames that anchors ``lo..hi`` and their windows touch, clamped to the episode: half-open."""
        deltas = [self.windows.deltas[key] for key in keys if key in self.windows]
        below = min((int(delta.min()) for delta in deltas), default=0)
        above = max((int(delta.max()) for delta in deltas), default=0)
        return max(0, lo + min(0, below)), min(length, hi + max(0, above))

    def reach_many(
        self, keys: Sequence[str], lo: NDArray[np.int64], hi: NDArray[np.int64], length: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `reach`, for many runs of anchors at once."""
        deltas = [self.windows.deltas[key] for key in keys if key in self.windows]
        below = min((int(delta.min()) for delta in deltas), default=0)
        above = max((int(delta.max()) for delta in deltas), default=0)
        return np.maximum(0, lo + min(0, below)), np.minimum(length, hi + max(0, above))

    def picture_frames(self, camera: str, frames: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Episode frames whose pictures a camera delivers for some anchors: int64[N, T], T = 1 without a window."""
        if camera in self.windows:
            return self.windows.indices_many(camera, frames, length)[0]
        return frames[:, None]


def _chosen(what: str, asked: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    if asked is None:
        return tuple(known)
    unknown = [key for key in asked if key not in known]
    if unknown:
        raise SelectionError(f"{what} names {', '.join(unknown)}, which the dataset does not have; it has {', '.join(known) or 'none'}")
    return tuple(dict.fromkeys(asked))
