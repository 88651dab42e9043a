"""Units that fit a decoded budget: every unit is decoded once, whatever the budget, the groups of pictures and the windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streams import described, opened

from ingest.engine import ReadOptions
from ingest.lerobot.make import MakeOptions, make_dataset
from train_integration.unit_sizes import that_fits

PICTURE = 32 * 64 * 3


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Datasets of four episodes of a hundred frames, by group of pictures."""
    places: dict[int, Path] = {}
    for gop in (2, 40):
        places[gop] = tmp_path_factory.mktemp("units") / "ds"
        make_dataset(places[gop], MakeOptions(episodes=4, frames="100:100", cameras=2, size=(32, 64), gop=gop))
    return places


@pytest.mark.parametrize("window", [None, [-0.1, 0.0]])
@pytest.mark.parametrize(
    ("gop", "held", "lanes", "longest"),
    [(2, 10_000, 4, 100), (2, 320, 4, 40), (2, 130, 4, 16), (2, 60, 1, 28), (40, 800, 4, 100), (40, 420, 4, 40), (40, 200, 2, 40)],
)
def test_what_fits_is_decoded_once(long: dict[int, Path], gop: int, held: int, lanes: int, longest: int, window: Any) -> None:
    cameras = ("observation.images.cam0", "observation.images.cam1")
    read = ReadOptions(delta_timestamps=None if window is None else dict.fromkeys(cameras, window), columns=("index",))
    description, dataset = described(long[gop], strategy="lanes", batch_size=4, lanes=4, lane_frames=128, read=read, prefetch_batches=1)
    fitting = that_fits(dataset, description, world_size=1, decoded_bytes=held * PICTURE)
    assert int(fitting.units.frames.sum()) == 400
    if window is None:
        assert (fitting.config.plan.lane_count(4), int(fitting.units.frames.max())) == (lanes, longest)
    with opened(fitting, decoded_bytes=held * PICTURE) as stream:
        assert sum(len(batch["is_pad"]) for batch in stream) == 400
        totals = stream.counters.totals()
    assert totals["reelray_decoded_bytes_peak"] <= held * PICTURE
    # A window of 0.1 s reaches three pictures back, and so into groups before its unit, of both cameras.
    again = 0 if window is None else 2 * (gop + 3) * len(fitting.units.frames)
    assert 800 <= totals["reelray_pictures_decoded"] <= 800 + again


def test_what_cannot_be_cut_is_left_as_it_is(long: dict[int, Path]) -> None:
    unlike: list[dict[str, Any]] = [{"strategy": "sequential"}, {"strategy": "lanes", "read": ReadOptions(cameras=())}]
    for changes in unlike:
        description, dataset = described(long[2], batch_size=4, lane_frames=64, **changes)
        assert that_fits(dataset, description, world_size=1, decoded_bytes=1) is description
    description, dataset = described(long[2], strategy="lanes", batch_size=4, lane_frames=64)
    by_sample = replace(description, config=replace(description.config, decode_mode="on_demand"))
    assert that_fits(dataset, by_sample, world_size=1, decoded_bytes=1) is by_sample
