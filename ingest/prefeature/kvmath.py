"""The frozen mathematics that teacher, trainer and validator share: norms, rotary and camera encodings, context K/V, final layer.

Precision follows the teacher under bf16 autocast: linear layers in bf16; layer norm, RMS norm and rotary in float32,
cast back; camera matrices in bf16. Shapes: B batch, S tokens, C hidden, h heads, d head channels, n frames.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves some of its own signatures untyped)
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ingest.errors import DatasetError
from ingest.prefeature.sizes import Sizes

NORM_EPS = 1e-6
MAX_REL_L2 = 5e-3
MIN_COSINE = 0.9999
"""Acceptance of rebuilt against direct values."""


class ContextKv(NamedTuple):
    """Keys and values of one block's context in both attention branches, each ``[B, h, S, d]``."""

    k_rope: Tensor
    v: Tensor
    k_prope: Tensor
    v_prope: Tensor


class Agreement(NamedTuple):
    """How close two tensors are; for empty tensors 0 and 1."""

    rel_l2: float
    cosine: float

    @property
    def accepted(self) -> bool:
        """Whether both thresholds hold; NaN never does."""
        return self.rel_l2 <= MAX_REL_L2 and self.cosine >= MIN_COSINE


def compare(found: Tensor, expected: Tensor) -> Agreement:
    """Relative L2 of the difference and cosine over the flattened tensors, in float64 sums."""
    if expected.numel() == 0:
        return Agreement(0.0, 1.0)
    a, b = found.double().flatten(), expected.double().flatten()
    norm_a, norm_b = float(a.norm()), float(b.norm())
    if norm_b == 0.0 or norm_a == 0.0:
        return Agreement(0.0, 1.0) if norm_a == norm_b else Agreement(float("inf"), 0.0)
    return Agreement(float((a - b).norm()) / norm_b, float(a @ b) / (norm_a * norm_b))


def layer_norm(x: Tensor) -> Tensor:
    """Layer norm without weights, float32 in and out."""
    return functional.layer_norm(x.float(), (x.shape[-1],), eps=NORM_EPS)


