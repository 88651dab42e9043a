"""Which earlier latent frames a chunk sees: everything while it fits, then first, most overlapping and most recent frames."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SettingsError

POINTS = 50_000
RADIUS = 8.0
_HALF_H, _HALF_V = 30.0, 17.5
"""Half the field of view used for overlap, degrees."""

_GROUP = 4
"""History beyond the first and the recent frames is chosen in groups of four latent frames."""


@functools.lru_cache(maxsize=2)
def sphere_points(seed: int) -> NDArray[np.float64]:
    """``[50000, 3]`` points uniform in a ball of radius 8, a pure function of the seed."""
    generator = np.random.Generator(np.random.PCG64(seed))
    radius = RADIUS * np.cbrt(generator.random(POINTS))
    longitude = 2 * np.pi * generator.random(POINTS)
    height = 1 - 2 * generator.random(POINTS)
    flat = np.sqrt(1 - height**2)
    return np.stack((radius * flat * np.cos(longitude), radius * flat * np.sin(longitude), radius * height), axis=1)


def _wrapped(degrees: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.abs((degrees + 180.0) % 360.0 - 180.0)


def _visible(points: NDArray[np.float64], centre: NDArray[np.float64], forward: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Points inside the field of view of a camera at ``centre`` looking along ``forward`` (azimuth and elevation cones)."""
    offset = points - centre
    flat = np.hypot(offset[:, 0], offset[:, 2])
    azimuth = np.degrees(np.arctan2(offset[:, 0], offset[:, 2])) - np.degrees(np.arctan2(forward[0], forward[2]))
    elevation = np.degrees(np.arctan2(offset[:, 1], flat)) - np.degrees(np.arctan2(forward[1], np.hypot(forward[0], forward[2])))
    return (_wrapped(azimuth) < _HALF_H) & (_wrapped(elevation) < _HALF_V)


def overlap(current: NDArray[np.float64], earlier: NDArray[np.float64], points: NDArray[np.float64]) -> float:
    """Share of the points seen by ``current`` that ``earlier`` also sees within the ball's radius.

    Args:
        current: ``[4, 4]`` world-to-camera.
        earlier: ``[4, 4]`` world-to-camera.
        points: ``[N, 3]`` around the current camera.
    """
    # Everything is seen from the current camera, which then sits at the origin and looks along z.
    relative = np.asarray(np.linalg.inv(earlier @ np.linalg.inv(current)), np.float64)
    centre, forward = relative[:3, 3], relative[:3, 2]
    seen = points[_visible(points, np.zeros(3), np.array([0.0, 0.0, 1.0]))]
    if not len(seen):
        return 0.0
    near = np.square(seen - centre).sum(axis=1) < RADIUS**2
    return np.count_nonzero(_visible(seen, centre, forward) & near) / len(seen)


def select_history(
    viewmats: NDArray[np.float64], current: int, *, memory_frames: int, recent_frames: int, chunk_frames: int, seed: int
) -> list[int]:
    """Latent frames that the chunk starting at ``current`` attends to, ascending.

    Args:
        viewmats: float64 ``[T, 4, 4]`` world-to-camera of the whole trajectory.
        current: first latent frame of the chunk.
        memory_frames: most frames to select.
        recent_frames: how many of them are the newest.
        chunk_frames: latent frames of the chunk (the query).
        seed: of the overlap points.

    Raises:
        SettingsError: ``current`` is not a frame of the trajectory.
    """
    if not 0 <= current < len(viewmats):
        raise SettingsError(f"chunk start {current} is outside 0..{len(viewmats) - 1}")
    if current <= memory_frames:
        return list(range(current))
    points = sphere_points(seed)
    query = range(current, min(current + chunk_frames, len(viewmats)))
    distances: list[tuple[float, int]] = []
    for start in range(_GROUP, current - recent_frames, _GROUP):
        total = sum(overlap(viewmats[frame], viewmats[start + probe], points) for frame in query for probe in (0, 2))
        distances.append((1.0 - total / (2 * len(query)), start))
    chosen = set(range(_GROUP))
    for _, start in sorted(distances):
        if len(chosen) >= memory_frames - recent_frames:
            break
        chosen.update(range(start, start + _GROUP))
    return sorted(chosen | set(range(current - recent_frames, current)))


@functools.lru_cache(maxsize=64)
def _selection(viewmats: bytes, memory_frames: int, recent_frames: int, chunk_frames: int, seed: int) -> tuple[tuple[int, ...], ...]:
    matrices = np.frombuffer(viewmats, np.float64).reshape(-1, 4, 4)
    limits = {"memory_frames": memory_frames, "recent_frames": recent_frames, "chunk_frames": chunk_frames, "seed": seed}
    return tuple(tuple(select_history(matrices, start, **limits)) for start in range(0, len(matrices), chunk_frames))


def history_table(
    viewmats: NDArray[np.float64], *, memory_frames: int, recent_frames: int, chunk_frames: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Selected frames of every chunk; remembered, because every case repeats the same few trajectories."""
    return _selection(np.ascontiguousarray(viewmats).tobytes(), memory_frames, recent_frames, chunk_frames, seed)
