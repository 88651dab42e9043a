"""Where pictures are, which episodes are read, and what is said when counts do not fit."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoilable import CAMERA, Dataset

from ingest.errors import MetadataError, PictureCountError, SelectionError
from ingest.lerobot.episodes import CameraSpans, EpisodeTable
from ingest.lerobot.info import DEFAULT_DATA_PATH, DEFAULT_VIDEO_PATH, Feature, Info
from ingest.lerobot.selection import parse_episodes, select_episodes
from ingest.lerobot.videomap import check_picture_count, map_cameras


def info_for(cameras: list[str]) -> Info:
    features = {camera: Feature(camera, "video", (48, 64, 3), (), False, {}) for camera in cameras}
    return Info("v3.0", 10.0, None, None, None, None, 1000, DEFAULT_DATA_PATH, DEFAULT_VIDEO_PATH, features, {})


def table_for(lengths: list[int], files: dict[str, list[int]], starts: dict[str, list[float]]) -> EpisodeTable:
    count = len(lengths)
    ends = np.cumsum(lengths)
    zeros = np.zeros(count, dtype=np.int64)
    cameras = {
        camera: CameraSpans(np.array(files[camera]) // 3, np.array(files[camera]) % 3, np.array(starts[camera]), np.array(starts[camera]))
        for camera in files
    }
    array = np.array(lengths, dtype=np.int64)
    return EpisodeTable(np.arange(count), array, ends - array, ends, zeros, zeros, cameras, zeros.astype(np.int32), ("meta",))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), count=st.integers(1, 12))
def test_pictures_lie_where_counting_puts_them(data: st.DataObject, count: int) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    cameras = ["a", "b"]
    files = {camera: data.draw(st.lists(st.integers(0, 7), min_size=count, max_size=count)) for camera in cameras}
    starts = {camera: data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.1, 2.5, 7.0]), min_size=count, max_size=count)) for camera in cameras}
    table = table_for(lengths, files, starts)
    maps = map_cameras(info_for(cameras), table)
    for camera in cameras:
        seen: dict[int, int] = {}
        for start, episode in sorted(zip(starts[camera], range(count), strict=True)):
            file = files[camera][episode]
            assert maps[camera].paths[maps[camera].file[episode]] == f"videos/{camera}/chunk-{file // 3:03d}/file-{file % 3:03d}.mp4"
            assert int(maps[camera].first_picture[episode]) == seen.get(file, 0), start
            seen[file] = seen.get(file, 0) + lengths[episode]
        for number, path in enumerate(maps[camera].paths):
            rows = maps[camera].rows_of(number)
            assert maps[camera].numbers[path] == number
            assert int(maps[camera].pictures[number]) == sum(lengths[row] for row in rows)
            check_picture_count("root", table, maps[camera], number, int(maps[camera].pictures[number]))


def test_locating_a_picture(dataset: Dataset) -> None:
    source = dataset.open()
    rows = source.maps[CAMERA].rows_of(1)
    path, first, count = source.pictures(int(rows[1]), CAMERA)
    assert path == f"videos/{CAMERA}/chunk-000/file-001.mp4"
    assert (first, count) == (int(source.episode_frames()[rows[0]]), int(source.episode_frames()[rows[1]]))
    assert source.locate(int(rows[1]), 2, CAMERA) == (path, first + 2)
    for frame in (-1, count):
        with pytest.raises(SelectionError, match="frame"):
            source.locate(int(rows[1]), frame, CAMERA)
    with pytest.raises(SelectionError, match="it has observation"):
        source.pictures(0, "observation.images.none")
    with pytest.raises(SelectionError, match="episode 5"):
        source.locate(5, 0, CAMERA)


def test_too_few_pictures_name_the_episodes_cut_short(dataset: Dataset) -> None:
    source = dataset.open()
    rows = source.maps[CAMERA].rows_of(0)
    lengths = [int(source.episode_frames()[row]) for row in rows]
    path = source.maps[CAMERA].paths[0]
    source.check_pictures(path, CAMERA, sum(lengths))
    with pytest.raises(PictureCountError) as error:
        source.check_pictures(path, CAMERA, sum(lengths) - 2)
    assert error.value.episodes == (int(rows[-1]),)
    assert (error.value.camera, error.value.file) == (CAMERA, path)
    for part in (path, f"{sum(lengths) - 2} pictures", f"{sum(lengths)} rows", f"last 2 of episode {int(rows[-1])}"):
        assert part in str(error.value)
    with pytest.raises(PictureCountError, match=f"all {lengths[-1]} of episode"):
        source.check_pictures(path, CAMERA, sum(lengths[:-1]) - 1)
    with pytest.raises(PictureCountError) as error:
        source.check_pictures(path, CAMERA, 0)
    assert error.value.episodes == tuple(int(row) for row in rows)


def test_too_many_pictures_put_every_episode_in_doubt(dataset: Dataset) -> None:
    source = dataset.open()
    path = source.maps[CAMERA].paths[1]
    with pytest.raises(PictureCountError, match="belong to no row") as error:
        source.check_pictures(path, CAMERA, int(source.maps[CAMERA].pictures[1]) + 3)
    assert error.value.episodes == tuple(int(row) for row in source.maps[CAMERA].rows_of(1))
    with pytest.raises(SelectionError):
        source.check_pictures("videos/other.mp4", CAMERA, 1)


def test_templates_that_give_two_files_one_path(dataset: Dataset) -> None:
    dataset.edit_info(lambda info: info.update(video_path="videos/{video_key}.mp4"))
    with pytest.raises(MetadataError, match="video_path"):
        dataset.open()


def test_small_drift_at_a_file_start_is_no_contradiction(dataset: Dataset) -> None:
    first = int(dataset.open().maps[CAMERA].rows_of(1)[0])
    dataset.edit_episode(first, __cam__from_timestamp=0.2)
    assert dataset.open().warnings == ()
    dataset.edit_episode(first, __cam__from_timestamp=1058.87)
    with pytest.raises(MetadataError, match=f"episode {first}.*1058.87"):
        dataset.open()


# --- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("episodes", "exclude", "expected"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        ([3, 1], None, [3, 1]),
        ([1, 1, 0, 1], None, [1, 0]),
        (None, [0, 4], [1, 2, 3]),
        ([4, 2], [2], [4]),
        (np.array([2, 0]), None, [2, 0]),
        (None, np.array([0, 4]), [1, 2, 3]),
        (range(1, 3), None, [1, 2]),
    ],
)
def test_selections(dataset: Dataset, episodes: Any, exclude: Any, expected: list[int]) -> None:
    chosen = select_episodes(dataset.open(), episodes, exclude)
    assert chosen.tolist() == expected
    assert chosen.dtype == np.int64


@pytest.mark.parametrize(
    ("episodes", "exclude", "word"),
    [
        ([5], None, r"\[5\] do not exist; the dataset has 5 episodes, 0..4"),
        ([-1], None, "negative"),
        ([1, -2, 9], None, "negative"),
        ([1.5], None, "1.5"),
        ([True], None, "True"),
        (["1"], None, "'1'"),
        ([2**70], None, "not an episode number"),
        ([], None, "holds no episode"),
        ([1], [1], "holds no episode"),
    ],
)
def test_selections_that_name_nothing(dataset: Dataset, episodes: Any, exclude: Any, word: str) -> None:
    with pytest.raises(SelectionError, match=word):
        select_episodes(dataset.open(), episodes, exclude)


def test_excluding_what_does_not_exist_is_only_told(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_episodes(dataset.open(), None, [-1, 0, 99]).tolist() == [1, 2, 3, 4]
    assert "[-1, 99]" in caplog.text


@pytest.mark.parametrize(("text", "expected"), [("1,3", [1, 3]), ("[1, 3]", [1, 3]), (" 7 ", [7]), ("3,-1", [3, -1])])
def test_lists_on_the_command_line(text: str, expected: list[int]) -> None:
    assert parse_episodes(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-3", "1.5", "[", "--1", "²"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(SelectionError, match="1,3"):
        parse_episodes(text)
