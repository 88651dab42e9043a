"""The main job on real input, through Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import xxhash

from actors.manager import PoolSettings
from ingest.engine import open_dataset
from ingest.engine.modes import DecodeMode
from ingest.engine.spec import ReadOptions
from ingest.plan import PlanSettings, plan_epoch
from train_integration.delivery import deliver_locally, deliver_through_ray
from train_integration.job import JobSettings, coverage, make_plan, run_training
from train_integration.options import StreamConfig, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.shared, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]


def real_recording(shared_dir: Path) -> Path:
    return shared_dir / "data" / "datasets" / "v30_cr5_real_22ep"


def linear_digests(root: Path, camera: str) -> dict[int, int]:
    """Digest of the picture of each row, from decoding every file from its start: picture k of a file is its k-th row."""
    source = open_dataset(root).source
    digests: dict[int, int] = {}
    rows: dict[str, list[int]] = {}
    for episode in source.episodes.episode_index.tolist():
        path, first, count = source.pictures(episode, camera)
        start = int(source.episodes.dataset_from[source.episodes.row(episode)])
        listed = rows.setdefault(path, [])
        listed.extend([-1] * (first + count - len(listed)))
        listed[first : first + count] = range(start, start + count)
    for path, listed in rows.items():
        with av.open(str(root / path)) as container:
            for index, frame in zip(listed, container.decode(video=0), strict=True):
                digests[index] = xxhash.xxh3_64_intdigest(frame.to_ndarray(format="rgb24").tobytes())
    return digests


def stream_config(**plan: Any) -> StreamConfig:
    return StreamConfig(plan=PlanSettings(clamp_workers=True, **plan), decoded_budget_gb=0.6)


def deliver(root: Path, config: StreamConfig, world_size: int, epoch: int = 0) -> Any:
    description, _ = open_stream(root, config)
    return deliver_through_ray(
        description, world_size=world_size, cursor=None, epoch=epoch, max_steps=None, digests=True, pool=PoolSettings(actors=2)
    )


def test_a_real_recording_comes_whole_and_pixel_exact(shared_dir: Path) -> None:
    root = real_recording(shared_dir)
    camera = open_dataset(root).source.cameras[0]
    config = stream_config(strategy="lanes", batch_size=16, seed=5)
    first, second = deliver(root, config, 2), deliver(root, config, 2, epoch=1)
    expected = linear_digests(root, camera)
    for found in (first, second):
        np.testing.assert_array_equal(np.sort(found.rows["index"]), np.arange(4924))
        wrong = [int(i) for i, d in zip(found.rows["index"], found.rows[f"digest:{camera}"], strict=True) if expected[int(i)] != int(d)]
        assert not wrong
    # The plan decides the order, so a second run has the same one; another epoch has another one.
    description, dataset = open_stream(root, config)
    for epoch, found in enumerate((first, second)):
        plan = plan_epoch(description.units, description.with_topology(world_size=2), epoch=epoch)
        table = plan.order_table()
        np.testing.assert_array_equal(found.rows["frame_index"], table.frame_index)
        np.testing.assert_array_equal(found.rows["episode_index"], table.episode_index)
    assert not np.array_equal(first.rows["index"], second.rows["index"])
    assert dataset.num_frames == 4924


@pytest.mark.parametrize(
    ("world_size", "workers", "batch_size", "strategy"),
    [(1, 3, 7, "lanes"), (2, 1, 4, "round_robin"), (3, 3, 1, "remaining"), (4, 1, 4, "sequential")],
)
def test_topologies_through_ray(shared_dir: Path, world_size: int, workers: int, batch_size: int, strategy: str) -> None:
    root = shared_dir / "data" / "trials" / "11_exact_coverage_ranks_resume" / "ds"
    config = stream_config(strategy=strategy, batch_size=batch_size, workers=workers)
    found = deliver(root, config, world_size)
    description, dataset = open_stream(root, config)
    plan = plan_epoch(description.units, description.with_topology(world_size=world_size))
    expected = deliver_locally(dataset, description, plan, ranks=list(range(world_size)), max_steps=None, digests=True)
    for name in expected.rows:
        if name != "t_ns":
            np.testing.assert_array_equal(found.rows[name], expected.rows[name], err_msg=name)
    np.testing.assert_array_equal(np.sort(found.rows["index"]), np.arange(73))


def test_training_on_a_real_recording_learns(shared_dir: Path, tmp_path: Path) -> None:
    config = StreamConfig(
        plan=PlanSettings(strategy="lanes", seed=3, world_size=2, batch_size=16, tail="pad"),
        read=ReadOptions(action_chunk=4, image_size=(96, 128)),
        epochs=None,
        decoded_budget_gb=0.6,
    )
    description, dataset = open_stream(real_recording(shared_dir), config)
    plan = make_plan(dataset, steps=170, chunk=4, seed=3, save_every=85, learning_rate=2e-3)
    result = run_training(description, plan, JobSettings(output_dir=tmp_path / "run", world_size=2, pool=PoolSettings(actors=2)))
    losses = [entry["loss"] for entry in result.log]
    assert sum(losses[-15:]) < 0.75 * sum(losses[:15])
    (whole, *_) = coverage(description, result.rows, 2)
    assert whole.complete
    assert (whole.missing, whole.duplicated, whole.in_order) == (0, 0, True)


@pytest.mark.parametrize("mode", ["auto", pytest.param("on_demand", marks=pytest.mark.soak)])
def test_open_groups_long_groups_and_fragments_come_pixel_exact_through_decode_actors(shared_dir: Path, mode: DecodeMode) -> None:
    (trial,) = (shared_dir / "data" / "trials").glob("09_*")
    for root in sorted(path for path in trial.iterdir() if path.is_dir()):
        camera = open_dataset(root).source.cameras[0]
        config = replace(stream_config(strategy="lanes", batch_size=8), lane_frames=16, decode_mode=mode)
        found = deliver(root, config, 2)
        expected = linear_digests(root, camera)
        assert sorted(found.rows["index"].tolist()) == sorted(expected)
        wrong = [int(i) for i, d in zip(found.rows["index"], found.rows[f"digest:{camera}"], strict=True) if expected[int(i)] != int(d)]
        assert not wrong, f"{root.name}: {wrong[:8]}"
