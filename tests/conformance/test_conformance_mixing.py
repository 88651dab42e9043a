"""How well the native orders mix real recordings, at what price: against the pool order that holds as many decoded pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan import decode_amplification
from ingest.engine import ReadOptions, open_dataset
from ingest.plan import EpochPlan, PlanSettings, Units, measure_mixing, plan_epoch, report_plan
from train_integration.decoding import InlineDecoding
from train_integration.feed import LocalFeed
from train_integration.options import StreamConfig, open_stream
from train_integration.stream import SampleStream

pytestmark = pytest.mark.shared
BATCH = 16


def planned(units: Units, strategy: str, pool: int | None = None) -> EpochPlan:
    settings = PlanSettings(strategy=strategy, batch_size=BATCH, pool_size=pool)  # pyright: ignore[reportArgumentType]
    return plan_epoch(units, settings)


def held_pictures(plan: EpochPlan) -> int:
    """Most pictures of open units at a time, each unit counted whole until its last use."""
    return int(report_plan(plan).peak_frames[0])


@pytest.mark.parametrize("name", ["v30_chenfei_act_55ep_synthvideo", "v30_pusht_206ep_synthvideo"])
@pytest.mark.parametrize("lane_frames", [30, 64])
def test_the_reservoir_mixes_more_episodes_than_the_pool_at_equal_decoded_bytes(shared_dir: Path, name: str, lane_frames: int) -> None:
    dataset = open_dataset(shared_dir / "data/datasets" / name)
    ours = planned(dataset.units(lane_frames=lane_frames), "reservoir")
    held, pool, theirs = held_pictures(ours), 0, None
    while theirs is None or held_pictures(theirs) < held:
        # The pool is given what the reservoir holds, or more, never less.
        pool += 1
        theirs = planned(dataset.units(), "remaining", pool)
    mine, other = measure_mixing(ours.rank(0)), measure_mixing(theirs.rank(0))
    assert mine.distinct_episodes >= 1.2 * other.distinct_episodes
    assert mine.uniform_distance < other.uniform_distance
    assert decode_amplification(dataset, ours.rank(0).orders[0].pieces) <= 1.05
    lanes = planned(dataset.units(lane_frames=lane_frames), "lanes")
    assert held_pictures(lanes) < held
    assert measure_mixing(lanes.rank(0)).distinct_episodes >= 0.95 * BATCH


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v30_chenfei_act_55ep_synthvideo", "v30_pusht_206ep_synthvideo"])
def test_a_stream_decodes_every_picture_of_the_reservoir_about_once(shared_dir: Path, name: str) -> None:
    read = ReadOptions(image_size=(96, 128))
    config = StreamConfig(plan=PlanSettings(strategy="reservoir", batch_size=BATCH), decode="inline", lane_frames=30, read=read)
    description, dataset = open_stream(shared_dir / "data/datasets" / name, config)
    decoding = lambda counters: InlineDecoding(2, name, counters)  # noqa: E731
    with SampleStream(description, 0, 1, LocalFeed(description.job), decoding, decoded_bytes=1 << 30, output="numpy") as stream:
        seen = [index for batch in stream for index in batch["index"].tolist()]
        totals = stream.counters.totals()
    assert sorted(seen) == list(range(dataset.num_frames))
    assert totals["reelray_camera_frames_delivered"] == dataset.num_frames * len(dataset.spec.cameras)
    assert totals["reelray_pictures_decoded"] <= 1.05 * totals["reelray_camera_frames_delivered"]
