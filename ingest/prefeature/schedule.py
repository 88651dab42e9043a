"""The four-step flow schedule, the Euler step and the seeded noise."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ingest.errors import ResourceUnavailableError
from ingest.prefeature.sizes import Sizes

FLOW_SHIFT = 5.0


def sigmas(steps: int) -> tuple[float, ...]:
    """``steps + 1`` noise levels from 1 to 0: evenly spaced, then shifted by 5s / (1 + 4s)."""
    even = [1.0 - step / steps for step in range(steps + 1)]
    return tuple(FLOW_SHIFT * level / (1.0 + (FLOW_SHIFT - 1.0) * level) for level in even)


def timesteps(steps: int) -> tuple[float, ...]:
    """The timestep of each denoise step, rounded to float32 as stored."""
    return tuple(float(torch.tensor(1000.0 * level, dtype=torch.float32)) for level in sigmas(steps)[:-1])


def euler_step(sample: Tensor, velocity: Tensor, step: int, steps: int) -> Tensor:
    """``bf16(sample + velocity * (sigma[step + 1] - sigma[step]))`` computed in float32."""
    levels = sigmas(steps)
    return (sample.float() + velocity.float() * (levels[step + 1] - levels[step])).to(torch.bfloat16)


def draw_noise(sizes: Sizes, seed: int, device: str) -> Tensor:
    """The noise of a whole trajectory, bf16 ``[1, C, T, H, W]`` on the CPU.

    CPU and CUDA generators differ, so the dataset records the device it was drawn on and keeps the tensor itself.

    Raises:
        ResourceUnavailableError: this machine has no such device.
    """
    try:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(sizes.noise_shape, generator=generator, dtype=torch.bfloat16, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ResourceUnavailableError(f"no noise can be drawn on {device!r} here ({reason}); name another with --noise-device") from error


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor without a copy; empty tensors give an empty view."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def tensor_sha256(tensor: Tensor) -> str:
    """Hex SHA-256 of a tensor's raw bytes."""
    return hashlib.sha256(tensor_bytes(tensor.cpu())).hexdigest()
