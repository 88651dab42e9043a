"""Rows of one episode: dtypes, pruning, repairs and everything that must not pass silently."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoilable import Dataset

from ingest.errors import DatasetError, RowsError, SelectionError, UnsafeInputError
from ingest.lerobot.footer import FooterError, parse_footer
from ingest.lerobot.footercache import FooterCache
from ingest.lerobot.parquet import ParquetSource
from ingest.lerobot.relocate import verify_data_files
from ingest.lerobot.rows import RowReader, read_rows
from ingest.lerobot.source import Source
from ingest.storage.base import ByteRange
from ingest.storage.wrapped import WrappedStore

FILES = ("data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet")


def everything(source: Source) -> list[int]:
    """The global index of every row, read episode by episode."""
    reader = RowReader(source)
    found: list[int] = []
    for episode in source.episodes.episode_index:
        rows = reader.read(int(episode))
        found += rows.numbers["index"].tolist()
        assert rows.numbers["frame_index"].tolist() == list(range(rows.length))
    return found


def total(source: Source) -> int:
    return int(source.episode_frames().sum())


def test_every_row_once(dataset: Dataset) -> None:
    source = dataset.open()
    assert everything(source) == list(range(total(source)))


def test_dtypes_shapes_and_projection(dataset: Dataset) -> None:
    rows = read_rows(dataset.open(), 1)
    assert {key: (values.dtype.name, values.shape[1:]) for key, values in rows.numbers.items()} == {
        "observation.state": ("float32", (4,)),
        "action": ("float32", (4,)),
        "timestamp": ("float32", ()),
        "frame_index": ("int64", ()),
        "episode_index": ("int64", ()),
        "index": ("int64", ()),
        "task_index": ("int64", ()),
    }
    assert rows.keys == tuple(rows.numbers)
    assert rows.nbytes > 0
    some = read_rows(dataset.open(), 1, ["action"])
    assert some.keys == ("action",)
    assert list(some.numbers) == ["action"]
    np.testing.assert_array_equal(some.numbers["action"], rows.numbers["action"])


@pytest.mark.parametrize("columns", [["actions"], ["observation.images.cam0"], ["action", "nothing"]])
def test_columns_that_are_not_stored(dataset: Dataset, columns: list[str]) -> None:
    with pytest.raises(SelectionError, match="stored are"):
        read_rows(dataset.open(), 0, columns)


def test_values_are_copies_and_gather_repeats(dataset: Dataset) -> None:
    rows = read_rows(dataset.open(), 0)
    value = rows.value("action", 0)
    assert isinstance(value, np.ndarray)
    value[:] = 77
    assert not np.any(rows.numbers["action"][0] == 77)
    gathered = rows.gather("action", np.array([1, 1, 0]))
    assert isinstance(gathered, np.ndarray)
    np.testing.assert_array_equal(gathered[0], gathered[1])
    gathered[:] = 77
    assert not np.any(rows.numbers["action"] == 77)


def test_one_reader_serves_many_threads(dataset: Dataset) -> None:
    source = dataset.open()
    reader = RowReader(source, cached_footers=1)
    episodes = list(range(5)) * 20
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda episode: reader.read(episode).numbers["index"].tolist(), episodes))
    for episode, indices in zip(episodes, found, strict=True):
        assert indices == list(range(int(source.episodes.dataset_from[episode]), int(source.episodes.dataset_to[episode])))


def test_rows_pickle(dataset: Dataset) -> None:
    rows = pickle.loads(pickle.dumps(read_rows(dataset.open(), 2)))
    assert rows.length == len(rows.numbers["index"])


# --- legal layouts ------------------------------------------------------------------------------


def test_lists_fixed_or_not_in_one_row_group(dataset: Dataset) -> None:
    before = [read_rows(dataset.open(), episode).numbers["action"] for episode in range(5)]

    def loosen(table: pa.Table) -> pa.Table:
        return table.set_column(table.schema.get_field_index("action"), "action", table.column("action").cast(pa.list_(pa.float32())))

    dataset.edit_table(FILES[0], loosen, row_group_size=10**6)
    for episode, expected in enumerate(before):
        np.testing.assert_array_equal(read_rows(dataset.open(), episode).numbers["action"], expected)


def test_other_column_order_and_types_in_the_second_file(dataset: Dataset) -> None:
    before = everything(dataset.open())

    def shuffle(table: pa.Table) -> pa.Table:
        wide = table.set_column(table.schema.get_field_index("action"), "action", table.column("action").cast(pa.large_list(pa.float64())))
        narrow = wide.set_column(wide.schema.get_field_index("index"), "index", wide.column("index").cast(pa.int32()))
        return narrow.select(sorted(narrow.column_names))

    dataset.edit_table(FILES[1], shuffle)
    source = dataset.open()
    assert everything(source) == before
    assert read_rows(source, 4).numbers["action"].dtype == np.float32


def test_episodes_out_of_order_in_a_file(dataset: Dataset) -> None:
    dataset.edit_rows(FILES[0], lambda rows: sorted(rows, key=lambda row: ((row["episode_index"] + 1) % 3, row["frame_index"])))
    source = dataset.open()
    assert everything(source) == list(range(total(source)))


@pytest.mark.parametrize(
    "options", [{}, {"row_group_size": 3}, {"write_statistics": False}, {"write_statistics": False, "row_group_size": 4}]
)
def test_row_groups_of_any_size_with_and_without_statistics(dataset: Dataset, options: dict[str, Any]) -> None:
    for path in FILES:
        dataset.edit_table(path, lambda table: table, **options)
    source = dataset.open()
    assert everything(source) == list(range(total(source)))
    assert verify_data_files(source) is source


def test_pruning_reads_only_groups_that_may_match(dataset: Dataset) -> None:
    groups = ParquetSource(dataset.store, FILES[0]).footer().groups
    assert [groups.candidates(episode) for episode in range(5)] == [[0], [1], [2], [], []]
    dataset.edit_table(FILES[0], lambda table: table, write_statistics=False)
    assert ParquetSource(dataset.store, FILES[0]).footer().groups.candidates(4) == [0]


@pytest.mark.parametrize(
    "options", [{}, {"version": "1.0"}, {"row_group_size": 2}, {"use_dictionary": False}, {"write_statistics": ["index"]}]
)
def test_footers_say_what_pyarrow_says(dataset: Dataset, options: dict[str, Any]) -> None:
    dataset.edit_table(FILES[0], lambda table: table.set_column(0, "negative", pa.array(range(-9, table.num_rows - 9))), **options)
    footer = ParquetSource(dataset.store, FILES[0]).footer()
    theirs = pq.read_metadata(dataset.root / FILES[0])
    assert footer.num_rows == theirs.num_rows
    for group in range(theirs.num_row_groups):
        columns = [theirs.row_group(group).column(position) for position in range(theirs.num_columns)]
        sizes: dict[str, int] = {}
        for column in columns:
            top = column.path_in_schema.split(".list")[0]
            sizes[top] = sizes.get(top, 0) + column.total_uncompressed_size
        assert {name: int(values[group]) for name, values in footer.groups.column_bytes.items()} == sizes
        (episodes,) = (column for column in columns if column.path_in_schema == "episode_index")
        assert bool(footer.groups.known[group]) == (episodes.statistics is not None and episodes.statistics.has_min_max)
        if footer.groups.known[group]:
            assert (footer.groups.low[group], footer.groups.high[group]) == (episodes.statistics.min, episodes.statistics.max)


def test_reads_are_bounded_before_memory_is_taken(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dataset.root / "meta/tasks.parquet"
    pq.write_table(pa.table({"task_index": np.zeros(3_000_000, dtype=np.int64), "task": pa.array(["x"] * 3_000_000)}), path)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr("ingest.lerobot.parquet.MAX_READ_BYTES", 40_000_000)
    with pytest.raises(UnsafeInputError, match=r"tasks\.parquet: the footer announces 48000000 bytes"):
        dataset.open()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=80))
def test_any_bytes_are_a_footer_or_a_typed_error(data: bytes) -> None:
    with suppress(FooterError):
        assert len(parse_footer(data)) >= 0


def test_a_row_group_far_larger_than_an_episode(dataset: Dataset) -> None:
    def pad(table: pa.Table) -> pa.Table:
        filler = table.slice(0, 1)
        column = filler.schema.get_field_index("episode_index")
        foreign = filler.set_column(column, "episode_index", pa.array([77])).take(np.zeros(140_000, dtype=np.int64))
        return pa.concat_tables([foreign, table, foreign])

    dataset.edit_table(FILES[0], pad, row_group_size=10**6)
    source = dataset.open()
    assert everything(source) == list(range(total(source)))


def test_text_null_and_bool_columns(dataset: Dataset) -> None:
    def more(table: pa.Table) -> pa.Table:
        count = table.num_rows
        table = table.append_column("done", pa.array([row % 2 == 0 for row in range(count)]))
        table = table.append_column("note", pa.array([None if row % 2 else f"row {row}" for row in range(count)]))
        table = table.append_column("empty", pa.nulls(count))
        table = table.append_column("maybe", pa.array([None if row % 2 else float(row) for row in range(count)]))
        return table.append_column("ragged", pa.array([[1.5] * (row % 3) for row in range(count)], type=pa.list_(pa.float64())))

    for path in FILES:
        dataset.edit_table(path, more)
    dataset.edit_info(
        lambda info: info["features"].update(
            done={"dtype": "bool", "shape": [1], "names": None},
            note={"dtype": "string", "shape": [1], "names": None},
            empty={"dtype": "float32", "shape": [1], "names": None},
            maybe={"dtype": "float32", "shape": [1], "names": None},
            ragged={"dtype": "float32", "shape": [2], "names": None},
        )
    )
    rows = read_rows(dataset.open(), 0)
    assert rows.numbers["done"].dtype == np.bool_
    assert list(rows.others) == ["note", "empty", "maybe", "ragged"]
    assert [rows.value("note", frame) for frame in (0, 1)] == ["row 0", None]
    assert rows.value("empty", 0) is None
    assert rows.value("maybe", 1) is None
    assert isinstance(rows.value("maybe", 2), np.float32)
    ragged = rows.value("ragged", 2)
    assert isinstance(ragged, np.ndarray)
    assert (ragged.dtype, ragged.shape) == (np.float32, (2,))
    assert rows.gather("note", np.array([0, 0, 1])) == ["row 0", "row 0", None]


def test_an_episode_spread_over_two_files_is_read_whole(dataset: Dataset) -> None:
    tables = [pq.read_table(dataset.root / path) for path in FILES]
    whole = pa.concat_tables(tables)
    cut = dataset.open().episodes.dataset_from[2] + 2
    pq.write_table(whole.slice(0, cut), dataset.root / FILES[0])
    pq.write_table(whole.slice(cut), dataset.root / FILES[1])
    for episode in range(5):
        dataset.edit_episode(episode, data__file_index=0)
    source = dataset.open()
    assert everything(source) == list(range(total(source)))
    verified = verify_data_files(source)
    assert verified.data_files(2) == FILES
    assert verified.data_files(4) == (FILES[1],)
    assert [(warning.code, warning.severity) for warning in verified.warnings] == [
        ("episode_spans_files", "info"),
        ("stale_data_file_index", "warning"),
        ("stale_data_file_index", "warning"),
    ]
    assert everything(verified) == list(range(total(source)))


# --- stale and damaged ---------------------------------------------------------------------------


def test_rows_listed_at_the_wrong_file_are_found_and_told(dataset: Dataset) -> None:
    first = int(pq.read_table(dataset.root / FILES[1]).column("episode_index")[0].as_py())
    dataset.edit_episode(first, data__file_index=0)
    source = dataset.open()
    (warning,) = read_rows(source, first).warnings
    assert (warning.code, warning.column, warning.found, warning.expected) == ("stale_data_file_index", "data/file_index", "0", "1")
    verified = verify_data_files(source)
    assert [finding.episode for finding in verified.warnings] == [first]
    for part in (f"episode {first}", "data/file_index is 0", "expected 1"):
        assert part in str(verified.warnings[0])
    assert everything(verified) == list(range(total(source)))
    assert verify_data_files(source, np.array([0])) is source


def test_a_wrong_chunk_is_told_as_such(dataset: Dataset) -> None:
    (dataset.root / "data/chunk-001").mkdir()
    (dataset.root / FILES[1]).rename(dataset.root / "data/chunk-001/file-001.parquet")
    source = dataset.open()
    with pytest.raises(RowsError, match="is missing"):
        read_rows(source, 4)
    (dataset.root / FILES[1]).write_bytes((dataset.root / FILES[0]).read_bytes())
    (warning,) = read_rows(source, 4).warnings
    assert (warning.column, warning.found, warning.expected) == ("data/chunk_index", "0", "1")


def test_problems_can_be_collected(dataset: Dataset) -> None:
    dataset.edit_rows(FILES[0], lambda rows: [row for row in rows if (row["episode_index"], row["frame_index"]) != (1, 2)])
    (dataset.root / FILES[1]).write_bytes(b"PAR1")
    problems: list[RowsError] = []
    verify_data_files(dataset.open(), problems=problems)
    assert [problem.episodes for problem in problems] == [(1,), (3, 4)]
    with pytest.raises(RowsError, match="episode 1: expected"):
        verify_data_files(dataset.open())


def test_episodes_without_a_frame(dataset: Dataset) -> None:
    last = dataset.open().episodes
    dataset.edit_rows(FILES[1], lambda rows: [row for row in rows if row["episode_index"] != 4])
    dataset.edit_episode(4, length=0, dataset_to_index=int(last.dataset_from[4]))
    rows = read_rows(dataset.open(), 4)
    assert (rows.length, rows.numbers["action"].shape) == (0, (0, 4))
    assert verify_data_files(dataset.open()).moved == {}


@pytest.mark.parametrize("damage", ["cut", "empty", "lfs", "noise", "gone"])
def test_damaged_data_files_are_named_with_a_cause(dataset: Dataset, damage: str) -> None:
    path = dataset.root / FILES[1]
    raw = path.read_bytes()
    words = {"cut": "not finalised", "empty": "is empty", "lfs": "LFS pointer", "noise": "not a parquet file", "gone": "is missing"}
    contents = {
        "cut": raw[: len(raw) // 2],
        "empty": b"",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        "noise": b"noise" * 100,
    }
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(contents[damage])
    source = dataset.open()
    assert read_rows(source, 0).length
    for action in (lambda: read_rows(source, 4), lambda: verify_data_files(source)):
        with pytest.raises(RowsError, match=words[damage]) as error:
            action()
        assert FILES[1] in str(error.value)
        assert error.value.file == FILES[1]
    with pytest.raises(RowsError) as error:
        read_rows(source, 4)
    assert error.value.episode == 4
    assert "episode 4" in str(error.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rows: rows[:-2], "expected .* rows .* found"),
        (lambda rows: [*rows, rows[-1]], "expected .* rows .* found"),
        (lambda rows: [{**row, "frame_index": row["frame_index"] + 1} for row in rows], "frame_index is 1, expected 0"),
        (lambda rows: [{**row, "index": row["index"] + 5} for row in rows], "index is .*dataset_from_index"),
        (lambda rows: rows[::-1], "frame_index"),
        (lambda rows: [{**row, "episode_index": 88} for row in rows], "found 0"),
        (lambda rows: [{**row, "frame_index": None} for row in rows], "whole numbers"),
    ],
)
def test_rows_that_break_an_invariant(dataset: Dataset, change: Any, word: str) -> None:
    dataset.edit_rows(FILES[1], change)
    source = dataset.open()
    with pytest.raises(RowsError, match=word) as error:
        everything(source)
    assert error.value.file == FILES[1]
    assert error.value.episode is not None
    assert FILES[1] in str(error.value)


def test_missing_columns_are_listed(dataset: Dataset) -> None:
    dataset.edit_table(FILES[1], lambda table: table.drop_columns(["action", "frame_index"]))
    with pytest.raises(RowsError, match=r"lacks the columns action, frame_index; it has observation\.state"):
        read_rows(dataset.open(), 4)
    dataset.edit_table(FILES[0], lambda table: table.append_column("action", table.column("action")))
    with pytest.raises(RowsError, match="same name: action"):
        read_rows(dataset.open(), 0)


@pytest.mark.parametrize(
    ("feature", "word"),
    [
        ({"dtype": "float32", "shape": [5], "names": None}, "shape"),
        ({"dtype": "float32", "shape": [], "names": None}, "values per row"),
        ({"dtype": "float32", "shape": [2, 2], "names": None}, None),
        ({"dtype": "int64", "shape": [4], "names": None}, "int64 is declared"),
    ],
)
def test_declared_shapes_are_kept(dataset: Dataset, feature: dict[str, Any], word: str | None) -> None:
    dataset.edit_info(lambda info: info["features"].update(action=feature))
    if word is None:
        assert read_rows(dataset.open(), 0).numbers["action"].shape[1:] == (2, 2)
        return
    with pytest.raises(RowsError, match=word) as error:
        read_rows(dataset.open(), 0)
    assert "action" in str(error.value)


def test_flipped_bytes_give_rows_or_a_typed_error(dataset: Dataset) -> None:
    source, path = dataset.open(), dataset.root / FILES[0]
    raw = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(60):
        spoilt = bytearray(raw)
        for position in rng.integers(0, len(raw), size=3):
            spoilt[position] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(spoilt))
        try:
            rows = read_rows(source, 1)
        except DatasetError:
            continue
        assert rows.numbers["frame_index"].tolist() == list(range(rows.length))


def test_nothing_of_a_parquet_is_unpickled(dataset: Dataset, tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (mark,))

    trap = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Trap())}

    def dress(table: pa.Table) -> pa.Table:
        fields = [field.with_metadata(trap) if field.name == "timestamp" else field for field in table.schema]
        return table.cast(pa.schema(fields, metadata={b"huggingface": pickle.dumps(Trap()), b"pandas": b"\x80"}))

    dataset.edit_table(FILES[0], dress)
    assert read_rows(dataset.open(), 0).numbers["timestamp"].dtype == np.float32
    assert not mark.exists()


class SlowStore(WrappedStore):
    """Counts reads, and takes its time over each, so that threads meet."""

    reads = 0

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        self.reads += 1
        time.sleep(0.01)
        return super().read_ranges(path, ranges)


def test_threads_that_begin_together_read_each_footer_once(dataset: Dataset) -> None:
    store = SlowStore(dataset.open().store)
    footers = FooterCache(store, limit=1)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(footers.get, [FILES[0]] * 16))
    assert store.reads == 1
    assert all(footer is found[0] for footer in found)
    assert footers.get(FILES[1]).num_rows > 0
    assert footers.get(FILES[0]).num_rows == found[0].num_rows
    assert store.reads == 3, "only one is kept"
    for _ in range(2):
        with pytest.raises(RowsError, match="missing"):
            footers.get("data/chunk-000/file-009.parquet")
