"""Records to batches: text stripped and padded to the batch, context padded dynamically, one record without any copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ingest.errors import DamagedDataError
from ingest.prefeature.kvmath import ContextKv, FrozenTeacher
from ingest.prefeature.kvmath import input65 as one_input65
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.prefetch import RecordLease
from ingest.prefeature.sizes import Sizes
from ingest.prefeature.storefiles import valid_tokens

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """A batch of records; each holds all of its supervised pairs.

    Shapes: B records, n frames of a chunk, S tokens of a chunk, C hidden, N text tokens, M context tokens, m context frames.

    Attributes:
        keys: primary keys.
        is_pad: bool ``[B]``, repeats that must not count.
        sizes: of the dataset.
        labels: int64 ``[B, n]``.
        viewmats, intrinsics: bf16 ``[B, n, 4, 4]`` and ``[B, n, 3, 3]``.
        rope_size, rope_start: int64 ``[B]``, rotary window of the target chunk.
        timestep: float32 ``[B]`` by step.
        noisy, velocity: bf16 ``[B, C_latent, n, H, W]`` by step.
        frame_condition: bf16 ``[B, n, C]`` by step.
        final_hidden: bf16 ``[B, S, C]`` by step.
        previous_hidden: bf16 ``[B, S, C]`` by step of the previous chunk; empty for views without it.
        image_latent: bf16 ``[B, C_latent, 1, H, W]``.
        text_k, text_v: bf16 ``[B, h, N, d]`` by block.
        text_mask: bool ``[B, N]``, True for real tokens.
        context: bf16 ``[B, M, C]`` by block; empty for views without it.
        context_mask: bool ``[B, M]``.
        context_viewmats, context_intrinsics: bf16 ``[B, m, 4, 4]`` and ``[B, m, 3, 3]``, identity where padded.
        context_frames: int64 ``[B]``.
    """

    keys: tuple[RecordKey, ...]
    is_pad: Tensor
    sizes: Sizes
    labels: Tensor
    viewmats: Tensor
    intrinsics: Tensor
    rope_size: Tensor
    rope_start: Tensor
    timestep: tuple[Tensor, ...]
    noisy: tuple[Tensor, ...]
    velocity: tuple[Tensor, ...]
    frame_condition: tuple[Tensor, ...]
    final_hidden: tuple[Tensor, ...]
    previous_hidden: Mapping[int, Tensor]
    image_latent: Tensor
    text_k: Mapping[int, Tensor]
    text_v: Mapping[int, Tensor]
    text_mask: Tensor
    context: Mapping[int, Tensor]
    context_mask: Tensor
    context_viewmats: Tensor
    context_intrinsics: Tensor
    context_frames: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The supervised ``(source step, target step)`` pairs."""
        return tuple((step, step + 1) for step in range(len(self.noisy) - 1))

    def input65(self, step: int) -> Tensor:
        """The predictor's input of one step, bf16 ``[B, 2C + 1, n, H, W]``: image and mask only where a chunk starts at frame 0."""
        starts = [key.chunk_id * self.sizes.chunk_frames for key in self.keys]
        rows = [one_input65(self.noisy[step][row : row + 1], self.image_latent[row : row + 1], start) for row, start in enumerate(starts)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def rebuild_kv(self, frozen: FrozenTeacher) -> dict[int, ContextKv]:
        """Context K/V of every stored block, on the device of the batch, by the functions that the validator uses."""
        return {
            block: frozen.rebuild_kv(block, feature, self.context_viewmats, self.context_intrinsics)
            for block, feature in self.context.items()
        }

    def to(self, device: torch.device | str) -> RecordBatch:
        """A copy on another device; asynchronous from page-locked memory."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            if isinstance(value, dict):
                return {key: move(item) for key, item in cast("dict[Any, Any]", value).items()}
            if isinstance(value, tuple):
                items = cast("tuple[Any, ...]", value)
                return tuple(move(item) for item in items) if items and isinstance(items[0], Tensor) else items
            return value

        return replace(self, **{name: move(getattr(self, name)) for name in self.__slots__})


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of equal shape; a single record stays a view of its buffer."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _pad_to(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenates along axis 0 after zero-padding ``axis`` to the longest."""
    longest = max(tensor.shape[axis] for tensor in tensors)
    if len(tensors) == 1:
        return tensors[0]
    shape = [len(tensors), *tensors[0].shape[1:]]
    shape[axis] = longest
    out = torch.zeros(shape, dtype=tensors[0].dtype)
    for row, tensor in enumerate(tensors):
        out[row : row + 1].narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return out


def _pad_cameras(tensors: Sequence[Tensor]) -> Tensor:
    """Pads frames with the identity, which every camera formula can invert."""
    if len(tensors) == 1:
        return tensors[0]
    longest, width = max(tensor.shape[1] for tensor in tensors), tensors[0].shape[-1]
    out = torch.eye(width, dtype=tensors[0].dtype).repeat(len(tensors), longest, 1, 1)
    for row, tensor in enumerate(tensors):
        out[row, : tensor.shape[1]] = tensor[0]
    return out


def _prefix_mask(lengths: Sequence[int]) -> Tensor:
    return torch.arange(max(lengths))[None] < torch.tensor(list(lengths))[:, None]


def collate(leases: Sequence[RecordLease], sizes: Sizes, text_blocks: Sequence[int], is_pad: Sequence[bool] | None = None) -> RecordBatch:
    """Makes a batch.

    Several records are copied into fresh tensors; with a single record every tensor stays a view of its lease's buffer
    (text K/V apart, whose padding is cut off).

    Args:
        leases: the records.
        sizes: of the dataset.
        text_blocks: blocks whose text K/V were read.
        is_pad: marks repeats.

    Raises:
        DamagedDataError: a record lacks a tensor, or its text mask is broken; names the record.
    """
    flags = torch.tensor(list(is_pad) if is_pad is not None else [False] * len(leases))

    def each(role: str, name: str) -> list[Tensor]:
        found: list[Tensor] = []
        for lease in leases:
            tensors = lease.tensors.get(role)
            if tensors is None or name not in tensors:
                raise DamagedDataError(f"record {lease.request.key}: {role} has no tensor {name!r}; this view cannot be made without it")
            found.append(tensors[name])
        return found

    def by_step(make: Callable[[int], Value]) -> tuple[Value, ...]:
        return tuple(make(step) for step in range(sizes.steps))

    text_role = "text" if "text" in leases[0].tensors else "case"
    counts = [valid_tokens(mask, str(lease.request.key)) for mask, lease in zip(each(text_role, "text_valid_mask"), leases, strict=True)]

    def text(block: int, kind: str) -> Tensor:
        rows = each(text_role, f"block_{block:02d}_{kind}_txt")
        return _pad_to([row[:, :, :count] for row, count in zip(rows, counts, strict=True)], 2)

    with_context = f"context_{sizes.blocks[0]:02d}" in leases[0].tensors
    first = f"context_{sizes.blocks[0]:02d}"
    frames = [len(row) for row in each(first, "selected_frame_indices")] if with_context else [0] * len(leases)
    cameras = (
        (_pad_cameras(each(first, "context_viewmats")), _pad_cameras(each(first, "context_Ks")))
        if with_context
        else (torch.zeros(len(leases), 0, 4, 4, dtype=torch.bfloat16), torch.zeros(len(leases), 0, 3, 3, dtype=torch.bfloat16))
    )
    previous = leases[0].tensors.get("previous", {})
    previous_steps = [int(name.split("_")[1]) for name in previous]
    return RecordBatch(
        keys=tuple(lease.request.key for lease in leases),
        is_pad=flags,
        sizes=sizes,
        labels=_join(each("step", "action_labels")),
        viewmats=_join(each("step", "target_viewmats")),
        intrinsics=_join(each("step", "target_Ks")),
        rope_size=_join(each("step", "rope_temporal_size")),
        rope_start=_join(each("step", "start_rope_start_idx")),
        timestep=by_step(lambda step: _join(each("step", f"step_{step}_timestep"))),
        noisy=by_step(lambda step: _join(each("step", f"step_{step}_noisy_sample"))),
        velocity=by_step(lambda step: _join(each("step", f"step_{step}_velocity"))),
        frame_condition=by_step(lambda step: _join(each("step", f"step_{step}_frame_condition"))),
        final_hidden=by_step(lambda step: _join(each("step", f"step_{step}_final_hidden"))),
        previous_hidden={step: _join(each("previous", f"step_{step}_final_hidden")) for step in sorted(previous_steps)},
        image_latent=_join(each("case", "image_condition_latent")),
        text_k={block: text(block, "k") for block in text_blocks},
        text_v={block: text(block, "v") for block in text_blocks},
        text_mask=_prefix_mask(counts),
        context={block: _pad_to(each(f"context_{block:02d}", "img_modulated"), 1) for block in sizes.blocks} if with_context else {},
        context_mask=_prefix_mask([count * sizes.frame_tokens for count in frames]),
        context_viewmats=cameras[0],
        context_intrinsics=cameras[1],
        context_frames=torch.tensor(frames, dtype=torch.int64),
    )
