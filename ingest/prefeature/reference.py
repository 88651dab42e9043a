"""The reference teacher: plain torch with the structure of the real one and seeded, non-zero weights.

Double-stream blocks with per-frame modulation, RMS-normalised queries and keys, a rotary and a camera attention branch,
text K/V prefill, a joint context pass with capture, and a modulated final layer. It runs on a CPU at any size.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves some of its own signatures untyped)
from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ingest.errors import DatasetError, ResourceUnavailableError
from ingest.prefeature.kvmath import (
    ContextKv,
    FrozenTeacher,
    apply_camera,
    apply_rotary,
    camera_matrices,
    encode_kv,
    join_heads,
    modulate,
    per_token,
    rms_norm,
    split_heads,
)
from ingest.prefeature.schedule import tensor_bytes
from ingest.prefeature.sizes import Sizes
from ingest.prefeature.teacher import EXACT_FLAGS, CaseInputs, ContextState, DenoiseOut, TeacherSpec, TextKv, Views

TIME_WIDTH = 256
VISION_GRID = 3
"""The image enters the text stream as 3 x 3 pooled vision tokens."""


def weight_bytes(sizes: Sizes) -> int:
    """Bytes of the blocks' weights, which are nearly all there is."""
    per_stream = 6 + 4 + 2 * sizes.mlp_ratio
    return 2 * sizes.depth * (2 * per_stream + 1) * sizes.hidden**2


def _require_memory(sizes: Sizes) -> None:
    needed, free = weight_bytes(sizes), psutil.virtual_memory().available
    if needed + needed // 4 > free:
        raise ResourceUnavailableError(
            f"the reference teacher of these sizes needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; "
            "it is for rehearsals: use smaller sizes ('--preset tiny'), or the real teacher"
        )


