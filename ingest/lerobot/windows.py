"""Temporal windows: which frames ``delta_timestamps`` asks for around an anchor, in whole frames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, cast

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SelectionError, SettingsError
from ingest.lerobot.info import Info

DEFAULT_TOLERANCE_S = 1e-4
_MOST_FRAMES = 1 << 40
"""Frames between an anchor and what its window asks for, at most: far more than any episode has, and no sum overflows."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Frame offsets by feature key.

    Attributes:
        deltas: int64[T] by key, in the order given; offsets in frames from the anchor.
    """

    deltas: Mapping[str, NDArray[np.int64]]

    @classmethod
    def from_delta_timestamps(
        cls,
        delta: Mapping[str, Sequence[float]] | None,
        fps: float,
        tolerance_s: float = DEFAULT_TOLERANCE_S,
        *,
        info: Info | None = None,
    ) -> Windows:
        """Turns seconds into frames.

        Args:
            delta: seconds relative to the anchor, by feature key; None or empty means no windows.
            fps: frames per second of the dataset.
            tolerance_s: most that an offset may lie beside the frame grid, in seconds; equal is allowed.
            info: when given, keys must be features that can be stacked.

        Raises:
            SettingsError: offsets beside the grid (all of them are listed), not finite, or an empty list.
            SelectionError: a key that is no feature of the dataset, or one whose values cannot be stacked.
        """
        if not math.isfinite(fps) or fps <= 0:
            raise SettingsError(f"fps is {fps}, expected a positive number")
        if not math.isfinite(tolerance_s) or tolerance_s < 0:
            raise SettingsError(f"tolerance_s must be non-negative, found {tolerance_s}")
        if info is not None:
            _check_keys(delta or {}, info)
        deltas: dict[str, NDArray[np.int64]] = {}
        offenders: list[str] = []
        for key, offsets in (delta or {}).items():
            values = [_seconds(key, offset) for offset in _offsets(key, offsets)]
            if not values:
                raise SettingsError(f"delta_timestamps[{key!r}] is empty; give at least one offset in seconds, or leave the key out")
            frames = [round(value * fps) for value in values]
            if max(map(abs, frames)) > _MOST_FRAMES:
                raise SettingsError(f"delta_timestamps[{key!r}] asks for {max(map(abs, values)):.6g} s away; no episode is that long")
            off_grid = [value for value, frame in zip(values, frames, strict=True) if abs(value * fps - frame) / fps > tolerance_s]
            if off_grid:
                offenders.append(f"{key}: {', '.join(f'{value:.6g}' for value in off_grid)}")
            deltas[key] = np.array(frames, dtype=np.int64)
        if offenders:
            raise SettingsError(
                f"delta_timestamps beside the frame grid of {fps:g} fps by more than tolerance_s = {tolerance_s:g} s: "
                f"{'; '.join(offenders)}. Use multiples of {1 / fps:.6g} s"
            )
        return cls(deltas)

    @property
    def keys(self) -> tuple[str, ...]:
        """Feature keys that have a window."""
        return tuple(self.deltas)

    def __contains__(self, key: object) -> bool:
        return key in self.deltas

    def size(self, key: str) -> int | None:
        """Frames in the window of ``key``, or None without one."""
        return len(self.deltas[key]) if key in self.deltas else None

    def indices(self, key: str, frame: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Frames of one window inside the episode.

        Args:
            key: a key of ``deltas``.
            frame: anchor, 0-based in the episode.
            length: frames of the episode.

        Returns:
            int64[T] frame numbers, clipped to the episode, and bool[T], true exactly where clipped.
        """
        indices, is_pad = self.indices_many(key, np.array([frame], dtype=np.int64), length)
        return indices[0], is_pad[0]

    def indices_many(
        self, key: str, frames: NDArray[np.int64], lengths: NDArray[np.int64] | int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """``indices`` for many anchors at once.

        Args:
            key: a key of ``deltas``.
            frames: int64[N], anchors.
            lengths: frames of the anchors' episodes, int64[N] or one number.

        Returns:
            int64[N, T] and bool[N, T].
        """
        wanted = np.asarray(frames, dtype=np.int64)[:, None] + self.deltas[key][None, :]
        last = np.broadcast_to(np.asarray(lengths, dtype=np.int64), (len(wanted),))[:, None] - 1
        return np.clip(wanted, 0, last), (wanted < 0) | (wanted > last)


def _offsets(key: str, offsets: object) -> Iterable[object]:
    if not isinstance(offsets, Iterable):
        raise SettingsError(f"delta_timestamps[{key!r}] is {offsets!r}, expected a list of seconds")
    return cast("Iterable[object]", offsets)


def _seconds(key: str, offset: object) -> float:
    if isinstance(offset, bool | str) or not isinstance(offset, SupportsFloat) or not math.isfinite(float(offset)):
        raise SettingsError(f"delta_timestamps[{key!r}] holds {offset!r}, expected a finite number of seconds")
    return float(offset)


def _check_keys(delta: Mapping[str, Sequence[float]], info: Info) -> None:
    unknown = [key for key in delta if key not in info.features]
    if unknown:
        raise SelectionError(
            f"delta_timestamps names {', '.join(map(str, unknown))}, which the dataset does not have; it has {', '.join(info.features)}"
        )
    for key in delta:
        feature = info.features[key]
        if not (feature.is_numeric or feature.is_video or feature.is_image):
            raise SelectionError(f"delta_timestamps names {key}, but values of type {feature.dtype} cannot be stacked into a window")
