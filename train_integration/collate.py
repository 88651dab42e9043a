"""NumPy batches as torch batches, without copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def to_torch(batch: Mapping[str, Any], *, device: torch.device | str | None = None) -> dict[str, Any]:
    """Turns every array of a batch into a tensor that shares its memory; lists and texts stay.

    Pictures arrive as (B, C, H, W) or (B, T, C, H, W) views of channels-last memory, and stay so: convolutions want it,
    and no copy is made on the CPU.

    Args:
        batch: as assembled.
        device: where to put tensors; None leaves them on the CPU.
    """
    tensors: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, np.ndarray) and value.dtype != object:
            array = value if value.flags.writeable else value.copy()
            tensor = torch.from_numpy(array)
            tensors[key] = tensor if device is None else tensor.to(device, non_blocking=True)
        else:
            tensors[key] = value
    return tensors
