"""Every size of the dataset in one frozen object; the defaults are those of the real v4 dataset."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from ingest.errors import SettingsError

SCHEMA = "predictor_context_prefeature_bf16_v1"
DATASET_NAME = "hyworldplay_predictor_prefeature_v4"
CONTEXT_PREFILL = "joint_noncausal_full_dit_prefill"
CONTEXT_TIMESTEP = 14.0
"""Timestep at which history frames enter the context pass (stabilisation level 15 minus one)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts and dimensions that decide every shape and path.

    Attributes:
        cases: image-text pairs.
        latent_frames: latent frames of a trajectory; a multiple of ``chunk_frames``.
        chunk_frames: latent frames denoised together.
        steps: denoise steps of a chunk.
        height, width: pixels of images and videos.
        spatial_stride, temporal_stride: pixels and frames that one latent cell covers.
        latent_channels: channels of a latent; the predictor's input has twice as many and a mask.
        hidden, heads, depth: transformer width, attention heads and double-stream blocks.
        blocks: the context blocks whose inputs are stored, ascending.
        rope_dims: rotary dimensions for time, height and width; they add up to ``head_dim``.
        rope_theta: rotary base.
        mlp_ratio: width of the MLP over ``hidden``.
        text_pad_tokens: text tokens on disk, padding included.
        memory_frames: most history frames that a chunk may see.
        recent_frames: how many of them are the newest ones.
        fps: frames per second of the videos.
    """

    cases: int = 100
    latent_frames: int = 32
    chunk_frames: int = 4
    steps: int = 4
    height: int = 480
    width: int = 832
    spatial_stride: int = 16
    temporal_stride: int = 4
    latent_channels: int = 32
    hidden: int = 2048
    heads: int = 16
    depth: int = 54
    blocks: tuple[int, ...] = (0, 1, 52, 53)
    rope_dims: tuple[int, int, int] = (16, 56, 56)
    rope_theta: float = 256.0
    mlp_ratio: int = 4
    text_pad_tokens: int = 903
    memory_frames: int = 20
    recent_frames: int = 12
    fps: int = 24

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and value <= 0:
                raise SettingsError(f"sizes: {name} must be positive, found {value}")
        if self.hidden % self.heads:
            raise SettingsError(f"sizes: hidden={self.hidden} is not a multiple of heads={self.heads}")
        if self.head_dim % 4 or any(dim <= 0 or dim % 2 for dim in self.rope_dims) or sum(self.rope_dims) != self.head_dim:
            raise SettingsError(
                f"sizes: rope_dims={self.rope_dims} must be even and add up to head_dim={self.head_dim}, itself a multiple of 4"
            )
        if self.latent_frames % self.chunk_frames:
            raise SettingsError(f"sizes: latent_frames={self.latent_frames} is not a multiple of chunk_frames={self.chunk_frames}")
        if self.height % self.spatial_stride or self.width % self.spatial_stride:
            raise SettingsError(f"sizes: {self.width}x{self.height} is not a multiple of spatial_stride={self.spatial_stride}")
        blocks = self.blocks
        if not blocks or list(blocks) != sorted(set(blocks)) or blocks[0] < 0 or blocks[-1] >= self.depth:
            raise SettingsError(f"sizes: blocks={blocks} must be ascending, unique and within 0..{self.depth - 1}")
        if self.depth > 100 or self.chunks > 100 or self.cases > 10_000:
            raise SettingsError("sizes: paths hold two digits for blocks and chunks and four for cases")

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden // self.heads

    @property
    def grid(self) -> tuple[int, int]:
        """Latent rows and columns."""
        return self.height // self.spatial_stride, self.width // self.spatial_stride

    @property
    def frame_tokens(self) -> int:
        """Tokens of one latent frame."""
        return self.grid[0] * self.grid[1]

    @property
    def chunks(self) -> int:
        """Chunks of a trajectory."""
        return self.latent_frames // self.chunk_frames

    @property
    def video_frames(self) -> int:
        """Pictures of a trajectory's video."""
        return (self.latent_frames - 1) * self.temporal_stride + 1

    @property
    def input_channels(self) -> int:
        """Channels of the predictor's input: noisy latent, image latent, mask."""
        return 2 * self.latent_channels + 1

    @property
    def noise_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a trajectory's noise, ``[1, C, T, H, W]``."""
        return 1, self.latent_channels, self.latent_frames, *self.grid

    @property
    def chunk_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one chunk's latent, ``[1, C, chunk_frames, H, W]``."""
        return 1, self.latent_channels, self.chunk_frames, *self.grid

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, lists for tuples."""
        return {name: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: object) -> Sizes:
        """The inverse of ``to_json``.

        Raises:
            SettingsError: not a mapping, a field unknown or missing, or a value of another type.
        """
        if not isinstance(value, dict):
            raise SettingsError(f"sizes: expected a mapping, found {type(value).__name__}")
        found = cast("dict[str, Any]", value)
        known = {field.name for field in fields(cls)}
        if set(found) != known:
            raise SettingsError(f"sizes: missing {sorted(known - set(found))}, unknown {sorted(set(found) - known)}")
        fields_found: dict[str, Any] = {
            name: tuple(cast("list[Any]", item)) if isinstance(item, list) else item for name, item in found.items()
        }
        try:
            made = cls(**fields_found)
        except TypeError as error:
            raise SettingsError(f"sizes: {error}") from None
        if made.to_json() != value:
            raise SettingsError("sizes: a value has another type than expected")
        return made


TINY = Sizes(
    cases=6,
    height=48,
    width=64,
    latent_channels=4,
    hidden=32,
    heads=2,
    depth=4,
    blocks=(0, 1, 2, 3),
    rope_dims=(4, 6, 6),
    text_pad_tokens=24,
)
"""A whole build in seconds on one core: 3x4 latent grid, hidden 32, all 8 chunks and 125 pictures."""


def preset(name: str) -> Sizes:
    """``full`` (the real sizes) or ``tiny``.

    Raises:
        SettingsError: another name.
    """
    if name == "full":
        return Sizes()
    if name == "tiny":
        return TINY
    raise SettingsError(f"unknown size preset {name!r}: use 'full' or 'tiny'")


def resized(sizes: Sizes, **changes: Any) -> Sizes:
    """A checked copy with some fields replaced."""
    return replace(sizes, **changes)
