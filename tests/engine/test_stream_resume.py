"""Streams that stop anywhere and go on anywhere: the rest is the same, whatever the stretch, the state or the topology."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import delivered, described, indices, no_thread_is_left, opened

from ingest.engine import ReadOptions
from ingest.errors import PlanError, SettingsError
from ingest.plan import Cursor, plan_epoch
from train_integration.options import open_stream
from train_integration.poolstate import dump_pool_state, load_pool_state
from train_integration.state import merged_state

STRATEGIES = ("lanes", "remaining", "round_robin", "sequential", "episode_sequential", "reservoir")
TAILS = ("exact", "drop_tail", "pad")
SLOW_TAILS = tuple(pytest.param(tail, marks=pytest.mark.slow) if tail != "pad" else tail for tail in TAILS)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_is_left():
        yield


def planned(description: Any, dataset: Any, *, rank: int = 0, world: int = 1, epoch: int = 0) -> list[list[int]]:
    """Global indices by batch, from the plan alone."""
    plan = plan_epoch(description.units, description.with_topology(world_size=world), epoch=epoch)
    starts = dataset.source.episodes.dataset_from
    return [(starts[plan.units.episode[batch.unit]] + batch.frame).tolist() for batch in plan.rank(rank).batches()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stretch", [1, 11, 40])
@pytest.mark.parametrize("tail", TAILS)
def test_stretches_change_nothing(small: Path, strategy: str, stretch: int, tail: str) -> None:
    description, dataset = described(
        small, strategy=strategy, world_size=2, workers=2, batch_size=5, lane_frames=4, tail=tail, epochs=2, read=ReadOptions(cameras=())
    )
    for rank in (0, 1):
        with opened(description, rank, 2, stretch_samples=stretch) as stream:
            for epoch in (0, 1):
                assert indices(stream) == planned(description, dataset, rank=rank, world=2, epoch=epoch)


@pytest.mark.parametrize("strategy", ["lanes", "remaining", "reservoir"])
def test_stretches_deliver_the_same_pictures(small: Path, strategy: str) -> None:
    read = ReadOptions(delta_timestamps={"observation.images.cam0": [-0.3, 0.0, 0.2]})
    description, dataset = described(small, strategy=strategy, batch_size=4, lane_frames=6, read=read)
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    for decoded in (40, 4000):
        with opened(description, stretch_samples=24, decoded_bytes=decoded * 32 * 64 * 3) as stream:
            for batch, (_, wanted) in zip(stream, dataset.iter_batches(plan), strict=True):
                for key in ("observation.images.cam0", "observation.images.cam1", "observation.images.cam0_is_pad", "index"):
                    np.testing.assert_array_equal(batch[key], wanted[key])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tail", SLOW_TAILS)
def test_a_checkpoint_at_every_step_of_two_epochs_gives_the_rest(small: Path, strategy: str, tail: str) -> None:
    description, _ = described(
        small, strategy=strategy, world_size=2, workers=3, batch_size=2, lane_frames=4, tail=tail, epochs=2, read=ReadOptions(cameras=())
    )
    with opened(description, 1, 2, stretch_samples=30) as stream:
        states: list[tuple[dict[str, Any], bytes | None, int]] = []
        batches: list[list[int]] = []
        for _ in range(2):
            states.append((stream.state_dict(), stream.pool_state(), len(batches)))
            for batch in stream:
                batches.append(batch["index"].tolist())
                states.append((stream.state_dict(), stream.pool_state(), len(batches)))
    with opened(description, 1, 2, stretch_samples=30) as stream:
        for number, (state, pools, done) in enumerate(states[:-1]):
            stream.load_state_dict(state, pool_state=pools if number % 2 else None)
            epochs = 2 - stream.epoch
            assert list(chain.from_iterable(indices(stream) for _ in range(epochs))) == batches[done:]
    assert strategy not in {"remaining", "round_robin"} or any(pools for _, pools, _ in states)


@pytest.mark.parametrize("strategy", ["remaining", pytest.param("lanes", marks=pytest.mark.slow)])
def test_two_hundred_steps_with_pictures_resume_at_every_step(tmp_path: Path, strategy: str) -> None:
    from ingest.lerobot.make import MakeOptions, make_dataset

    make_dataset(tmp_path / "ds", MakeOptions(episodes=9, frames="45:75", cameras=1, size=(32, 64), gop=6, seed=2))
    description, dataset = described(tmp_path / "ds", strategy=strategy, workers=3, batch_size=2, prefetch_batches=1)
    assert dataset.num_frames >= 400

    def seen(batch: dict[str, Any]) -> tuple[list[int], int]:
        return batch["index"].tolist(), int(batch["observation.images.cam0"].astype(np.int64).sum())

    with opened(description, max_steps=200) as stream:
        rows = []
        states = [(stream.state_dict(), stream.pool_state())]
        for batch in stream:
            rows.append(seen(batch))
            states.append((stream.state_dict(), stream.pool_state()))
    assert len(rows) == 200
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    starts = dataset.source.episodes.dataset_from
    for step, (state, pools) in enumerate(states[:200]):
        with opened(description, max_steps=min(2, 200 - step)) as stream:
            # Without the pools' own state the draws before the position are replayed, to the same end.
            stream.load_state_dict(state, pool_state=pools if step % 3 else None)
            assert [seen(batch) for batch in stream] == rows[step : step + 2]
            # The whole rest, as the stream's own plan has it from here on.
            cursor = Cursor.from_json(json.dumps(state["cursor"]))
        again = plan_epoch(description.units, plan.settings, cursor)
        rest = [(starts[plan.units.episode[one.unit]] + one.frame).tolist() for one in again.rank(0).batches(stop=200)]
        assert rest == [found for found, _ in rows[step:]]
    # Nothing that was delivered is read or decoded again.
    state, pools = states[190]
    with opened(description, max_steps=10) as stream:
        stream.load_state_dict(state, pool_state=pools)
        assert len(indices(stream)) == 10
        assert stream.counters.totals()["reelray_pictures_decoded"] <= 6 * 20 * 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chain_of_topologies_delivers_every_frame_once(small: Path, data: st.DataObject) -> None:
    strategy = data.draw(st.sampled_from(STRATEGIES))
    tail = data.draw(st.sampled_from(["exact", "pad"]))
    share = data.draw(st.sampled_from(["episodes", "frame_exact"]))
    chain_of = [
        (world, data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5)))
        for world in data.draw(st.sampled_from([(1, 2, 3, 1), (3, 1), (2, 5, 2), (1, 1, 4)]))
    ]
    seen: list[int] = []
    state: dict[str, Any] | None = None
    epoch = 0
    frames = 0
    for number, (world, workers, batch) in enumerate(chain_of):
        description, dataset = described(
            small, strategy=strategy, workers=workers, batch_size=batch, tail=tail, share=share, lane_frames=4, read=ReadOptions(cameras=())
        )
        frames = dataset.num_frames
        steps = None if number == len(chain_of) - 1 else data.draw(st.integers(0, 5))
        states = []
        for rank in range(world):
            with opened(description, rank, world, max_steps=steps, stretch_samples=data.draw(st.sampled_from([3, 20, 1000]))) as stream:
                if state is not None:
                    stream.load_state_dict(state)
                if stream.epoch == epoch and steps != 0:
                    seen += delivered(stream)
                states.append(stream.state_dict())
        state = merged_state(states) if all(one["cursor"]["epoch"] == states[0]["cursor"]["epoch"] for one in states) else None
        if state is None or state["cursor"]["epoch"] > epoch:
            break
    assert sorted(seen) == list(range(frames))


def test_pool_states_are_small_and_only_a_short_cut(small: Path) -> None:
    description, _ = described(small, strategy="remaining", workers=2, batch_size=3, read=ReadOptions(cameras=()))
    with opened(description) as stream:
        assert stream.pool_state() is None
        batches = iter(stream)
        for _ in range(4):
            next(batches)
        state, pools = stream.state_dict(), stream.pool_state()
        rest = [batch["index"].tolist() for batch in batches]
    assert pools is not None
    assert len(pools) <= 2 * (32 << 10)
    for wrong in (b"", b"no archive", pools[:-30], pools[:200] + b"\0" * 40 + pools[240:], b"PK" + pools[2:]):
        with opened(description) as stream:
            stream.load_state_dict(state, pool_state=wrong)
            assert indices(stream) == rest
    # The state of another rank, seed or step is not taken.
    other, _ = described(small, strategy="remaining", workers=2, batch_size=3, seed=7, read=ReadOptions(cameras=()))
    plan = plan_epoch(other.units, other.with_topology(world_size=1))
    assert not load_pool_state(plan.rank(0), pools)
    foreign = dump_pool_state(plan.rank(0), 4)
    assert foreign is not None
    with opened(description) as stream:
        stream.load_state_dict(state, pool_state=foreign)
        assert indices(stream) == rest


def test_checkpoints_keep_the_pool_file_of_each_rank(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ray.train import Checkpoint

    from train_integration.checkpoints import load_pools, pool_file

    description, _ = described(small, strategy="round_robin", batch_size=3, read=ReadOptions(cameras=()))
    with opened(description, 1, 2) as stream:
        batches = iter(stream)
        for _ in range(4):
            next(batches)
        state, pools = stream.state_dict(), stream.pool_state()
        rest = [batch["index"].tolist() for batch in batches]
    assert pools is not None
    (tmp_path / pool_file(1)).write_bytes(pools)
    checkpoint = Checkpoint.from_directory(str(tmp_path))
    assert load_pools(checkpoint, 0) is None
    with opened(description, 1, 2) as stream:
        stream.load_state_dict(state, pool_state=load_pools(checkpoint, 1))
        assert indices(stream) == rest


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [0, 2])
def test_loop_goes_on_without_end_and_equal_on_all_ranks(small: Path, strategy: str, workers: int) -> None:
    description, dataset = described(
        small, strategy=strategy, workers=workers, batch_size=4, tail="loop", lane_frames=5, epochs=None, read=ReadOptions(cameras=())
    )
    plan = plan_epoch(description.units, description.with_topology(world_size=2))
    starts = dataset.source.episodes.dataset_from
    for rank in (0, 1):
        total = plan.steps * 3
        wanted = [(starts[plan.units.episode[one.unit]] + one.frame).tolist() for one in plan.rank(rank).batches(0, total)]
        with opened(description, rank, 2, stretch_samples=22) as stream:
            found: list[list[int]] = []
            states: list[dict[str, Any]] = []
            for _ in range(3):
                for batch in stream:
                    found.append(batch["index"].tolist())
                    assert not batch["is_pad"].any()
                    states.append(stream.state_dict())
                assert len(found) % plan.steps == 0
            assert stream.epoch == 0
        assert found == wanted
        for step in (0, plan.steps - 1, plan.steps + 2):
            with opened(description, rank, 2, stretch_samples=22) as stream:
                stream.load_state_dict(states[step])
                left = (plan.steps - 1 - step) % plan.steps or plan.steps
                assert indices(stream) == wanted[step + 1 : step + 1 + left]
    with pytest.raises(PlanError, match="loop"):
        opened(description, 0, 3, cursor=plan.cursor_at(3))


def test_loop_and_skipping_exclude_each_other(small: Path) -> None:
    with pytest.raises(SettingsError, match="loop"):
        described(small, tail="loop", damage="skip_episode")


def test_a_resume_may_have_more_ranks_than_episodes(small: Path) -> None:
    description, dataset = described(small, strategy="remaining", batch_size=16, tail="pad", read=ReadOptions(cameras=()))
    with pytest.raises(PlanError, match="rank 7"), opened(description, 0, 9) as stream:
        next(iter(stream))
    with opened(description, max_steps=dataset.num_frames // 16 - 1) as stream:
        head = delivered(stream)
        state = stream.state_dict()
    rest: list[int] = []
    steps: set[int] = set()
    for rank in range(20):
        with opened(description, rank, 20) as stream:
            stream.load_state_dict(state)
            steps.add(stream.steps)
            rest += delivered(stream)
    assert sorted(head + rest) == list(range(dataset.num_frames))
    assert len(steps) == 1


def test_an_evaluation_stream_runs_beside_training(small: Path) -> None:
    description, dataset = described(small, strategy="remaining", batch_size=3, tail="pad", epochs=None, read=ReadOptions(cameras=()))
    held_out, _ = open_stream(small, description.config.for_evaluation(episodes=(5, 2), recipe=None))
    wanted = [index for episode in (5, 2) for index in range(*_bounds(dataset, episode))]
    with opened(description) as training, opened(held_out, 1, 2) as second, opened(held_out, 0, 2) as first:
        batches = iter(training)
        for _ in range(3):
            next(batches)
            found = sorted(index for stream in (first, second) for index in delivered(stream))
            assert found == sorted(wanted)
            assert indices(first) == []
            for stream in (first, second):
                stream.set_epoch(0)
        assert training.step == 3


def _bounds(dataset: Any, episode: int) -> tuple[int, int]:
    table = dataset.source.episodes
    row = table.row(episode)
    return int(table.dataset_from[row]), int(table.dataset_from[row] + table.length[row])


@pytest.mark.parametrize("strategy", ["lanes", "remaining", "sequential"])
def test_skipped_episodes_stay_skipped_over_topologies(damaged: tuple[Path, int, int], strategy: str) -> None:
    root, episode, _ = damaged
    description, dataset = described(root, strategy=strategy, batch_size=3, damage="skip_episode", lane_frames=None)
    mine = set(range(*_bounds(dataset, episode)))
    seen: list[int] = []
    state: dict[str, Any] | None = None
    records: list[Any] = []
    for world, steps in ((2, 9), (3, 3), (1, None)):
        states = []
        for rank in range(world):
            with opened(description, rank, world, max_steps=steps) as stream:
                if state is not None:
                    stream.load_state_dict(state)
                seen += delivered(stream)
                states.append(stream.state_dict())
                records += stream.damage.records
        state = merged_state(states)
        # Restoring it once more changes nothing.
        assert merged_state([state]) == state
    assert len(seen) == len(set(seen))
    missing = set(range(dataset.num_frames)) - set(seen)
    assert missing <= mine
    assert len(records) == 1
    assert state is not None
    assert state["cursor"]["epoch"] == 1
    assert state["cursor"]["skipped"] == [[0, episode, episode, -1, 0]]
    with opened(description) as stream:
        stream.load_state_dict(state)
        assert set(delivered(stream)) == set(range(dataset.num_frames)) - mine
