"""What a teacher must offer. The rollout loop, history selection, Euler steps and writing live outside of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.errors import DatasetError
from ingest.prefeature.kvmath import ContextKv
from ingest.prefeature.sizes import Sizes

EXACT_FLAGS: Mapping[str, bool] = {
    "denoise_cache": False,
    "history_cache_reuse": False,
    "context_pooling": False,
    "context_pruning": False,
    "sparse_attention": False,
    "sage_attention": False,
    "fp8_gemm": False,
    "prompt_rewrite": False,
    "classifier_free_guidance": False,
    "torch_compile": False,
}
"""The exact Full-DiT path: everything that would approximate the teacher is off."""


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """Identity of a teacher.

    Attributes:
        name: ``reference`` or ``hy_worldplay``.
        sizes: shapes it works with.
        checkpoint: where the weights came from, as recorded in the dataset.
        checkpoint_sha256: hash of the weights.
        flags: exactness flags as they are in force.
        offloading: whether weights move between CPU and GPU; affects memory only.
        device: torch device of the transformer.
    """

    name: str
    sizes: Sizes
    checkpoint: str
    checkpoint_sha256: str
    flags: Mapping[str, bool]
    offloading: bool
    device: str

    def require_exact(self) -> None:
        """Refuses any setting that is not the exact Full-DiT path.

        Raises:
            DatasetError: a flag is missing or on; the message names every one.
        """
        wrong = [name for name, value in EXACT_FLAGS.items() if self.flags.get(name) is not value]
        if wrong:
            raise DatasetError(
                f"teacher {self.name!r} is not on the exact Full-DiT path: {', '.join(wrong)} must be off. "
                "Turn them off in the teacher's settings; the dataset never mixes exact and approximate tensors"
            )

    def fingerprint(self) -> str:
        """SHA-256 over weights, sizes and flags."""
        value: dict[str, Any] = {
            "name": self.name,
            "sizes": self.sizes.to_json(),
            "checkpoint_sha256": self.checkpoint_sha256,
            "flags": dict(self.flags),
        }
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CaseInputs:
    """An encoded image-text pair.

    Attributes:
        image_latent: bf16 ``[1, C, 1, H, W]``.
        text: whatever the teacher's ``text_prefill`` takes; opaque to everyone else.
    """

    image_latent: Tensor
    text: Any


@dataclass(frozen=True, slots=True)
class TextKv:
    """Text keys and values of every block, each bf16 ``[1, h, n_valid, d]`` without padding."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Views:
    """What the transformer is told about some latent frames.

    Attributes:
        labels: int64 ``[1, n]``.
        viewmats: bf16 ``[1, n, 4, 4]``.
        intrinsics: bf16 ``[1, n, 3, 3]``.
    """

    labels: Tensor
    viewmats: Tensor
    intrinsics: Tensor


@dataclass(frozen=True, slots=True)
class ContextState:
    """The context window of one chunk.

    Attributes:
        frames: latent frames in the window; 0 for chunk 0.
        kv: K/V of every block, or empty when there is no context.
        captured: bf16 ``[1, S, C]`` input of the K/V layers by captured block.
    """

    frames: int
    kv: tuple[ContextKv, ...]
    captured: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True)
class DenoiseOut:
    """One forward pass of the denoiser.

    Attributes:
        final_hidden: bf16 ``[1, S, C]``, after the last block.
        frame_condition: bf16 ``[1, n, C]``.
        velocity: bf16 ``[1, C_latent, n, H, W]``.
        input65: bf16 input that the patch embedding really received.
    """

    final_hidden: Tensor
    frame_condition: Tensor
    velocity: Tensor
    input65: Tensor


class Teacher(Protocol):
    """The frozen model that the dataset is made from. Every tensor it returns may live on its own device."""

    @property
    def spec(self) -> TeacherSpec:
        """Identity and sizes."""
        ...

    def encode_case(self, image: NDArray[np.uint8], caption: str) -> CaseInputs:
        """Encodes an image ``[H, W, 3]`` and its caption."""
        ...

    def text_prefill(self, inputs: CaseInputs) -> TextKv:
        """Text K/V of all blocks; independent of action, timestep and chunk."""
        ...

    def context_prefill(self, latents65: Tensor, timestep: float, views: Views, text: TextKv, capture: tuple[int, ...]) -> ContextState:
        """Runs the history frames jointly and non-causally, ``latents65`` bf16 ``[1, 2C+1, n, H, W]``, n > 0."""
        ...

    def denoise(self, latents65: Tensor, timestep: float, views: Views, text: TextKv, context: ContextState) -> DenoiseOut:
        """One full pass over a chunk, ``latents65`` bf16 ``[1, 2C+1, chunk_frames, H, W]``."""
        ...

    def frame_condition(self, timestep: float, labels: Tensor) -> Tensor:
        """bf16 ``[1, n, C]`` for int64 labels ``[1, n]``, without running the transformer."""
        ...

    def frozen_parts(self) -> Mapping[str, Tensor]:
        """bf16 weights named as in ``schema.frozen_schema``."""
        ...

    def decode(self, latents: Tensor) -> Iterator[NDArray[np.uint8]]:
        """Pictures ``[H, W, 3]`` of a whole trajectory's latents ``[1, C, T, H, W]``."""
        ...
