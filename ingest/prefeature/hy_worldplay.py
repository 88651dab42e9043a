# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (the model's own code is untyped and not part of this project)
"""Adapter to a user's own HY-WorldPlay checkout and weights on a GPU. Untested on the real model.

No code of the model is included: a checkout is imported at run time, called the way its own pipeline calls the
transformer, and observed through hooks. Its licence limits what outputs may be used for; see ``docs/prefeature.md``.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ingest.errors import DatasetError, ResourceUnavailableError, SettingsError
from ingest.prefeature.durable import hash_file
from ingest.prefeature.kvmath import ContextKv
from ingest.prefeature.sizes import Sizes
from ingest.prefeature.teacher import CaseInputs, ContextState, DenoiseOut, TeacherSpec, TextKv, Views
from ingest.prefeature.teachers import TeacherChoice

log = logging.getLogger(__name__)

MIN_GPU_BYTES = 72_000_000_000
"""What the model's authors give for one process without sequence parallelism."""

VERSION = "480p_i2v"
_SPARSE = "flex-block-attn"
_RESOLUTION = "480p"


@dataclass(frozen=True, slots=True)
class Upstream:
    """The live objects of a checkout: its pipeline, inference switches and parallel state."""

    pipeline: Any
    infer_state: Any
    parallel: Any


@dataclass(frozen=True, slots=True)
class _TextInputs:
    prompt: Tensor
    mask: Tensor
    extra: Mapping[str, Tensor]
    vision: Tensor


def check_gpu(device: str) -> None:
    """Refuses a machine that cannot hold the transformer, before anything is loaded.

    Raises:
        ResourceUnavailableError: no CUDA, or too little memory; the message gives both figures.
    """
    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise ResourceUnavailableError(f"teacher hy_worldplay needs a CUDA device, got {device!r}; use one worker per GPU")
    _, total = torch.cuda.mem_get_info(torch.device(device))
    if total < MIN_GPU_BYTES:
        raise ResourceUnavailableError(
            f"{device} has {total / 1e9:.0f} GB, the transformer needs {MIN_GPU_BYTES / 1e9:.0f} GB resident; use an 80 GB GPU"
        )


def load_upstream(choice: TeacherChoice) -> Upstream:
    """Imports the checkout and loads the pipeline with every approximation off.

    Raises:
        SettingsError: a path is missing or the checkout has another shape than expected.
    """
    for name in ("checkout", "checkpoint", "model_path"):
        if not getattr(choice, name):
            raise SettingsError(f"teacher hy_worldplay needs --{name.replace('_', '-')}")
    if not (Path(choice.checkout) / "hyvideo").is_dir():
        raise SettingsError(f"{choice.checkout} holds no 'hyvideo' package; give the root of a HY-WorldPlay checkout")
    if choice.checkout not in sys.path:
        sys.path.insert(0, choice.checkout)
    try:
        parallel_states = importlib.import_module("hyvideo.commons.parallel_states")
        infer_states = importlib.import_module("hyvideo.commons.infer_state")
        pipelines = importlib.import_module("hyvideo.pipelines.worldplay_video_pipeline")
        parallel = parallel_states.initialize_parallel_state(sp=1)
        infer_state = infer_states.initialize_infer_state(
            SimpleNamespace(use_sageattn=False, sage_blocks_range="0-53", enable_torch_compile=False, use_fp8_gemm=False, quant_type="")
        )
        pipeline = pipelines.HunyuanVideo_1_5_Pipeline.create_pipeline(
            choice.model_path,
            VERSION,
            create_sr_pipeline=False,
            force_sparse_attn=False,
            transformer_dtype=torch.bfloat16,
            enable_offloading=False,
            enable_group_offloading=False,
            device=torch.device(choice.device),
            action_ckpt=choice.checkpoint,
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"the checkout at {choice.checkout} does not have the expected shape ({error}); use a version with "
            "hyvideo.pipelines.worldplay_video_pipeline, and install its requirements into the workers' runtime environment"
        ) from error
    return Upstream(pipeline, infer_state, parallel)


def observed_flags(upstream: Upstream) -> dict[str, bool]:
    """The exactness flags as they are in force, read from the live objects."""
    pipeline, infer = upstream.pipeline, upstream.infer_state
    config = pipeline.transformer.config
    caches = ("denoise_cache", "history_cache_reuse", "context_pooling", "context_pruning")
    return {
        **{name: bool(getattr(pipeline, name, False) or getattr(pipeline.transformer, name, False)) for name in caches},
        "sparse_attention": getattr(config, "attn_mode", None) == _SPARSE,
        "sage_attention": bool(infer is not None and infer.enable_sageattn),
        "fp8_gemm": bool(infer is not None and infer.use_fp8_gemm),
        "prompt_rewrite": bool(getattr(pipeline, "prompt_rewrite", False)),
        "classifier_free_guidance": bool(pipeline.do_classifier_free_guidance),
        "torch_compile": bool(infer is not None and infer.enable_torch_compile),
    }


