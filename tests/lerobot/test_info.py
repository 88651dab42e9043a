"""info.json: versions, numbers, shapes and templates, and what is said about each bad one."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoilable import Dataset

from ingest.errors import MetadataError, ReelrayError, SelectionError, StorageError, UnsafeInputError, UnsupportedVersionError
from ingest.lerobot.info import Info, read_info
from ingest.storage.local import LocalStore

BASE: dict[str, Any] = {
    "codebase_version": "v3.0",
    "fps": 30,
    "features": {
        "action": {"dtype": "float32", "shape": [6], "names": ["a"] * 6},
        "observation.images.top": {"dtype": "video", "shape": [48, 64, 3], "names": ["height", "width", "channels"]},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    },
}


def parse(tmp_path: Path, *, allow: bool = False, **changes: Any) -> Info:
    return parse_raw(tmp_path, json.dumps({**BASE, **changes}).encode(), allow=allow)


def parse_raw(tmp_path: Path, raw: bytes, *, allow: bool = False) -> Info:
    (tmp_path / "meta").mkdir(exist_ok=True)
    (tmp_path / "meta/info.json").write_bytes(raw)
    return read_info(LocalStore.at(tmp_path), allow_unknown_version=allow)


@pytest.mark.parametrize("version", ["v3.0", "3.0", "v3.1", "v3.0.1", "v3.12"])
def test_version_three_is_read(tmp_path: Path, version: str) -> None:
    assert parse(tmp_path, codebase_version=version).version == version


@pytest.mark.parametrize("version", ["v2.1", "v2.0", "v1.6", "2.1"])
def test_older_versions_are_refused_with_the_way_to_convert(tmp_path: Path, version: str) -> None:
    for allow in (False, True):
        with pytest.raises(UnsupportedVersionError) as error:
            parse(tmp_path, allow=allow, codebase_version=version)
        for part in (str(tmp_path), version, "v3.0", "convert_dataset_v21_to_v30"):
            assert part in str(error.value)


@pytest.mark.parametrize(
    ("version", "word"), [("v4.0", "newer"), ("0.4.4", "unreadable"), (None, "missing"), (3, "unreadable"), ("", "unreadable")]
)
def test_unknown_versions_are_refused_unless_allowed(tmp_path: Path, version: object, word: str) -> None:
    with pytest.raises(UnsupportedVersionError, match=word) as error:
        parse(tmp_path, codebase_version=version)
    assert "codebase_version" in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert parse(tmp_path, allow=True, codebase_version=version).fps == 30


@pytest.mark.parametrize("fps", [0, -1, "30", None, True, float("nan"), float("inf"), 10**400, [30]])
def test_fps_that_is_no_rate(tmp_path: Path, fps: object) -> None:
    with pytest.raises(MetadataError, match="fps"):
        parse(tmp_path, fps=fps)


def test_fractional_fps_stays_exact(tmp_path: Path) -> None:
    assert parse(tmp_path, fps=29.97).fps == 29.97
    assert parse(tmp_path, fps=10.0).fps == 10


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ([48, 64, 3], ["height", "width", "channels"], (48, 64, 3)),
        ([3, 48, 64], ["channels", "height", "width"], (48, 64, 3)),
        ([3, 48, 64], ["height", "width", "channels"], (48, 64, 3)),
        ([3, 48, 64], None, (48, 64, 3)),
        ([48, 64, 1], None, (48, 64, 1)),
        ([1, 48, 64], {"motors": ["a"]}, (48, 64, 1)),
        ([48, 64], None, (48, 64, 1)),
    ],
)
def test_picture_shapes_in_either_order(tmp_path: Path, shape: list[int], names: object, expected: tuple[int, int, int]) -> None:
    features = {"observation.images.top": {"dtype": "video", "shape": shape, "names": names}}
    assert parse(tmp_path, features=features).features["observation.images.top"].picture_shape == expected


@pytest.mark.parametrize("shape", [[], [3], [1, 2, 3, 4]])
def test_a_camera_without_the_shape_of_a_picture(tmp_path: Path, shape: list[int]) -> None:
    with pytest.raises(MetadataError, match=r"observation\.images\.top"):
        parse(tmp_path, features={"observation.images.top": {"dtype": "video", "shape": shape, "names": None}})


@pytest.mark.parametrize(
    ("fields", "depth"),
    [
        ({"info": {"is_depth_map": True}}, True),
        ({"info": {"video.is_depth_map": True}}, True),
        ({"video_info": {"video.is_depth_map": True}}, True),
        ({"info": {"video.is_depth_map": False}}, False),
        ({"info": None}, False),
        ({}, False),
    ],
)
def test_depth_flags(tmp_path: Path, fields: dict[str, Any], depth: bool) -> None:
    feature = {"dtype": "video", "shape": [48, 64, 1], "names": None, **fields}
    assert parse(tmp_path, features={"observation.depth": feature}).features["observation.depth"].is_depth is depth


def test_scalars_may_have_shape_empty_or_one(tmp_path: Path) -> None:
    info = parse(
        tmp_path,
        features={"a": {"dtype": "float64", "shape": []}, "b": {"dtype": "int32", "shape": [1]}, "c": {"dtype": "bool", "shape": [2]}},
    )
    assert [info.features[key].is_scalar for key in "abc"] == [True, True, False]
    assert [info.features[key].item_dtype for key in "abc"] == ["float32", "int64", "bool"]


@pytest.mark.parametrize(
    ("field", "template"),
    [
        ("data_path", "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"),
        ("video_path", "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"),
    ],
)
def test_templates_of_v2_say_so(tmp_path: Path, field: str, template: str) -> None:
    with pytest.raises(MetadataError, match="placeholders of v2") as error:
        parse(tmp_path, **{field: template})
    assert field in str(error.value)
    assert "convert_dataset_v21_to_v30" in str(error.value)


@pytest.mark.parametrize(
    "template",
    [
        "../{file_index:03d}.parquet",
        "/x/{file_index}.parquet",
        "data/{file_index.__class__}.parquet",
        "data/{other}.parquet",
        "data/{file_index",
        "s3://b/{file_index}",
    ],
)
def test_templates_that_would_leave_the_root(tmp_path: Path, template: str) -> None:
    with pytest.raises(UnsafeInputError, match="data_path"):
        parse(tmp_path, data_path=template)


@pytest.mark.parametrize("key", ["..", "../x", "a/b", "/x"])
def test_camera_keys_that_would_leave_the_root(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsafeInputError):
        parse(tmp_path, features={key: {"dtype": "video", "shape": [48, 64, 3], "names": None}})


def test_expanded_paths(tmp_path: Path) -> None:
    info = parse(tmp_path, data_path="data/chunk-{chunk_index:03d}/episode_{file_index:06d}.parquet")
    assert info.data_file(1, 12) == "data/chunk-001/episode_000012.parquet"
    assert info.video_file("observation.images.top", 0, 7) == "videos/observation.images.top/chunk-000/file-007.mp4"


def test_unknown_feature_lists_what_exists(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="action"):
        parse(tmp_path).feature("actions")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "not valid JSON"),
        (b'{"fps": 30', "not valid JSON"),
        (b"[1]", "expected an object"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_files_that_are_not_json(tmp_path: Path, raw: bytes, word: str) -> None:
    with pytest.raises(MetadataError, match=word) as error:
        parse_raw(tmp_path, raw)
    assert "meta/info.json" in str(error.value)


def test_a_pointer_instead_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="LFS pointer"):
        parse_raw(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def test_no_info_at_all(tmp_path: Path) -> None:
    with pytest.raises(MetadataError, match="not a LeRobotDataset"):
        read_info(LocalStore.at(tmp_path))


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=True)
    | st.sampled_from(["video", "image", "float32", "{video_key}", "..", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "names", "info", "is_depth_map"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(["features", "fps", "splits", "data_path", "video_path", "total_frames", "chunks_size", "codebase_version"]),
    value=_JSON,
    inner=st.booleans(),
)
def test_any_json_gives_an_info_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, key: str, value: object, inner: bool) -> None:
    fields: dict[str, Any] = {**BASE, key: value}
    if inner:
        fields = {**BASE, "features": {"observation.images.top": value}}
    with suppress(ReelrayError):
        assert parse_raw(tmp_path_factory.mktemp("info"), json.dumps(fields).encode()).fps > 0


def test_image_datasets_may_leave_video_path_out(dataset: Dataset) -> None:
    dataset.edit_info(lambda info: info.update(video_path=None))
    assert dataset.open().cameras == ("observation.images.cam0",)
