"""The audit: each fault found once, by name, with what was found and what would fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spoilable import CAMERA, EPISODES, Dataset

from ingest.errors import VideoFormatError
from ingest.lerobot.doctor import audit
from ingest.lerobot.findings import AuditReport, Finding, Findings
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.storage.local import LocalStore
from ingest.video.index import ProbingIndex
from ingest.video.tables import SampleTable

DATA = ("data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet")
VIDEOS = (f"videos/{CAMERA}/chunk-000/file-000.mp4", f"videos/{CAMERA}/chunk-000/file-001.mp4")


def errors(report: AuditReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == "error"]


def the_error(report: AuditReport, code: str) -> Finding:
    found = [finding for finding in errors(report) if finding.code == code]
    assert len(found) == 1, report.to_text()
    assert report.exit_status == 1
    assert found[0].file is not None
    assert found[0].file in found[0].message
    return found[0]


@dataclass
class CutIndex:
    """An index that takes pictures from the end of some files, or adds them."""

    inner: ProbingIndex
    pictures: dict[str, int]
    shift_s: float = 0.0

    def table(self, path: str) -> SampleTable:
        table = self.inner.table(path)
        change = self.pictures.get(path, 0)
        presented = np.asarray(table.presented)
        presented = presented[:change] if change < 0 else np.concatenate([presented, presented[:1].repeat(change)])
        return replace(table, presented=presented, sample_pts=np.asarray(table.sample_pts) + self.shift_s)


def test_a_sound_dataset(dataset: Dataset) -> None:
    walked: list[str] = []
    report = audit(dataset.store, strict_time=True, progress=lambda path, number: walked.append(path))
    assert report.findings == ()
    assert report.exit_status == 0
    rows = int(dataset.open().episode_frames().sum())
    assert report.checked == {"episodes": 5, "rows": rows, "data_files": 2, "video_files": 2, "pictures": rows}
    assert walked == [*DATA, *VIDEOS]
    assert "no fault found" in report.to_text()
    assert json.loads(report.to_json())["exit_status"] == 0


@pytest.mark.parametrize("change", [-2, 3])
def test_picture_counts(dataset: Dataset, change: int) -> None:
    source = dataset.open()
    expected = int(source.maps[CAMERA].pictures[1])
    report = audit(dataset.store, index=CutIndex(ProbingIndex(dataset.store), {VIDEOS[1]: change}))
    finding = the_error(report, "picture_count")
    assert (finding.file, finding.column) == (VIDEOS[1], CAMERA)
    assert (finding.found, finding.expected) == (f"{expected + change} pictures", f"{expected} pictures")
    assert finding.episode == int(source.maps[CAMERA].rows_of(1)[-1 if change < 0 else 0])


def test_times_are_warned_about_once_per_file(dataset: Dataset) -> None:
    index = CutIndex(ProbingIndex(dataset.store), {}, shift_s=0.05)
    report = audit(dataset.store, index=index)
    assert report.exit_status == 0
    assert [(finding.code, finding.severity, finding.file) for finding in report.findings] == [
        ("time_drift", "warning", path) for path in VIDEOS
    ]
    assert "0.05" in report.findings[0].message
    assert audit(dataset.store, index=index, strict_time=True).exit_status == 1
    assert audit(dataset.store, index=index, tolerance_s=0.06, strict_time=True).findings == ()


def test_a_deviation_equal_to_the_tolerance_is_allowed(dataset: Dataset) -> None:
    index = CutIndex(ProbingIndex(dataset.store), {}, shift_s=0.05)
    assert audit(dataset.store, index=index, tolerance_s=0.05, strict_time=True).findings == ()


def test_rates_that_differ(dataset: Dataset) -> None:
    dataset.edit_info(lambda info: info.update(fps=11))
    report = audit(dataset.store)
    found = {finding.code: finding for finding in report.findings}
    assert report.exit_status == 0
    assert (found["fps_mismatch"].found, found["fps_mismatch"].expected) == ("11", "10")
    assert "timestamps_off_grid" in found
    assert "time_drift" in found


@pytest.mark.parametrize("variant", ["a", "b", "c", "d", "e"])
def test_stale_metadata_in_five_variants(dataset: Dataset, variant: str) -> None:
    source = dataset.open()
    table = source.episodes
    if variant == "a":
        first = int(np.flatnonzero(table.data_file == 1)[0])
        dataset.edit_episode(first, data__file_index=0)
        finding = the_error(audit(dataset.store), "stale_data_file_index")
        assert (finding.episode, finding.column, finding.found, finding.expected) == (first, "data/file_index", "0", "1")
    elif variant == "b":
        shutil.copy(dataset.root / EPISODES, dataset.root / "meta/episodes/chunk-000/file-001.parquet")
        finding = the_error(audit(dataset.store), "duplicate_episode_rows")
        assert finding.column == "episode_index"
    elif variant == "c":
        for episode in range(2, 5):
            start = int(table.dataset_from[episode]) + 5
            dataset.edit_episode(episode, dataset_from_index=start, dataset_to_index=start + int(table.length[episode]))
        report = audit(dataset.store)
        finding = the_error(report, "index_range_shifted")
        want = int(table.dataset_from[2])
        assert (finding.episode, finding.column, finding.found, finding.expected) == (2, "dataset_from_index", str(want + 5), str(want))
        assert any(other.column == "index" for other in errors(report))
    elif variant == "d":
        spans, rows = table.cameras[CAMERA], source.maps[CAMERA].rows_of(1)
        shift = float(spans.to_timestamp[source.maps[CAMERA].rows_of(0)[-1]])
        for row in rows:
            dataset.edit_episode(int(row), __cam__from_timestamp=float(spans.from_timestamp[row]) + shift)
        finding = the_error(audit(dataset.store), "from_timestamp_not_reset")
        assert (finding.episode, finding.column, finding.expected) == (int(rows[0]), f"videos/{CAMERA}/from_timestamp", "0")
        assert finding.found == f"{shift:.6g}"
    else:
        dataset.edit_info(lambda info: info.update(total_episodes=8, total_frames=140))
        report = audit(dataset.store)
        assert [(finding.column, finding.found, finding.expected) for finding in errors(report)] == [
            ("total_episodes", "8", "5"),
            ("total_frames", "140", str(int(table.length.sum()))),
        ]
        assert report.exit_status == 1


@pytest.mark.parametrize("variant", ["a", "b", "c", "d"])
def test_interrupted_recordings(dataset: Dataset, variant: str) -> None:
    if variant == "a":
        path = dataset.root / DATA[1]
        path.write_bytes(path.read_bytes()[:-50])
        finding = the_error(audit(dataset.store), "data_file_unreadable")
        assert finding.file == DATA[1]
        assert "not finalised" in finding.message
        assert "episodes 3, 4" in finding.message
    elif variant == "b":
        path = dataset.root / EPISODES
        path.write_bytes(path.read_bytes()[:-50])
        assert "not finalised" in the_error(audit(dataset.store), "episodes_unreadable").message
    elif variant == "c":
        shutil.rmtree(dataset.root / "meta/episodes")
        assert "not finalised" in the_error(audit(dataset.store), "episodes_unreadable").message
    else:
        dataset.edit_rows(EPISODES, lambda rows: rows[:2])
        report = audit(dataset.store)
        assert {finding.column for finding in errors(report) if finding.code == "stale_info_counts"} == {"total_episodes", "total_frames"}
        assert {finding.episode for finding in report.findings if finding.code == "orphan_rows"} == {2, 3, 4}
        assert {finding.file for finding in report.findings if finding.code == "orphan_video"} == {VIDEOS[1]}


@pytest.mark.parametrize(
    ("change", "code", "column"),
    [
        (lambda rows: [{**row, "index": row["index"] + 5} for row in rows], "index_mismatch", "index"),
        (lambda rows: [{**row, "index": row["index"] - 10} for row in rows], "duplicate_index", "index"),
        (lambda rows: [{**row, "frame_index": row["frame_index"] + 1} for row in rows], "frame_order", "frame_index"),
        (lambda rows: rows[:-1], "row_count", "length"),
        (lambda rows: [{**row, "task_index": 9} for row in rows], "task_unknown", "task_index"),
        (lambda rows: [*rows[:3], {**rows[3], "action": [float("nan")] * 4}, *rows[4:]], "not_finite", "action"),
        (lambda rows: [*rows[:3], {**rows[3], "action": [float("inf")] * 4}, *rows[4:]], "not_finite", "action"),
    ],
)
def test_rows_that_contradict_the_metadata(dataset: Dataset, change: Any, code: str, column: str) -> None:
    dataset.edit_rows(DATA[1], change)
    report = audit(dataset.store)
    finding = next(finding for finding in errors(report) if finding.code == code)
    assert (finding.file, finding.column) == (DATA[1], column)
    assert finding.episode in (3, 4)
    assert finding.found is not None
    assert finding.expected is not None
    assert {other.file for other in errors(report)} == {DATA[1]}


def test_timestamps_off_the_grid_tell_the_worst(dataset: Dataset) -> None:
    dataset.edit_rows(DATA[1], lambda rows: [{**row, "timestamp": row["timestamp"] + 0.01 * row["frame_index"]} for row in rows])
    report = audit(dataset.store)
    (finding,) = (finding for finding in report.findings if finding.code != "stats_mismatch")
    longest = int(dataset.open().episode_frames()[3:].max()) - 1
    assert (finding.code, finding.severity, finding.file) == ("timestamps_off_grid", "warning", DATA[1])
    assert f"frame {longest}" in finding.message
    assert audit(dataset.store, strict_time=True).exit_status == 1


def test_float32_rounding_is_no_deviation(tmp_path: Path) -> None:
    frames = 100_010
    make_dataset(tmp_path / "far", MakeOptions(episodes=1, frames="2", cameras=1, size=(32, 64), fps=30, storage="image"))
    data = Dataset(tmp_path / "far")
    assert abs(float(np.float32(100_004 / 30)) - 100_004 / 30) > 1e-4

    def lengthen(table: pa.Table) -> pa.Table:
        number = np.arange(frames)
        longer = table.drop_columns([CAMERA]).take(np.zeros(frames, dtype=np.int64))
        for name, values in (("timestamp", (number / 30).astype(np.float32)), ("frame_index", number), ("index", number)):
            longer = longer.set_column(longer.schema.get_field_index(name), name, pa.array(values))
        return longer

    data.edit_table(DATA[0], lengthen)
    data.edit_episode(0, length=frames, dataset_to_index=frames)
    data.edit_info(lambda info: info.update(total_frames=frames))
    data.edit_info(lambda info: info["features"].pop(CAMERA))
    (data.root / "meta/stats.json").unlink()
    assert audit(data.store, strict_time=True).findings == ()


@pytest.mark.parametrize("damage", ["gone", "empty", "lfs", "noise"])
def test_damaged_videos(dataset: Dataset, damage: str) -> None:
    path = dataset.root / VIDEOS[1]
    if damage == "gone":
        path.unlink()
    else:
        contents = {"empty": b"", "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "noise": b"noise" * 500}
        path.write_bytes(contents[damage])
    finding = the_error(audit(dataset.store), "video_missing" if damage == "gone" else "video_unreadable")
    assert (finding.file, finding.column) == (VIDEOS[1], CAMERA)
    assert finding.episode == int(dataset.open().maps[CAMERA].rows_of(1)[0])
    if damage == "lfs":
        assert "LFS pointer" in finding.message


def test_a_video_that_cannot_be_indexed_is_one_finding(dataset: Dataset) -> None:
    @dataclass
    class Broken:
        inner: ProbingIndex

        def table(self, path: str) -> SampleTable:
            if path == VIDEOS[0]:
                raise VideoFormatError(f"{path}: no moov box", file=path)
            return self.inner.table(path)

    assert "no moov box" in the_error(audit(dataset.store, index=Broken(ProbingIndex(dataset.store))), "video_unreadable").message


def test_all_videos_missing_says_how_many(dataset: Dataset) -> None:
    shutil.move(dataset.root / "videos", dataset.root / "video")
    report = audit(dataset.store)
    assert len(errors(report)) == 2
    assert "2 of 2 files" in errors(report)[0].message


def test_declared_size_and_codec(dataset: Dataset) -> None:
    def change(info: dict[str, Any]) -> None:
        info["features"][CAMERA]["shape"] = [48, 64, 3]
        info["features"][CAMERA]["info"]["video.codec"] = "av1"

    dataset.edit_info(change)
    report = audit(dataset.store)
    sizes = [finding for finding in errors(report) if finding.code == "picture_size"]
    assert [(finding.found, finding.expected) for finding in sizes] == [("64x32", "64x48")] * 2
    codecs = [finding for finding in report.findings if finding.code == "codec_mismatch"]
    assert [(finding.severity, finding.found, finding.expected) for finding in codecs] == [("info", "av1", "h264")] * 2


def test_tasks_that_are_not_indexed(dataset: Dataset) -> None:
    dataset.edit_episode(3, tasks=["juggle"])
    finding = the_error(audit(dataset.store), "task_not_indexed")
    assert (finding.episode, finding.column, finding.found) == (3, "tasks", "juggle")


def test_statistics_that_do_not_fit(dataset: Dataset) -> None:
    stats = json.loads((dataset.root / "meta/stats.json").read_text())
    stats["action"]["mean"] = [9.0] * 4
    (dataset.root / "meta/stats.json").write_text(json.dumps(stats))
    (finding,) = audit(dataset.store).findings
    assert (finding.code, finding.severity, finding.column) == ("stats_mismatch", "warning", "action")
    (dataset.root / "meta/stats.json").unlink()
    assert audit(dataset.store).findings == ()
    (dataset.root / "meta/stats.json").write_text("{")
    the_error(audit(dataset.store), "stats_unreadable")


def test_columns_that_are_missing_or_of_another_shape(dataset: Dataset) -> None:
    dataset.edit_table(DATA[0], lambda table: table.drop_columns(["action"]))
    dataset.edit_table(DATA[1], lambda table: table.append_column("extra", pa.nulls(table.num_rows)))
    report = audit(dataset.store)
    assert the_error(report, "column_missing").column == "action"
    assert [finding.file for finding in report.findings if finding.code == "column_undeclared"] == [DATA[1]]
    dataset.edit_info(lambda info: info["features"]["observation.state"].update(shape=[3]))
    assert any(finding.column == "observation.state" for finding in errors(audit(dataset.store)) if finding.code == "column_mismatch")


def test_hand_made_scalars_are_told(dataset: Dataset) -> None:
    dataset.edit_info(lambda info: info["features"]["timestamp"].update(shape=[]))
    report = audit(dataset.store)
    assert [(finding.code, finding.column) for finding in report.findings] == [("scalar_shape", "timestamp")]
    assert report.exit_status == 0


def test_files_nobody_names_are_told(dataset: Dataset) -> None:
    shutil.copy(dataset.root / VIDEOS[0], dataset.root / f"videos/{CAMERA}/chunk-000/file-007.mp4")
    pq.write_table(pa.table({"episode_index": [7], "frame_index": [0], "index": [0]}), dataset.root / "data/chunk-000/file-009.parquet")
    (dataset.root / "data/chunk-000/file-010.parquet").write_bytes(b"PAR1 cut")
    report = audit(dataset.store)
    assert report.exit_status == 0
    assert {finding.code for finding in report.findings if finding.severity == "warning"} == {"column_missing", "data_file_unreadable"}
    assert {finding.code for finding in report.findings if finding.severity == "info"} == {
        "orphan_rows",
        "orphan_data_file",
        "orphan_video",
    }


def test_versions_are_refused_before_anything_is_read(dataset: Dataset) -> None:
    for version, allow, status in (("v2.1", True, 1), ("v4.0", False, 1), ("v4.0", True, 0)):
        dataset.edit_info(lambda info, version=version: info.update(codebase_version=version))
        report = audit(dataset.store, allow_unknown_version=allow)
        assert report.exit_status == status
        assert bool(report.checked["rows"]) == (status == 0)


def test_pictures_in_cells(tmp_path: Path) -> None:
    make_dataset(tmp_path / "images", MakeOptions(episodes=2, frames="4", cameras=1, size=(32, 64), storage="image"))
    data = Dataset(tmp_path / "images")
    assert audit(data.store).findings == ()
    data.edit_rows(DATA[0], lambda rows: [{**row, CAMERA: {"bytes": b"noise", "path": None}} for row in rows])
    assert the_error(audit(data.store), "image_unreadable").column == CAMERA


def test_flipped_bytes_give_a_report(dataset: Dataset) -> None:
    rng = np.random.default_rng(5)
    files = [*DATA, *VIDEOS, EPISODES, "meta/tasks.parquet", "meta/info.json", "meta/stats.json"]
    for name in files * 4:
        path = dataset.root / name
        raw = path.read_bytes()
        spoilt = bytearray(raw)
        for position in rng.integers(0, len(raw), size=3):
            spoilt[position] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(spoilt))
        report = audit(dataset.store)
        assert report.exit_status == int(any(finding.severity == "error" for finding in report.findings))
        path.write_bytes(raw)


def test_many_faults_of_one_kind_are_counted() -> None:
    found = Findings()
    found.extend(Finding("x", "warning", f"fault {number}") for number in range(1000))
    found.add(Finding("y", "error", "bad", repairable=True))
    report = AuditReport.of("root", found, {})
    assert report.findings[0].code == "y"
    assert len(report.findings) == 102
    assert "900 more" in report.findings[-1].message
    assert report.exit_status == 1
    assert "1 error, 101 warning, 0 info" in report.to_text()


def test_an_empty_folder(tmp_path: Path) -> None:
    assert the_error(audit(LocalStore.at(tmp_path)), "info_unreadable").file == "meta/info.json"