def open_teacher(choice: TeacherChoice, sizes: Sizes) -> HyWorldPlayTeacher:
    """Checks the machine, loads the model and wraps it.

    Raises:
        ResourceUnavailableError: the GPU is missing or too small.
        SettingsError: paths or checkout are unusable.
        DatasetError: the model is not on the exact path, or has other sizes.
    """
    check_gpu(choice.device)
    sha256 = hash_file(Path(choice.checkpoint)).sha256
    return HyWorldPlayTeacher(load_upstream(choice), sizes, checkpoint=choice.checkpoint, checkpoint_sha256=sha256, device=choice.device)


class HyWorldPlayTeacher:
    """The real teacher behind the ``Teacher`` protocol.

    Args:
        upstream: loaded pipeline and states.
        sizes: must be those of the model.
        checkpoint, checkpoint_sha256: recorded in the dataset.
        device: of the transformer.

    Raises:
        DatasetError: an approximation is on, sequences are sharded, or shapes differ.
    """

    def __init__(self, upstream: Upstream, sizes: Sizes, *, checkpoint: str, checkpoint_sha256: str, device: str) -> None:
        pipeline = upstream.pipeline
        pipeline._guidance_scale = 1.0
        pipeline._guidance_rescale = 0.0
        pipeline._clip_skip = None
        self._pipeline = pipeline
        self._transformer: Any = pipeline.transformer
        self._sizes = sizes
        self._device = device
        if getattr(upstream.parallel, "sp_enabled", False):
            raise DatasetError("sequence parallelism is on: hooks would see parts of tensors; run one process per GPU")
        offloading = bool(getattr(pipeline, "enable_offloading", False))
        if offloading:
            log.warning("offloading is on: results are the same, but the transformer moves to the GPU for every chunk")
        self._spec = TeacherSpec("hy_worldplay", sizes, checkpoint, checkpoint_sha256, observed_flags(upstream), offloading, device)
        self._spec.require_exact()
        blocks = len(self._transformer.double_blocks)
        width = self._transformer.double_blocks[0].img_attn_k.weight.shape[0]
        if (blocks, width) != (sizes.depth, sizes.hidden):
            raise DatasetError(f"the model has {blocks} blocks of width {width}, the dataset {sizes.depth} of {sizes.hidden}")

    @property
    def spec(self) -> TeacherSpec:
        return self._spec

    def encode_case(self, image: NDArray[np.uint8], caption: str) -> CaseInputs:
        pipeline, sizes = self._pipeline, self._sizes
        with torch.inference_mode():
            prompt, _, mask, _ = pipeline.encode_prompt(caption, self._device, 1, False, "", clip_skip=None, data_type="video")
            extra = pipeline._prepare_byt5_embeddings(caption, self._device) if pipeline.config.glyph_byT5_v2 else {}
            picture = Image.fromarray(image)
            latent = pipeline.get_image_condition_latents("i2v", picture, sizes.height, sizes.width)
            vision = pipeline._prepare_vision_states(image, _RESOLUTION, latent, self._device)
        return CaseInputs(latent.to(torch.bfloat16).clone(), _TextInputs(prompt, mask, dict(extra), vision))

    def _empty_cache(self, text: TextKv | None) -> list[dict[str, Tensor | None]]:
        blank: dict[str, Tensor | None] = {"k_vision": None, "v_vision": None, "k_txt": None, "v_txt": None}
        if text is None:
            return [dict(blank) for _ in range(self._sizes.depth)]
        pairs = zip(text.keys, text.values, strict=True)
        return [blank | {"k_txt": k.to(self._device), "v_txt": v.to(self._device)} for k, v in pairs]

    def _call(self, **arguments: Any) -> Any:
        kind = "cuda" if self._device.startswith("cuda") else "cpu"
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return self._transformer(bi_inference=False, **arguments)

    def text_prefill(self, inputs: CaseInputs) -> TextKv:
        text: _TextInputs = inputs.text
        cache = self._call(
            ar_txt_inference=True,
            ar_vision_inference=False,
            timestep_txt=torch.zeros(1, device=self._device, dtype=torch.bfloat16),
            text_states=text.prompt[:1],
            encoder_attention_mask=text.mask[:1],
            vision_states=text.vision[:1],
            mask_type="i2v",
            extra_kwargs={name: value[:1] for name, value in text.extra.items()},
            kv_cache=self._empty_cache(None),
            cache_txt=True,
        )
        keys = tuple(entry["k_txt"].to(torch.bfloat16).clone() for entry in cache)
        return TextKv(keys, tuple(entry["v_txt"].to(torch.bfloat16).clone() for entry in cache))

    def _vision(self, latents65: Tensor, timestep: float, views: Views, cache: Any, *, cached: bool, start: int) -> Any:
        frames = latents65.shape[2]
        return self._call(
            ar_txt_inference=False,
            ar_vision_inference=True,
            hidden_states=latents65.to(self._device),
            timestep=torch.full((frames,), timestep, device=self._device),
            timestep_r=None,
            mask_type="i2v",
            return_dict=False,
            viewmats=views.viewmats.to(self._device, torch.bfloat16),
            Ks=views.intrinsics.to(self._device, torch.bfloat16),
            action=views.labels.to(self._device, torch.bfloat16),
            kv_cache=cache,
            cache_vision=cached,
            rope_temporal_size=start + frames,
            start_rope_start_idx=start,
        )

    def context_prefill(self, latents65: Tensor, timestep: float, views: Views, text: TextKv, capture: tuple[int, ...]) -> ContextState:
        caught: dict[int, Tensor] = {}
        layers = {block: self._transformer.double_blocks[block].img_attn_k for block in capture}

        def note(block: int) -> Any:
            def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
                del module
                caught[block] = arguments[0].detach().to(torch.bfloat16).clone()

            return hook

        handles = [layer.register_forward_pre_hook(note(block)) for block, layer in layers.items()]
        try:
            cache = self._vision(latents65, timestep, views, self._empty_cache(text), cached=True, start=0)
        finally:
            for handle in handles:
                handle.remove()
        missing = sorted(set(capture) - set(caught))
        if missing:
            raise DatasetError(f"no input was captured at blocks {missing}; the checkout runs its blocks compiled or in another way")
        kv = tuple(ContextKv(e["k_vision"][:1], e["v_vision"][:1], e["k_vision"][1:2], e["v_vision"][1:2]) for e in cache)
        return ContextState(latents65.shape[2], kv, caught)

    def denoise(self, latents65: Tensor, timestep: float, views: Views, text: TextKv, context: ContextState) -> DenoiseOut:
        cache = self._empty_cache(text)
        for entry, kv in zip(cache, context.kv, strict=False):
            entry["k_vision"], entry["v_vision"] = torch.cat((kv.k_rope, kv.k_prope)), torch.cat((kv.v, kv.v_prope))
        seen: dict[str, Tensor] = {}

        def before_final(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            del module
            seen["hidden"] = arguments[0].detach().to(torch.bfloat16).clone()
            seen["condition"] = arguments[1].detach().to(torch.bfloat16).clone()

        def before_patch(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            del module
            seen["input"] = arguments[0].detach().to(torch.bfloat16).clone()

        handles = [
            self._transformer.final_layer.register_forward_pre_hook(before_final),
            self._transformer.img_in.register_forward_pre_hook(before_patch),
        ]
        try:
            velocity = self._vision(latents65, timestep, views, cache, cached=False, start=context.frames)[0]
        finally:
            for handle in handles:
                handle.remove()
        if set(seen) != {"hidden", "condition", "input"}:
            raise DatasetError("the final layer or patch embedding did not run as a module; torch.compile must be off")
        condition = self._per_frame(seen["condition"], latents65.shape[2])
        return DenoiseOut(seen["hidden"], condition, velocity.to(torch.bfloat16).clone(), seen["input"])

    def _per_frame(self, condition: Tensor, frames: int) -> Tensor:
        """One row per frame ``[1, n, C]``, whether the model repeats rows to tokens or not.

        Raises:
            DatasetError: another number of rows.
        """
        rows = condition.reshape(-1, condition.shape[-1])
        if len(rows) == frames * self._sizes.frame_tokens:
            rows = rows[:: self._sizes.frame_tokens]
        if len(rows) != frames:
            raise DatasetError(f"the condition has {len(rows)} rows for {frames} frames")
        return rows[None]

    def frame_condition(self, timestep: float, labels: Tensor) -> Tensor:
        flat = labels.reshape(-1).to(self._device)
        kind = "cuda" if self._device.startswith("cuda") else "cpu"
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            time = self._transformer.time_in(torch.full(flat.shape, timestep, device=self._device))
            return (time + self._transformer.action_in(flat.to(torch.bfloat16))).to(torch.bfloat16)[None].clone()

    def frozen_parts(self) -> Mapping[str, Tensor]:
        final = self._transformer.final_layer
        modulation = final.adaLN_modulation[1]
        parts: dict[str, Tensor] = {
            "final_mod_weight": modulation.weight,
            "final_mod_bias": modulation.bias,
            "final_linear_weight": final.linear.weight,
            "final_linear_bias": final.linear.bias,
        }
        for number in self._sizes.blocks:
            block = self._transformer.double_blocks[number]
            for kind in ("k", "v"):
                layer = getattr(block, f"img_attn_{kind}")
                parts[f"block_{number:02d}_img_attn_{kind}_weight"] = layer.weight
                parts[f"block_{number:02d}_img_attn_{kind}_bias"] = layer.bias
            parts[f"block_{number:02d}_img_attn_k_norm_weight"] = block.img_attn_k_norm.weight
        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in parts.items()}

    def decode(self, latents: Tensor) -> Iterator[NDArray[np.uint8]]:
        vae = self._pipeline.vae
        scaled = latents.to(self._device) / vae.config.scaling_factor
        shift = getattr(vae.config, "shift_factor", None)
        kind = "cuda" if self._device.startswith("cuda") else "cpu"
        with torch.inference_mode(), torch.autocast(kind, torch.float16, enabled=kind == "cuda"):
            video = vae.decode(scaled + shift if shift else scaled, return_dict=False)[0]
        frames = ((video.float() / 2 + 0.5).clamp(0, 1) * 255).to(torch.uint8)[0].permute(1, 2, 3, 0).cpu().numpy()
        yield from frames
