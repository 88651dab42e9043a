"""Depth in physical units: what the stored values of a depth camera mean.

A recorder either stores millimetres as they are, or codes of 12 bits that divide a range linearly or logarithmically and
then names the range in ``meta/info.json``. Codes become distances by table, picture by picture, and never pass through RGB.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ingest.errors import MetadataError
from ingest.lerobot.info import Feature

DepthUnit = Literal["mm", "m"]

_LARGEST_CODE = 4095
_VALUES = 1 << 16


def depth_table(feature: Feature, unit: DepthUnit) -> NDArray[np.uint16] | NDArray[np.float32] | None:
    """What each stored value of a depth feature is delivered as.

    Args:
        feature: a depth camera or stored depth picture.
        unit: ``mm`` delivers uint16 millimetres, ``m`` float32 metres.

    Returns:
        [65536], delivered value by stored value; None where stored values are delivered as they are.

    Raises:
        MetadataError: the declared range of the codes is no range.
    """
    quantised = feature.is_video and any(_setting(feature, name) is not None for name in ("depth_min", "depth_max"))
    stored = np.arange(_VALUES, dtype=np.float64)
    if quantised:
        metres = _metres(feature, np.minimum(stored, _LARGEST_CODE))
    elif unit == "mm":
        return None
    else:
        metres = stored / 1000
    if unit == "m":
        return metres.astype(np.float32)
    return np.clip(np.rint(metres * 1000), 0, _VALUES - 1).astype(np.uint16)


def _setting(feature: Feature, name: str) -> Any:
    return feature.details.get(f"video.{name}", feature.details.get(name))


def _metres(feature: Feature, codes: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high, shift = (_number(feature, name, default) for name, default in (("depth_min", 0.01), ("depth_max", 10.0), ("shift", 3.5)))
    logarithmic = _setting(feature, "use_log")
    if low >= high or low < 0 or (logarithmic is not False and low + shift <= 0):
        raise MetadataError(
            f"{feature.key}: depth codes from depth_min = {low} to depth_max = {high} with shift = {shift} name no range; "
            "correct the feature's info in meta/info.json"
        )
    share = codes / _LARGEST_CODE
    if logarithmic is False:
        return low + share * (high - low)
    bottom, top = math.log(low + shift), math.log(high + shift)
    return np.clip(np.exp(bottom + share * (top - bottom)) - shift, low, high)


def _number(feature: Feature, name: str, default: float) -> float:
    value = _setting(feature, name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MetadataError(f"{feature.key}: {name} is {value!r}, expected a finite number; correct the feature's info in meta/info.json")
    return float(cast("float", value))
