"""Real and LeRobot-written datasets: every picture where it belongs, every item as LeRobot gives it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from answers import SEQUENTIAL, barcodes, cli, linear, sha256

from ingest.engine import Dataset, open_dataset
from ingest.lerobot.barcode import picture_code
from ingest.plan import PlanSettings, plan_epoch
from train_integration.recording import picture_digests

pytestmark = pytest.mark.shared


@pytest.mark.parametrize("name", ["v30_pusht_206ep_synthvideo", "v30_chenfei_act_55ep_synthvideo", "v30_samuele_4ep_synthvideo"])
def test_every_picture_carries_its_row(shared_dir: Path, name: str) -> None:
    dataset = open_dataset(shared_dir / "data/datasets" / name, columns=["index"], return_uint8=True)
    found = barcodes(dataset)
    assert dataset.num_frames == dataset.source.info.total_frames
    for number, camera in enumerate(dataset.spec.cameras):
        assert len(found[camera]) == dataset.num_frames
        wrong = [index for index, code in found[camera].items() if code != picture_code(index, number)]
        assert not wrong, f"{camera}: {wrong[:5]}"


def test_a_real_recording_equals_its_linear_decode(shared_dir: Path) -> None:
    root = shared_dir / "data/datasets/v30_cr5_real_22ep"
    dataset = open_dataset(root, columns=["index", "timestamp"], return_uint8=True)
    (camera,) = dataset.spec.cameras
    wanted: dict[tuple[str, int], int] = {}
    for path in dataset.source.camera_map(camera).paths:
        for number, digest in enumerate(_linear_digests(root / path)):
            wanted[path, number] = digest
    seen: set[int] = set()
    wall_clock = 0.0
    plan = plan_epoch(dataset.units(), SEQUENTIAL)
    for planned, batch in dataset.iter_batches(plan):
        episodes = plan.units.episode[planned.unit].tolist()
        for episode, frame, index, digest in zip(
            episodes, planned.frame.tolist(), batch["index"].tolist(), picture_digests(batch[camera]).tolist(), strict=True
        ):
            assert wanted[dataset.source.locate(episode, frame, camera)] == digest
            seen.add(index)
        wall_clock = max(wall_clock, float(np.abs(batch["timestamp"] - planned.frame / dataset.fps).max()))
    assert seen == set(range(4924))
    assert len(wanted) == 4924
    assert wall_clock > 2


def _linear_digests(path: Path) -> list[int]:
    import av

    with av.open(str(path)) as container:
        return [xxhash.xxh3_64_intdigest(frame.to_ndarray(format="rgb24").tobytes()) for frame in container.decode(video=0)]


def test_two_ranks_deliver_a_real_recording_once(shared_dir: Path) -> None:
    dataset = open_dataset(shared_dir / "data/datasets/v30_cr5_real_22ep", cameras=[])
    starts = dataset.source.episodes.dataset_from
    orders: list[list[int]] = []
    for epoch in (0, 0, 1):
        table = plan_epoch(dataset.units(), PlanSettings(world_size=2, workers=2, batch_size=8), epoch=epoch).order_table()
        order = (starts[table.episode_index] + table.frame_index).tolist()
        assert sorted(order) == list(range(4924))
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("kind", ["items", "windows"])
@pytest.mark.parametrize("name", ["small", "h264b"])
def test_items_equal_those_of_the_reference_reader(shared_dir: Path, name: str, kind: str) -> None:
    root = shared_dir / "data/lerobot_written"
    answer = json.loads((root / f"{name}.{kind}.json").read_text())
    floats = open_dataset(root / name, delta_timestamps=answer["delta_timestamps"])
    exact = open_dataset(root / name, delta_timestamps=answer["delta_timestamps"], return_uint8=True)
    assert answer["items"]
    for entry in answer["items"]:
        item, whole, wanted = floats[entry["index"]], exact[entry["index"]], entry["item"]
        assert set(item) == set(wanted)
        for key, described in wanted.items():
            _compare(key, item[key], whole[key], described)


def _compare(key: str, value: Any, whole: Any, described: dict[str, Any]) -> None:
    if described.get("type") == "str":
        assert value == described["value"]
        return
    assert value.dtype.name == described["dtype"], key
    assert list(value.shape) == described["shape"], key
    if "sha256_uint8" in described:
        assert sha256(whole) == described["sha256_uint8"], key
        np.testing.assert_array_equal(value, whole.astype(np.float32) / np.float32(255))
    else:
        assert value.tolist() == described["values"], key


def test_one_changed_item_is_noticed(shared_dir: Path) -> None:
    root = shared_dir / "data/lerobot_written"
    entry = json.loads((root / "small.items.json").read_text())["items"][3]
    dataset: Dataset = open_dataset(root / "small")
    item, whole = dataset[entry["index"]], open_dataset(root / "small", return_uint8=True)[entry["index"]]
    for key, described in entry["item"].items():
        for field in set(described) & {"values", "value", "dtype", "shape", "sha256_uint8"}:
            with pytest.raises(AssertionError):
                _compare(key, item[key], whole[key], described | {field: "something else"})


@pytest.mark.parametrize("command", [["plan"], ["stream", "--engine", "local"]])
@pytest.mark.parametrize("strategy", ["remaining", "lanes"])
def test_stopped_at_random_steps_the_rest_is_the_same(shared_dir: Path, tmp_path: Path, command: list[str], strategy: str) -> None:
    (trial,) = (shared_dir / "data/trials").glob("11_*")
    arguments = [trial / "ds", "--world-size", 2, "--workers", 2, "--batch-size", 2, "--strategy", strategy]
    whole = _order(tmp_path, [*command, *arguments])
    last = max(row[1] for row in whole)
    generator = random.Random(11)
    stops = [generator.randrange(last + 1) for _ in range(20)]
    for number, stop in enumerate(stops):
        cursor = tmp_path / f"{number}.json"
        head = _order(tmp_path, [*command, *arguments, "--max-steps", stop, "--cursor-out", cursor])
        rest = _order(tmp_path, [*command, *arguments, "--cursor-in", cursor])
        assert all(row[1] < stop for row in head)
        assert sorted(head + rest) == whole


@pytest.mark.parametrize("worlds", [(2, 3, 1), (4, 1, 2), (1, 8, 3)])
def test_chains_of_world_sizes_deliver_every_row_once(shared_dir: Path, tmp_path: Path, worlds: tuple[int, ...]) -> None:
    (trial,) = (shared_dir / "data/trials").glob("11_*")
    rows: list[int] = []
    cursor = tmp_path / "cursor.json"
    for number, world in enumerate(worlds):
        arguments = ["stream", trial / "ds", "--engine", "local", "--world-size", world, "--batch-size", 3, "--cursor-out", cursor]
        arguments += ["--cursor-in", cursor] if number else []
        arguments += ["--max-steps", 2] if number + 1 < len(worlds) else []
        rows += [row[3] for row in _order(tmp_path, arguments)]
    assert sorted(rows) == list(range(73))


def _order(tmp_path: Path, arguments: list[Any]) -> list[tuple[int, ...]]:
    file = tmp_path / "order.parquet"
    status, _ = cli(*arguments, "--order", file)
    assert status == 0
    table = pq.read_table(file)
    return sorted(zip(*(table.column(name).to_pylist() for name in ("rank", "step", "position", "index")), strict=True))


def test_the_local_engine_covers_a_trial_in_every_order(shared_dir: Path) -> None:
    (trial,) = (shared_dir / "data/trials").glob("11_*")
    dataset = open_dataset(trial / "ds", return_uint8=True)
    (path,) = dataset.source.camera_map(dataset.spec.cameras[0]).paths[:1]
    assert len(linear(trial / "ds" / path)) == int(dataset.source.camera_map(dataset.spec.cameras[0]).pictures[0])
    for strategy in ("lanes", "remaining", "sequential", "reservoir"):
        for world, workers, batch in ((1, 1, 7), (2, 3, 4), (3, 1, 1), (8, 1, 4)):
            settings = PlanSettings(strategy=strategy, world_size=world, workers=workers, batch_size=batch, clamp_workers=True)
            plan = plan_epoch(dataset.units(), settings)
            seen = [index for rank in range(world) for _, found in dataset.iter_batches(plan, rank) for index in found["index"].tolist()]
            assert sorted(seen) == list(range(73))
