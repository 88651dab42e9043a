"""The plain IterableDataset: the order of the plan with any number of loader workers, from any batch on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from streams import described

from ingest.engine import ReadOptions
from ingest.errors import CursorError, SettingsError
from ingest.plan import plan_epoch

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from train_integration import iterable  # noqa: E402
from train_integration.iterable import EpisodeIterableDataset, rank_and_world_size  # noqa: E402

NUMBERS = ReadOptions(cameras=())


def planned(description: Any, workers: int, *, epoch: int = 0, world: int = 1, rank: int = 0) -> list[list[int]]:
    from dataclasses import replace

    settings = replace(description.with_topology(world_size=world), workers=workers)
    plan = plan_epoch(description.units, settings, epoch=epoch)
    starts = description.job.source.episodes.dataset_from
    return [(starts[plan.units.episode[batch.unit]] + batch.frame).tolist() for batch in plan.rank(rank).batches()]


def loader(dataset: Any, workers: int, size: int | None) -> Any:
    return DataLoader(dataset, batch_size=size, num_workers=workers)


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


@pytest.mark.parametrize("strategy", ["remaining", "lanes"])
@pytest.mark.parametrize(("workers", "batched"), [(0, False), (0, True), (1, True), (3, False)])
def test_loaders_deliver_the_plan_and_go_on_from_any_batch(small: Path, strategy: str, workers: int, batched: bool) -> None:
    description, _ = described(small, strategy=strategy, batch_size=5, lane_frames=4, read=NUMBERS)
    dataset = EpisodeIterableDataset(description, rank=0, world_size=2, batched=batched)
    size = None if batched else 5
    expected = [planned(description, workers, epoch=epoch, world=2) for epoch in (0, 1)]
    assert indices(loader(dataset, workers, size)) == expected[0]
    assert indices(loader(dataset, workers, size)) == expected[1]
    assert dataset.epoch == 1
    dataset.set_epoch(0)
    batches = iter(loader(dataset, workers, size))
    for _ in range(4):
        next(batches)
    state = dataset.state_dict(4)
    if workers == 0:
        assert dataset.state_dict() == state
    del batches
    fresh = EpisodeIterableDataset(description, rank=0, world_size=2, batched=batched)
    fresh.load_state_dict(state)
    found = indices(loader(fresh, workers, size))
    assert found == expected[0][4:]
    assert indices(loader(fresh, workers, size)) == expected[1]


def test_pictures_and_keys_are_those_of_samples(small: Path) -> None:
    description, dataset = described(small, strategy="sequential", batch_size=4)
    found = list(EpisodeIterableDataset(description, rank=0, world_size=1))
    assert len(found) == dataset.num_frames
    dataset.as_uint8 = True
    for number in (0, 57, len(found) - 1):
        wanted = dataset[number]
        assert found[number].keys() == wanted.keys()
        for key in ("observation.images.cam0", "action"):
            assert (found[number][key].numpy() == wanted[key]).all()


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_states_of_loader_workers_restore_each_worker(small: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loader does that keeps the state of each of its workers: take batches in turns, save, restore, go on."""
    description, _ = described(small, strategy="remaining", batch_size=3, read=NUMBERS)
    workers = 2

    class Info:
        num_workers = workers
        id = 0

    monkeypatch.setattr(iterable, "get_worker_info", lambda: Info)

    def copies(states: list[dict[str, Any]] | None) -> list[Any]:
        made = [EpisodeIterableDataset(description, rank=0, world_size=1, batched=True) for _ in range(workers)]
        for dataset, state in zip(made, states or [], strict=False):
            dataset.load_state_dict(state)
        return made

    def run(made: list[Any], start: int, stop: int | None) -> tuple[list[list[int]], int]:
        iterators, live, rows, turn = [], [], [], start
        for slot, dataset in enumerate(made):
            Info.id = slot
            iterators.append(iter(dataset))
            live.append(True)
        while any(live) and (stop is None or len(rows) < stop):
            Info.id = turn % workers
            if live[Info.id]:
                try:
                    rows.append(next(iterators[Info.id])["index"].tolist())
                except StopIteration:
                    live[Info.id] = False
            turn += 1
        return rows, turn % workers

    expected = planned(description, workers)
    first = copies(None)
    head, turn = run(first, 0, cut)
    states = []
    for slot, dataset in enumerate(first):
        Info.id = slot
        states.append(dataset.state_dict())
    rest, _ = run(copies(states), turn, None)
    assert head + rest == expected


def test_rank_and_world_size_come_from_the_environment(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description, _ = described(small, read=NUMBERS)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_and_world_size() == (1, 3)
    assert EpisodeIterableDataset(description).world_size == 3
    for rank, world, match in (("3", "3", "RANK=3"), ("-1", "2", "RANK=-1"), ("0", "0", "WORLD_SIZE=0"), ("x", "1", "whole numbers")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(SettingsError, match=match):
            rank_and_world_size()
    with pytest.raises(SettingsError, match="together"):
        EpisodeIterableDataset(description, rank=0)
    with pytest.raises(CursorError, match="version"):
        EpisodeIterableDataset(description, rank=0, world_size=1).load_state_dict({})
    with pytest.raises(SettingsError, match="non-negative"):
        EpisodeIterableDataset(description, rank=0, world_size=1).set_epoch(-1)
