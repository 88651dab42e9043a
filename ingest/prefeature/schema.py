"""Names, dtypes and shapes of every tensor: the one description that writer, reader, validator and documentation share."""

from __future__ import annotations

from ingest.prefeature.sizes import Sizes
from ingest.prefeature.tensorfile import TensorSpec, file_bytes

TextSpecs = list[TensorSpec]
STEP_FIELDS = ("timestep", "noisy_sample", "frame_condition", "final_hidden", "velocity")
CONTEXT_SHARED = ("selected_frame_indices", "context_viewmats", "context_Ks", "rope_temporal_size", "start_rope_start_idx")
"""Tensors that must be equal in the context files of one record."""


def _text(sizes: Sizes, blocks: tuple[int, ...] | range) -> TextSpecs:
    shape = (1, sizes.heads, sizes.text_pad_tokens, sizes.head_dim)
    specs = [TensorSpec(f"block_{block:02d}_{kind}_txt", "BF16", shape) for block in blocks for kind in ("k", "v")]
    return [*specs, TensorSpec("text_valid_mask", "BOOL", (1, sizes.text_pad_tokens))]


def case_schema(sizes: Sizes) -> list[TensorSpec]:
    """Image condition and text K/V of the stored blocks."""
    return [TensorSpec("image_condition_latent", "BF16", (1, sizes.latent_channels, 1, *sizes.grid)), *_text(sizes, sizes.blocks)]


def text_kv_schema(sizes: Sizes) -> list[TensorSpec]:
    """Text K/V of every block."""
    return _text(sizes, range(sizes.depth))


def step_schema(sizes: Sizes) -> list[TensorSpec]:
    """Actions, cameras, rotary window and the targets of every denoise step."""
    frames = sizes.chunk_frames
    specs = [
        TensorSpec("action_labels", "I64", (1, frames)),
        TensorSpec("target_viewmats", "BF16", (1, frames, 4, 4)),
        TensorSpec("target_Ks", "BF16", (1, frames, 3, 3)),
        TensorSpec("rope_temporal_size", "I64", (1,)),
        TensorSpec("start_rope_start_idx", "I64", (1,)),
    ]
    for step in range(sizes.steps):
        specs += [
            TensorSpec(f"step_{step}_timestep", "F32", (1,)),
            TensorSpec(f"step_{step}_noisy_sample", "BF16", sizes.chunk_shape),
            TensorSpec(f"step_{step}_frame_condition", "BF16", (1, frames, sizes.hidden)),
            TensorSpec(f"step_{step}_final_hidden", "BF16", (1, frames * sizes.frame_tokens, sizes.hidden)),
            TensorSpec(f"step_{step}_velocity", "BF16", sizes.chunk_shape),
        ]
    return specs


def context_schema(sizes: Sizes, context_frames: int) -> list[TensorSpec]:
    """Pre-feature of one block; every dimension that counts context frames is 0 for chunk 0."""
    tokens = context_frames * sizes.frame_tokens
    return [
        TensorSpec("img_modulated", "BF16", (1, tokens, sizes.hidden)),
        TensorSpec("context_valid_mask", "BOOL", (1, tokens)),
        TensorSpec("selected_frame_indices", "I64", (context_frames,)),
        TensorSpec("context_viewmats", "BF16", (1, context_frames, 4, 4)),
        TensorSpec("context_Ks", "BF16", (1, context_frames, 3, 3)),
        TensorSpec("rope_temporal_size", "I64", (1,)),
        TensorSpec("start_rope_start_idx", "I64", (1,)),
    ]


def frozen_schema(sizes: Sizes) -> list[TensorSpec]:
    """The teacher weights that validation and training need: final layer, and K, V, K-norm of the stored blocks."""
    hidden = sizes.hidden
    specs = [
        TensorSpec("final_mod_weight", "BF16", (2 * hidden, hidden)),
        TensorSpec("final_mod_bias", "BF16", (2 * hidden,)),
        TensorSpec("final_linear_weight", "BF16", (sizes.latent_channels, hidden)),
        TensorSpec("final_linear_bias", "BF16", (sizes.latent_channels,)),
    ]
    for block in sizes.blocks:
        for kind in ("k", "v"):
            specs.append(TensorSpec(f"block_{block:02d}_img_attn_{kind}_weight", "BF16", (hidden, hidden)))
            specs.append(TensorSpec(f"block_{block:02d}_img_attn_{kind}_bias", "BF16", (hidden,)))
        specs.append(TensorSpec(f"block_{block:02d}_img_attn_k_norm_weight", "BF16", (sizes.head_dim,)))
    return specs


def noise_schema(sizes: Sizes) -> list[TensorSpec]:
    """The noise that every trajectory starts from."""
    return [TensorSpec("noise", "BF16", sizes.noise_shape)]


def folder_bytes(sizes: Sizes, actions: int, context_frames: list[int]) -> dict[str, int]:
    """Tensor bytes by folder for a whole dataset, without ``__metadata__``.

    Args:
        sizes: the sizes.
        actions: trajectories per case.
        context_frames: context frames of each chunk.
    """
    runs = sizes.cases * actions
    return {
        "cases": sizes.cases * file_bytes(case_schema(sizes)),
        "text_kv_exact_all54_bf16": sizes.cases * file_bytes(text_kv_schema(sizes)),
        "steps": runs * sizes.chunks * file_bytes(step_schema(sizes)),
        "context_prefeature": runs * len(sizes.blocks) * sum(file_bytes(context_schema(sizes, frames)) for frames in context_frames),
    }
