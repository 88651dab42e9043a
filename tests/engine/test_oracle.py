"""Samples of the single-process engine against linear decodes and the files themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich_dataset import DEPTH, PICTURE, LinearPictures, depth_of, picture_of

from ingest.engine import Dataset, iter_samples, open_dataset
from ingest.engine.counters import Counters
from ingest.errors import BudgetError, DecodeError, LocationError, ObjectNotFoundError, PictureCountError, SelectionError, SettingsError
from ingest.lerobot.barcode import picture_code, read_barcode
from ingest.plan import PlanSettings, plan_epoch

CAMERAS = ("observation.images.cam0", "observation.images.cam1")


def frames_of(dataset: Dataset) -> list[tuple[int, int]]:
    return [
        (int(episode), frame) for episode, length in zip(dataset.selection, dataset.lengths, strict=True) for frame in range(int(length))
    ]


def test_every_sample_equals_the_files(rich: Path) -> None:
    dataset = open_dataset(rich, return_uint8=True)
    linear = LinearPictures(dataset.source)
    for index, (episode, frame) in enumerate(frames_of(dataset)):
        item = dataset.sample(episode, frame)
        assert set(item) == {*dataset.source.info.features, "task"}
        for number, camera in enumerate(CAMERAS):
            assert item[camera].shape == (3, 32, 64)
            np.testing.assert_array_equal(np.moveaxis(item[camera], 0, -1), linear.picture(camera, episode, frame))
            assert read_barcode(item[camera]) == picture_code(index, number)
        assert item[DEPTH].dtype == np.uint16
        np.testing.assert_array_equal(item[DEPTH][0], depth_of(index))
        np.testing.assert_array_equal(np.moveaxis(item[PICTURE], 0, -1), picture_of(index))
        assert (int(item["index"]), int(item["frame_index"]), int(item["episode_index"])) == (index, frame, episode)
        assert item["index"].shape == ()
        assert bool(item["next.done"]) == (index % 3 == 0)
        assert item["note"] == (None if index % 5 == 0 else f"row {index}")
        assert item["nothing"] is None
        assert item["task"] == "follow the disc"


def test_float_pictures_are_uint8_over_255(rich: Path) -> None:
    exact, scaled = open_dataset(rich, return_uint8=True).sample(2, 1), open_dataset(rich).sample(2, 1)
    for camera in (*CAMERAS, PICTURE):
        assert scaled[camera].dtype == np.float32
        np.testing.assert_array_equal(scaled[camera], exact[camera].astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(scaled[DEPTH], exact[DEPTH])


def test_windows_clamp_to_the_episode(rich: Path) -> None:
    offsets = [-3, 0, 1, 2]
    deltas = {key: [offset / 10 for offset in offsets] for key in (CAMERAS[0], DEPTH, PICTURE, "action", "next.done")}
    dataset = open_dataset(rich, return_uint8=True, delta_timestamps=deltas)
    single = open_dataset(rich, return_uint8=True)
    for episode, length in zip(dataset.selection.tolist(), dataset.lengths.tolist(), strict=True):
        whole = [single.sample(episode, frame) for frame in range(length)]
        for frame in range(length):
            item = dataset.sample(episode, frame)
            wanted = [min(max(frame + offset, 0), length - 1) for offset in offsets]
            padded = [not 0 <= frame + offset < length for offset in offsets]
            for key in deltas:
                assert item[f"{key}_is_pad"].tolist() == padded
                np.testing.assert_array_equal(item[key], np.stack([whole[at][key] for at in wanted]))
            np.testing.assert_array_equal(item[CAMERAS[1]], whole[frame][CAMERAS[1]])


def test_batches_stack_samples_whatever_units_they_come_from(rich: Path) -> None:
    deltas = {CAMERAS[0]: [-0.4, 0.0, 0.3], "action": [0.0, 0.5]}
    dataset = open_dataset(rich, delta_timestamps=deltas)
    single = {pair: dataset.sample(*pair) for pair in frames_of(dataset)}
    units = dataset.units(lane_frames=3)
    assert len(units) > dataset.num_episodes
    plan = plan_epoch(units, PlanSettings(strategy="lanes", batch_size=5, tail="pad"))
    seen = 0
    for planned, batch in dataset.iter_batches(plan):
        assert batch["is_pad"].tolist() == planned.is_pad.tolist()
        for place, (unit, frame) in enumerate(zip(planned.unit.tolist(), planned.frame.tolist(), strict=True)):
            item = single[int(units.episode[unit]), frame]
            assert set(batch) == {*item, "is_pad"}
            for key, value in item.items():
                if isinstance(value, np.ndarray):
                    assert batch[key].dtype == value.dtype
                    np.testing.assert_array_equal(batch[key][place], value)
                else:
                    assert batch[key][place] == value
        seen += int(np.count_nonzero(~planned.is_pad))
    assert seen == dataset.num_frames


@pytest.mark.parametrize("held", [1, 2, 3, 7, 12, 1000])
def test_a_budget_of_decoded_pictures_holds_and_changes_none(small: Path, held: int) -> None:
    """Groups have five pictures of 32x64: budgets below, at and above a group, and of two cameras by turns."""
    dataset = open_dataset(small, return_uint8=True, delta_timestamps={CAMERAS[0]: [-0.3, 0.0, 0.2]})
    plan = plan_epoch(dataset.units(), PlanSettings(strategy="remaining", batch_size=4, pool_size=2))
    wanted = [batch for _, batch in dataset.iter_batches(plan, max_steps=6)]
    dataset.counters = Counters()
    budget = held * 32 * 64 * 3 + 5
    for found, other in zip(dataset.iter_batches(plan, max_steps=6, decoded_bytes=budget), wanted, strict=True):
        for camera in CAMERAS:
            np.testing.assert_array_equal(found[1][camera], other[camera])
    assert 0 < dataset.counters.totals()["reelray_decoded_bytes_peak"] <= budget
    with pytest.raises(BudgetError, match="takes 6144 bytes, more than the decoded budget of 6143 bytes: raise decoded_budget_gb"):
        next(dataset.iter_batches(plan, decoded_bytes=32 * 64 * 3 - 1))


def test_selection_order_and_positions(small: Path) -> None:
    dataset = open_dataset(small, episodes=[3, 1], columns=["index"], cameras=[])
    starts, lengths = dataset.source.episodes.dataset_from, dataset.source.episodes.length
    wanted = [int(starts[episode]) + frame for episode in (3, 1) for frame in range(int(lengths[episode]))]
    assert [int(sample["index"]) for sample in iter_samples(dataset)] == wanted
    assert [int(dataset[position]["index"]) for position in range(len(dataset))] == wanted
    assert int(dataset[-1]["index"]) == wanted[-1]
    assert set(dataset[0]) == {"index", "task"}
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    for episode, frame in ((0, 0), (3, int(lengths[3])), (3, -1)):
        with pytest.raises(SelectionError):
            dataset.sample(episode, frame)


def test_unselected_cameras_are_not_fetched(small: Path) -> None:
    both, one = open_dataset(small), open_dataset(small, cameras=[CAMERAS[0]])
    for dataset in (both, one):
        list(iter_samples(dataset))
    reads = [dataset.counters.totals()["reelray_payload_bytes_read"] for dataset in (both, one)]
    assert 0 < reads[1] < 0.7 * reads[0]


def test_transforms_depend_on_the_sample_alone(small: Path) -> None:
    def mark(picture: np.ndarray, key: object) -> np.ndarray:
        seed = abs(hash((key.seed, key.epoch, key.index, key.camera))) % 251  # type: ignore[attr-defined]
        return np.full_like(picture, seed)

    dataset = open_dataset(small, return_uint8=True, image_transforms=mark)
    found = []
    for size, strategy in ((2, "remaining"), (5, "lanes")):
        plan = plan_epoch(dataset.units(), PlanSettings(strategy=strategy, batch_size=size))
        marks = {
            int(i): int(p.flat[0])
            for _, batch in dataset.iter_batches(plan)
            for i, p in zip(batch["index"], batch[CAMERAS[1]], strict=True)
        }
        found.append(marks)
    assert found[0] == found[1]
    assert len(set(found[0].values())) > 20


def test_resized_pictures_have_the_size_asked_for(small: Path) -> None:
    item = open_dataset(small, return_uint8=True, image_size=(16, 24)).sample(0, 0)
    assert item[CAMERAS[0]].shape == (3, 16, 24)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"cameras": ["observation.images.cam9"]}, SelectionError),
        ({"columns": ["nope"]}, SelectionError),
        ({"episodes": [99]}, SelectionError),
        ({"episodes": [-1]}, SelectionError),
        ({"delta_timestamps": {"nope": [0.0]}}, SelectionError),
        ({"delta_timestamps": {"task": [0.0]}}, SelectionError),
        ({"delta_timestamps": {"action": [0.033]}}, SettingsError),
        ({"image_size": (0, 4)}, SettingsError),
        ({"revision": "bad name"}, LocationError),
    ],
)
def test_wrong_options_are_named(small: Path, arguments: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        open_dataset(small, **arguments)


def test_locations_of_local_folders(small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(small.parent))
    monkeypatch.chdir(small.parent)
    for spelling in (small, str(small), f"{small}/", f"file://{small}", "~/ds", "ds", "./ds/", Path("ds")):
        assert open_dataset(spelling).num_frames == open_dataset(small).num_frames
    assert open_dataset("owner/name", root=small).num_frames == open_dataset(small).num_frames
    with pytest.raises(ObjectNotFoundError, match="is not a directory"):
        open_dataset(tmp_path / "missing")


def test_missing_pictures_and_rows_name_their_episodes(tmp_path: Path, spoilt: Path) -> None:
    with pytest.raises(PictureCountError, match=r"episode 2.*also.*is missing"):
        open_dataset(spoilt)
    dataset = open_dataset(spoilt, damage="skip_episode")
    assert dataset.selection.tolist() == [0, 1]
    assert [record.episode for record in dataset.damage.records] == [2, 3]
    assert [int(sample["index"]) for sample in iter_samples(dataset)] == list(range(dataset.num_frames))
    with pytest.raises(SelectionError, match="every selected episode is damaged"):
        open_dataset(spoilt, episodes=[2], damage="skip_episode")


def test_damaged_payload_is_named(damaged: tuple[Path, int, int]) -> None:
    root, episode, frame = damaged
    dataset = open_dataset(root)
    dataset.sample(episode, 0)
    with pytest.raises(DecodeError, match=rf"episode {episode}, {CAMERAS[0]}: videos/.*picture \d+ \(bytes") as raised:
        dataset.sample(episode, frame)
    assert (raised.value.episode, raised.value.camera) == (episode, CAMERAS[0])
    assert raised.value.byte_range is not None
