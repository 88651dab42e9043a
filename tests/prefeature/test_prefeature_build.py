"""Builds: the same bytes however often they are interrupted, and nothing half-written is ever taken for complete."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tinydata import KEY, SHORT, STEP, context, prepare, rewrite, tree_digest

from ingest.errors import DamagedDataError, DatasetError, LockTimeoutError, MetadataError, StorageError
from ingest.prefeature import build as build_module
from ingest.prefeature import durable, layout
from ingest.prefeature.build import Workshop, begin_build, build_local, remaining_bytes
from ingest.prefeature.cases import prepare_cases
from ingest.prefeature.config import read_config
from ingest.prefeature.journal import read_journals
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.merge import merge
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.rollout import Trajectory, final_latents, run_chunk, run_context
from ingest.prefeature.schedule import draw_noise
from ingest.prefeature.sizes import resized
from ingest.prefeature.storefiles import load_case, load_frozen, load_noise
from ingest.prefeature.validate import validate


class Crash(BaseException):
    """Stands for a killed process: not an Exception, so nothing handles it."""


def rebuilt(root: Path, teacher: ReferenceTeacher, **options: bool) -> None:
    """Builds, merges and validates."""
    build_local(root, teacher, **options)
    merge(root)
    report = validate(root)
    assert report.ok, report.to_text()


def crash_after(monkeypatch: pytest.MonkeyPatch, module: object, name: str, count: int) -> None:
    """Lets a function run ``count`` times and crash on the next call."""
    real: Callable[..., object] = getattr(module, name)
    left = [count]

    def wrapper(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapper)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 7, 23, 60])
def test_a_build_interrupted_between_files_ends_with_the_same_bytes(short_built: Path, tmp_path: Path, count: int) -> None:
    root, teacher = prepare(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, os, "replace", count)
        with pytest.raises(Crash):
            build_local(root, teacher)
    rebuilt(root, teacher)
    assert tree_digest(root) == tree_digest(short_built)


@pytest.mark.parametrize("count", [0, 2, 3, 9])
def test_a_build_interrupted_before_a_journal_line_registers_what_is_there(short_built: Path, tmp_path: Path, count: int) -> None:
    root, teacher = prepare(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, build_module.JournalWriter, "append", count)
        with pytest.raises(Crash):
            build_local(root, teacher)
    reports = build_local(root, teacher)
    if count == 9:
        assert any(report.registered for report in reports)
    merge(root)
    assert validate(root).ok
    assert tree_digest(root) == tree_digest(short_built)


def test_a_finished_build_computes_nothing(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = ReferenceTeacher(SHORT)
    for name in ("denoise", "context_prefill", "text_prefill", "decode"):
        monkeypatch.setattr(teacher, name, lambda *args: pytest.fail("the teacher was used"))
    before = tree_digest(dataset)
    reports = build_local(dataset, teacher)
    assert all(report.finished and not report.built and not report.video for report in reports)
    merge(dataset)
    assert {k: v for k, v in tree_digest(dataset).items() if k != layout.SUCCESS} == {
        k: v for k, v in before.items() if k != layout.SUCCESS
    }


def test_mid_trajectory_resume_is_bit_exact(short_built: Path) -> None:
    config = read_config(short_built)
    step = read_tensors(short_built, layout.step_path(RecordKey(0, 1, 0)))
    latents = load_noise(short_built, config).clone()
    latents[:, :, :4] = final_latents(step, 4)
    teacher = ReferenceTeacher(SHORT)
    trajectory, case = Trajectory.of(config, 1), load_case(short_built, config, 0)
    again = run_chunk(
        teacher, load_frozen(short_built, config), trajectory, case, latents, 1, run_context(teacher, trajectory, case, latents, 1)
    )
    stored = read_tensors(short_built, layout.step_path(RecordKey(0, 1, 1)))
    assert all(torch.equal(again.step[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("damage", ["step", "context", "both", "video", "case"])
def test_gaps_are_repaired_and_later_chunks_verified(dataset: Path, short_built: Path, damage: str) -> None:
    middle = RecordKey(1, 2, 1)
    if damage in ("step", "both"):
        (dataset / layout.step_path(middle)).unlink()
    if damage in ("context", "both"):
        with open(dataset / layout.context_path(middle, 2), "r+b") as handle:
            handle.truncate(100)
    if damage == "video":
        (dataset / layout.video_path(1, 2)).write_bytes(b"not a video")
    if damage == "case":
        (dataset / layout.case_path(1)).unlink()
    reports = build_local(dataset, ReferenceTeacher(SHORT))
    touched = [report for report in reports if report.built or report.video]
    if damage == "case":
        assert not touched
    elif damage == "video":
        assert [(report.case_id, report.action_id, report.built) for report in touched] == [(1, 2, ())]
    else:
        assert [(report.case_id, report.action_id, report.built, report.kept) for report in touched] == [(1, 2, (1,), (0, 2))]
    merge(dataset)
    assert validate(dataset).ok
    assert tree_digest(dataset) == tree_digest(short_built)


def test_a_later_chunk_that_no_longer_follows_is_rebuilt(dataset: Path, short_built: Path) -> None:
    (dataset / layout.step_path(RecordKey(1, 2, 1))).unlink()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["img_modulated"].view(-1)[7] += 1.0

    rewrite(dataset, context(1), change)
    report = next(r for r in build_local(dataset, ReferenceTeacher(SHORT)) if (r.case_id, r.action_id) == (1, 2))
    assert report.built == (1, 2)
    merge(dataset)
    assert tree_digest(dataset)[context(1)] == tree_digest(short_built)[context(1)]


def test_deep_resume_rebuilds_a_hole_that_headers_do_not_show(dataset: Path, short_built: Path) -> None:
    path = dataset / STEP
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)
    assert not any(report.built for report in build_local(dataset, ReferenceTeacher(SHORT)))
    reports = build_local(dataset, ReferenceTeacher(SHORT), deep=True)
    assert [report.built for report in reports if report.built] == [(KEY.chunk_id,)]
    merge(dataset, verify_hashes=True)
    assert validate(dataset).ok
    assert tree_digest(dataset) == tree_digest(short_built)


def test_a_rebuild_touches_nothing_else(dataset: Path) -> None:
    files = [path for path in dataset.rglob("*") if path.is_file() and path.suffix in (".safetensors", ".mp4")]

    # The number of a file that was removed may be given to the next one.
    def written() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    before = written()
    (dataset / STEP).unlink()
    build_local(dataset, ReferenceTeacher(SHORT))
    changed = {path.relative_to(dataset).as_posix() for path, found in written().items() if found != before[path]}
    assert changed == set(layout.record_paths(KEY, SHORT))


def test_another_teacher_is_refused_by_name_of_the_field(dataset: Path) -> None:
    with pytest.raises(MetadataError, match="teacher_checkpoint_sha256: recorded"):
        build_local(dataset, ReferenceTeacher(SHORT, seed=1))
    with pytest.raises(MetadataError, match="sizes: recorded"):
        build_local(dataset, ReferenceTeacher(resized(SHORT, hidden=64, rope_dims=(8, 12, 12))))


def test_swapped_cases_are_refused(dataset: Path) -> None:
    rows = [json.loads(line) for line in (dataset / layout.CASES).read_text(encoding="utf-8").splitlines()]
    rows[0]["case_id"], rows[1]["case_id"] = 1, 0
    text = "".join(json.dumps(row) + "\n" for row in reversed(rows))
    (dataset / layout.CASES).write_text(text, encoding="utf-8")
    with pytest.raises(MetadataError, match="cases were changed or reordered"):
        build_local(dataset, ReferenceTeacher(SHORT))


def test_a_journal_of_another_build_is_refused(dataset: Path) -> None:
    path = dataset / layout.journal_path(0)
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[0]) | {"build_fingerprint": "sha256:other"}
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")
    with pytest.raises(MetadataError, match="belongs to build sha256:other"):
        begin_build(dataset)


def test_two_builds_at_once_are_refused(dataset: Path) -> None:
    shop = Workshop(dataset, ReferenceTeacher(SHORT), 0)
    try:
        with pytest.raises(LockTimeoutError, match="another build"):
            Workshop(dataset, ReferenceTeacher(SHORT), 0)
    finally:
        shop.close()


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, teacher = prepare(tmp_path)
    needed = remaining_bytes(root, read_config(root))
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    with pytest.raises(StorageError, match=r"needs .* GB, only"):
        build_local(root, teacher)
    assert not (root / "steps").exists()


def test_remaining_bytes_are_exact_for_tensors(tmp_path: Path, short_built: Path) -> None:
    root, _ = prepare(tmp_path)
    config = read_config(root)
    folders = ("cases", layout.TEXT_KV, "steps", layout.CONTEXT)
    written = sum(path.stat().st_size for folder in folders for path in (short_built / folder).rglob("*.safetensors"))
    # recorded checks and keys in the metadata come on top of the payload
    assert 0 < written - remaining_bytes(root, config) < 900 * sum(1 for f in folders for _ in (short_built / f).rglob("*.safetensors"))
    assert remaining_bytes(short_built, config) == 0


def test_a_stop_finishes_the_chunk_and_keeps_it(tmp_path: Path) -> None:
    root, teacher = prepare(tmp_path)
    shop = Workshop(root, teacher, 0)
    asked: list[int] = []
    try:
        shop.build_frozen({})
        shop.build_case(0, {})
        report = shop.build_trajectory(0, 0, {}, should_stop=lambda: len(asked) > 1 or asked.append(1) is not None)
    finally:
        shop.close()
    assert (report.built, report.finished, report.video) == ((0, 1), False, False)
    assert {key for key in read_journals(root, read_config(root).fingerprint).lines if key[0] == "record"} == {
        ("record", 0, 0, 0),
        ("record", 0, 0, 1),
    }


def test_a_teacher_that_contradicts_itself_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, teacher = prepare(tmp_path)
    real = teacher.context_prefill

    def other(*args: object) -> object:
        state = real(*args)  # type: ignore[arg-type]
        return type(state)(state.frames, state.kv, {block: tensor * 1.1 for block, tensor in state.captured.items()})

    monkeypatch.setattr(teacher, "context_prefill", other)
    with pytest.raises(DatasetError, match="K/V rebuilt from img_modulated differs"):
        build_local(root, teacher)


def test_identical_captions_are_both_built(tmp_path: Path) -> None:
    source = tmp_path / "source"
    sizes = resized(SHORT, cases=2)
    for folder in ("a", "b"):
        (source / folder).mkdir(parents=True)
        torch.manual_seed(ord(folder))
        Image.effect_noise((80, 60), 50 + ord(folder)).convert("RGB").save(source / folder / "same words.png")
    root = tmp_path / "dataset"
    root.mkdir()
    teacher = ReferenceTeacher(sizes)
    cases = prepare_cases(source, root, sizes, teacher.spec)
    assert [case.caption for case in cases] == ["same words"] * 2
    rebuilt(root, teacher)
    assert merge(root).records == 24


def test_files_are_readable_for_others(short_built: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for path in short_built.rglob("*"):
        if path.is_file() and path.parent.name != layout.JOURNALS:
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path


def test_noise_is_the_same_in_every_trajectory(short_built: Path) -> None:
    noise = draw_noise(SHORT, 0, "cpu")
    for key in (RecordKey(0, 0, 1), RecordKey(1, 3, 1)):
        assert torch.equal(read_tensors(short_built, layout.step_path(key))["step_0_noisy_sample"], noise[:, :, 4:8])


def test_a_changed_image_is_refused(tmp_path: Path) -> None:
    root, teacher = prepare(tmp_path)
    (root / layout.image_path(0)).write_bytes(b"other")
    with pytest.raises(DamagedDataError, match="changed since the cases stage"):
        build_local(root, teacher)
