"""A small behaviour-cloning policy: cameras and state in, a chunk of actions out.

It is real enough to show that pictures and rows belong together: it can only lower its loss by reading the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

IMAGE_SIDE = 48
"""Pictures are reduced to squares of this many pixels before the first convolution."""


class Normalizer(nn.Module):
    """Centres and scales vectors with the dataset's statistics.

    Args:
        mean: shape ``[D]``.
        std: shape ``[D]``; values below 1e-6 count as 1, so that constant columns stay finite.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.float())
        self.register_buffer("std", torch.where(std.float() < 1e-6, torch.ones_like(std.float()), std.float()))

    def forward(self, values: Tensor) -> Tensor:
        """``[..., D]`` → ``[..., D]``, zero mean and unit deviation."""
        return (values - self.mean) / self.std

    def invert(self, values: Tensor) -> Tensor:
        """The inverse of `forward`."""
        return values * self.std + self.mean


class CameraEncoder(nn.Module):
    """A compact convolution stack that ends in expected pixel coordinates (a spatial softmax)."""

    def __init__(self, channels: int = 3, keypoints: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=1, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, keypoints, 3, stride=1, padding=1),
        )
        self.features = 2 * keypoints

    def forward(self, pictures: Tensor) -> Tensor:
        """uint8, or float32 in [0, 1], ``[B, C, H, W]`` → float32 ``[B, 2 * keypoints]`` in [-1, 1]."""
        shown = pictures.float() / 255.0 if pictures.dtype == torch.uint8 else pictures
        small = functional.interpolate(shown, size=(IMAGE_SIDE, IMAGE_SIDE), mode="area")
        maps = self.layers(small - 0.5)
        batch, keypoints, height, width = maps.shape
        weight = maps.reshape(batch, keypoints, -1).softmax(-1).reshape(batch, keypoints, height, width)
        rows = torch.linspace(-1, 1, height, device=maps.device)
        columns = torch.linspace(-1, 1, width, device=maps.device)
        return torch.cat([(weight.sum(3) * rows).sum(-1), (weight.sum(2) * columns).sum(-1)], dim=1)


class BehaviourCloning(nn.Module):
    """Predicts the next ``chunk`` actions from the cameras and the state at the anchor frame.

    Args:
        cameras: camera feature keys.
        state_key: vector feature that joins the pictures, or None.
        statistics: ``{key: (mean [D], std [D])}`` of the state and of ``action``.
        chunk: actions predicted per sample.
        hidden: width of the two hidden layers.
    """

    def __init__(
        self,
        cameras: Sequence[str],
        state_key: str | None,
        statistics: Mapping[str, tuple[Tensor, Tensor]],
        chunk: int = 1,
        hidden: int = 128,
    ) -> None:
        super().__init__()
        self.cameras = tuple(cameras)
        self.state_key = state_key
        self.chunk = chunk
        self.action_norm = Normalizer(*statistics["action"])
        self.action_dim = int(self.action_norm.mean.numel())
        self.encoders = nn.ModuleList([CameraEncoder() for _ in self.cameras])
        width = sum(2 * 16 for _ in self.cameras)
        self.state_norm = Normalizer(*statistics[state_key]) if state_key is not None else None
        if self.state_norm is not None:
            width += int(self.state_norm.mean.numel())
        self.head = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, chunk * self.action_dim)
        )

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Normalised actions ``[B, chunk, D]``."""
        parts = [encoder(_anchor(batch[key])) for key, encoder in zip(self.cameras, self.encoders, strict=True)]
        if self.state_norm is not None and self.state_key is not None:
            state = batch[self.state_key]
            parts.append(self.state_norm(state if state.ndim == 2 else state[:, -1]))
        return self.head(torch.cat(parts, dim=1)).reshape(-1, self.chunk, self.action_dim)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean smooth L1 distance over real samples and real window steps; a scalar.

        ``batch["is_pad"]`` (bool ``[B]``) and ``batch["action_is_pad"]`` (bool ``[B, chunk]``, optional) weigh zero.
        """
        target = batch["action"]
        target = target[:, None] if target.ndim == 2 else target
        error = functional.smooth_l1_loss(self(batch), self.action_norm(target), reduction="none").mean(-1)
        weight = (~batch["is_pad"])[:, None].expand_as(error).float()
        if "action_is_pad" in batch:
            weight = weight * (~batch["action_is_pad"]).float()
        return (error * weight).sum() / weight.sum().clamp_min(1.0)


class LossOf(nn.Module):
    """A policy whose ``forward`` is its loss, so that gradient synchronisation hooks into the call that counts."""

    def __init__(self, policy: BehaviourCloning) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """See `BehaviourCloning.loss`."""
        return self.policy.loss(batch)


def _anchor(pictures: Tensor) -> Tensor:
    """The last picture of a window ``[B, T, C, H, W]``, or the picture itself ``[B, C, H, W]``."""
    return pictures if pictures.ndim == 4 else pictures[:, -1]
