"""The class with LeRobot's arguments: its order, epochs, resume and refusals, against a plain reading of LeRobot's rules."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingest.engine import open_dataset
from ingest.errors import CursorError, PlanError, SelectionError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.storage.executor import close_executor, configure_executor, shared_executor
from ingest.storage.local import LocalStore

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

import reelray  # noqa: E402
from train_integration import iterable  # noqa: E402
from train_integration.lerobot_dataset import StreamingLeRobotDataset  # noqa: E402

# --- LeRobot's rules, plainly -----------------------------------------------------------------------


def shards(episodes: list[int], counts: dict[int, int], number: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(number)]
    for episode in sorted(episodes, key=lambda one: (-counts[one], one)):
        min(parts, key=lambda part: sum(counts[one] for one in part)).append(episode)
    return parts


def pool_epoch(
    episodes: list[int], counts: dict[int, int], *, pool: int, seed: int, epoch: int, strategy: str
) -> Iterator[tuple[int, int]]:
    random = np.random.default_rng([seed, epoch])
    pending = np.array(sorted(episodes))
    random.shuffle(pending)
    waiting, residents, turn = pending.tolist(), {}, []

    def admit() -> None:
        while len(residents) < pool and waiting:
            frames = np.arange(counts[waiting[0]])
            random.shuffle(frames)
            residents[waiting.pop(0)] = frames.tolist()

    admit()
    while residents:
        if strategy == "remaining":
            draw = int(random.integers(sum(map(len, residents.values()))))
            for episode in list(residents):
                if draw < len(residents[episode]):
                    break
                draw -= len(residents[episode])
        else:
            if not turn:
                order = np.array(list(residents))
                random.shuffle(order)
                turn = order.tolist()
            episode = turn.pop()
        frame = residents[episode].pop()
        if not residents[episode]:
            del residents[episode]
            admit()
        yield episode, frame


class Rules:
    """What a rank delivers by LeRobot's rules: batches from its workers in turn, each with epochs of its own."""

    def __init__(self, root: Path, *, workers: int = 0, rank: int = 0, world: int = 1, pool: int | None = None, **order: Any) -> None:
        source = open_source(LocalStore.at(root))
        self.starts = dict(zip(source.episodes.episode_index.tolist(), source.episodes.dataset_from.tolist(), strict=True))
        self.counts = dict(zip(source.episodes.episode_index.tolist(), source.episodes.length.tolist(), strict=True))
        mine = shards(sorted(self.counts), self.counts, world)[rank]
        self.shares = shards(mine, self.counts, workers) if workers > 1 else [mine]
        self.pool = max(1, round(32 / max(1, workers))) if pool is None else pool
        self.order = {"seed": 42, "strategy": "remaining"} | order

    def samples(self, worker: int, epoch: int, *, repeat: bool = False, shuffle: bool = True) -> Iterator[int]:
        while True:
            order = pool_epoch(self.shares[worker], self.counts, pool=self.pool, epoch=epoch if shuffle else 0, **self.order)
            yield from (self.starts[episode] + frame for episode, frame in order)
            epoch += 1
            if not repeat:
                return

    def batches(self, size: int, epoch: int = 0, **how: Any) -> Iterator[list[int]]:
        live = [self.samples(worker, epoch, **how) for worker in range(len(self.shares))]
        while live:
            for one in list(live):
                batch = list(islice(one, size))
                if batch:
                    yield batch
                if len(batch) < size:
                    live.remove(one)


def found(dataset: StreamingLeRobotDataset, workers: int, size: int, limit: int | None = None) -> list[list[int]]:
    loader = DataLoader(dataset, batch_size=size, num_workers=workers)
    return [batch["index"].tolist() for batch in islice(loader, limit)]


