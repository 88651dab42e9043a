"""The episode table, tasks and statistics: repaired, refused, and never more read than needed."""

from __future__ import annotations

import io
import pickle
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spoilable import CAMERA, EPISODES, Dataset

from ingest.errors import MetadataError, SelectionError, UnsafeInputError
from ingest.lerobot.episodes import read_episode_table
from ingest.lerobot.info import read_info
from ingest.lerobot.source import open_source
from ingest.lerobot.tasks import read_stats, read_tasks
from ingest.storage.local import LocalStore


def test_rows_are_sorted_whatever_the_order_of_files_and_rows(dataset: Dataset) -> None:
    before = dataset.open().episodes
    table = pq.read_table(dataset.root / EPISODES)
    pq.write_table(table.take([4, 2]), dataset.root / EPISODES)
    other = dataset.root / "meta/episodes/chunk-001/file-000.parquet"
    other.parent.mkdir()
    columns = list(reversed(table.column_names))
    pq.write_table(table.take([3, 0, 1]).select(columns), other)
    after = dataset.open().episodes
    for name in ("episode_index", "length", "dataset_from", "dataset_to", "data_chunk", "data_file"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    np.testing.assert_array_equal(before.cameras[CAMERA].from_timestamp, after.cameras[CAMERA].from_timestamp)
    assert [after.meta_paths[number] for number in after.meta_file] == [after.meta_paths[1]] * 2 + [EPISODES, after.meta_paths[1], EPISODES]


def test_identical_repeats_are_used_once_with_a_warning(dataset: Dataset) -> None:
    frames = int(dataset.open().episode_frames().sum())
    shutil.copy(dataset.root / EPISODES, dataset.root / "meta/episodes/chunk-000/file-001.parquet")
    source = dataset.open()
    assert len(source.episodes) == 5
    assert int(source.episode_frames().sum()) == frames
    (warning,) = source.warnings
    assert warning.code == "duplicate_episode_rows"
    assert "file-001.parquet" in str(warning)
    assert "episode_index" in str(warning)


def test_repeats_that_differ_are_refused_by_name(dataset: Dataset) -> None:
    table = pq.read_table(dataset.root / EPISODES).slice(2, 1)
    changed = table.set_column(table.schema.get_field_index("length"), "length", pa.array([999]))
    pq.write_table(changed, dataset.root / "meta/episodes/chunk-000/file-001.parquet")
    with pytest.raises(MetadataError, match="episode 2 is listed twice") as error:
        dataset.open()
    for part in ("column length", "999", "file-000.parquet", "file-001.parquet"):
        assert part in str(error.value)


def test_gaps_are_told_and_read(dataset: Dataset) -> None:
    dataset.edit_rows(EPISODES, lambda rows: [row for row in rows if row["episode_index"] not in (0, 2)])
    source = dataset.open()
    assert source.episodes.episode_index.tolist() == [1, 3, 4]
    assert any(warning.code == "episode_gap" and "0..0" not in str(warning) and "2" in str(warning) for warning in source.warnings)
    with pytest.raises(SelectionError, match="episode 2 does not exist"):
        source.episodes.row(2)
    with pytest.raises(SelectionError, match="episode 9"):
        source.episodes.rows(np.array([1, 9]))
    assert source.episodes.rows(np.array([4, 1])).tolist() == [2, 0]


@pytest.mark.parametrize(
    "column", [f"videos/{CAMERA}/chunk_index", "data/file_index", "dataset_from_index", f"videos/{CAMERA}/from_timestamp"]
)
def test_a_missing_column_is_named(dataset: Dataset, column: str) -> None:
    dataset.edit_table(EPISODES, lambda table: table.drop_columns([column]))
    with pytest.raises(MetadataError) as error:
        dataset.open()
    assert column in str(error.value)
    assert EPISODES in str(error.value)


def test_length_may_be_left_out(dataset: Dataset) -> None:
    before = dataset.open().episode_frames().tolist()
    dataset.edit_table(EPISODES, lambda table: table.drop_columns(["length"]))
    assert dataset.open().episode_frames().tolist() == before


@pytest.mark.parametrize(
    ("column", "values", "word"),
    [
        ("length", [None, 1, 1, 1, 1], "no value in row 0"),
        ("length", [1.5, 1, 1, 1, 1], "whole number"),
        ("length", [-1, 1, 1, 1, 1], "0 or more"),
        ("length", ["a", "b", "c", "d", "e"], "whole numbers"),
        ("episode_index", [-1, 1, 2, 3, 4], "starts at 0"),
        (f"videos/{CAMERA}/from_timestamp", [float("nan"), 0, 0, 0, 0], "finite"),
        ("data/file_index", [2**63 + 5, 0, 0, 0, 0], "index"),
    ],
)
def test_values_that_are_no_counts(dataset: Dataset, column: str, values: list[Any], word: str) -> None:
    array = pa.array(values, type=pa.uint64()) if values[0] == 2**63 + 5 else pa.array(values)
    dataset.edit_table(EPISODES, lambda table: table.set_column(table.schema.get_field_index(column), column, array))
    with pytest.raises(MetadataError, match=word):
        dataset.open()


def test_whole_floats_count(dataset: Dataset) -> None:
    before = dataset.open().episode_frames().tolist()
    dataset.edit_table(EPISODES, lambda table: table.set_column(2, "length", table.column("length").cast(pa.float64())))
    assert dataset.open().episode_frames().tolist() == before


def test_columns_of_the_same_name_are_refused(dataset: Dataset) -> None:
    dataset.edit_table(EPISODES, lambda table: table.append_column("length", table.column("length")))
    with pytest.raises(MetadataError, match="same name: length"):
        dataset.open()


def test_shifted_index_ranges_are_refused(dataset: Dataset) -> None:
    ranges = dataset.open().episodes
    want = int(ranges.dataset_from[2])
    for episode in range(2, 5):
        start = int(ranges.dataset_from[episode])
        dataset.edit_episode(episode, dataset_from_index=start + 5, dataset_to_index=start + 5 + int(ranges.length[episode]))
    with pytest.raises(MetadataError, match="episode 2") as error:
        dataset.open()
    assert f"dataset_from_index is {want + 5}, expected {want}" in str(error.value)


def test_lengths_that_contradict_the_range(dataset: Dataset) -> None:
    dataset.edit_episode(1, length=99)
    with pytest.raises(MetadataError, match="column length is 99"):
        dataset.open()


def test_times_that_count_on_over_the_file_border(dataset: Dataset) -> None:
    source = dataset.open()
    camera = source.maps[CAMERA]
    first = int(camera.rows_of(1)[0])
    shift = float(source.episodes.cameras[CAMERA].to_timestamp[camera.rows_of(0)[-1]])
    for row in camera.rows_of(1):
        spans = source.episodes.cameras[CAMERA]
        dataset.edit_episode(
            int(row),
            __cam__from_timestamp=float(spans.from_timestamp[row]) + shift,
            __cam__to_timestamp=float(spans.to_timestamp[row]) + shift,
        )
    with pytest.raises(MetadataError, match=f"episode {first}") as error:
        dataset.open()
    assert f"videos/{CAMERA}/from_timestamp" in str(error.value)
    assert "expected 0" in str(error.value)
    assert f"{shift:.6g}" in str(error.value)


def test_counts_of_info_are_not_trusted(dataset: Dataset) -> None:
    dataset.edit_info(lambda info: info.update(total_episodes=8, total_frames=140))
    source = dataset.open()
    assert len(source.episodes) == 5
    assert [(warning.column, warning.found) for warning in source.warnings] == [("total_episodes", "8"), ("total_frames", "140")]


@pytest.mark.parametrize("damage", ["cut", "empty", "lfs", "noise", "gone", "folder"])
def test_damaged_metadata_is_named_with_a_cause(dataset: Dataset, damage: str) -> None:
    path = dataset.root / EPISODES
    raw = path.read_bytes()
    words = {
        "cut": "finalised",
        "empty": "is empty",
        "lfs": "LFS pointer",
        "noise": "not a parquet file",
        "gone": "no episode is known",
        "folder": "no episode is known",
    }
    if damage == "cut":
        path.write_bytes(raw[: len(raw) * 2 // 3])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "lfs":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    elif damage == "noise":
        path.write_bytes(bytes(range(256)) * 8)
    elif damage == "gone":
        path.unlink()
    else:
        shutil.rmtree(dataset.root / "meta/episodes")
    with pytest.raises(MetadataError, match=words[damage]) as error:
        dataset.open()
    assert "meta/episodes" in str(error.value)


def test_stray_files_are_no_metadata(dataset: Dataset) -> None:
    before = len(dataset.open().episodes)
    (dataset.root / "meta/episodes/episodes.parquet").write_bytes(b"something else")
    assert len(dataset.open().episodes) == before
    shutil.rmtree(dataset.root / "meta/episodes/chunk-000")
    with pytest.raises(MetadataError, match=r"it holds meta/episodes/episodes\.parquet"):
        dataset.open()


def test_metadata_without_a_row(dataset: Dataset) -> None:
    dataset.edit_table(EPISODES, lambda table: table.slice(0, 0))
    with pytest.raises(MetadataError, match="lists no episode"):
        dataset.open()


def test_flipped_bytes_give_a_table_or_a_typed_error(dataset: Dataset) -> None:
    path = dataset.root / EPISODES
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        spoilt = bytearray(raw)
        for position in rng.integers(0, len(raw), size=3):
            spoilt[position] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(spoilt))
        with suppress(MetadataError, UnsafeInputError):
            dataset.open()


@dataclass(frozen=True)
class CountingStore:
    """A local store that adds up the bytes that parquet readers fetch."""

    inner: LocalStore
    read: list[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, path: str) -> BinaryIO:
        data, read = self.inner.read_all(path), self.read

        class Counted(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                part = super().read(size)
                read.append(len(part))
                return part

        return Counted(data)


def test_statistics_columns_are_never_read(dataset: Dataset) -> None:
    noise = np.random.default_rng(0).bytes(400_000)
    dataset.edit_table(
        EPISODES, lambda table: table.append_column("stats/huge/max", pa.array([noise] * 5)), use_dictionary=False, compression="none"
    )
    store = CountingStore(dataset.store, [])
    open_source(store)  # type: ignore[arg-type]
    assert sum(store.read) < 500_000


def test_a_source_needs_metadata_only_and_pickles(dataset: Dataset) -> None:
    shutil.rmtree(dataset.root / "data")
    shutil.rmtree(dataset.root / "videos")
    source = dataset.open()
    again = pickle.loads(pickle.dumps(source))
    assert again.locate(1, 2, CAMERA) == source.locate(1, 2, CAMERA)
    assert again.info == source.info


@pytest.mark.parametrize("layout", ["named", "unnamed", "plain", "other"])
def test_tasks_in_every_layout_by_task_index(dataset: Dataset, layout: str) -> None:
    path = dataset.root / "meta/tasks.parquet"
    numbers, texts = [2, 0, 7], ["stack", "pick", "place"]
    if layout in ("named", "unnamed"):
        pd.DataFrame({"task_index": numbers}, index=pd.Index(texts, name="task" if layout == "named" else None)).to_parquet(path)
    else:
        pq.write_table(pa.table({"task_index": numbers, "task" if layout == "plain" else "instruction": texts}), path)
    tasks = read_tasks(dataset.store)
    assert [tasks.text(number) for number in (0, 2, 7)] == ["pick", "stack", "place"]
    with pytest.raises(MetadataError, match="task_index 1"):
        tasks.text(1)


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"task_index": [0, 0], "task": ["a", "b"]}, "two texts"),
        ({"task_index": [0, 1]}, "no column 'task'"),
        ({"task": ["a", "b"]}, "task_index"),
        ({"task_index": [0, 1], "task": ["a", None]}, "expected a string"),
        ({"task_index": [0, None], "task": ["a", "b"]}, "no value"),
    ],
)
def test_tasks_that_cannot_be_used(dataset: Dataset, columns: dict[str, list[Any]], word: str) -> None:
    pq.write_table(pa.table(columns), dataset.root / "meta/tasks.parquet")
    with pytest.raises(MetadataError, match=word) as error:
        read_tasks(dataset.store)
    assert "meta/tasks.parquet" in str(error.value)