def per_token(condition: Tensor, tokens: int) -> Tensor:
    """Repeats ``[B, n, C]`` to the tokens of each frame, ``[B, S, C]``."""
    return condition.repeat_interleave(tokens // condition.shape[1], dim=1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``LN(x) * (1 + scale) + shift`` in float32, rounded to bf16 as the next linear layer sees it.

    Args:
        x: ``[B, S, C]``.
        shift, scale: ``[B, n, C]`` with S a multiple of n.
    """
    tokens = x.shape[1]
    return (layer_norm(x) * (1.0 + per_token(scale, tokens).float()) + per_token(shift, tokens).float()).to(torch.bfloat16)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, S, C]`` to ``[B, h, S, d]``."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """``[B, h, S, d]`` to ``[B, S, C]``."""
    batch, heads, tokens, width = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * width)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last axis: float32 inside, rounded to the input's dtype, then weighted."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype) * weight


@functools.lru_cache(maxsize=32)
def _rotary(grid: tuple[int, int], dims: tuple[int, int, int], theta: float, start: int, frames: int, device: str) -> tuple[Tensor, Tensor]:
    time = torch.arange(start, start + frames, dtype=torch.float32)
    axes = (time, torch.arange(grid[0], dtype=torch.float32), torch.arange(grid[1], dtype=torch.float32))
    mesh = torch.meshgrid(*axes, indexing="ij")
    angles: list[Tensor] = []
    for positions, width in zip(mesh, dims, strict=True):
        speed = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles.append(positions.reshape(-1, 1) * speed)
    table = torch.cat(angles, dim=1)
    return table.cos().to(device), table.sin().to(device)


def apply_rotary(x: Tensor, sizes: Sizes, start: int, frames: int) -> Tensor:
    """Rotates neighbouring channel pairs by the token's position on the (time, row, column) grid.

    Args:
        x: ``[B, h, S, d]`` with S = frames * tokens of a frame.
        sizes: gives grid, dims and base.
        start: time position of the first frame inside its window.
        frames: latent frames in ``x``.
    """
    cosine, sine = _rotary(sizes.grid, sizes.rope_dims, sizes.rope_theta, start, frames, str(x.device))
    pairs = x.float().unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    return torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1).flatten(-2).to(x.dtype)


def _lifted(fx: Tensor, fy: Tensor) -> Tensor:
    made = torch.zeros(*fx.shape, 4, 4, dtype=fx.dtype, device=fx.device)
    made[..., 0, 0], made[..., 1, 1] = fx, fy
    made[..., 2, 2] = made[..., 3, 3] = 1.0
    return made


def camera_matrices(viewmats: Tensor, intrinsics: Tensor) -> tuple[Tensor, Tensor]:
    """Projection ``P = lift(K) w2c`` and its inverse, bf16 ``[B, n, 4, 4]``; the principal point counts as zero.

    Args:
        viewmats: bf16 ``[B, n, 4, 4]`` world-to-camera.
        intrinsics: bf16 ``[B, n, 3, 3]``.
    """
    fx, fy = intrinsics[..., 0, 0], intrinsics[..., 1, 1]
    back = torch.zeros_like(viewmats)
    turned = viewmats[..., :3, :3].transpose(-1, -2)
    back[..., :3, :3] = turned
    back[..., :3, 3] = -(turned @ viewmats[..., :3, 3:]).squeeze(-1)
    back[..., 3, 3] = 1.0
    return _lifted(fx, fy) @ viewmats, back @ _lifted(fx.reciprocal(), fy.reciprocal())


def apply_camera(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiplies every group of four channels by the matrix of the token's frame.

    Args:
        x: ``[B, h, S, d]``.
        matrices: ``[B, n, 4, 4]``; S is a multiple of n.
    """
    batch, heads, tokens, width = x.shape
    frames = matrices.shape[1]
    if tokens == 0:
        return x
    grouped = x.reshape(batch, heads, frames, tokens // frames * (width // 4), 4)
    return (grouped @ matrices.to(x.dtype)[:, None].transpose(-1, -2)).reshape(x.shape)


def encode_kv(k: Tensor, v: Tensor, viewmats: Tensor, intrinsics: Tensor, sizes: Sizes, start: int) -> ContextKv:
    """Both branches of normalised keys and values ``[B, h, S, d]``."""
    frames = viewmats.shape[1]
    _, inverse = camera_matrices(viewmats, intrinsics)
    return ContextKv(apply_rotary(k, sizes, start, frames), v, apply_camera(k, inverse), apply_camera(v, inverse))


@dataclass(frozen=True, slots=True)
class FrozenTeacher:
    """The weights of ``teacher_frozen.safetensors`` with what is computed from them.

    Attributes:
        sizes: of the dataset.
        tensors: bf16, named as in ``schema.frozen_schema``.
    """

    sizes: Sizes
    tensors: Mapping[str, Tensor]

    def to(self, device: torch.device | str) -> FrozenTeacher:
        """A copy on another device."""
        return FrozenTeacher(self.sizes, {name: tensor.to(device) for name, tensor in self.tensors.items()})

    def _get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise DatasetError(f"the frozen teacher weights lack {name!r}; blocks {self.sizes.blocks} are available")
        return self.tensors[name]

    def rebuild_kv(self, block: int, img_modulated: Tensor, viewmats: Tensor, intrinsics: Tensor) -> ContextKv:
        """Context vision K/V of one block from its stored input.

        Args:
            block: one of ``sizes.blocks``.
            img_modulated: bf16 ``[B, S, C]``, S = n * tokens of a frame (padding included).
            viewmats: bf16 ``[B, n, 4, 4]``; padded frames hold the identity.
            intrinsics: bf16 ``[B, n, 3, 3]``; padded frames hold the identity.

        Raises:
            DatasetError: the block is not stored, or S does not match n.
        """
        if img_modulated.shape[1] != viewmats.shape[1] * self.sizes.frame_tokens:
            raise DatasetError(
                f"context has {img_modulated.shape[1]} tokens for {viewmats.shape[1]} frames, expected {self.sizes.frame_tokens} each"
            )
        prefix = f"block_{block:02d}_img_attn_"
        k = functional.linear(img_modulated, self._get(prefix + "k_weight"), self._get(prefix + "k_bias"))
        v = functional.linear(img_modulated, self._get(prefix + "v_weight"), self._get(prefix + "v_bias"))
        k = rms_norm(split_heads(k, self.sizes.heads), self._get(prefix + "k_norm_weight"))
        return encode_kv(k, split_heads(v, self.sizes.heads), viewmats, intrinsics, self.sizes, 0)

    def final_layer(self, final_hidden: Tensor, frame_condition: Tensor) -> Tensor:
        """Velocity bf16 ``[B, C_latent, n, H, W]`` from ``[B, n*HW, C]`` and ``[B, n, C]``."""
        mod = functional.linear(functional.silu(frame_condition), self._get("final_mod_weight"), self._get("final_mod_bias"))
        shift, scale = mod.chunk(2, dim=-1)
        weight, bias = self._get("final_linear_weight"), self._get("final_linear_bias")
        frames: list[Tensor] = []
        # frame by frame: the float32 intermediates of one frame stay in a CPU's cache, which makes this five times faster there
        for hidden, frame_shift, frame_scale in zip(
            final_hidden.split(self.sizes.frame_tokens, dim=1), shift.split(1, dim=1), scale.split(1, dim=1), strict=True
        ):
            frames.append(functional.linear(modulate(hidden, frame_shift, frame_scale), weight, bias))
        return torch.stack(frames, dim=1).unflatten(2, self.sizes.grid).permute(0, 4, 1, 2, 3).contiguous()


def compare_kv(rebuilt: ContextKv, direct: ContextKv) -> dict[str, float]:
    """Agreement of the four tensors; ``k_*`` and ``v_*`` without a branch are the worse of the two branches."""
    found: dict[str, float] = {}
    for kind, branches in (("k", ("k_rope", "k_prope")), ("v", ("v", "v_prope"))):
        pairs = [compare(getattr(rebuilt, name), getattr(direct, name)) for name in branches]
        for label, pair in zip(("rope", "prope"), pairs, strict=True):
            found[f"{kind}_{label}_rel_l2"], found[f"{kind}_{label}_cos"] = pair
        found[f"{kind}_rel_l2"], found[f"{kind}_cos"] = max(p.rel_l2 for p in pairs), min(p.cosine for p in pairs)
    return found


def kv_accepted(check: Mapping[str, float]) -> bool:
    """Whether a recorded comparison is complete and within the thresholds."""
    names = [f"{kind}{branch}" for kind in ("k", "v") for branch in ("", "_rope", "_prope")]
    return all(Agreement(check.get(f"{n}_rel_l2", float("nan")), check.get(f"{n}_cos", float("nan"))).accepted for n in names)


def input65(noisy: Tensor, image_latent: Tensor, first_frame: int) -> Tensor:
    """The predictor's input: noisy latent, image latent and mask; the latter two are zero except at global frame 0.

    Args:
        noisy: bf16 ``[B, C, n, H, W]``.
        image_latent: bf16 ``[B, C, 1, H, W]``.
        first_frame: global latent frame of ``noisy[:, :, 0]``.
    """
    mask = torch.zeros_like(noisy[:, :1])
    condition = torch.zeros_like(noisy)
    if first_frame == 0:
        condition[:, :, :1] = image_latent
        mask[:, :, :1] = 1.0
    return torch.cat((noisy, condition, mask), dim=1)
