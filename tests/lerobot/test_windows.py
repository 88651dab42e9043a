"""Windows: exact in whole frames at any frame number, padded exactly where clipped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoilable import Dataset

from ingest.errors import SelectionError, SettingsError
from ingest.lerobot.windows import Windows


@settings(max_examples=200, deadline=None)
@given(
    offsets=st.lists(st.integers(-40, 40), min_size=1, max_size=8),
    length=st.integers(1, 30),
    fps=st.sampled_from([1, 10, 15, 24, 29.97, 30, 50, 60, 1000]),
    data=st.data(),
)
def test_indices_equal_the_plain_definition(offsets: list[int], length: int, fps: float, data: st.DataObject) -> None:
    windows = Windows.from_delta_timestamps({"action": [offset / fps for offset in offsets]}, fps)
    frame = data.draw(st.integers(0, length - 1))
    indices, is_pad = windows.indices("action", frame, length)
    wanted = [frame + offset for offset in offsets]
    assert indices.tolist() == [min(max(want, 0), length - 1) for want in wanted]
    assert is_pad.tolist() == [not 0 <= want < length for want in wanted]
    assert (indices.dtype, is_pad.dtype) == (np.int64, np.bool_)


@pytest.mark.parametrize("frame", [100_004, 2**24 - 1, 2**24, 2**24 + 1, 2**31 + 3])
def test_far_frames_stay_exact(frame: int) -> None:
    windows = Windows.from_delta_timestamps({"a": [-2 / 30, -1 / 30, 0.0, 1 / 30, 3 / 30]}, 30)
    indices, is_pad = windows.indices("a", frame, frame + 2)
    assert indices.tolist() == [frame - 2, frame - 1, frame, frame + 1, frame + 1]
    assert is_pad.tolist() == [False, False, False, False, True]


def test_many_anchors_at_once() -> None:
    windows = Windows.from_delta_timestamps({"a": [-0.1, 0.0, 0.2]}, 10)
    frames, lengths = np.array([0, 4, 2, 0]), np.array([5, 5, 3, 1])
    indices, is_pad = windows.indices_many("a", frames, lengths)
    for row, (frame, length) in enumerate(zip(frames, lengths, strict=True)):
        one, pad = windows.indices("a", int(frame), int(length))
        np.testing.assert_array_equal(indices[row], one)
        np.testing.assert_array_equal(is_pad[row], pad)
    assert windows.indices_many("a", np.empty(0, dtype=np.int64), 5)[0].shape == (0, 3)


def test_offsets_beside_the_grid_are_all_listed() -> None:
    with pytest.raises(SettingsError) as error:
        Windows.from_delta_timestamps({"action": [0.0, 0.05, 0.1], "state": [0.033]}, 10)
    for part in ("action: 0.05", "state: 0.033", "0.0001", "10 fps"):
        assert part in str(error.value)


def test_a_deviation_equal_to_the_tolerance_is_allowed() -> None:
    assert Windows.from_delta_timestamps({"a": [0.125]}, 1, 0.125).deltas["a"].tolist() == [0]
    with pytest.raises(SettingsError):
        Windows.from_delta_timestamps({"a": [0.125]}, 1, 0.1249)
    assert Windows.from_delta_timestamps({"a": [0.5, 1.5]}, 1, 0.5).deltas["a"].tolist() == [0, 2]


@pytest.mark.parametrize("offsets", [[], [float("nan")], [float("inf")], ["0.1"], [None], [True], 0.1, "0.1"])
def test_offsets_that_are_no_seconds(offsets: object) -> None:
    with pytest.raises(SettingsError, match="action"):
        Windows.from_delta_timestamps({"action": offsets}, 10)  # type: ignore[dict-item]


@pytest.mark.parametrize(("fps", "tolerance_s"), [(0, 1e-4), (float("nan"), 1e-4), (10, -1), (10, float("nan"))])
def test_rates_and_tolerances_that_are_none(fps: float, tolerance_s: float) -> None:
    with pytest.raises(SettingsError):
        Windows.from_delta_timestamps({"a": [0.0]}, fps, tolerance_s)


def test_keys_are_checked_against_the_features(dataset: Dataset) -> None:
    info = dataset.open().info
    windows = Windows.from_delta_timestamps({"action": [0.0], "observation.images.cam0": [-0.1, 0.0]}, info.fps, info=info)
    assert windows.keys == ("action", "observation.images.cam0")
    assert "action" in windows
    assert (windows.size("action"), windows.size("index")) == (1, None)
    with pytest.raises(SelectionError, match=r"actions.*it has observation\.state, action"):
        Windows.from_delta_timestamps({"actions": [0.0]}, info.fps, info=info)
    dataset.edit_info(lambda fields: fields["features"].update(note={"dtype": "string", "shape": [1], "names": None}))
    info = dataset.open().info
    with pytest.raises(SelectionError, match="cannot be stacked"):
        Windows.from_delta_timestamps({"note": [0.0]}, info.fps, info=info)


def test_no_windows() -> None:
    assert Windows.from_delta_timestamps(None, 30).keys == ()
