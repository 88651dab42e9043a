"""Journals and merge: nothing incomplete or contradictory ever looks complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tinydata import KEY, SHORT, STEP, context, rewrite, tree_digest

from ingest.errors import DamagedDataError, MetadataError
from ingest.prefeature import layout
from ingest.prefeature.build import build_local
from ingest.prefeature.merge import merge
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.validate import validate


def journal(root: Path, worker: int = 0) -> Path:
    """Path of a journal."""
    return root / layout.journal_path(worker)


def test_merging_twice_gives_the_same_bytes(dataset: Path) -> None:
    before = tree_digest(dataset)
    merge(dataset, verify_hashes=True)
    validate(dataset)
    assert tree_digest(dataset) == before


def test_a_torn_last_line_is_tolerated_elsewhere_it_is_an_error(dataset: Path) -> None:
    lines = journal(dataset).read_bytes().splitlines(keepends=True)
    journal(dataset).write_bytes(b"".join(lines) + b'{"kind":"rec')
    report = merge(dataset)
    assert report.records == 24
    assert "torn" in report.warnings[0]
    journal(dataset).write_bytes(b"".join(lines[:3]) + b'{"kind":"rec\n' + b"".join(lines[3:]))
    with pytest.raises(MetadataError, match=r"worker_0\.jsonl line 4"):
        merge(dataset)


def test_a_torn_last_line_means_rebuilding_or_registering(dataset: Path, short_built: Path) -> None:
    data = journal(dataset).read_bytes()
    journal(dataset).write_bytes(data[:-40])
    build_local(dataset, ReferenceTeacher(SHORT))
    merge(dataset)
    validate(dataset)
    assert tree_digest(dataset) == tree_digest(short_built)


def test_equal_duplicates_are_kept_once_and_conflicts_name_both_sides(dataset: Path) -> None:
    lines = [json.loads(line) for line in journal(dataset).read_text(encoding="utf-8").splitlines()]
    record = next(line for line in lines if line["kind"] == "record")
    copy = record | {"worker_id": 1, "seconds": 9.0}
    journal(dataset, 1).write_text(json.dumps(copy) + "\n", encoding="utf-8")
    report = merge(dataset)
    assert report.records == 24
    assert "they agree" in report.warnings[0]
    copy["input65_sha256"] = ["0"] * 4
    journal(dataset, 1).write_text(json.dumps(copy) + "\n", encoding="utf-8")
    with pytest.raises(MetadataError, match=r"worker_0\.jsonl line \d+ and manifests/worker_1\.jsonl line 1 disagree .* in input65_sha256"):
        merge(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"case_id": "0"}, "must be whole numbers"),
        ({"chunk_id": -2}, "must be whole numbers"),
        ({"attempt": 1.5}, "must be whole numbers"),
        ({"case_id": True}, "must be whole numbers"),
        ({"input65_sha256": None}, "without its recorded checks"),
        ({"kv_check": [1]}, "without its recorded checks"),
        ({"kind": "other"}, "not a journal line of kind"),
        ({"files": []}, "not a journal line of kind"),
        ({"files": {"x": 1}}, "files are malformed"),
    ],
)
def test_lines_that_no_worker_wrote_are_named(dataset: Path, change: dict[str, object], message: str) -> None:
    lines = [json.loads(line) for line in journal(dataset).read_text(encoding="utf-8").splitlines()]
    number = next(number for number, line in enumerate(lines) if line["kind"] == "record")
    lines[number] |= change
    journal(dataset).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(MetadataError, match=rf"worker_0\.jsonl line {number + 1}: .*{message}"):
        merge(dataset)


def test_merge_refuses_swapped_files(dataset: Path) -> None:
    other = STEP.replace("action_02", "action_03")
    a, b = (dataset / STEP).read_bytes(), (dataset / other).read_bytes()
    (dataset / STEP).write_bytes(b)
    (dataset / other).write_bytes(a)
    with pytest.raises(DamagedDataError, match=r"2 damaged files.*belongs to another record"):
        merge(dataset)


def test_missing_pieces_are_listed_and_partial_never_looks_complete(dataset: Path) -> None:
    (dataset / STEP).unlink()
    with pytest.raises(MetadataError, match=r"chunk_02.* does not exist"):
        merge(dataset)
    assert not (dataset / layout.SUCCESS).exists()
    report = merge(dataset, allow_partial=True)
    assert (report.records, report.partial, report.train_records) == (23, True, 0)
    assert (dataset / layout.PARTIAL_MANIFEST).exists()
    for name in (layout.MANIFEST, layout.TRAIN_MANIFEST, layout.INVENTORY, layout.SUCCESS):
        assert not (dataset / name).exists()
    build_local(dataset, ReferenceTeacher(SHORT))
    assert merge(dataset).records == 24
    assert not (dataset / layout.PARTIAL_MANIFEST).exists()


def test_merge_refuses_damage(dataset: Path) -> None:
    data = bytearray((dataset / context(2)).read_bytes())
    data[-3] ^= 1
    (dataset / context(2)).write_bytes(bytes(data))
    assert merge(dataset).records == 24
    with pytest.raises(DamagedDataError, match="block_02"):
        merge(dataset, verify_hashes=True)
    os.truncate(dataset / context(2), 3000)
    with pytest.raises(DamagedDataError, match="truncated"):
        merge(dataset)


def test_links_and_fields_of_the_manifest(short_built: Path) -> None:
    rows = [json.loads(line) for line in (short_built / layout.MANIFEST).read_text(encoding="utf-8").splitlines()]
    assert [(r["case_id"], r["action_id"], r["chunk_id"]) for r in rows] == sorted(
        (r["case_id"], r["action_id"], r["chunk_id"]) for r in rows
    )
    row = next(r for r in rows if (r["case_id"], r["action_id"], r["chunk_id"]) == (1, 2, 2))
    assert row["previous_chunk_id"] == 1
    assert row["previous_step_tensor_file"] == "steps/case_0001/action_02/chunk_01.safetensors"
    assert row["context_prefeature_files"]["03"] == context(3)
    assert "previous_chunk_id" not in rows[0]
    assert "é" in row["caption"]
    assert set(row["kv_check"]["00"]) >= {"k_rel_l2", "k_cos", "v_rel_l2", "v_cos"}
    train = (short_built / layout.TRAIN_MANIFEST).read_text(encoding="utf-8").splitlines()
    assert train == [json.dumps(r, sort_keys=True, ensure_ascii=False, separators=(",", ":")) for r in rows if r["chunk_id"]]


def test_samples_recomputed_with_the_teacher(dataset: Path, short_teacher: ReferenceTeacher) -> None:
    assert validate(dataset, teacher=(short_teacher, 4)).ok

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["img_modulated"] = tensors["img_modulated"].roll(1, dims=2)

    for key in layout.record_keys(SHORT, 4):
        if key.chunk_id == KEY.chunk_id:
            rewrite(dataset, context(2, key), change)
    report = validate(dataset, teacher=(short_teacher, 24))
    assert {finding.code for finding in report.findings} == {"kv"}
    assert len(report.findings) == 8