def _weights(sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """Every weight, drawn in a fixed order; norms near one, the rest scaled to keep activations near unit size."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made: dict[str, Tensor] = {}

    def linear(name: str, out: int, inner: int, gain: float = 1.0) -> None:
        made[f"{name}.weight"] = (torch.randn(out, inner, generator=generator) * (gain / math.sqrt(inner))).to(torch.bfloat16)
        made[f"{name}.bias"] = (torch.randn(out, generator=generator) * 0.02).to(torch.bfloat16)

    def norm(name: str) -> None:
        made[f"{name}.weight"] = (1.0 + 0.1 * torch.randn(sizes.head_dim, generator=generator)).to(torch.bfloat16)

    hidden = sizes.hidden
    linear("img_in", hidden, sizes.input_channels)
    for embed in ("time", "action"):
        linear(f"{embed}.0", hidden, TIME_WIDTH)
        linear(f"{embed}.2", hidden, hidden)
    for block in range(sizes.depth):
        for stream in ("img", "txt"):
            prefix = f"{block}.{stream}"
            linear(f"{prefix}_mod", 6 * hidden, hidden, 0.5)
            for name in ("q", "k", "v", "proj"):
                linear(f"{prefix}_{name}", hidden, hidden)
            norm(f"{prefix}_q_norm")
            norm(f"{prefix}_k_norm")
            linear(f"{prefix}_fc1", sizes.mlp_ratio * hidden, hidden)
            linear(f"{prefix}_fc2", hidden, sizes.mlp_ratio * hidden)
        linear(f"{block}.img_prope_proj", hidden, hidden)
    linear("final_mod", 2 * hidden, hidden, 0.5)
    linear("final_linear", sizes.latent_channels, hidden)
    linear("vision_in", hidden, sizes.latent_channels)
    made["kind_embedding"] = (torch.randn(2, hidden, generator=generator) * 0.5).to(torch.bfloat16)
    made["vae"] = torch.randn(sizes.latent_channels, 3, generator=generator)
    return made


def _hash_weights(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(tensor_bytes(weights[name]))
    return digest.hexdigest()


class ReferenceTeacher:
    """A small, deterministic teacher; see the module's text.

    Args:
        sizes: any consistent sizes.
        seed: of the weights.
        device: torch device.

    Raises:
        ResourceUnavailableError: the weights do not fit into the free memory.
    """

    def __init__(self, sizes: Sizes, seed: int = 0, device: str = "cpu") -> None:
        _require_memory(sizes)
        weights = _weights(sizes, seed)
        self._sizes = sizes
        self._device = device
        self._spec = TeacherSpec("reference", sizes, f"reference:seed={seed}", _hash_weights(weights), dict(EXACT_FLAGS), False, device)
        self._w = {name: tensor.to(device) for name, tensor in weights.items()}
        self._vae = weights["vae"].double()
        self._unvae = torch.linalg.pinv(self._vae)
        self._frozen = FrozenTeacher(sizes, self.frozen_parts())

    @property
    def spec(self) -> TeacherSpec:
        return self._spec

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._w[f"{name}.weight"], self._w[f"{name}.bias"])

    def _embed(self, name: str, values: Tensor) -> Tensor:
        """Sinusoidal embedding and two linear layers, ``[...]`` to bf16 ``[..., C]``."""
        half = TIME_WIDTH // 2
        speed = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float32, device=self._device) / half)
        angles = values.float().unsqueeze(-1) * speed
        wave = torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.bfloat16)
        return self._linear(f"{name}.2", functional.silu(self._linear(f"{name}.0", wave)))

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        return self._linear(f"{prefix}_fc2", functional.gelu(self._linear(f"{prefix}_fc1", x), approximate="tanh"))

    def _qkv(self, prefix: str, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split_heads(self._linear(f"{prefix}_{name}", m), self._sizes.heads) for name in ("q", "k", "v"))
        return rms_norm(q, self._w[f"{prefix}_q_norm.weight"]), rms_norm(k, self._w[f"{prefix}_k_norm.weight"]), v

    def encode_case(self, image: NDArray[np.uint8], caption: str) -> CaseInputs:
        sizes = self._sizes
        if image.shape != (sizes.height, sizes.width, 3):
            raise DatasetError(f"case image is {image.shape}, expected {(sizes.height, sizes.width, 3)}; run the cases stage again")
        # Sums in float64 and without BLAS, whose float32 rounding may depend on memory alignment and flip a bf16 digit.
        pixels = torch.from_numpy(image.astype(np.float64)).permute(2, 0, 1)[None] / 127.5 - 1.0
        pooled = functional.avg_pool2d(pixels, sizes.spatial_stride)
        latent = (self._vae[:, :, None, None] * pooled).sum(1)[None].unsqueeze(2).to(torch.bfloat16)
        vision = functional.adaptive_avg_pool2d(latent[:, :, 0].double(), VISION_GRID).flatten(2).transpose(1, 2)
        latent, vision = latent.to(self._device), vision.to(torch.bfloat16).to(self._device)
        words = caption.split() or [""]
        rows: list[Tensor] = []
        for word in words:
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big"))
            rows.append(torch.randn(sizes.hidden, generator=generator))
        kinds = self._w["kind_embedding"]
        text = torch.stack(rows).to(torch.bfloat16).to(self._device) + kinds[0]
        return CaseInputs(latent, torch.cat((self._linear("vision_in", vision) + kinds[1], text[None]), dim=1))

    def text_prefill(self, inputs: CaseInputs) -> TextKv:
        x: Tensor = inputs.text
        condition = functional.silu(self._embed("time", torch.zeros(1, 1, device=self._device)))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for block in range(self._sizes.depth):
            prefix = f"{block}.txt"
            shift1, scale1, gate1, shift2, scale2, gate2 = self._linear(f"{prefix}_mod", condition).chunk(6, dim=-1)
            q, k, v = self._qkv(prefix, modulate(x, shift1, scale1))
            keys.append(k)
            values.append(v)
            x = x + gate1 * self._linear(f"{prefix}_proj", join_heads(functional.scaled_dot_product_attention(q, k, v)))
            x = x + gate2 * self._mlp(prefix, modulate(x, shift2, scale2))
        return TextKv(tuple(keys), tuple(values))

    def frame_condition(self, timestep: float, labels: Tensor) -> Tensor:
        labels = labels.to(self._device)
        return self._embed("time", torch.full(labels.shape, timestep, device=self._device)) + self._embed("action", labels)

    def _vision(
        self,
        latents65: Tensor,
        condition: Tensor,
        views: Views,
        text: TextKv,
        context: ContextState,
        capture: tuple[int, ...],
    ) -> tuple[Tensor, list[ContextKv], dict[int, Tensor]]:
        """All blocks over some frames; the frames follow ``context.frames`` in the rotary window."""
        sizes = self._sizes
        viewmats, intrinsics = views.viewmats.to(self._device), views.intrinsics.to(self._device)
        project, _ = camera_matrices(viewmats, intrinsics)
        frames = latents65.shape[2]
        tokens = latents65.permute(0, 2, 3, 4, 1).flatten(1, 3)
        x = self._linear("img_in", tokens)
        silu = functional.silu(condition)
        caught: dict[int, Tensor] = {}
        kv: list[ContextKv] = []
        for block in range(sizes.depth):
            prefix = f"{block}.img"
            shift1, scale1, gate1, shift2, scale2, gate2 = self._linear(f"{prefix}_mod", silu).chunk(6, dim=-1)
            m = modulate(x, shift1, scale1)
            if block in capture:
                caught[block] = m
            q, k, v = self._qkv(prefix, m)
            own = encode_kv(k, v, viewmats, intrinsics, sizes, context.frames)
            kv.append(own)
            q_rope = apply_rotary(q, sizes, context.frames, frames)
            q_prope = apply_camera(q, project.transpose(-1, -2))
            seen = context.kv[block] if context.frames else None
            rope = self._attend(q_rope, text, block, (seen.k_rope, seen.v) if seen else None, own.k_rope, own.v)
            prope = self._attend(q_prope, text, block, (seen.k_prope, seen.v_prope) if seen else None, own.k_prope, own.v_prope)
            mixed = self._linear(f"{prefix}_proj", join_heads(rope))
            mixed = mixed + self._linear(f"{block}.img_prope_proj", join_heads(apply_camera(prope, project)))
            x = x + per_token(gate1, x.shape[1]) * mixed
            x = x + per_token(gate2, x.shape[1]) * self._mlp(prefix, modulate(x, shift2, scale2))
        return x, kv, caught

    def _attend(self, q: Tensor, text: TextKv, block: int, seen: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor) -> Tensor:
        """Full attention over text, context and current tokens, in this order."""
        middle_k, middle_v = ([seen[0]], [seen[1]]) if seen else ([], [])
        keys = torch.cat([text.keys[block].to(self._device), *middle_k, k], dim=2)
        values = torch.cat([text.values[block].to(self._device), *middle_v, v], dim=2)
        return functional.scaled_dot_product_attention(q, keys, values)

    def context_prefill(self, latents65: Tensor, timestep: float, views: Views, text: TextKv, capture: tuple[int, ...]) -> ContextState:
        alone = ContextState(0, (), {})
        condition = self.frame_condition(timestep, views.labels)
        _, kv, caught = self._vision(latents65.to(self._device), condition, views, text, alone, capture)
        return ContextState(latents65.shape[2], tuple(kv), caught)

    def denoise(self, latents65: Tensor, timestep: float, views: Views, text: TextKv, context: ContextState) -> DenoiseOut:
        latents65 = latents65.to(self._device)
        condition = self.frame_condition(timestep, views.labels)
        hidden, _, _ = self._vision(latents65, condition, views, text, context, ())
        return DenoiseOut(hidden, condition, self._frozen.final_layer(hidden, condition), latents65)

    def frozen_parts(self) -> Mapping[str, Tensor]:
        parts = {
            "final_mod_weight": "final_mod.weight",
            "final_mod_bias": "final_mod.bias",
            "final_linear_weight": "final_linear.weight",
            "final_linear_bias": "final_linear.bias",
        }
        for block in self._sizes.blocks:
            for kind in ("k", "v"):
                for part in ("weight", "bias"):
                    parts[f"block_{block:02d}_img_attn_{kind}_{part}"] = f"{block}.img_{kind}.{part}"
            parts[f"block_{block:02d}_img_attn_k_norm_weight"] = f"{block}.img_k_norm.weight"
        return {name: self._w[source] for name, source in parts.items()}

    def decode(self, latents: Tensor) -> Iterator[NDArray[np.uint8]]:
        """The first latent frame gives one picture, each further one ``temporal_stride``."""
        for frame in range(latents.shape[2]):
            latent = latents[0, :, frame].double().cpu()
            colour = (self._unvae[:, :, None, None] * latent).sum(1).permute(1, 2, 0)
            small = ((colour + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
            stride = self._sizes.spatial_stride
            picture = np.repeat(np.repeat(small, stride, axis=0), stride, axis=1)
            for _ in range(1 if frame == 0 else self._sizes.temporal_stride):
                yield picture
