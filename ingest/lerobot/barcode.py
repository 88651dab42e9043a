"""The barcode that made datasets carry in every picture, so that any delivered picture proves whose it is.

The top-left 64x24 pixels hold 8x8 cells: rows 0 and 1 are a 16-bit code, white = 1, most significant bit first; row 2 is the
inverted low byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CELL = 8
WIDTH = 8 * CELL
HEIGHT = 3 * CELL
CAMERA_STEP = 10_000

_WHITE, _BLACK = 235, 16


def picture_code(index: int, camera: int) -> int:
    """The code of row ``index`` as camera number ``camera`` sees it."""
    return (index + CAMERA_STEP * camera) % 65_536


def paint_barcode(luma: NDArray[np.uint8], code: int) -> None:
    """Paints ``code`` into the top-left corner.

    Args:
        luma: uint8[H, W] video-range luma (16..235), at least 24x64; changed in place.
        code: 0..65535.
    """
    rows = np.array([code >> 8, code & 255, ~code & 255], dtype=np.uint8)
    bits = np.unpackbits(rows[:, None], axis=1)
    cells = np.where(bits, _WHITE, _BLACK).astype(np.uint8)
    luma[:HEIGHT, :WIDTH] = np.repeat(np.repeat(cells, CELL, axis=0), CELL, axis=1)


def read_barcode(picture: NDArray[Any]) -> int | None:
    """Reads the code of a picture.

    Args:
        picture: uint8[H, W, 3] RGB, uint8[3, H, W], or uint8[H, W] grey.

    Returns:
        0..65535, or None when the picture is too small or its check row does not fit.
    """
    grey = np.asarray(picture)
    if grey.ndim == 3:
        grey = grey[0] if grey.shape[0] in (1, 3) and grey.shape[2] not in (1, 3) else grey[..., 0]
    if grey.ndim != 2 or grey.shape[0] < HEIGHT or grey.shape[1] < WIDTH:
        return None
    corner = grey[:HEIGHT, :WIDTH].reshape(3, CELL, 8, CELL)[:, 2:6, :, 2:6].astype(np.float64)
    high, low, check = (int(value) for value in np.packbits(corner.mean(axis=(1, 3)) > 127, axis=1)[:, 0])
    return (high << 8) | low if check == ~low & 255 else None
