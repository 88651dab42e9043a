"""The autoregressive rollout, outside of any teacher: chunks, history, Euler steps, capture, and every stored tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ingest.errors import DatasetError
from ingest.prefeature.config import DatasetConfig
from ingest.prefeature.kvmath import FrozenTeacher, compare, compare_kv, input65, kv_accepted
from ingest.prefeature.schedule import euler_step, tensor_sha256, timesteps
from ingest.prefeature.sizes import CONTEXT_TIMESTEP, Sizes
from ingest.prefeature.teacher import ContextState, Teacher, TextKv, Views

NO_CONTEXT = ContextState(0, (), {})


class StepMode(Enum):
    """How one denoise step gets its velocity."""

    FULL = "full"
    REUSE_HIDDEN = "reuse_hidden"
    REUSE_VELOCITY = "reuse_velocity"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What is fixed about a trajectory before any image is seen.

    Attributes:
        sizes: of the dataset.
        viewmats, intrinsics: bf16 ``[1, T, 4, 4]`` and ``[1, T, 3, 3]``.
        labels: int64 ``[1, T]``.
        history: selected latent frames of each chunk.
    """

    sizes: Sizes
    viewmats: Tensor
    intrinsics: Tensor
    labels: Tensor
    history: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, config: DatasetConfig, action: int) -> Trajectory:
        """The trajectory of one action."""
        cameras = config.cameras(action)
        return cls(
            config.sizes,
            torch.as_tensor(cameras.viewmats).to(torch.bfloat16)[None],
            torch.as_tensor(cameras.intrinsics).to(torch.bfloat16)[None],
            torch.as_tensor(cameras.labels)[None],
            config.history(action),
        )

    def views(self, frames: Sequence[int]) -> Views:
        """Cameras and labels of some latent frames."""
        index = torch.as_tensor(list(frames), dtype=torch.int64)
        return Views(self.labels[:, index], self.viewmats[:, index], self.intrinsics[:, index])

    def chunk_frames(self, chunk: int) -> range:
        """Latent frames of a chunk."""
        return range(chunk * self.sizes.chunk_frames, (chunk + 1) * self.sizes.chunk_frames)


