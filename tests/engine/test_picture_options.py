"""Picture options through the engine: planes, resized pictures, and depth in physical units."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich_dataset import DEPTH, PICTURE, LinearPictures, depth_of

from ingest.engine.dataset import open_dataset
from ingest.engine.depth import depth_table
from ingest.engine.spec import ReadOptions
from ingest.errors import DamagedDataError, MetadataError, SettingsError
from ingest.lerobot.info import Feature
from train_integration.mixtures import Member, open_mixture
from train_integration.options import StreamConfig, open_stream
from train_integration.pixels import Colour, camera_colour, planes_to_rgb
from train_integration.transforms import SeededTransform

CAMERA = "observation.images.cam0"


def depth_feature(**details: object) -> Feature:
    return Feature("depth", "video", (4, 4, 1), (), True, {f"video.{name}": value for name, value in details.items()})


def test_planes_come_out_as_uint8_and_convert_to_the_exact_pictures(rich: Path) -> None:
    dataset = open_dataset(rich, pixel_format="yuv420p", cameras=(CAMERA,))
    sample = dataset.sample(2, 1)
    assert sample[CAMERA].dtype == np.uint8
    assert sample[CAMERA].shape == (1, 48, 64)
    colour = camera_colour(dataset, CAMERA)
    assert colour == Colour("bt601", False)
    exact = np.moveaxis(LinearPictures(dataset.source).picture(CAMERA, 2, 1), -1, 0).astype(int)
    converted = planes_to_rgb(torch.from_numpy(np.ascontiguousarray(sample[CAMERA])), colour).numpy().astype(int)
    assert np.abs(converted - exact).max() <= 3


def test_colour_is_asked_of_delivered_cameras_only(rich: Path) -> None:
    with pytest.raises(SettingsError, match="not delivered"):
        camera_colour(open_dataset(rich, cameras=()), CAMERA)


@pytest.mark.parametrize("pixel_format", ["rgb24", "yuv420p"])
def test_resized_pictures_have_the_size_asked_for(rich: Path, pixel_format: str) -> None:
    dataset = open_dataset(rich, image_size=(16, 20), resize_filter="area", pixel_format=pixel_format, return_uint8=True)
    sample = dataset.sample(1, 2)
    assert sample[CAMERA].shape == ((3, 16, 20) if pixel_format == "rgb24" else (1, 24, 20))
    assert sample[DEPTH].shape == (1, 16, 20)
    assert sample[DEPTH].dtype == np.uint16
    row = int(sample["index"])
    assert np.isin(sample[DEPTH], depth_of(row)).all()


def test_depth_without_a_declared_range_is_millimetres(rich: Path) -> None:
    millimetres, metres = (open_dataset(rich, depth_output_unit=unit).sample(3, 2) for unit in ("mm", "m"))
    row = int(metres["index"])
    np.testing.assert_array_equal(millimetres[DEPTH][0], depth_of(row))
    assert metres[DEPTH].dtype == np.float32
    np.testing.assert_allclose(metres[DEPTH][0], depth_of(row) / 1000, rtol=1e-6)


def test_declared_codes_become_distances(rich: Path, tmp_path: Path) -> None:
    root = tmp_path / "coded"
    shutil.copytree(rich, root)
    info = json.loads((root / "meta/info.json").read_text())
    settings = {"video.depth_min": 0.1, "video.depth_max": 6.0, "video.shift": 0.0, "video.use_log": False}
    info["features"][DEPTH]["info"] |= settings
    (root / "meta/info.json").write_text(json.dumps(info))
    sample = open_dataset(root).sample(0, 1)
    expected = 0.1 + depth_of(int(sample["index"])) / 4095 * 5.9
    assert sample[DEPTH].dtype == np.uint16
    np.testing.assert_array_equal(sample[DEPTH][0], np.rint(expected * 1000))
    windowed = open_dataset(root, depth_output_unit="m", delta_timestamps={DEPTH: [-0.1, 0.0]}).sample(0, 1)
    assert windowed[DEPTH].shape == (2, 1, 32, 64)
    np.testing.assert_allclose(windowed[DEPTH][1, 0], expected, rtol=1e-6)


def test_logarithmic_codes_invert_their_quantiser() -> None:
    table = depth_table(depth_feature(depth_min=0.01, depth_max=10.0, shift=3.5, use_log=True), "m")
    assert table is not None
    distances = np.linspace(0.01, 10.0, 500)
    share = (np.log(distances + 3.5) - np.log(3.51)) / (np.log(13.5) - np.log(3.51))
    codes = np.rint(share * 4095).astype(int)
    assert np.abs(table[codes] - distances).max() < 0.003
    assert table[0] == pytest.approx(0.01)
    assert table[4095] == pytest.approx(10.0)
    assert table[65535] == table[4095]


@pytest.mark.parametrize(
    "details",
    [
        {"depth_min": 5.0, "depth_max": 1.0},
        {"depth_min": -1.0, "depth_max": 1.0},
        {"depth_min": "near", "depth_max": 1.0},
        {"depth_min": 0.0, "depth_max": float("inf")},
        {"depth_min": 0.0, "depth_max": 1.0, "shift": 0.0, "use_log": True},
    ],
)
def test_a_range_that_is_none_is_refused(details: dict[str, object]) -> None:
    with pytest.raises(MetadataError, match="depth"):
        depth_table(depth_feature(**details), "mm")


@pytest.mark.parametrize(
    "options",
    [
        {"pixel_format": "bgr24"},
        {"resize_filter": "sharp"},
        {"depth_output_unit": "feet"},
        {"pixel_format": "yuv420p", "image_size": (15, 20)},
        {"image_size": (0, 20)},
        {"cameras": "observation.images.cam0"},
        {"delta_timestamps": [0.0]},
        {"delta_timestamps": "action"},
        {"delta_timestamps": {"action": 0.0}},
    ],
)
def test_options_that_mean_nothing_are_refused_when_opening(rich: Path, options: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        open_dataset(rich, **options)


@pytest.mark.parametrize("pixel_format", ["yuv420p", "gray"])
def test_transforms_that_would_not_be_applied_are_refused(rich: Path, pixel_format: str) -> None:
    transform, read = SeededTransform(lambda picture, _: picture), ReadOptions(pixel_format=pixel_format)
    config = StreamConfig(read=read, image_transforms=transform)
    for opening in (
        lambda: open_dataset(rich, options=read, image_transforms=transform),
        lambda: open_stream(rich, config),
        lambda: open_mixture([Member(source=rich)], config),
    ):
        with pytest.raises(SettingsError, match=f"pixel_format '{pixel_format}' delivers none of observation.images.cam0"):
            opening()
    only_stored = open_dataset(rich, cameras=(DEPTH,), pixel_format=pixel_format, image_transforms=transform, return_uint8=True)
    assert only_stored.sample(0, 0)[PICTURE].shape == (3, 6, 8)


@pytest.mark.parametrize("pixel_format", ["rgb24", "yuv420p"])
def test_a_part_of_a_picture_is_that_part_of_the_whole(rich: Path, pixel_format: str) -> None:
    top, left, height, width = 6, 10, 20, 36
    whole = open_dataset(rich, pixel_format=pixel_format, return_uint8=True).sample(2, 1)
    part = open_dataset(rich, pixel_format=pixel_format, return_uint8=True, image_crop=(top, left, height, width)).sample(2, 1)
    rows, columns = slice(top, top + height), slice(left, left + width)
    np.testing.assert_array_equal(part[DEPTH], whole[DEPTH][:, rows, columns])
    if pixel_format == "rgb24":
        np.testing.assert_array_equal(part[CAMERA], whole[CAMERA][:, rows, columns])
        return
    assert part[CAMERA].shape == (1, height * 3 // 2, width)
    planes, found = planes_of(whole[CAMERA][0]), planes_of(part[CAMERA][0])
    np.testing.assert_array_equal(found[0], planes[0][rows, columns])
    for own, other in zip(found[1:], planes[1:], strict=True):
        np.testing.assert_array_equal(own, other[top // 2 : (top + height) // 2, left // 2 : (left + width) // 2])


def planes_of(picture: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    height, width = picture.shape[0] * 2 // 3, picture.shape[1]
    flat, luma, chroma = picture.reshape(-1), height * width, height * width // 4
    parts = flat[:luma], flat[luma : luma + chroma], flat[luma + chroma :]
    return [part.reshape(-1, width if part.size == luma else width // 2) for part in parts]


@pytest.mark.parametrize("pixel_format", ["rgb24", "yuv420p"])
def test_a_part_is_cut_out_before_it_is_resized(rich: Path, pixel_format: str) -> None:
    given: Any = {"pixel_format": pixel_format, "return_uint8": True, "resize_filter": "area"}
    part = open_dataset(rich, image_crop=(8, 16, 24, 32), image_size=(12, 16), **given).sample(1, 2)
    again = open_dataset(rich, image_crop=(8, 16, 24, 32), **given).sample(1, 2)
    assert part[CAMERA].shape == ((3, 12, 16) if pixel_format == "rgb24" else (1, 18, 16))
    luma = [
        np.moveaxis(one[CAMERA], 0, -1) if pixel_format == "rgb24" else planes_of(one[CAMERA][0])[0][..., None] for one in (part, again)
    ]
    expected = luma[1].reshape(12, 2, 16, 2, -1).mean(axis=(1, 3))
    assert np.abs(luma[0].astype(float) - expected).max() <= 4
    assert part[DEPTH].shape == (1, 12, 16)
    assert np.isin(part[DEPTH], again[DEPTH]).all()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"image_crop": (0, 0, 49, 64)}, DamagedDataError, "do not contain the part"),
        ({"image_crop": (40, 0, 20, 64)}, DamagedDataError, "do not contain the part"),
        ({"image_crop": (0, 0, 0, 4)}, SettingsError, "top, left, height, width"),
        ({"image_crop": (-1, 0, 4, 4)}, SettingsError, "top, left, height, width"),
        ({"image_crop": (0, 0, 4)}, SettingsError, "top, left, height, width"),
        ({"image_crop": (1, 0, 4, 4), "pixel_format": "yuv420p"}, SettingsError, "even"),
    ],
)
def test_a_part_that_pictures_do_not_have_is_refused_at_open(
    rich: Path, given: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        open_dataset(rich, **given)
