"""A module tree with the shape of the real checkout, computing what the reference teacher computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingest.prefeature.kvmath import ContextKv, FrozenTeacher
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.teacher import CaseInputs, ContextState, TextKv, Views

PACKAGE = {
    "hyvideo/__init__.py": "",
    "hyvideo/commons/__init__.py": "",
    "hyvideo/pipelines/__init__.py": "",
    "hyvideo/commons/parallel_states.py": "from types import SimpleNamespace\n"
    "def initialize_parallel_state(sp):\n    return SimpleNamespace(sp=sp, sp_enabled=sp > 1)\n",
    "hyvideo/commons/infer_state.py": "from types import SimpleNamespace\n"
    "def initialize_infer_state(args):\n"
    "    return SimpleNamespace(enable_sageattn=args.use_sageattn, use_fp8_gemm=args.use_fp8_gemm,\n"
    "                           enable_torch_compile=args.enable_torch_compile)\n",
    "hyvideo/pipelines/worldplay_video_pipeline.py": "from fakeplay import FakePipeline\n"
    "class HunyuanVideo_1_5_Pipeline:\n"
    "    @classmethod\n"
    "    def create_pipeline(cls, path, version, **options):\n"
    "        return FakePipeline(path, version, options)\n",
}


def write_checkout(folder: Path) -> Path:
    """A checkout whose pipeline is ``FakePipeline``."""
    for name, text in PACKAGE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


class Final(nn.Module):
    """Final layer with the real attribute names."""

    def __init__(self, frozen: FrozenTeacher) -> None:
        super().__init__()
        hidden = frozen.sizes.hidden
        self.frozen = frozen
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden, dtype=torch.bfloat16))
        self.linear = nn.Linear(hidden, frozen.sizes.latent_channels, dtype=torch.bfloat16)
        tensors = frozen.tensors
        self.adaLN_modulation[1].weight.data, self.adaLN_modulation[1].bias.data = tensors["final_mod_weight"], tensors["final_mod_bias"]
        self.linear.weight.data, self.linear.bias.data = tensors["final_linear_weight"], tensors["final_linear_bias"]

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        return self.frozen.final_layer(hidden, condition[None])


class Block(nn.Module):
    """Only what the adapter touches: the K and V layers and the K norm."""

    def __init__(self, weights: dict[str, Tensor], number: int, hidden: int) -> None:
        super().__init__()
        for kind in ("k", "v"):
            layer = nn.Linear(hidden, hidden, dtype=torch.bfloat16)
            layer.weight.data, layer.bias.data = weights[f"{number}.img_{kind}.weight"], weights[f"{number}.img_{kind}.bias"]
            setattr(self, f"img_attn_{kind}", layer)
        self.img_attn_k_norm = nn.Module()
        self.img_attn_k_norm.weight = nn.Parameter(weights[f"{number}.img_k_norm.weight"], requires_grad=False)


class Transformer(nn.Module):
    """The transformer's call signature over the reference teacher's mathematics."""

    def __init__(self, teacher: ReferenceTeacher, repeat_condition: bool) -> None:
        super().__init__()
        self.teacher, self.repeat = teacher, repeat_condition
        sizes = teacher.spec.sizes
        weights = teacher._w
        self.config = SimpleNamespace(attn_mode="flash", in_channels=sizes.latent_channels)
        self.double_blocks = nn.ModuleList(Block(weights, number, sizes.hidden) for number in range(sizes.depth))
        self.final_layer = Final(teacher._frozen)
        self.img_in = nn.Identity()
        self.skip_layers = False

    def time_in(self, times: Tensor) -> Tensor:
        return self.teacher._embed("time", times)

    def action_in(self, labels: Tensor) -> Tensor:
        return self.teacher._embed("action", labels)

    def forward(self, *, bi_inference: bool, ar_txt_inference: bool, ar_vision_inference: bool, kv_cache: Any, **a: Any) -> Any:
        assert not bi_inference
        if ar_txt_inference:
            assert a["cache_txt"]
            assert a["mask_type"] == "i2v"
            text = self.teacher.text_prefill(CaseInputs(torch.empty(0), a["text_states"]))
            for entry, k, v in zip(kv_cache, text.keys, text.values, strict=True):
                entry["k_txt"], entry["v_txt"] = k, v
            return kv_cache
        assert ar_vision_inference
        frames = a["hidden_states"].shape[2]
        start = a["start_rope_start_idx"]
        assert a["rope_temporal_size"] == start + frames
        views = Views(a["action"].to(torch.int64), a["viewmats"], a["Ks"])
        text = TextKv(tuple(e["k_txt"] for e in kv_cache), tuple(e["v_txt"] for e in kv_cache))
        state = ContextState(0, (), {})
        if not a["cache_vision"] and start:
            kv = tuple(ContextKv(e["k_vision"][:1], e["v_vision"][:1], e["k_vision"][1:], e["v_vision"][1:]) for e in kv_cache)
            state = ContextState(start, kv, {})
        condition = self.teacher.frame_condition(float(a["timestep"][0]), views.labels)
        x65 = self.img_in(a["hidden_states"])
        every = tuple(range(len(self.double_blocks)))
        hidden, own, caught = self.teacher._vision(x65, condition, views, text, state, every)
        if not self.skip_layers:
            for number, block in enumerate(self.double_blocks):
                block.img_attn_k(caught[number])
        if a["cache_vision"]:
            for entry, kv in zip(kv_cache, own, strict=True):
                entry["k_vision"], entry["v_vision"] = torch.cat((kv.k_rope, kv.k_prope)), torch.cat((kv.v, kv.v_prope))
            return kv_cache
        rows = condition[0]
        velocity = self.final_layer(hidden, rows)
        return velocity, None


class FakePipeline:
    """The pipeline's attributes and helper methods that the adapter uses."""

    teacher: ReferenceTeacher

    def __init__(self, path: str, version: str, options: dict[str, Any]) -> None:
        assert version == "480p_i2v"
        assert options["force_sparse_attn"] is False
        assert options["create_sr_pipeline"] is False
        self.options = options
        self.enable_offloading = options["enable_offloading"]
        self.transformer = Transformer(self.teacher, False)
        self.config = SimpleNamespace(glyph_byT5_v2=True)
        self.vae = SimpleNamespace(config=SimpleNamespace(scaling_factor=0.5, shift_factor=None), decode=self._decode)
        self._guidance_scale = 6.0

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1.0

    def encode_prompt(self, prompt: str, device: Any, count: int, guided: bool, negative: str, **options: Any) -> tuple[Any, ...]:
        assert guided is False
        self._caption = prompt
        return torch.zeros(1, 1, 4), None, torch.ones(1, 1), None

    def _prepare_byt5_embeddings(self, prompt: str, device: Any) -> dict[str, Tensor]:
        return {"byt5_text_states": torch.zeros(1, 2, 2), "byt5_text_mask": torch.zeros(1, 2)}

    def get_image_condition_latents(self, task: str, picture: Any, height: int, width: int) -> Tensor:
        assert task == "i2v"
        self._inputs = self.teacher.encode_case(np.asarray(picture), self._caption)
        return self._inputs.image_latent

    def _prepare_vision_states(self, image: Any, resolution: str, latents: Any, device: Any) -> Tensor:
        return torch.zeros(1, 3, 4)

    def _decode(self, latents: Tensor, return_dict: bool) -> tuple[Tensor]:
        sizes = self.teacher.spec.sizes
        frames = np.stack(list(self.teacher.decode(latents * self.vae.config.scaling_factor)))
        assert frames.shape[0] == sizes.video_frames
        return (torch.as_tensor(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0,)
