"""The adapter to the real model, against a fake tree of the same shape (untested on the real model)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fakeplay
import numpy as np
import pytest
import torch
from tinydata import SHORT, prepare, tree_digest

from ingest.errors import DatasetError, ResourceUnavailableError, SettingsError
from ingest.prefeature import hy_worldplay
from ingest.prefeature.build import build_local
from ingest.prefeature.cases import prepare_cases
from ingest.prefeature.config import read_config
from ingest.prefeature.hy_worldplay import HyWorldPlayTeacher, Upstream, check_gpu, load_upstream, observed_flags
from ingest.prefeature.kvmath import FrozenTeacher, compare
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.rollout import CaseTensors, Trajectory, run_chunk, run_context
from ingest.prefeature.sizes import resized
from ingest.prefeature.storefiles import load_noise
from ingest.prefeature.teacher import TextKv
from ingest.prefeature.teachers import TeacherChoice


@pytest.fixture
def choice(tmp_path: Path) -> Iterator[TeacherChoice]:
    """Settings that point to a fake checkout."""
    checkout = fakeplay.write_checkout(tmp_path / "checkout")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    fakeplay.FakePipeline.teacher = ReferenceTeacher(SHORT)
    yield TeacherChoice(
        "hy_worldplay",
        SHORT.to_json(),
        checkpoint=str(tmp_path / "model.safetensors"),
        checkout=str(checkout),
        model_path=str(tmp_path),
    )
    sys.path[:] = [entry for entry in sys.path if entry != str(checkout)]
    for name in [name for name in sys.modules if name.split(".")[0] == "hyvideo"]:
        del sys.modules[name]


@pytest.fixture
def adapted(choice: TeacherChoice) -> HyWorldPlayTeacher:
    """The adapter over the fake tree on the CPU."""
    return HyWorldPlayTeacher(load_upstream(choice), SHORT, checkpoint="x", checkpoint_sha256="y", device="cpu")


def test_it_sees_what_the_model_computes(adapted: HyWorldPlayTeacher, short_built: Path) -> None:
    """Same mathematics behind both teachers, so everything captured must be equal bit for bit."""
    reference = ReferenceTeacher(SHORT)
    config = read_config(short_built)
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    inputs = reference.encode_case(image, "a red door")
    text = reference.text_prefill(inputs)
    mine = adapted.encode_case(image, "a red door")
    assert torch.equal(mine.image_latent, inputs.image_latent)
    case = CaseTensors(inputs.image_latent, text)
    trajectory = Trajectory.of(config, 2)
    latents = load_noise(short_built, config)
    frozen = FrozenTeacher(SHORT, dict(adapted.frozen_parts()))
    assert all(torch.equal(frozen.tensors[name], tensor) for name, tensor in reference.frozen_parts().items())
    for chunk in (0, 2):
        expected = run_chunk(reference, frozen, trajectory, case, latents, chunk, run_context(reference, trajectory, case, latents, chunk))
        found = run_chunk(adapted, frozen, trajectory, case, latents, chunk, run_context(adapted, trajectory, case, latents, chunk))
        assert found.input65_sha256 == expected.input65_sha256
        for name, tensor in expected.step.items():
            assert torch.equal(found.step[name], tensor), name
        for block in SHORT.blocks:
            assert torch.equal(found.context[block]["img_modulated"], expected.context[block]["img_modulated"])
    labels = trajectory.views(range(4)).labels
    assert torch.equal(adapted.frame_condition(937.5, labels), reference.frame_condition(937.5, labels))
    pictures = [torch.stack([torch.as_tensor(picture) for picture in teacher.decode(latents)]) for teacher in (adapted, reference)]
    assert compare(*pictures).rel_l2 < 0.02


def test_text_prefill_reads_the_cache(adapted: HyWorldPlayTeacher) -> None:
    reference = ReferenceTeacher(SHORT)
    inputs = reference.encode_case(np.zeros((48, 64, 3), np.uint8), "two words")
    mine = adapted.encode_case(np.zeros((48, 64, 3), np.uint8), "two words")
    opaque = hy_worldplay._TextInputs(inputs.text, mine.text.mask, mine.text.extra, mine.text.vision)
    text = adapted.text_prefill(type(inputs)(inputs.image_latent, opaque))
    expected: TextKv = reference.text_prefill(inputs)
    assert all(torch.equal(a, b) for a, b in zip(text.keys, expected.keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(text.values, expected.values, strict=True))


@pytest.mark.parametrize(
    ("place", "name", "value", "flag"),
    [
        ("infer_state", "enable_sageattn", True, "sage_attention"),
        ("infer_state", "use_fp8_gemm", True, "fp8_gemm"),
        ("infer_state", "enable_torch_compile", True, "torch_compile"),
        ("pipeline", "prompt_rewrite", True, "prompt_rewrite"),
        ("pipeline", "denoise_cache", True, "denoise_cache"),
        ("pipeline", "context_pruning", True, "context_pruning"),
        ("config", "attn_mode", "flex-block-attn", "sparse_attention"),
    ],
)
def test_every_approximation_is_refused_by_name(choice: TeacherChoice, place: str, name: str, value: object, flag: str) -> None:
    upstream = load_upstream(choice)
    target = upstream.pipeline.transformer.config if place == "config" else getattr(upstream, place)
    setattr(target, name, value)
    assert observed_flags(upstream)[flag]
    with pytest.raises(DatasetError, match=flag):
        HyWorldPlayTeacher(upstream, SHORT, checkpoint="x", checkpoint_sha256="y", device="cpu")


def test_guidance_is_switched_off(choice: TeacherChoice) -> None:
    upstream = load_upstream(choice)
    assert observed_flags(upstream)["classifier_free_guidance"]
    teacher = HyWorldPlayTeacher(upstream, SHORT, checkpoint="x", checkpoint_sha256="y", device="cpu")
    assert teacher.spec.flags["classifier_free_guidance"] is False


def test_sharded_sequences_and_other_sizes_are_refused(choice: TeacherChoice) -> None:
    upstream = load_upstream(choice)
    sharded = Upstream(upstream.pipeline, upstream.infer_state, SimpleNamespace(sp_enabled=True))
    with pytest.raises(DatasetError, match="sequence parallelism"):
        HyWorldPlayTeacher(sharded, SHORT, checkpoint="x", checkpoint_sha256="y", device="cpu")
    with pytest.raises(DatasetError, match="4 blocks of width 32"):
        HyWorldPlayTeacher(upstream, resized(SHORT, depth=6), checkpoint="x", checkpoint_sha256="y", device="cpu")


def test_hooks_that_do_not_fire_are_noticed_and_always_removed(adapted: HyWorldPlayTeacher, short_built: Path) -> None:
    config = read_config(short_built)
    trajectory, latents = Trajectory.of(config, 0), load_noise(short_built, config)
    reference = ReferenceTeacher(SHORT)
    inputs = reference.encode_case(np.zeros((48, 64, 3), np.uint8), "x")
    case = CaseTensors(inputs.image_latent, reference.text_prefill(inputs))
    adapted._transformer.skip_layers = True
    with pytest.raises(DatasetError, match=r"no input was captured at blocks \[0, 1, 2, 3\]"):
        run_context(adapted, trajectory, case, latents, 1)
    assert not adapted._transformer.double_blocks[0].img_attn_k._forward_pre_hooks


def test_offloading_is_recorded_not_refused(choice: TeacherChoice, caplog: pytest.LogCaptureFixture) -> None:
    upstream = load_upstream(choice)
    upstream.pipeline.enable_offloading = True
    teacher = HyWorldPlayTeacher(upstream, SHORT, checkpoint="x", checkpoint_sha256="y", device="cpu")
    assert teacher.spec.offloading
    assert "offloading is on" in caplog.text


def test_the_transformer_stays_on_the_gpu(choice: TeacherChoice) -> None:
    upstream = load_upstream(choice)
    assert upstream.pipeline.options["enable_offloading"] is False
    assert upstream.pipeline.options["enable_group_offloading"] is False
    assert upstream.pipeline.options["transformer_dtype"] is torch.bfloat16
    assert not HyWorldPlayTeacher(upstream, SHORT, checkpoint="x", checkpoint_sha256="y", device="cpu").spec.offloading


def test_a_checkout_of_another_shape_is_named(choice: TeacherChoice) -> None:
    (Path(choice.checkout) / "hyvideo" / "pipelines" / "worldplay_video_pipeline.py").write_text("", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"does not have the expected shape .*HunyuanVideo_1_5_Pipeline"):
        load_upstream(choice)


def test_repeated_condition_rows_are_taken_per_frame(adapted: HyWorldPlayTeacher) -> None:
    rows = torch.randn(4, SHORT.hidden).to(torch.bfloat16)
    assert torch.equal(adapted._per_frame(rows, 4)[0], rows)
    assert torch.equal(adapted._per_frame(rows.repeat_interleave(SHORT.frame_tokens, 0), 4)[0], rows)
    with pytest.raises(DatasetError, match="3 rows for 4 frames"):
        adapted._per_frame(rows[:3], 4)


def test_machine_and_paths_are_checked_first(choice: TeacherChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceUnavailableError, match="needs a CUDA device"):
        choice.make()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 24_000_000_000))
    with pytest.raises(ResourceUnavailableError, match="has 24 GB, the transformer needs 72 GB"):
        check_gpu("cuda:0")
    with pytest.raises(SettingsError, match="--checkout"):
        load_upstream(TeacherChoice("hy_worldplay", SHORT.to_json()))
    with pytest.raises(SettingsError, match="no 'hyvideo' package"):
        load_upstream(TeacherChoice("hy_worldplay", SHORT.to_json(), checkpoint="x", model_path="x", checkout=str(tmp_path)))
    with pytest.raises(SettingsError, match="unknown teacher"):
        TeacherChoice("other", SHORT.to_json()).make()
    for device in ("fpga", "toaster"):
        with pytest.raises(ResourceUnavailableError, match=f"this machine has no '{device}'"):
            TeacherChoice("reference", SHORT.to_json(), device=device).make()


def test_no_code_of_the_model_is_included() -> None:
    folder = Path(hy_worldplay.__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "TENCENT" not in text
        assert "import hyvideo" not in text


def test_a_dataset_can_be_built_through_the_adapter(adapted: HyWorldPlayTeacher, tmp_path: Path) -> None:
    root, _ = prepare(tmp_path)
    other = tmp_path / "adapted"
    other.mkdir()
    prepare_cases(tmp_path / "source", other, SHORT, adapted.spec)
    adapted.text_prefill = lambda inputs: ReferenceTeacher(SHORT).text_prefill(  # type: ignore[method-assign]
        adapted._pipeline._inputs
    )
    reports = build_local(other, adapted, only=[(0, 1)])
    assert reports[0].built == (0, 1, 2)
    assert tree_digest(other).keys() > tree_digest(root).keys()
