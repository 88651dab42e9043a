"""The mathematics that teacher, trainer and validator share."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tinydata import SHORT, prepare

from ingest.errors import ResourceUnavailableError
from ingest.prefeature import layout
from ingest.prefeature.build import build_local
from ingest.prefeature.config import read_config
from ingest.prefeature.kvmath import apply_camera, apply_rotary, camera_matrices, compare, input65, rms_norm
from ingest.prefeature.merge import merge
from ingest.prefeature.reference import ReferenceTeacher, weight_bytes
from ingest.prefeature.rollout import Trajectory, run_context
from ingest.prefeature.schedule import euler_step
from ingest.prefeature.sizes import TINY, Sizes, resized
from ingest.prefeature.storefiles import load_case, load_noise
from ingest.prefeature.tensorfile import read_header
from ingest.prefeature.validate import validate


def test_rotary_depends_on_relative_position_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, SHORT.frame_tokens, 16), torch.randn(1, 2, SHORT.frame_tokens, 16)
    scores = [(apply_rotary(q, SHORT, start + 3, 1) * apply_rotary(k, SHORT, start, 1)).sum(-1) for start in (0, 5)]
    assert torch.allclose(scores[0], scores[1], atol=1e-4)
    assert torch.equal(apply_rotary(q, SHORT, 0, 1)[:, :, 0], q[:, :, 0])
    norms = apply_rotary(q, SHORT, 7, 1).norm(dim=-1)
    assert torch.allclose(norms, q.norm(dim=-1), atol=1e-5)


def test_rotary_frequencies() -> None:
    x = torch.zeros(1, 1, 2 * SHORT.frame_tokens, 16)
    x[..., 0] = x[..., 2] = 1.0
    turned = apply_rotary(x, SHORT, 0, 2)[0, 0, SHORT.frame_tokens]
    assert torch.allclose(turned[:2], torch.tensor([math.cos(1), math.sin(1)]))
    assert torch.allclose(turned[2:4], torch.tensor([math.cos(256**-0.5), math.sin(256**-0.5)]))


def test_camera_matrices_are_inverse_and_applied_in_groups_of_four(short_built: Path) -> None:
    views = Trajectory.of(read_config(short_built), 3).views(range(6))
    project, inverse = camera_matrices(views.viewmats.double(), views.intrinsics.double())
    eye = torch.eye(4, dtype=torch.float64)
    assert torch.allclose(project @ inverse, eye.expand_as(project), atol=2e-2)
    x = torch.randn(1, 2, 6 * 3, 16, dtype=torch.float64)
    by_hand = torch.stack([torch.cat([project[0, t // 3] @ x[0, 1, t, g * 4 : g * 4 + 4] for g in range(4)]) for t in range(18)])
    assert torch.allclose(apply_camera(x, project)[0, 1], by_hand)


def test_attention_scores_of_the_camera_branch_are_relative() -> None:
    """q through P^T and k through P^-1 leave scores unchanged for tokens of one camera."""
    views = torch.eye(4, dtype=torch.float64).repeat(1, 2, 1, 1)
    views[0, :, :3, 3] = torch.tensor([0.3, -0.2, 0.5])
    intrinsics = torch.diag(torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)).repeat(1, 2, 1, 1)
    project, inverse = camera_matrices(views, intrinsics)
    q, k = torch.randn(1, 1, 4, 8, dtype=torch.float64), torch.randn(1, 1, 4, 8, dtype=torch.float64)
    turned = apply_camera(q, project.transpose(-1, -2)) @ apply_camera(k, inverse).transpose(-1, -2)
    assert torch.allclose(turned, q @ k.transpose(-1, -2))


def test_norms_and_euler() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    assert torch.allclose(rms_norm(x, torch.tensor([1.0, 2.0], dtype=torch.bfloat16)).float(), torch.tensor([[0.8484, 2.2656]]), atol=0.01)
    sample, velocity = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)
    assert euler_step(sample, velocity, 3, 4).item() == pytest.approx(1 - 2 * 0.625)


def test_input65_is_zero_beyond_the_first_global_frame() -> None:
    noisy, image = torch.randn(1, 4, 4, 3, 4).to(torch.bfloat16), torch.randn(1, 4, 1, 3, 4).to(torch.bfloat16)
    first, later = input65(noisy, image, 0), input65(noisy, image, 4)
    assert torch.equal(first[:, :4], noisy)
    assert torch.equal(first[:, 4:8, :1], image)
    assert (first[:, 8, 0] == 1).all()
    assert not first[:, 4:, 1:].any()
    assert not later[:, 4:].any()


def test_compare_of_empty_and_zero_tensors() -> None:
    assert compare(torch.empty(0), torch.empty(0)).accepted
    assert not compare(torch.ones(3), torch.zeros(3)).accepted
    assert not compare(torch.full((3,), math.nan), torch.ones(3)).accepted


def test_everything_reaches_the_output(short_built: Path) -> None:
    """Action, camera, text, image and history must each change the result; otherwise tests on it would be vacuous."""
    config, teacher = read_config(short_built), ReferenceTeacher(SHORT)
    trajectory, case, latents = Trajectory.of(config, 0), load_case(short_built, config, 0), load_noise(short_built, config)
    views = trajectory.views(range(4, 8))
    window = run_context(teacher, trajectory, case, latents, 1)
    x65 = input65(latents[:, :, 4:8], case.image_latent, 4)
    base = teacher.denoise(x65, 937.5, views, case.text, window).velocity
    other = load_case(short_built, config, 1)
    changed = [
        teacher.denoise(x65, 625.0, views, case.text, window),
        teacher.denoise(x65, 937.5, type(views)(views.labels + 1, views.viewmats, views.intrinsics), case.text, window),
        teacher.denoise(x65, 937.5, Trajectory.of(config, 3).views(range(4, 8)), case.text, window),
        teacher.denoise(x65, 937.5, views, other.text, window),
        teacher.denoise(x65, 937.5, views, case.text, run_context(teacher, trajectory, other, latents, 1)),
    ]
    assert all(compare(out.velocity, base).rel_l2 > 1e-3 for out in changed)
    assert base.abs().max() > 0.1


def test_deep_features_belong_to_their_window_and_block_zero_does_not(short_built: Path) -> None:
    config, teacher = read_config(short_built), ReferenceTeacher(SHORT)
    trajectory, case, latents = Trajectory.of(config, 0), load_case(short_built, config, 0), load_noise(short_built, config)
    small, large = (run_context(teacher, trajectory, case, latents, chunk) for chunk in (1, 2))
    shared = 2 * SHORT.frame_tokens
    places = [list(trajectory.history[2]).index(frame) for frame in trajectory.history[1][:2]]
    assert places == [0, 1]
    assert torch.equal(small.captured[0][:, :shared], large.captured[0][:, :shared])
    assert not torch.equal(small.captured[3][:, :shared], large.captured[3][:, :shared])


def test_the_reference_teacher_asks_for_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ReferenceTeacher(SHORT)._w
    blocks = sum(tensor.nbytes for name, tensor in parts.items() if name[0].isdigit() and tensor.ndim == 2)
    assert weight_bytes(SHORT) == blocks
    assert round(weight_bytes(Sizes()) / 1e9) == 17
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16_000_000_000))
    with pytest.raises(ResourceUnavailableError, match=r"needs 16\.8 GB of memory, 16\.0 GB are free"):
        ReferenceTeacher(Sizes())


@pytest.mark.slow
def test_full_depth_names_and_shapes(tmp_path: Path) -> None:
    """All 54 blocks with a narrow model: names block_00 to block_53 and the real context blocks."""
    sizes = resized(TINY, cases=1, depth=54, blocks=(0, 1, 52, 53))
    root, teacher = prepare(tmp_path, sizes)
    build_local(root, teacher)
    merge(root)
    report = validate(root)
    assert report.ok, report.to_text()
    assert len(read_header(root, layout.text_kv_path(0)).entries) == 109
    assert (root / "context_prefeature" / "block_53" / "case_0000" / "action_03" / "chunk_07.safetensors").exists()
