"""Every acceptance condition is made to fail, and the validator must name file, tensor and index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tinydata import SHORT, STEP, context, refresh_inventory, rewrite
from torch import Tensor

from ingest.errors import MetadataError
from ingest.prefeature import layout
from ingest.prefeature.durable import write_bytes
from ingest.prefeature.findings import CONDITIONS, Finding
from ingest.prefeature.jsonio import json_lines
from ingest.prefeature.manifest import read_manifest
from ingest.prefeature.scan import first_nonfinite, first_zero_run
from ingest.prefeature.sizes import resized
from ingest.prefeature.validate import validate
from ingest.prefeature.videos import write_video

CASE = layout.case_path(1)
TEXT = layout.text_kv_path(1)


def findings(root: Path, code: str, *, full: bool = True) -> list[Finding]:
    """Findings of one condition; there must be some, and no success mark may remain."""
    report = validate(root, full=full)
    assert not report.ok
    assert not (root / layout.SUCCESS).exists()
    found = [finding for finding in report.findings if finding.code == code]
    assert found, report.to_text()
    return found


def only(root: Path, code: str, *, full: bool = True) -> Finding:
    """The one finding of a dataset that breaks exactly one condition."""
    report = validate(root, full=full)
    assert [finding.code for finding in report.findings] == [code], report.to_text()
    return report.findings[0]


def put(name: str, value: float, at: int) -> Callable[[dict[str, Tensor]], None]:
    """A change that sets one element."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[at] = value

    return change


def test_a_good_dataset_has_no_findings_and_every_condition_is_checked(dataset: Path) -> None:
    report = validate(dataset)
    assert report.ok
    assert all(report.checked[code] for code in CONDITIONS), report.to_text()
    assert (dataset / layout.SUCCESS).exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["step_1_final_hidden", "step_3_velocity"])
def test_nonfinite_values_are_named(dataset: Path, value: float, name: str) -> None:
    rewrite(dataset, STEP, put(name, value, 77))
    found = findings(dataset, "finite")[0]
    assert (found.file, found.tensor, found.index) == (STEP, name, 77)


def test_nan_in_a_context_feature(dataset: Path) -> None:
    rewrite(dataset, context(2), put("img_modulated", float("nan"), 1001))
    found = findings(dataset, "finite")[0]
    assert (found.file, found.tensor, found.index) == (context(2), "img_modulated", 1001)


