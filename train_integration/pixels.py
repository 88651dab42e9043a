"""Planes to RGB on the device: the other half of ``pixel_format="yuv420p"``.

Planes are half as many bytes as RGB and cost no conversion on the CPU. The device converts with the matrix and range of the
stream, and repeats each chroma value over its four pixels, as the exact path does; the results differ by rounding alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from ingest.engine.fetch import UnitRequest
from ingest.errors import SettingsError
from ingest.video.decode import decode_pictures
from ingest.video.spans import picture_span

if TYPE_CHECKING:
    from ingest.engine.dataset import Dataset

Matrix = Literal["bt601", "bt709", "bt2020", "fcc", "smpte240m"]

_LUMA: dict[str, tuple[float, float]] = {
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "fcc": (0.30, 0.11),
    "smpte240m": (0.212, 0.087),
}
"""Weights of red and blue in luma."""

_MATRIX_OF_CODE: dict[int, Matrix] = {1: "bt709", 4: "fcc", 5: "bt601", 6: "bt601", 7: "smpte240m", 9: "bt2020", 10: "bt2020"}
"""By the matrix coefficients of ISO/IEC 23091-4; what is unspecified is BT.601, as in the exact path."""

_FULL_RANGE = 2


@dataclass(frozen=True, slots=True)
class Colour:
    """How a stream codes colour.

    Attributes:
        matrix: which weights luma has.
        full_range: luma spans 0..255 instead of 16..235.
    """

    matrix: Matrix = "bt601"
    full_range: bool = False


def camera_colour(dataset: Dataset, camera: str) -> Colour:
    """How a camera's pictures code colour, as its first selected picture says.

    Recorders write all files of a camera alike; where files differ, open one dataset for each kind.

    Args:
        dataset: the opened dataset.
        camera: a delivered colour camera.

    Raises:
        SettingsError: the dataset does not deliver the camera.
        DamagedDataError: the picture cannot be decoded.
    """
    if camera not in dataset.spec.cameras:
        raise SettingsError(f"{camera} is not delivered; delivered are {', '.join(dataset.spec.cameras) or 'no cameras'}")
    unit = dataset.reader().read(UnitRequest(0, int(dataset.selection[0]), 0, 1))
    track = unit.tracks[camera]
    span = picture_span(track.table, np.zeros(1, np.int64))
    payload = [memoryview(track.data)[start:stop] for start, stop in span.ranges]
    _, frame = next(iter(decode_pictures(track.table, span, payload)))
    full = frame.format.name.startswith("yuvj") or int(frame.color_range) == _FULL_RANGE
    return Colour(_MATRIX_OF_CODE.get(int(frame.colorspace), "bt601"), full)


def planes_to_rgb(planes: torch.Tensor, colour: Colour | None = None, *, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Converts pictures of ``pixel_format="yuv420p"`` to RGB, on whatever device they are.

    Args:
        planes: uint8 [..., 1, height * 3 / 2, width]: Y, then U, then V, as delivered.
        colour: how the stream codes colour; see `camera_colour`. None is limited-range BT.601.
        dtype: ``torch.uint8`` gives levels, a floating type gives 0..1.

    Returns:
        [..., 3, height, width].

    Raises:
        SettingsError: the tensor does not have the form of planes.
    """
    rows, width = planes.shape[-2:] if planes.ndim >= 3 else (0, 0)
    if planes.ndim < 3 or planes.shape[-3] != 1 or planes.dtype != torch.uint8 or rows % 3 or rows == 0 or width % 2 or (rows // 3 * 2) % 2:
        raise SettingsError(f"expected uint8 planes [..., 1, height * 3 / 2, width], found {planes.dtype} {list(planes.shape)}")
    colour = colour or Colour()
    height = rows // 3 * 2
    flat = planes.reshape(*planes.shape[:-3], rows * width)
    luma = flat[..., : height * width].reshape(*flat.shape[:-1], height, width).to(torch.float32)
    chroma = flat[..., height * width :].reshape(*flat.shape[:-1], 2, height // 2, width // 2).to(torch.float32) - 128.0
    chroma = chroma.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
    luma_gain, chroma_gain = (1.0, 1.0) if colour.full_range else (255 / 219, 255 / 224)
    if not colour.full_range:
        luma = luma - 16.0
    luma = luma * luma_gain
    red_weight, blue_weight = _LUMA[colour.matrix]
    green_weight = 1.0 - red_weight - blue_weight
    blue_difference, red_difference = chroma[..., 0, :, :] * chroma_gain, chroma[..., 1, :, :] * chroma_gain
    red = luma + 2 * (1 - red_weight) * red_difference
    blue = luma + 2 * (1 - blue_weight) * blue_difference
    green = (
        luma - (2 * (1 - blue_weight) * blue_weight * blue_difference + 2 * (1 - red_weight) * red_weight * red_difference) / green_weight
    )
    rgb = torch.stack((red, green, blue), dim=-3).clamp_(0.0, 255.0)
    return rgb.round_().to(torch.uint8) if dtype == torch.uint8 else (rgb / 255.0).to(dtype)