def test_statistics_are_arrays_and_may_be_absent(dataset: Dataset) -> None:
    stats = read_stats(dataset.store)
    assert stats["action"]["mean"].shape == (4,)
    assert stats[CAMERA]["mean"].shape == (3, 1, 1)
    (dataset.root / "meta/stats.json").write_text('{"action": {"mean": [1, "x"]}}')
    with pytest.raises(MetadataError, match=r"action\.mean"):
        read_stats(dataset.store)
    (dataset.root / "meta/stats.json").unlink()
    assert read_stats(dataset.store) == {}


def test_a_million_episodes_open_in_seconds(tmp_path: Path) -> None:
    count = 1_000_000
    (tmp_path / "meta/episodes/chunk-000").mkdir(parents=True)
    index = np.arange(count, dtype=np.int64)
    columns: dict[str, Any] = {
        "episode_index": index,
        "length": np.full(count, 300),
        "dataset_from_index": index * 300,
        "dataset_to_index": (index + 1) * 300,
        "data/chunk_index": index // 1_000_000,
        "data/file_index": index // 1000,
    }
    features = {"observation.images.cam0": {"dtype": "video", "shape": [48, 64, 3], "names": None}}
    columns |= {f"videos/{CAMERA}/chunk_index": index * 0, f"videos/{CAMERA}/file_index": index // 100}
    columns |= {f"videos/{CAMERA}/from_timestamp": (index % 100) * 10.0, f"videos/{CAMERA}/to_timestamp": (index % 100) * 10.0 + 10}
    pq.write_table(pa.table(columns), tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0], "task": ["x"]}), tmp_path / "meta/tasks.parquet")
    (tmp_path / "meta/info.json").write_text(pd.Series({"codebase_version": "v3.0", "fps": 30, "features": features}).to_json())
    source = open_source(LocalStore.at(tmp_path))
    assert source.locate(999_999, 299, CAMERA) == (f"videos/{CAMERA}/chunk-000/file-9999.mp4", 100 * 300 - 1)
    table, _ = read_episode_table(source.store, read_info(source.store))
    assert len(table) == count
