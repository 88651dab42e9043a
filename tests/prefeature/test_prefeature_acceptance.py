"""The acceptance list of the specification, line by line: each condition is broken once, and the finding says where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tinydata import SHORT, STEP, context, refresh_inventory, rewrite
from torch import Tensor

from ingest.prefeature import layout
from ingest.prefeature.durable import write_bytes, write_tensors
from ingest.prefeature.findings import CONDITIONS
from ingest.prefeature.jsonio import json_lines
from ingest.prefeature.manifest import read_manifest
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.sizes import resized
from ingest.prefeature.tensorfile import TensorSpec, read_header
from ingest.prefeature.validate import validate
from ingest.prefeature.videos import write_video

CASE, TEXT, VIDEO = layout.case_path(1), layout.text_kv_path(1), layout.video_path(1, 2)
EMPTY = layout.context_path(layout.RecordKey(0, 0, 0), 3)
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Break:
    """One broken condition.

    Attributes:
        line: of the acceptance list.
        change: breaks it.
        code, file, tensor, index: what the finding must say.
    """

    line: str
    change: Change
    code: str
    file: str
    tensor: str | None = None
    index: int | None = None


def remove(path: str) -> Change:
    return lambda root: (root / path).unlink()


def extra(path: str, like: str = STEP) -> Change:
    return lambda root: shutil.copyfile(root / like, root / path)


def put(path: str, tensor: str, value: float, at: int = 0) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[tensor].view(-1)[at] = value

    return lambda root: rewrite(root, path, change)


def respecify(path: str, tensor: str, make: Callable[[Tensor], Tensor | None]) -> Change:
    """Gives a tensor another shape or dtype, or leaves it out."""

    def change(root: Path) -> None:
        header = read_header(root, path)
        tensors = {name: value.clone() for name, value in read_tensors(root, path).items()}
        made = make(tensors.pop(tensor))
        specs = {entry.spec.name: entry.spec for entry in header.entries.values()}
        old = specs.pop(tensor)
        if made is not None:
            tensors[tensor] = made
            dtype = {torch.float32: "F32", torch.int64: "I64"}.get(made.dtype, old.dtype)
            specs[tensor] = TensorSpec(tensor, dtype, tuple(made.shape))
        write_tensors(root / path, list(specs.values()), tensors, dict(header.metadata))
        refresh_inventory(root, path)

    return change


def scaled(path: str, tensor: str, factor: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[tensor] *= factor

    return lambda root: rewrite(root, path, change)


def rolled(path: str, tensor: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[tensor] = tensors[tensor].roll(1, dims=2)

    return lambda root: rewrite(root, path, change)


def film(frames: int, height: int, width: int) -> Change:
    """Another video in place of the right one."""
    sizes = resized(SHORT, latent_frames=(frames - 1) // 4 + 1, chunk_frames=1, memory_frames=1, height=height, width=width)

    def change(root: Path) -> None:
        write_video(root / VIDEO, (np.zeros((height, width, 3), np.uint8) for _ in range(frames)), sizes)
        refresh_inventory(root, VIDEO)

    return change


def records(
    change: Callable[[list[dict[str, object]]], object], train: Callable[[list[dict[str, object]]], object] | None = None
) -> Change:
    """Edits the manifest and derives the training manifest from it, or edits the latter too."""

    def edit(root: Path) -> None:
        rows: list[dict[str, object]] = read_manifest(root)
        change(rows)
        chosen = [row for row in rows if row["chunk_id"]]
        if train is not None:
            train(chosen)
        write_bytes(root / layout.MANIFEST, json_lines(rows))
        write_bytes(root / layout.TRAIN_MANIFEST, json_lines(chosen))
        refresh_inventory(root, layout.MANIFEST, layout.TRAIN_MANIFEST)

    return edit


def stale(metadata: dict[str, str], path: str = STEP) -> Change:
    return lambda root: rewrite(root, path, lambda tensors: None, metadata)


def flipped(path: str) -> Change:
    """One bit, without telling the inventory."""

    def change(root: Path) -> None:
        data = bytearray((root / path).read_bytes())
        data[-9] ^= 1
        (root / path).write_bytes(data)

    return change


def hole(path: str) -> Change:
    """The second half of a file as a crash of the machine leaves it."""

    def change(root: Path) -> None:
        size = (root / path).stat().st_size
        with open(root / path, "r+b") as handle:
            handle.truncate(size // 2)
            handle.truncate(size)
        refresh_inventory(root, path)

    return change


def cut(path: str) -> Change:
    def change(root: Path) -> None:
        with open(root / path, "r+b") as handle:
            handle.truncate((root / path).stat().st_size - 64)
        refresh_inventory(root, path)

    return change


NAN, LAST_PAD = float("nan"), (2 * SHORT.text_pad_tokens - 1) * SHORT.head_dim
BREAKS = [
    Break("1 a case tensor is missing", remove(CASE), "files", CASE),
    Break("1 a case tensor too many", extra("cases/case_0009.safetensors", CASE), "files", "cases/case_0009.safetensors"),
    Break("1 an all-block text file is missing", remove(TEXT), "files", TEXT),
    Break("2 a step tensor is missing", remove(STEP), "files", STEP),
    Break("2 a step tensor too many", extra("steps/extra.safetensors"), "files", "steps/extra.safetensors"),
    Break("3 a context file is missing", remove(context(1)), "files", context(1)),
    Break("3 a zero-length context file is missing", remove(EMPTY), "files", EMPTY),
    Break("3 a context file too many", extra(f"{layout.CONTEXT}/block_03/x"), "files", f"{layout.CONTEXT}/block_03/x"),
    Break("4 a video is missing", remove(VIDEO), "files", VIDEO),
    Break("4 a short video", film(41, 48, 64), "video", VIDEO),
    Break("4 a long video", film(49, 48, 64), "video", VIDEO),
    Break("4 a video of another size", film(45, 32, 64), "video", VIDEO),
    Break("4 a video cut in the middle", cut(VIDEO), "video", VIDEO),
    Break("5 a duplicate record", records(lambda rows: rows.insert(1, rows[0])), "manifest", layout.MANIFEST, None, 2),
    Break("5 a missing record", records(lambda rows: rows.pop(3)), "manifest", layout.MANIFEST),
    Break("5 a missing link", records(lambda rows: rows[1].pop("previous_chunk_id")), "manifest", layout.MANIFEST, None, 2),
    Break("5 a wrong caption", records(lambda rows: rows[4].update(caption="x")), "manifest", layout.MANIFEST, None, 5),
    Break("5 a wrong path", records(lambda rows: rows[4].update(video_file="../x")), "manifest", layout.MANIFEST, None, 5),
    Break("5 training lacks a record", records(lambda _: None, lambda rows: rows.pop()), "train_manifest", layout.TRAIN_MANIFEST),
    Break("6 a shape", respecify(STEP, "action_labels", lambda t: t[:, :3].clone()), "header", STEP, "action_labels"),
    Break("6 a dtype", respecify(STEP, "step_1_velocity", torch.Tensor.float), "header", STEP, "step_1_velocity"),
    Break("6 a tensor is missing", respecify(CASE, "image_condition_latent", lambda _: None), "header", CASE, "image_condition_latent"),
    Break(
        "6 a shape in a context file", respecify(context(2), "context_Ks", lambda t: t[:, 1:].clone()), "header", context(2), "context_Ks"
    ),
    Break("6 NaN in a hidden state", put(STEP, "step_2_final_hidden", NAN, 123), "finite", STEP, "step_2_final_hidden", 123),
    Break("6 infinity in a timestep", put(STEP, "step_2_timestep", float("inf")), "finite", STEP, "step_2_timestep", 0),
    Break("6 NaN in text", put(TEXT, "block_00_k_txt", NAN, 2), "finite", TEXT, "block_00_k_txt", 2),
    Break("6 NaN in the image latent", put(CASE, "image_condition_latent", NAN, 4), "finite", CASE, "image_condition_latent", 4),
    Break("6 NaN in a feature", put(context(1), "img_modulated", NAN, 70), "finite", context(1), "img_modulated", 70),
    Break("6 a context mask", put(context(0), "context_valid_mask", 0, 7), "mask", context(0), "context_valid_mask", 7),
    Break("6 a text mask", put(TEXT, "text_valid_mask", 0, 1), "mask", TEXT, "text_valid_mask", 1),
    Break("6 text padding", put(TEXT, "block_03_v_txt", 1, LAST_PAD), "mask", TEXT, "block_03_v_txt", LAST_PAD),
    Break("6 context frames", put(context(0), "selected_frame_indices", 6, 1), "context_frames", context(0), "selected_frame_indices", 1),
    Break("7 indices differ", put(context(2), "selected_frame_indices", 6, 1), "shared", context(2), "selected_frame_indices", 1),
    Break("7 cameras differ", put(context(2), "context_viewmats", 9, 5), "shared", context(2), "context_viewmats", 5),
    Break("8 the velocity", scaled(STEP, "step_3_velocity", 1.02), "velocity", STEP, "step_3_velocity"),
    Break("8 the hidden state", scaled(STEP, "step_0_final_hidden", -1.0), "velocity", STEP, "step_0_velocity"),
    Break("9 the 65-channel input", put(STEP, "step_1_noisy_sample", 9), "input65", STEP, "step_1_noisy_sample"),
    Break("+ case text", put(CASE, "block_01_k_txt", 3, 8), "text", CASE, "block_01_k_txt", 8),
    Break(
        "+ recorded K/V",
        records(lambda rows: rows[2]["kv_check"]["00"].update(k_rope_rel_l2=0.006)),
        "kv",
        context(0, layout.RecordKey(0, 0, 2)),
    ),  # type: ignore[index]
    Break("a the scheduler chain", put(STEP, "step_3_noisy_sample", 9, 11), "chain", STEP, "step_3_noisy_sample", 11),
    Break("b the noise", put(STEP, "step_0_noisy_sample", 0.125, 6), "noise", STEP, "step_0_noisy_sample", 6),
    Break("c a frame condition", put(STEP, "step_1_frame_condition", 9, 2), "condition", STEP, "step_1_frame_condition"),
    Break("d a window", rolled(context(0), "img_modulated"), "window", context(0), "img_modulated"),
    Break("e a timestep", put(STEP, "step_1_timestep", 900), "timestep", STEP, "step_1_timestep", 0),
    Break("f labels", put(STEP, "action_labels", 5, 2), "camera", STEP, "action_labels", 2),
    Break("f viewmats", put(STEP, "target_viewmats", 0.5, 9), "camera", STEP, "target_viewmats", 9),
    Break("f intrinsics", put(context(3), "context_Ks", 0.5, 0), "camera", context(3), "context_Ks", 0),
    Break("the rotary window", put(STEP, "rope_temporal_size", 4), "rope", STEP, "rope_temporal_size", 0),
    Break("chunks of another rollout", stale({"history_sha256": "0" * 64}), "history", STEP),
    Break("a stale fingerprint", stale({"build_fingerprint": "sha256:" + "1" * 64}), "header", STEP),
    Break("a file of another record", stale({"key": "case_0000/action_00/chunk_01/block_02"}, context(2)), "header", context(2)),
    Break("a hole in a step file", hole(STEP), "hole", STEP, "step_3_velocity", 0),
    Break("a hole in a context file", hole(context(3)), "hole", context(3), "img_modulated"),
    Break("a truncated file", cut(context(3)), "header", context(3)),
    Break("a flipped bit in text", flipped(TEXT), "hash", TEXT),
    Break("a flipped bit in a video", flipped(VIDEO), "hash", VIDEO),
    Break("a changed image", flipped(layout.image_path(1)), "image", layout.image_path(1)),
    Break(
        "a manifest changed after the merge",
        lambda root: write_bytes(root / layout.MANIFEST, (root / layout.MANIFEST).read_bytes() + b"{}\n"),
        "manifest",
        layout.MANIFEST,
    ),
    Break("frozen weights are missing", remove(layout.FROZEN), "header", layout.FROZEN),
    Break("noise is missing", remove(layout.NOISE), "noise", layout.NOISE),
    Break("the inventory is missing", remove(layout.INVENTORY), "manifest", layout.INVENTORY),
]


@pytest.mark.parametrize("case", BREAKS, ids=lambda case: case.line.replace(" ", "-"))
def test_a_broken_condition_is_found_and_named(dataset: Path, case: Break) -> None:
    case.change(dataset)
    report = validate(dataset)
    assert not report.ok
    places = {(finding.code, finding.file, finding.tensor, finding.index) for finding in report.findings}
    matching = [
        place
        for place in places
        if place[:2] == (case.code, case.file) and case.tensor in (None, place[2]) and case.index in (None, place[3])
    ]
    assert matching, report.to_text()
    assert not (dataset / layout.SUCCESS).exists()
    assert json.loads((dataset / layout.LOGS / "validation.json").read_text(encoding="utf-8"))["ok"] is False


def test_a_file_that_another_program_rewrote_is_still_searched(dataset: Path) -> None:
    tensors = safetensors.torch.load_file(dataset / STEP)
    tensors["step_2_velocity"].view(-1)[31] = NAN
    safetensors.torch.save_file(tensors, dataset / STEP)
    report = validate(dataset)
    places = {(finding.code, finding.file, finding.tensor, finding.index) for finding in report.findings}
    assert ("finite", STEP, "step_2_velocity", 31) in places
    assert {"header", "hash", "finite"} <= {place[0] for place in places}


def test_every_condition_is_broken_by_some_line() -> None:
    assert {case.code for case in BREAKS} == set(CONDITIONS)


def test_values_of_tensors_are_named_down_to_the_element() -> None:
    exempt = {"velocity", "input65", "condition", "window", "hole"}  # of these only the tensor, or the first of many elements, is known
    for case in BREAKS:
        if case.tensor is not None and case.code not in exempt | {"header"}:
            assert case.index is not None, case.line
