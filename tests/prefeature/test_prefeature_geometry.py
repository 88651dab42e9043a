"""Sizes, byte arithmetic, poses, labels and history selection against the figures of the real dataset."""

from __future__ import annotations

import numpy as np
import pytest

from ingest.errors import SettingsError
from ingest.prefeature import layout
from ingest.prefeature.actions import actions_for, cameras_of, parse_pose
from ingest.prefeature.history import history_table, overlap, sphere_points
from ingest.prefeature.schedule import sigmas, timesteps
from ingest.prefeature.schema import case_schema, context_schema, folder_bytes, step_schema, text_kv_schema
from ingest.prefeature.sizes import TINY, Sizes, resized
from ingest.prefeature.tensorfile import file_bytes, make_header

REAL = Sizes()
FRAMES = [0, 4, 8, 12, 16, 20, 20, 20]


def test_counts_of_the_real_dataset() -> None:
    actions = len(actions_for(REAL.latent_frames))
    assert (REAL.cases * actions, REAL.video_frames, REAL.chunks, REAL.grid) == (400, 125, 8, (30, 52))
    keys = list(layout.record_keys(REAL, actions))
    assert len(keys) == len(set(keys)) == 3200
    assert sum(key.chunk_id != 0 for key in keys) == 2800
    files = layout.data_files(REAL, actions)
    assert sum(path.startswith("context_prefeature/") for path in files) == 12_800
    assert sum(path.startswith("videos/") for path in files) == 400
    assert len(files) == 100 + 100 + 100 + 3200 + 12_800 + 400


def test_bytes_of_the_real_dataset() -> None:
    assert file_bytes(step_schema(REAL)) == 105_499_048
    assert len(make_header(step_schema(REAL))) == 2_208
    assert sum(spec.nbytes for spec in case_schema(REAL)) == 29_690_247
    assert sum(spec.nbytes for spec in text_kv_schema(REAL)) == 399_459_207
    assert file_bytes(context_schema(REAL, 0)) == 544
    folders = folder_bytes(REAL, 4, FRAMES)
    assert round(folders["cases"] / 1e9, 2) == 2.97
    assert round(folders["text_kv_exact_all54_bf16"] / 2**30, 2) == 37.20
    assert round(folders["steps"] / 1e9, 2) == 337.60
    assert round(folders["context_prefeature"] / 1e9, 2) == 1022.63
    media = 0.40e9 + 0.02e9
    assert round((sum(folders.values()) + media) / 1e9, 2) == 1403.56


def test_paths_are_those_of_the_layout() -> None:
    key = layout.RecordKey(7, 2, 3)
    assert layout.step_path(key) == "steps/case_0007/action_02/chunk_03.safetensors"
    assert layout.context_path(key, 52) == "context_prefeature/block_52/case_0007/action_02/chunk_03.safetensors"
    assert layout.text_kv_path(7) == "text_kv_exact_all54_bf16/case_0007_text_kv_exact_all54_bf16.safetensors"
    assert layout.case_path(7) == "cases/case_0007.safetensors"
    assert layout.video_path(7, 2) == "videos/case_0007/action_02.mp4"
    assert layout.image_path(7) == "input_images/case_0007.jpg"
    assert layout.journal_path(3) == "manifests/worker_3.jsonl"
    assert layout.is_temporary("steps/.x.safetensors.host.1.abc.tmp")
    assert not layout.is_temporary("steps/case_0000/action_00/chunk_00.safetensors")


@pytest.mark.parametrize(
    ("number", "name", "pose", "labels"),
    [
        (0, "w_s", "w-15,s-16", (9, 18)),
        (1, "a_d", "a-15,d-16", (36, 27)),
        (2, "up_down", "up-15,down-16", (3, 4)),
        (3, "left_right", "left-15,right-16", (2, 1)),
    ],
)
def test_the_four_actions(number: int, name: str, pose: str, labels: tuple[int, int]) -> None:
    action = actions_for(32)[number]
    assert (action.name, action.pose) == (name, pose)
    cameras = cameras_of(pose, 32)
    assert cameras.labels.tolist() == [0] + [labels[0]] * 15 + [labels[1]] * 16
    assert np.allclose(cameras.intrinsics[5], [[0.5050505, 0, 0.5], [0, 0.8978675, 0.5], [0, 0, 1]])
    table = history_table(cameras.viewmats, memory_frames=20, recent_frames=12, chunk_frames=4, seed=0)
    assert [len(frames) for frames in table] == FRAMES
    assert table[:6] == tuple(tuple(range(n)) for n in (0, 4, 8, 12, 16, 20))
    assert table[6] == (*range(8), *range(12, 24))
    assert table[7] == (*range(8), *range(16, 28))


def test_history_does_not_hang_on_the_seed() -> None:
    views = cameras_of("left-15,right-16", 32).viewmats
    tables = {history_table(views, memory_frames=20, recent_frames=12, chunk_frames=4, seed=seed) for seed in range(4)}
    assert len(tables) == 1


def test_overlap_is_one_with_itself_and_falls_with_distance() -> None:
    views = cameras_of("left-15,right-16", 32).viewmats
    points = sphere_points(0)
    assert overlap(views[5], views[5], points) == 1.0
    assert overlap(views[0], views[15], points) < overlap(views[0], views[5], points) < 1.0


def test_motion_moves_the_way_it_says() -> None:
    forward = np.linalg.inv(cameras_of("w-3", 4).viewmats)
    assert np.allclose(forward[3, :3, 3], [0, 0, 0.24])
    right = np.linalg.inv(cameras_of("d-2", 3).viewmats)
    assert np.allclose(right[2, :3, 3], [0.16, 0, 0])
    turned = np.linalg.inv(cameras_of("right-30", 31).viewmats)
    assert np.allclose(turned[30, :3, 2], [1, 0, 0], atol=1e-9)
    moved = np.linalg.inv(cameras_of("right-30,w-1", 32).viewmats)
    assert np.allclose(moved[31, :3, 3], [0.08, 0, 0], atol=1e-9)


@pytest.mark.parametrize("pose", ["", "w", "w-", "w-0", "w-1.5", "fly-3", "w-3;s-2", "w--3", "w-3,", "W-3", "w-99999"])
def test_unreadable_poses_name_the_grammar(pose: str) -> None:
    with pytest.raises(SettingsError, match="MOTION-COUNT"):
        parse_pose(pose)


def test_a_pose_of_another_length_names_both_counts() -> None:
    with pytest.raises(SettingsError, match=r"stands for 31 latent frames \(121 pictures\), expected 32"):
        cameras_of("w-15,s-15", 32)


def test_schedule() -> None:
    assert np.allclose(sigmas(4), [1, 0.9375, 0.8333333, 0.625, 0])
    assert timesteps(4) == (1000.0, 937.5, float(np.float32(1000 * 5 / 6)), 625.0)


@pytest.mark.parametrize(
    "change",
    [{"hidden": 30}, {"rope_dims": (4, 4, 6)}, {"latent_frames": 30}, {"height": 50}, {"blocks": (1, 0)}, {"blocks": (0, 9)}, {"cases": 0}],
)
def test_inconsistent_sizes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        resized(TINY, **change)


def test_sizes_travel_through_json() -> None:
    assert Sizes.from_json(REAL.to_json()) == REAL
    for broken in (None, {}, REAL.to_json() | {"extra": 1}, REAL.to_json() | {"hidden": "2048"}):
        with pytest.raises(SettingsError):
            Sizes.from_json(broken)
