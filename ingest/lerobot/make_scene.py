"""What a made dataset shows: a disc that moves smoothly, and rows that follow from where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingest.lerobot.barcode import HEIGHT, paint_barcode, picture_code

Pattern = Literal["barcode", "noise"]
ACTION_NAMES = ("x", "y", "x_times_y", "x_minus_y")
STATE_NAMES = ("x_squared", "y_squared", "radius", "distance")

_BLOCK = 8


@dataclass(frozen=True, slots=True)
class Scene:
    """The disc of one episode.

    Attributes:
        position: float64[N, 2], (x, y) of the disc in −1..1, by frame.
        first_index: global index of frame 0.
        seed: seed of the dataset, which keys the noise.
    """

    position: NDArray[np.float64]
    first_index: int
    seed: int

    @classmethod
    def of_episode(cls, seed: int, episode: int, frames: int, fps: float, first_index: int) -> Scene:
        """Draws one episode's path: two sines with random speed and phase."""
        rng = np.random.default_rng([seed, episode])
        time_s = np.arange(frames) / fps
        speed = rng.uniform(0.15, 0.45, size=2)
        phase = rng.uniform(0.0, 2 * np.pi, size=2)
        return cls(0.9 * np.sin(2 * np.pi * speed * time_s[:, None] + phase), first_index, seed)

    def action(self) -> NDArray[np.float32]:
        """float32[N, 4]: smooth functions of the disc's position."""
        x, y = self.position.T
        return np.stack([x, y, x * y, x - y], axis=1).astype(np.float32)

    def state(self) -> NDArray[np.float32]:
        """float32[N, 4]: functions of the position that lose its signs, so that the action cannot be had without looking."""
        x, y = self.position.T
        return np.stack([x**2, y**2, np.hypot(x, y), 1 - (x**2 + y**2) / 2], axis=1).astype(np.float32)

    def paint(self, luma: NDArray[np.uint8], frame: int, camera: int, pattern: Pattern) -> None:
        """Paints the picture of one frame as one camera sees it.

        Args:
            luma: uint8[H, W] video-range luma, overwritten.
            frame: frame of the episode.
            camera: camera number; odd cameras see the axes exchanged.
            pattern: ``barcode`` shows the disc, ``noise`` shows blocks that tell nothing; both carry the barcode.
        """
        index = self.first_index + frame
        height, width = luma.shape
        if pattern == "noise":
            rng = np.random.default_rng([self.seed, camera, index])
            blocks = rng.integers(40, 200, size=(-(-height // _BLOCK), -(-width // _BLOCK)), dtype=np.uint8)
            luma[:] = np.repeat(np.repeat(blocks, _BLOCK, axis=0), _BLOCK, axis=1)[:height, :width]
        else:
            luma[:] = 72
            self._paint_disc(luma[HEIGHT:], frame, camera)
        paint_barcode(luma, picture_code(index, camera))

    def _paint_disc(self, field: NDArray[np.uint8], frame: int, camera: int) -> None:
        height, width = field.shape
        across, down = (float(value) for value in self.position[frame][:: 1 if camera % 2 == 0 else -1])
        radius = max(3.0, 0.16 * min(height, width))
        centre_x = (across + 1) / 2 * (width - 1)
        centre_y = (down + 1) / 2 * (height - 1)
        left, right = max(0, int(centre_x - radius) - 1), min(width, int(centre_x + radius) + 2)
        top, bottom = max(0, int(centre_y - radius) - 1), min(height, int(centre_y + radius) + 2)
        rows: NDArray[np.float64] = np.arange(top, bottom, dtype=np.float64)[:, None] - centre_y
        columns: NDArray[np.float64] = np.arange(left, right, dtype=np.float64)[None, :] - centre_x
        field[top:bottom, left:right][rows**2 + columns**2 <= radius**2] = 210