@dataclass(frozen=True, slots=True)
class CaseTensors:
    """A case as the rollout needs it: bf16 image latent ``[1, C, 1, H, W]`` and text K/V without padding."""

    image_latent: Tensor
    text: TextKv


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Everything that is stored about one chunk.

    Attributes:
        step: tensors of the step file.
        context: tensors of the context file by block.
        input65_sha256: hash of the input that the teacher really received, by step.
        kv_check: rebuilt against direct K/V by block.
        history_sha256: hash of the latents that the chunk was made from.
        final_latents: bf16 ``[1, C, chunk_frames, H, W]`` after the last step.
    """

    step: Mapping[str, Tensor]
    context: Mapping[int, Mapping[str, Tensor]]
    input65_sha256: tuple[str, ...]
    kv_check: Mapping[int, Mapping[str, float]]
    history_sha256: str
    final_latents: Tensor


def run_context(teacher: Teacher, trajectory: Trajectory, case: CaseTensors, latents: Tensor, chunk: int) -> ContextState:
    """The joint, non-causal pass over the history of a chunk; chunk 0 has none.

    Args:
        teacher: the teacher.
        trajectory: cameras and history.
        case: image and text.
        latents: bf16 ``[1, C, T, H, W]``, final in every frame before the chunk.
        chunk: chunk number.
    """
    frames = trajectory.history[chunk]
    if not frames:
        return NO_CONTEXT
    selected = latents[:, :, list(frames)]
    blocks = trajectory.sizes.blocks
    return teacher.context_prefill(
        input65(selected, case.image_latent, frames[0]), CONTEXT_TIMESTEP, trajectory.views(frames), case.text, blocks
    )


def context_tensors(trajectory: Trajectory, context: ContextState, chunk: int) -> dict[int, dict[str, Tensor]]:
    """The seven tensors of each context file, zero-length where chunk 0 has no context."""
    sizes = trajectory.sizes
    frames = trajectory.history[chunk]
    views = trajectory.views(frames)
    tokens = len(frames) * sizes.frame_tokens
    found: dict[int, dict[str, Tensor]] = {}
    for block in sizes.blocks:
        feature = context.captured[block].cpu() if frames else torch.empty(1, 0, sizes.hidden, dtype=torch.bfloat16)
        found[block] = {
            "img_modulated": feature.to(torch.bfloat16),
            "context_valid_mask": torch.ones(1, tokens, dtype=torch.bool),
            "selected_frame_indices": torch.as_tensor(frames, dtype=torch.int64),
            "context_viewmats": views.viewmats,
            "context_Ks": views.intrinsics,
            "rope_temporal_size": torch.tensor([len(frames)], dtype=torch.int64),
            "start_rope_start_idx": torch.zeros(1, dtype=torch.int64),
        }
    return found


def check_kv(frozen: FrozenTeacher, trajectory: Trajectory, context: ContextState, chunk: int) -> dict[int, dict[str, float]]:
    """Rebuilds the context K/V from the captured features and compares it with what the teacher used.

    Raises:
        DatasetError: a block misses the thresholds; training on such features would see another teacher.
    """
    views = trajectory.views(trajectory.history[chunk])
    found: dict[int, dict[str, float]] = {}
    for block in trajectory.sizes.blocks:
        if not context.frames:
            exact = {f"{kind}{branch}_": None for kind in ("k", "v") for branch in ("_rope", "_prope", "")}
            found[block] = {name + suffix: value for name in exact for suffix, value in (("rel_l2", 0.0), ("cos", 1.0))}
            continue
        feature = context.captured[block]
        rebuilt = frozen.rebuild_kv(
            block, feature.to(torch.bfloat16), views.viewmats.to(feature.device), views.intrinsics.to(feature.device)
        )
        found[block] = compare_kv(rebuilt, context.kv[block])
        if not kv_accepted(found[block]):
            raise DatasetError(
                f"chunk {chunk}, block {block}: K/V rebuilt from img_modulated differs from the teacher's own {found[block]}; "
                "the frozen weights or the camera and rotary path are not those of the teacher"
            )
    return found


def run_chunk(
    teacher: Teacher, frozen: FrozenTeacher, trajectory: Trajectory, case: CaseTensors, latents: Tensor, chunk: int, context: ContextState
) -> ChunkResult:
    """All denoise steps of one chunk with everything that is stored.

    Args:
        teacher: the teacher.
        frozen: its frozen parts on the teacher's device.
        trajectory: cameras and history.
        case: image and text.
        latents: bf16 ``[1, C, T, H, W]``: noise in the chunk's frames.
        chunk: chunk number.
        context: result of ``run_context``.

    Raises:
        DatasetError: rebuilt K/V or velocity differ from the teacher's.
    """
    sizes = trajectory.sizes
    frames = trajectory.chunk_frames(chunk)
    views = trajectory.views(frames)
    sample = latents[:, :, frames.start : frames.stop].clone()
    step_tensors: dict[str, Tensor] = {
        "action_labels": views.labels,
        "target_viewmats": views.viewmats,
        "target_Ks": views.intrinsics,
        "rope_temporal_size": torch.tensor([context.frames + sizes.chunk_frames], dtype=torch.int64),
        "start_rope_start_idx": torch.tensor([context.frames], dtype=torch.int64),
    }
    hashes: list[str] = []
    for step, timestep in enumerate(timesteps(sizes.steps)):
        out = teacher.denoise(input65(sample, case.image_latent, frames.start), timestep, views, case.text, context)
        agreement = compare(frozen.final_layer(out.final_hidden, out.frame_condition), out.velocity)
        if not agreement.accepted:
            raise DatasetError(f"chunk {chunk}, step {step}: the frozen final layer gives another velocity than the teacher ({agreement})")
        step_tensors[f"step_{step}_timestep"] = torch.tensor([timestep], dtype=torch.float32)
        step_tensors[f"step_{step}_noisy_sample"] = sample
        step_tensors[f"step_{step}_frame_condition"] = out.frame_condition.cpu()
        step_tensors[f"step_{step}_final_hidden"] = out.final_hidden.cpu()
        step_tensors[f"step_{step}_velocity"] = out.velocity.cpu()
        hashes.append(tensor_sha256(out.input65))
        sample = euler_step(sample, step_tensors[f"step_{step}_velocity"], step, sizes.steps)
    return ChunkResult(
        step_tensors,
        context_tensors(trajectory, context, chunk),
        tuple(hashes),
        check_kv(frozen, trajectory, context, chunk),
        history_sha256(latents, frames.start),
        sample,
    )


def history_sha256(latents: Tensor, first_frame: int) -> str:
    """Hash of the final latents before a chunk: equal exactly when the chunk follows from the chunks that are there.

    Args:
        latents: bf16 ``[1, C, T, H, W]``.
        first_frame: of the chunk.
    """
    return tensor_sha256(latents[:, :, :first_frame])


def final_latents(step: Mapping[str, Tensor], steps: int) -> Tensor:
    """Latents after the last step, bit-exactly from a stored step file: this is what makes a trajectory resumable."""
    last = steps - 1
    return euler_step(step[f"step_{last}_noisy_sample"], step[f"step_{last}_velocity"], last, steps)


def roll_latents(
    teacher: Teacher,
    frozen: FrozenTeacher,
    trajectory: Trajectory,
    case: CaseTensors,
    noise: Tensor,
    modes: Sequence[StepMode],
) -> Tensor:
    """Latents of a whole trajectory without storing anything, for evaluation videos.

    Args:
        teacher: the teacher.
        frozen: its frozen parts.
        trajectory: cameras and history.
        case: image and text.
        noise: bf16 ``[1, C, T, H, W]``.
        modes: one per denoise step. ``REUSE_HIDDEN`` applies the final layer to the hidden state of the last full step with
            the current step's condition; ``REUSE_VELOCITY`` repeats that step's velocity.

    Raises:
        DatasetError: the number of modes is wrong or the first step is not full.
    """
    sizes = trajectory.sizes
    if len(modes) != sizes.steps or modes[0] is not StepMode.FULL:
        raise DatasetError(f"{len(modes)} step modes given, expected {sizes.steps} and the first one full")
    latents = noise.clone()
    for chunk in range(sizes.chunks):
        context = run_context(teacher, trajectory, case, latents, chunk)
        frames = trajectory.chunk_frames(chunk)
        views = trajectory.views(frames)
        sample = latents[:, :, frames.start : frames.stop].clone()
        hidden = velocity = sample
        for step, timestep in enumerate(timesteps(sizes.steps)):
            if modes[step] is StepMode.FULL:
                out = teacher.denoise(input65(sample, case.image_latent, frames.start), timestep, views, case.text, context)
                hidden, velocity = out.final_hidden, out.velocity
            elif modes[step] is StepMode.REUSE_HIDDEN:
                velocity = frozen.final_layer(hidden, teacher.frame_condition(timestep, views.labels))
            sample = euler_step(sample, velocity.cpu(), step, sizes.steps)
        latents[:, :, frames.start : frames.stop] = sample
    return latents