def in_worker(dataset: StreamingLeRobotDataset, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterates as loader worker 0 does, in this process: after an error in a real one, torch takes five seconds to end each of them."""
    with monkeypatch.context() as patch:
        patch.setattr(iterable, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=workers))
        for _ in dataset:
            pass


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


# --- order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "workers", "size", "given"),
    [
        ("remaining", 0, 5, 1),
        ("remaining", 1, 7, 4),
        ("remaining", 3, 4, 1),
        ("round_robin", 0, 4, 4),
        ("round_robin", 2, 5, 5),
    ],
)
def test_epochs_are_lerobots_whatever_the_loader(small: Path, strategy: Any, workers: int, size: int, given: int) -> None:
    dataset = StreamingLeRobotDataset(str(small), sampling_strategy=strategy, batch_size=given)
    rules = Rules(small, workers=workers, strategy=strategy)
    assert found(dataset, workers, size) == list(rules.batches(size))
    assert found(dataset, workers, size) == list(rules.batches(size, epoch=1))
    dataset.set_epoch(4)
    assert found(dataset, workers, size) == list(rules.batches(size, epoch=4))


@pytest.mark.parametrize(
    ("options", "workers", "pool", "order"),
    [
        ({"episode_pool_size": 2}, 2, 2, {}),
        ({"buffer_size": 5}, 0, 5, {}),
        ({"buffer_size": 5}, 2, 2, {}),
        ({"buffer_size": 7, "max_num_shards": 1, "prefetch_episodes": 0}, 2, 4, {}),
        ({"seed": None}, 0, 32, {}),
        ({"seed": 7}, 0, 32, {"seed": 7}),
        ({"byte_budget_gb": 1e-5}, 0, None, {}),
    ],
)
def test_what_decides_the_order(small: Path, options: dict[str, Any], workers: int, pool: int | None, order: dict[str, Any]) -> None:
    dataset = StreamingLeRobotDataset(str(small), **options)
    batches = found(dataset, workers, 4)
    if pool is None:
        # The budget admits fewer episodes than the pool: another order, of the same frames.
        assert batches != list(Rules(small).batches(4))
        assert sorted(flat(batches)) == list(range(dataset.num_frames))
    else:
        assert batches == list(Rules(small, workers=workers, pool=pool, **order).batches(4))


def test_without_shuffling_the_first_epoch_comes_again(small: Path) -> None:
    dataset = StreamingLeRobotDataset(str(small), shuffle=False)
    first = list(Rules(small).batches(6))
    assert [found(dataset, 0, 6) for _ in range(2)] == [first, first]


@pytest.mark.parametrize(("workers", "size", "shuffle"), [(0, 16, True), (0, 16, False), (2, 5, True), (3, 8, False)])
def test_repeating_goes_on_for_ever_and_inside_batches(small: Path, workers: int, size: int, shuffle: bool) -> None:
    dataset = StreamingLeRobotDataset(str(small), repeat=True, shuffle=shuffle)
    steps = 3 * dataset.num_frames // size
    rules = Rules(small, workers=workers)
    assert found(dataset, workers, size, steps) == list(islice(rules.batches(size, repeat=True, shuffle=shuffle), steps))


def test_native_orders_deliver_every_frame_once_too(small: Path) -> None:
    for strategy in ("lanes", "sequential"):
        dataset = StreamingLeRobotDataset(str(small), sampling_strategy=strategy, batch_size=4)
        assert sorted(flat(found(dataset, 2, 4))) == list(range(dataset.num_frames))


# --- resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize(("workers", "steps"), [(0, 0), (0, 4), (0, 11), (2, 1), (3, 4), (3, 11)])
def test_lerobots_state_goes_on_after_its_samples(small: Path, repeat: bool, workers: int, steps: int) -> None:
    size = 5
    expected = list(islice(Rules(small, workers=workers).batches(size, repeat=repeat), 40))
    dataset = StreamingLeRobotDataset(str(small), repeat=repeat)
    dataset.load_state_dict({"epoch": 0, "offset": steps * size, "batch_size": size})
    assert found(dataset, workers, size, 40 - steps) == expected[steps:]


def test_a_single_consumer_goes_on_from_any_sample(small: Path) -> None:
    for repeat, offset in ((False, 7), (True, 7), (True, 2 * 57 + 3)):
        dataset = StreamingLeRobotDataset(str(small), repeat=repeat)
        order = flat(islice(Rules(small).batches(1, epoch=2, repeat=repeat), 300))
        dataset.load_state_dict({"epoch": 2, "offset": offset, "batch_size": 4})
        assert [int(sample["index"]) for sample in islice(dataset, 40)] == order[offset : offset + 40]
    dataset = StreamingLeRobotDataset(str(small))
    dataset.load_state_dict({"offset": 10_000})
    assert list(dataset) == []
    assert found(dataset, 0, 5) == list(Rules(small).batches(5, epoch=1))


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_its_own_state_goes_on_with_the_batch_size_that_it_counts(small: Path, repeat: bool, workers: int) -> None:
    size, steps = 5, 4
    expected = list(islice(Rules(small, workers=workers).batches(size, repeat=repeat), 20))
    dataset = StreamingLeRobotDataset(str(small), repeat=repeat)
    dataset.load_state_dict({"offset": 2 * size, "batch_size": size})
    assert found(dataset, workers, size, steps - 2) == expected[2:steps]
    state = json.loads(json.dumps(dataset.state_dict(steps - 2)))
    fresh = StreamingLeRobotDataset(str(small), repeat=repeat)
    fresh.load_state_dict(state)
    assert found(fresh, workers, size, 20 - steps) == expected[steps:]


def test_states_that_mean_nothing_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = StreamingLeRobotDataset(str(small))
    for state, message in (
        ({"epoch": -1}, "epoch must be non-negative"),
        ({"offset": -1}, "offset must be non-negative"),
        ({"batch_size": 0}, "batch_size must be positive"),
        ({"offset": 2.5}, "offset must be non-negative and whole"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.load_state_dict(state)
    with pytest.raises(CursorError, match="version"):
        dataset.load_state_dict({"offset": 1, "step": 2})
    dataset.load_state_dict({"offset": 7, "batch_size": 4})
    with pytest.raises(ValueError, match="not a whole number of batches of 4; resuming with 2 DataLoader workers needs whole batches"):
        in_worker(dataset, 2, monkeypatch)
    other = StreamingLeRobotDataset(str(small), seed=7)
    with pytest.raises(CursorError, match="seed"):
        next(iter(_loaded(other, StreamingLeRobotDataset(str(small)).state_dict())))


def _loaded(dataset: StreamingLeRobotDataset, state: dict[str, Any]) -> StreamingLeRobotDataset:
    dataset.load_state_dict(state)
    return dataset


# --- ranks and selection ----------------------------------------------------------------------------


def test_ranks_share_the_episodes(small: Path) -> None:
    everything = []
    for rank in range(3):
        dataset = StreamingLeRobotDataset(str(small), rank=rank, world_size=3)
        rules = Rules(small, rank=rank, world=3)
        batches = found(dataset, 0, 4)
        assert batches == list(rules.batches(4))
        everything += flat(batches)
        assert dataset.num_frames_for_rank(rank, 3) == sum(map(len, batches))
        assert dataset.num_episodes_for_rank(rank, 3) == len(rules.shares[0])
        assert (dataset.num_frames, dataset.num_episodes) == (sum(rules.counts.values()), 7)
    assert sorted(everything) == list(range(dataset.num_frames))
    assert [dataset.num_episodes_for_rank(rank, 9) for rank in (0, 6, 7)] == [1, 1, 0]
    assert dataset.num_frames_for_rank(8, 9) == 0
    for rank, world in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} and world_size {world}"):
            dataset.num_frames_for_rank(rank, world)
        with pytest.raises(ValueError, match=f"rank {rank} and world_size {world}"):
            dataset.num_episodes_for_rank(rank, world)


def test_ranks_and_workers_without_episodes_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        PlanError, match="rank 8 owns no streaming episodes: 7 episodes over world_size 9; reduce the data-parallel world size"
    ):
        StreamingLeRobotDataset(str(small), rank=8, world_size=9)
    dataset = StreamingLeRobotDataset(str(small), rank=0, world_size=3)
    message = "owns 2 streaming episodes, fewer than its 3 workers; reduce num_workers"
    with pytest.raises(ValueError, match=message):
        dataset.num_frames_for_rank(0, 3, 3)
    with pytest.raises(ValueError, match=message):
        in_worker(dataset, 3, monkeypatch)
    assert dataset.num_frames_for_rank(0, 3, 2) == dataset.num_frames_for_rank(0, 3, 0)


def test_selections(small: Path) -> None:
    dataset = StreamingLeRobotDataset(str(small), episodes=[5, 1, 5, 3], exclude_episodes=[3, 99])
    lengths = open_source(LocalStore.at(small)).episodes.length
    assert (dataset.num_episodes, dataset.num_frames) == (2, int(lengths[5] + lengths[1]))
    assert {int(sample["episode_index"]) for sample in dataset} == {1, 5}
    for episodes in ([-1], [7]):
        with pytest.raises(SelectionError):
            StreamingLeRobotDataset(str(small), episodes=episodes)


# --- samples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"return_uint8": True, "depth_output_unit": "m"}])
def test_samples_equal_the_map_style_item(rich: Path, options: dict[str, Any]) -> None:
    windows = {"observation.images.cam0": [-0.2, 0.0], "action": [0.0, 0.1, 0.2]}
    dataset = StreamingLeRobotDataset("owner/name", rich, delta_timestamps=windows, **options)
    single = open_dataset(rich, delta_timestamps=windows, **options)
    for sample in islice(dataset, 20):
        item = single[int(sample["index"])]
        assert sample.keys() == item.keys()
        for key, value in item.items():
            if isinstance(value, np.ndarray):
                assert torch.equal(sample[key], torch.from_numpy(np.ascontiguousarray(value))), key
                assert sample[key].numpy().dtype == value.dtype
            else:
                assert sample[key] == value


def test_what_it_says_of_the_dataset(small: Path) -> None:
    dataset = StreamingLeRobotDataset(str(small), depth_output_unit="m")
    meta = dataset.meta
    assert (dataset.fps, meta.fps, meta.total_episodes, meta.total_frames) == (10, 10, 7, dataset.num_frames)
    assert meta.camera_keys == meta.video_keys == ["observation.images.cam0", "observation.images.cam1"]
    assert meta.features["observation.images.cam0"]["dtype"] == "video"
    assert tuple(meta.features["action"]["shape"]) == np.asarray(meta.stats["action"]["mean"]).shape
    assert dataset.depth_output_unit == "m"
    assert reelray.StreamingLeRobotDataset is StreamingLeRobotDataset


def test_transforms_in_torchvisions_style_get_the_pictures(small: Path) -> None:
    dataset = StreamingLeRobotDataset(str(small), image_transforms=lambda picture: torch.zeros_like(picture), return_uint8=True)
    assert not any(int(sample["observation.images.cam1"].max()) for sample in islice(dataset, 5))


# --- arguments --------------------------------------------------------------------------------------


def test_what_is_deprecated_or_without_effect_is_told(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reelray.lerobot")
    expected = found(StreamingLeRobotDataset(str(small)), 0, 5)
    assert not caplog.records
    with pytest.warns(FutureWarning, match="streaming is deprecated and has no effect"):
        dataset = StreamingLeRobotDataset(str(small), streaming=False)
    assert found(dataset, 0, 5) == expected
    with pytest.warns(FutureWarning, match="rng is deprecated and has no effect"):
        dataset = StreamingLeRobotDataset(str(small), rng=np.random.default_rng(3), video_decoder_cache_size=3, force_cache_sync=True)
    assert found(dataset, 0, 5) == expected
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["video_decoder_cache_size", "force_cache_sync"]


def test_connections_follow_the_fetch_threads(small: Path) -> None:
    import fsspec

    memory: Any = fsspec.filesystem("memory")
    memory.put(str(small), "/lerobot", recursive=True)
    try:
        for options, connections, subranges in (
            ({}, 16, 1),
            ({"max_num_shards": 2}, 8, 1),
            ({"episode_pool_size": 2, "prefetch_episodes": 8}, 10, 1),
            ({"native_http_connections": 3, "native_http_subranges": 5}, 3, 5),
        ):
            configure_executor()
            dataset = StreamingLeRobotDataset("memory://lerobot", **options)
            limits = shared_executor().limits
            assert (limits.connections, limits.subranges) == (connections, subranges)
        assert found(dataset, 0, 5) == list(Rules(small).batches(5))
    finally:
        memory.rm("/lerobot", recursive=True)
        configure_executor()
        close_executor()


def test_payload_may_be_elsewhere(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small / "meta", tmp_path / "described" / "meta")
    for part in ("data", "videos"):
        shutil.copytree(small / part, tmp_path / "payload" / part)
    dataset = StreamingLeRobotDataset("owner/name", tmp_path / "described", data_root=tmp_path / "payload")
    assert found(dataset, 0, 5) == list(Rules(small).batches(5))
    with pytest.raises(ValueError, match="missing"):
        StreamingLeRobotDataset("owner/name", tmp_path / "described")


def test_damage_reaches_the_loop(damaged: tuple[Path, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    root, episode, _ = damaged
    with pytest.raises(ValueError, match=f"episode {episode}"):
        in_worker(StreamingLeRobotDataset(str(root), episodes=[episode, 4]), 2, monkeypatch)


def test_one_episode_over_the_budget_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    make_dataset(tmp_path / "set", MakeOptions(episodes=3, frames="6:6", cameras=1, size=(32, 64)))
    dataset = StreamingLeRobotDataset(str(tmp_path / "set"), byte_budget_gb=1e-7)
    with pytest.raises(ValueError, match=r"Episode \d of dataset 0 requires \d+ bytes, exceeding the byte budget"):
        next(iter(dataset))
