"""Pictures stored inside parquet cells: decoded one by one, when asked for."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ingest.errors import DatasetError, ReelrayError
from ingest.lerobot.info import Feature
from ingest.storage.base import Store

_MAX_ENCODED_BYTES = 256 << 20
_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP")


def decode_cell(
    cell: object, feature: Feature, store: Store, fail: Callable[[str], DatasetError]
) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Decodes one cell ``{bytes, path}``.

    Args:
        cell: the cell as a dict; ``path`` is read from the dataset only when there are no bytes.
        feature: its declaration; the decoded size must agree with it.
        store: the dataset.
        fail: builds the error for a message.

    Returns:
        uint8[H, W, 3] RGB, or uint16[H, W, 1] for a depth map.

    Raises:
        DatasetError: no picture, one that cannot be decoded, or one of another size than declared.
    """
    raw = _encoded(cell, store, fail)
    height, width, _channels = feature.picture_shape
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(raw), formats=_FORMATS) as picture:
                if (picture.height, picture.width) != (height, width):
                    raise fail(f"picture {feature.key} is {picture.width}x{picture.height}, but {width}x{height} is declared")
                if feature.is_depth or picture.mode.startswith("I"):
                    return np.asarray(picture).astype(np.uint16)[..., None]
                return np.array(picture.convert("RGB"), dtype=np.uint8)
    except ReelrayError:
        raise
    except (
        OSError,
        ValueError,
        SyntaxError,
        UnidentifiedImageError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise fail(f"picture {feature.key} cannot be decoded ({len(raw)} bytes): {error}") from error


def _encoded(cell: object, store: Store, fail: Callable[[str], DatasetError]) -> bytes:
    if isinstance(cell, bytes):
        return cell
    if isinstance(cell, dict):
        fields = cast("dict[str, Any]", cell)
        raw, path = fields.get("bytes"), fields.get("path")
        if isinstance(raw, bytes) and raw:
            return raw
        if isinstance(path, str) and path:
            try:
                if store.size(path) > _MAX_ENCODED_BYTES:
                    raise fail(f"picture file {path} has more than {_MAX_ENCODED_BYTES} bytes")
                return store.read_all(path)
            except ReelrayError as error:
                raise fail(f"the cell holds no bytes, and its path {path!r} cannot be read: {error}") from error
    raise fail("the cell holds no picture")
