"""Frames so far into an episode that their time in single precision names a neighbour: position decides, not time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from streams import described, opened

from ingest.engine import ReadOptions, open_dataset
from ingest.lerobot.barcode import read_barcode
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import plan_epoch

CAMERA = "observation.images.cam0"
FRAMES = 100_010
DELTAS = (-2, 0, 3, 8)


def test_pictures_and_rows_beyond_frame_hundred_thousand(tmp_path: Path) -> None:
    make_dataset(tmp_path / "ds", MakeOptions(episodes=1, frames=f"{FRAMES}:{FRAMES}", cameras=1, size=(32, 64), fps=30, gop=30))
    # The stored column is off by more than any tolerance there.
    assert abs(float(np.float32(100_004 / 30)) - 100_004 / 30) > 1e-4
    window = [delta / 30 for delta in DELTAS]
    read = ReadOptions(delta_timestamps={CAMERA: window, "action": window})
    dataset, plain = open_dataset(tmp_path / "ds", options=read, return_uint8=True), open_dataset(tmp_path / "ds", cameras=())

    def check(frame: int, pictures: np.ndarray, pads: np.ndarray, actions: np.ndarray, action_pads: np.ndarray) -> None:
        wanted = [min(max(frame + delta, 0), FRAMES - 1) for delta in DELTAS]
        assert [read_barcode(picture) for picture in pictures] == [number % (1 << 16) for number in wanted]
        assert pads.tolist() == action_pads.tolist() == [frame + delta >= FRAMES for delta in DELTAS]
        for place, number in enumerate(wanted):
            np.testing.assert_array_equal(actions[place], plain.sample(0, number)["action"])

    for frame in (99_998, 100_000, 100_004, FRAMES - 1):
        sample = dataset.sample(0, frame)
        check(frame, *(np.asarray(sample[key]) for key in (CAMERA, f"{CAMERA}_is_pad", "action", "action_is_pad")))
    description, _ = described(tmp_path / "ds", strategy="sequential", batch_size=4, lane_frames=None, read=read)
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    with opened(description, cursor=plan.cursor_at(plan.steps - 2)) as stream:
        batches = list(stream)
    found = [int(frame) for batch in batches for frame in batch["frame_index"]]
    assert found == list(range(FRAMES - 6, FRAMES))
    for batch in batches:
        for place, frame in enumerate(batch["frame_index"].tolist()):
            check(frame, *(batch[key][place] for key in (CAMERA, f"{CAMERA}_is_pad", "action", "action_is_pad")))
