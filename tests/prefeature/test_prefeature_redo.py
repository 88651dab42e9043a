"""Redoing work whose bytes differ the second time, as on a GPU: nothing old and new is ever mixed, and no crash hides it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tinydata import KEY, SHORT, STEP, context, prepare, rewrite, tree_digest

from ingest.errors import DatasetError, MetadataError
from ingest.prefeature import layout
from ingest.prefeature.build import build_local
from ingest.prefeature.config import read_config
from ingest.prefeature.durable import hash_file
from ingest.prefeature.journal import JournalWriter, read_journals
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.merge import merge
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.rollout import history_sha256
from ingest.prefeature.teacher import CaseInputs, DenoiseOut, TextKv
from ingest.prefeature.tensorfile import read_header
from ingest.prefeature.validate import validate

MIDDLE = RecordKey(KEY.case_id, KEY.action_id, 1)


class Crash(BaseException):
    """Stands for a killed process."""


class DriftingTeacher(ReferenceTeacher):
    """The same weights with slightly different sums, like another driver: its velocities follow from its hidden states."""

    def denoise(self, *args: object, **kwargs: object) -> DenoiseOut:
        out = super().denoise(*args, **kwargs)  # type: ignore[arg-type]
        hidden = out.final_hidden.clone()
        hidden.view(-1)[::7] *= 1.01
        return DenoiseOut(hidden, out.frame_condition, self._frozen.final_layer(hidden, out.frame_condition), out.input65)

    def text_prefill(self, inputs: CaseInputs) -> TextKv:
        text = super().text_prefill(inputs)
        return TextKv(tuple(key * 1.01 for key in text.keys), text.values)


def interrupted(root: Path, holder: object, call: str, count: int) -> bool:
    """A build by the drifting teacher that dies at the ``count``-th call of something; False when it ends before."""
    real: Callable[..., object] = getattr(holder, call)
    left = [count]

    def wrapper(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, call, wrapper)
        try:
            build_local(root, DriftingTeacher(SHORT))
        except Crash:
            return True
    return False


def finished(root: Path) -> None:
    """Builds on with the drifting teacher; everything must fit together afterwards."""
    build_local(root, DriftingTeacher(SHORT))
    merge(root, verify_hashes=True)
    report = validate(root)
    assert report.ok, report.to_text()


def test_a_redone_chunk_takes_everything_after_it_along(dataset: Path) -> None:
    before = tree_digest(dataset)
    (dataset / layout.step_path(MIDDLE)).unlink()
    finished(dataset)
    after = tree_digest(dataset)
    changed = {path for path in before if before[path] != after[path]} - {layout.INVENTORY, layout.MANIFEST, layout.TRAIN_MANIFEST}
    changed -= {layout.SUCCESS}
    name = f"case_{KEY.case_id:04d}/action_{KEY.action_id:02d}"
    assert changed
    assert all(name in path for path in changed)
    assert {layout.step_path(MIDDLE), STEP, context(0), layout.video_path(KEY.case_id, KEY.action_id)} <= changed


@pytest.mark.parametrize("count", range(6))
def test_a_crash_during_a_redo_is_never_taken_for_complete(dataset: Path, count: int) -> None:
    """Between any two journal lines of a redo: withdrawal and line of chunk 1, of chunk 2, and of the video."""
    (dataset / layout.step_path(MIDDLE)).unlink()
    assert interrupted(dataset, JournalWriter, "append", count) == (count < 5)
    finished(dataset)


@pytest.mark.parametrize("count", range(12))
def test_files_of_two_attempts_are_never_one_record(dataset: Path, count: int) -> None:
    """A crash at every rename while a record is replaced whose step file was good and whose context was not."""
    os.truncate(dataset / context(1, MIDDLE), 100)
    assert interrupted(dataset, os, "replace", count) == (count < 11)
    finished(dataset)


def test_a_withdrawn_record_is_missing_until_it_is_built(dataset: Path) -> None:
    config = read_config(dataset)
    journal = JournalWriter(dataset, 0, config.fingerprint)
    journal.void("record", 1, case_id=KEY.case_id, action_id=KEY.action_id, chunk_id=KEY.chunk_id)
    journal.close()
    with pytest.raises(MetadataError, match=r"chunk_02: no journal line"):
        merge(dataset)
    reports = build_local(dataset, ReferenceTeacher(SHORT))
    assert [report.registered for report in reports if report.registered] == [(KEY.chunk_id,)]
    merge(dataset, verify_hashes=True)
    assert validate(dataset).ok


@pytest.mark.parametrize("value", [float("nan"), None])
def test_an_unknown_record_is_registered_only_when_its_contents_are_sound(dataset: Path, short_built: Path, value: float | None) -> None:
    (dataset / layout.journal_path(0)).unlink()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            tensors["img_modulated"][:, 20:] = 0
        else:
            tensors["img_modulated"].view(-1)[5] = value

    rewrite(dataset, context(2), spoil)
    reports = build_local(dataset, ReferenceTeacher(SHORT))
    assert [report.built for report in reports if report.built] == [(KEY.chunk_id,)]
    assert sum(len(report.registered) for report in reports) == 23
    merge(dataset, verify_hashes=True)
    assert validate(dataset).ok
    assert tree_digest(dataset) == tree_digest(short_built)


def test_other_text_is_refused_before_anything_is_replaced(dataset: Path) -> None:
    whole, part = dataset / layout.text_kv_path(1), dataset / layout.case_path(1)
    os.truncate(whole, 200)
    before = hash_file(part)
    for _ in range(2):  # a second try must not take the first one's files for good
        with pytest.raises(DatasetError, match="other text K/V than its trajectories were made with"):
            build_local(dataset, DriftingTeacher(SHORT))
        assert whole.stat().st_size == 200
        assert hash_file(part) == before
    build_local(dataset, ReferenceTeacher(SHORT))
    merge(dataset, verify_hashes=True)
    assert validate(dataset).ok


def test_a_case_without_trajectories_may_change(tmp_path: Path) -> None:
    root, teacher = prepare(tmp_path)
    build_local(root, teacher, only=[])
    build_local(root, teacher, only=[(0, 0)])
    (root / layout.case_path(1)).unlink(missing_ok=True)
    build_local(root, DriftingTeacher(SHORT), only=[(1, 0)])
    for pair in layout.trajectories(SHORT, 4):
        build_local(root, DriftingTeacher(SHORT), only=[pair])
    merge(root, verify_hashes=True)
    assert validate(root).ok


def test_a_failure_of_the_machine_leaves_no_mark(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, teacher = prepare(tmp_path / "fresh")
    real = teacher.denoise
    calls = [0]

    def fail(*args: object) -> DenoiseOut:
        calls[0] += 1
        if calls[0] == 7:
            raise RuntimeError("CUDA error: out of memory")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(teacher, "denoise", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        build_local(root, teacher)
    keys = [key for key in read_journals(root, read_config(root).fingerprint).lines if key[0] == "record"]
    assert keys == [("record", 0, 0, 0)]
    assert [path.name for path in (root / "steps").rglob("*.safetensors")] == ["chunk_00.safetensors"]
    build_local(root, teacher)
    merge(root)
    validate(root)
    assert tree_digest(root) == tree_digest(dataset)


def test_a_video_of_other_latents_is_made_again(dataset: Path) -> None:
    name = layout.video_path(0, 1)
    other = dataset / layout.video_path(0, 2)
    good = (dataset / name).read_bytes()
    (dataset / name).write_bytes(other.read_bytes())
    report = next(r for r in build_local(dataset, ReferenceTeacher(SHORT)) if (r.case_id, r.action_id) == (0, 1))
    assert report.video
    assert (dataset / name).read_bytes() == good


def test_a_build_of_a_part_leaves_everything_else_alone(dataset: Path) -> None:
    (dataset / "steps" / "notes.txt").write_text("mine", encoding="utf-8")
    (dataset / "steps" / "case_0007").mkdir()
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in dataset.rglob("*") if "manifests" not in path.parts}
    build_local(dataset, ReferenceTeacher(SHORT), only=[(0, 0)])
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in before} == before


def test_the_hash_of_the_history_tells_chunks_apart(short_built: Path) -> None:
    hashes = [read_header(short_built, layout.step_path(RecordKey(0, 1, chunk))).metadata["history_sha256"] for chunk in range(3)]
    assert len(set(hashes)) == 3
    assert hashes[0] == history_sha256(torch.empty(1, 4, 3, 2, 2), 0)