def test_a_hole_passes_the_cheap_check_and_fails_the_full_one(dataset: Path) -> None:
    path = dataset / STEP
    size = path.stat().st_size
    with open(path, "r+b") as handle:
        handle.truncate(size // 2)
        handle.truncate(size)
    refresh_inventory(dataset, STEP)
    assert validate(dataset, full=False, mark=False).ok
    holes = findings(dataset, "hole")
    assert {hole.file for hole in holes} == {STEP}
    assert any(hole.tensor == "step_3_velocity" for hole in holes)


def test_a_partial_hole_inside_one_tensor(dataset: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["img_modulated"].view(-1)[1024:2048] = 0

    rewrite(dataset, context(3), change)
    found = findings(dataset, "hole")[0]
    assert (found.file, found.tensor) == (context(3), "img_modulated")
    assert found.index is not None
    assert 1024 <= found.index < 2048


@pytest.mark.parametrize("full", [False, True])
def test_truncation(dataset: Path, full: bool) -> None:
    path = dataset / STEP
    with open(path, "r+b") as handle:
        handle.truncate(path.stat().st_size - 1000)
    found = findings(dataset, "header", full=full)[0]
    assert found.file == STEP
    assert "truncated" in found.message


def test_trailing_bytes(dataset: Path) -> None:
    with open(dataset / STEP, "ab") as handle:
        handle.write(b"x")
    assert findings(dataset, "header", full=False)[0].file == STEP


def test_flipped_header_bytes(dataset: Path) -> None:
    with open(dataset / context(0), "r+b") as handle:
        handle.seek(20)
        handle.write(b"\xff\xfe\x00")
    assert findings(dataset, "header")[0].file == context(0)


def test_swapped_files_of_equal_size(dataset: Path) -> None:
    other = STEP.replace("action_02", "action_03")
    a, b = dataset / STEP, dataset / other
    assert a.stat().st_size == b.stat().st_size
    shutil.move(a, dataset / "x")
    shutil.move(b, a)
    shutil.move(dataset / "x", b)
    refresh_inventory(dataset, STEP, other)
    found = findings(dataset, "header", full=False)
    assert {finding.file for finding in found} == {STEP, other}
    assert "belongs to another record" in found[0].message


def test_a_stale_fingerprint(dataset: Path) -> None:
    rewrite(dataset, STEP, lambda tensors: None, {"build_fingerprint": "sha256:" + "0" * 64})
    found = only(dataset, "header")
    assert found.file == STEP
    assert "build_fingerprint" in found.message


def test_one_changed_byte_is_seen_by_its_hash(dataset: Path) -> None:
    path = dataset / TEXT
    with open(path, "r+b") as handle:
        handle.seek(path.stat().st_size - 4000)
        byte = handle.read(1)
        handle.seek(-1, 1)
        handle.write(bytes([byte[0] ^ 1]))
    assert TEXT in {finding.file for finding in findings(dataset, "hash")}


def test_a_wrong_context_mask(dataset: Path) -> None:
    rewrite(dataset, context(1), put("context_valid_mask", False, 5))
    found = only(dataset, "mask")
    assert (found.file, found.tensor, found.index) == (context(1), "context_valid_mask", 5)


def test_a_text_mask_with_a_gap(dataset: Path) -> None:
    for path in (CASE, TEXT):
        rewrite(dataset, path, put("text_valid_mask", False, 2))
    places = {(finding.file, finding.tensor, finding.index) for finding in findings(dataset, "mask")}
    assert places == {
        (CASE, "text_valid_mask", 2),
        (TEXT, "text_valid_mask", 2),
    }


def test_text_padding_that_is_not_zero(dataset: Path) -> None:
    rewrite(dataset, TEXT, put("block_01_k_txt", 1.0, 23 * 16 + 3))
    found = findings(dataset, "mask")[0]
    assert (found.file, found.tensor) == (TEXT, "block_01_k_txt")


def test_text_of_the_case_differs_from_the_all_block_file(dataset: Path) -> None:
    rewrite(dataset, CASE, put("block_02_v_txt", 3.0, 5))
    found = only(dataset, "text")
    assert found.file == CASE
    assert "block_02_v_txt" in found.message
    assert "element 5" in found.message


def test_unequal_indices(dataset: Path) -> None:
    rewrite(dataset, context(1), put("selected_frame_indices", 7, 0))
    assert {(f.file, f.tensor, f.index) for f in findings(dataset, "shared")} == {(context(1), "selected_frame_indices", 0)}
    assert {(f.file, f.tensor) for f in findings(dataset, "context_frames")} == {(context(1), "selected_frame_indices")}


def test_cameras_of_one_block_differ(dataset: Path) -> None:
    rewrite(dataset, context(3), put("context_viewmats", 0.5, 3))
    assert findings(dataset, "shared")[0].tensor == "context_viewmats"
    found = findings(dataset, "camera")[0]
    assert (found.file, found.tensor, found.index) == (context(3), "context_viewmats", 3)


def test_context_frames_of_another_chunk(dataset: Path) -> None:
    shutil.copyfile(dataset / context(1, layout.RecordKey(1, 2, 1)), dataset / context(1))
    assert findings(dataset, "header", full=False)[0].file == context(1)


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ("camera", "action_labels", 5),
        ("camera", "target_Ks", 0.25),
        ("rope", "rope_temporal_size", 99),
        ("rope", "start_rope_start_idx", 1),
        ("timestep", "step_2_timestep", 800.0),
        ("noise", "step_0_noisy_sample", 0.125),
        ("chain", "step_2_noisy_sample", 9.0),
        ("input65", "step_1_noisy_sample", 9.0),
        ("condition", "step_2_frame_condition", 9.0),
    ],
)
def test_wrong_step_values(dataset: Path, code: str, name: str, value: float) -> None:
    rewrite(dataset, STEP, put(name, value, 0))
    found = [finding for finding in findings(dataset, code) if finding.file == STEP]
    assert found
    assert any(finding.tensor == name for finding in found)


def test_bad_velocity(dataset: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["step_3_velocity"] *= 1.02

    rewrite(dataset, STEP, change)
    found = only(dataset, "velocity")
    assert (found.file, found.tensor) == (STEP, "step_3_velocity")
    assert "relative L2" in found.message


def test_velocity_within_tolerance_is_accepted(dataset: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["step_3_velocity"].view(-1)[0] *= 1.01

    rewrite(dataset, STEP, change)
    assert validate(dataset).ok


def test_block_zero_feature_of_a_frame_differs_between_windows(dataset: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        feature = tensors["img_modulated"]
        tensors["img_modulated"] = feature.roll(1, dims=2)

    rewrite(dataset, context(0), change)
    found = findings(dataset, "window")
    assert {(finding.file, finding.tensor) for finding in found} == {(context(0), "img_modulated")}
    assert "latent frame 0" in found[0].message


def test_condition_differs_between_trajectories(dataset: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["step_0_frame_condition"] += 1.0

    for chunk in range(SHORT.chunks):
        rewrite(dataset, layout.step_path(layout.RecordKey(1, 2, chunk)), change)
    assert any(finding.tensor == "step_0_frame_condition" for finding in findings(dataset, "condition"))


def test_wrong_image_latent_breaks_the_input_of_chunk_zero_only(dataset: Path) -> None:
    rewrite(dataset, CASE, put("image_condition_latent", 5.0, 3))
    found = findings(dataset, "input65")
    assert {finding.file for finding in found} == {layout.step_path(layout.RecordKey(1, action, 0)) for action in range(4)}
    assert len(found) == 4 * SHORT.steps


def test_recorded_kv_check_out_of_bounds(dataset: Path) -> None:
    records = read_manifest(dataset)
    records[5]["kv_check"]["02"]["v_prope_cos"] = 0.9998
    write_bytes(dataset / layout.MANIFEST, json_lines(records))
    write_bytes(dataset / layout.TRAIN_MANIFEST, json_lines(record for record in records if record["chunk_id"]))
    refresh_inventory(dataset, layout.MANIFEST, layout.TRAIN_MANIFEST)
    assert only(dataset, "kv").file == records[5]["context_prefeature_files"]["02"]


def test_extra_and_missing_files(dataset: Path) -> None:
    extra = "steps/case_0001/action_02/chunk_09.safetensors"
    shutil.copyfile(dataset / STEP, dataset / extra)
    (dataset / context(0, layout.RecordKey(0, 0, 0))).unlink()
    found = findings(dataset, "files", full=False)
    assert {(finding.file, finding.message.split(";")[0]) for finding in found} == {
        (extra, "is not part of this dataset"),
        (context(0, layout.RecordKey(0, 0, 0)), "is missing"),
    }


def test_leftover_temporary_files_are_only_a_warning(dataset: Path) -> None:
    (dataset / "steps" / ".chunk.safetensors.host.1.00.tmp").write_bytes(b"half")
    report = validate(dataset, full=False)
    assert report.ok
    assert "temporary" in report.warnings[0]


def test_short_video(dataset: Path) -> None:
    name = layout.video_path(1, 2)
    fewer = resized(SHORT, latent_frames=8, memory_frames=4)
    write_video(dataset / name, (np.zeros((48, 64, 3), np.uint8) for _ in range(fewer.video_frames)), fewer)
    refresh_inventory(dataset, name)
    found = only(dataset, "video")
    assert found.file == name
    assert "29 pictures decoded, expected 45" in found.message


def test_video_of_another_size_and_broken_video(dataset: Path) -> None:
    small = resized(SHORT, height=32, width=32)
    first, second = layout.video_path(0, 0), layout.video_path(0, 1)
    write_video(dataset / first, (np.zeros((32, 32, 3), np.uint8) for _ in range(small.video_frames)), small)
    (dataset / second).write_bytes((dataset / second).read_bytes()[:900])
    refresh_inventory(dataset, first, second)
    found = {finding.file: finding.message for finding in findings(dataset, "video")}
    assert "32x32, expected 64x48" in found[first]
    assert "cannot be decoded" in found[second]


def test_changed_image(dataset: Path) -> None:
    name = layout.image_path(0)
    Image.new("RGB", (64, 48)).save(dataset / name)
    refresh_inventory(dataset, name)
    assert only(dataset, "image").file == name
    Image.new("RGB", (64, 40)).save(dataset / name)
    assert any("64x40" in finding.message for finding in findings(dataset, "image", full=False))


def edit_manifest(root: Path, change: Callable[[list[dict[str, object]]], None]) -> None:
    """Changes manifest records and keeps everything else consistent with them."""
    records: list[dict[str, object]] = read_manifest(root)
    change(records)
    write_bytes(root / layout.MANIFEST, json_lines(records))
    write_bytes(root / layout.TRAIN_MANIFEST, json_lines(record for record in records if record["chunk_id"]))
    refresh_inventory(root, layout.MANIFEST, layout.TRAIN_MANIFEST)


@pytest.mark.parametrize("value", [None, "x", [1], {"00": "x"}, {"00": {"k_rel_l2": "0"}}, {"00": {}}, {}])
def test_hostile_checks_are_findings_and_never_a_crash(dataset: Path, value: object) -> None:
    edit_manifest(dataset, lambda records: records[2].update(kv_check=value, input65_sha256=value))
    report = validate(dataset)
    assert {finding.code for finding in report.findings} & {"kv", "input65"}
    assert all(finding.file for finding in report.findings)


def test_duplicate_record(dataset: Path) -> None:
    edit_manifest(dataset, lambda records: records.insert(4, records[3]))
    found = only(dataset, "manifest", full=False)
    assert "duplicate of line 4" in found.message
    assert found.index == 5


def test_missing_record(dataset: Path) -> None:
    edit_manifest(dataset, lambda records: records.pop(7) and None)
    assert "case_0000/action_02/chunk_01" in only(dataset, "manifest", full=False).message


def test_missing_link(dataset: Path) -> None:
    edit_manifest(dataset, lambda records: records[1].pop("previous_step_tensor_file") and None)
    assert "previous_step_tensor_file is None" in only(dataset, "manifest", full=False).message


def test_a_link_to_another_trajectory(dataset: Path) -> None:
    edit_manifest(dataset, lambda records: records[2].update(previous_step_tensor_file=records[4]["step_tensor_file"]))
    assert "previous_step_tensor_file" in only(dataset, "manifest", full=False).message


def test_training_manifest_with_chunk_zero(dataset: Path) -> None:
    write_bytes(dataset / layout.TRAIN_MANIFEST, (dataset / layout.MANIFEST).read_bytes())
    refresh_inventory(dataset, layout.TRAIN_MANIFEST)
    found = only(dataset, "train_manifest", full=False)
    assert "24 records, expected 16" in found.message


def test_changed_cases_are_refused(dataset: Path) -> None:
    lines = (dataset / layout.CASES).read_text(encoding="utf-8").splitlines(keepends=True)
    (dataset / layout.CASES).write_text("".join(reversed(lines)), encoding="utf-8")
    with pytest.raises(MetadataError, match="case ids"):
        validate(dataset)


def test_an_edited_config_is_refused(dataset: Path) -> None:
    raw = json.loads((dataset / layout.CONFIG).read_text(encoding="utf-8"))
    (dataset / layout.CONFIG).write_text(json.dumps(raw | {"seed": 1}), encoding="utf-8")
    with pytest.raises(MetadataError, match="fingerprint"):
        validate(dataset)


def test_reports(dataset: Path) -> None:
    rewrite(dataset, STEP, put("step_1_final_hidden", float("nan"), 9))
    report = validate(dataset)
    written = json.loads((dataset / "logs" / "validation.json").read_text(encoding="utf-8"))
    assert written["ok"] is False
    first = next(finding for finding in written["findings"] if finding["code"] == "finite")
    assert (first["file"], first["tensor"], first["index"]) == (STEP, "step_1_final_hidden", 9)
    page = (dataset / "logs" / "validation.html").read_text(encoding="utf-8")
    assert STEP in page
    assert "<script" not in page
    assert STEP in report.to_text()


def test_scans_find_the_first_bad_place() -> None:
    values = torch.randn(70_000).to(torch.bfloat16)
    raw = values.view(torch.uint8).numpy()
    assert first_nonfinite(raw, "BF16") is None
    values[69_999] = float("nan")
    assert first_nonfinite(raw, "BF16") == 69_999
    values[69_999] = 1.0
    values[512:768] = 0
    assert first_zero_run(raw) == 1024
    assert first_zero_run(np.zeros(10, np.uint8)) == 0
    assert first_zero_run(np.zeros(0, np.uint8)) is None
