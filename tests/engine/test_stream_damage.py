"""Damaged episodes in the stream: which error, at which step, and what is delivered without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streams import PICTURE_BYTES, config, no_thread_is_left, open_rank

from ingest.errors import DecodeError, PlanError, SelectionError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, plan_epoch
from ingest.storage.local import LocalStore
from ingest.video.index import ProbingIndex
from train_integration.delivery import deliver_locally
from train_integration.options import StreamConfig, open_stream


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    with no_thread_is_left():
        yield


@pytest.mark.parametrize("pictures", [16, 4000])
@pytest.mark.parametrize("strategy", ["lanes", "remaining", "sequential"])
def test_damage_in_mid_epoch_drops_one_episode(damaged: tuple[Path, int, int], strategy: str, pictures: int) -> None:
    root, episode, _ = damaged
    description, dataset = config(root, strategy=strategy, batch_size=4, damage="skip_episode", lane_frames=None)
    mine = {int(i) for i in range(episode * 12, episode * 12 + 12)}
    states = []
    batches: list[list[int]] = []
    with open_rank(description, 0, 1, decoded=pictures * PICTURE_BYTES) as stream:
        states.append(stream.state_dict())
        for batch in stream:
            batches.append(batch["index"].tolist())
            states.append(stream.state_dict())
        (record,) = stream.damage.records
    seen = [index for batch in batches for index in batch]
    assert len(seen) == len(set(seen))
    assert set(range(dataset.num_frames)) - set(seen) <= mine
    assert record.episode == episode
    assert record.frames == len(mine - set(seen))
    assert record.frames > 0
    for step in range(0, len(batches), 3):
        with open_rank(description, 0, 1, decoded=pictures * PICTURE_BYTES) as stream:
            stream.load_state_dict(states[step])
            assert [batch["index"].tolist() for batch in stream] == batches[step:]


@pytest.mark.parametrize("strategy", ["lanes", "remaining", "sequential"])
def test_damage_drops_the_same_samples_wherever_a_stream_begins_and_however_it_decodes(
    damaged: tuple[Path, int, int], strategy: str
) -> None:
    root, episode, frame = damaged
    runs = []
    for mode in ("auto", "once", "on_demand"):
        description, dataset = config(root, strategy=strategy, batch_size=4, damage="skip_episode", lane_frames=None, decode_mode=mode)
        with open_rank(description, 0, 1, decoded=200 * PICTURE_BYTES) as stream:
            batches = [batch["index"].tolist() for batch in stream]
            (record,) = stream.damage.records
        runs.append((batches, record.step, record.frames))
    assert runs[0] == runs[1] == runs[2]
    batches, step, _ = runs[0]
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    oracle = deliver_locally(dataset, description, plan, ranks=[0], max_steps=None, digests=False)
    assert oracle.rows["index"].tolist() == [index for batch in batches for index in batch]
    undamaged = [batch.frame[batch.unit == episode].tolist() for batch in plan.rank(0).batches()]
    lost = {frame, frame + 1}  # of a group of three pictures
    assert step == next(number for number, frames in enumerate(undamaged) if lost & {*frames}), "nothing is left out before it must be"
    for start in range(step):
        with open_rank(description, 0, 1, decoded=200 * PICTURE_BYTES, cursor=plan.cursor.advance(start)) as stream:
            assert [batch["index"].tolist() for batch in stream] == batches[start:]


def test_a_rank_without_anything_to_fill_its_batches_with_ends_with_an_error(tmp_path: Path) -> None:
    root = tmp_path / "lost"
    make_dataset(root, MakeOptions(episodes=1, frames="12:12", cameras=1, size=(32, 64), gop=12))
    (video,) = root.rglob("*.mp4")
    table = ProbingIndex(LocalStore.at(root)).table(str(video.relative_to(root)))
    with video.open("r+b") as file:
        file.seek(int(table.offsets[0]))
        file.write(b"\xff" * int(table.sizes[0]))
    plan = PlanSettings(strategy="sequential", batch_size=4, tail="pad", share="frame_exact", world_size=2)
    description, dataset = open_stream(root, StreamConfig(plan=plan, damage="skip_episode", stall_s=5))
    with open_rank(description, 0, 2) as stream:
        with pytest.raises(SelectionError, match="every episode that could fill the batches of rank 0 is damaged"):
            list(stream)
        assert [record.episode for record in stream.damage.records] == [0]
    planned = plan_epoch(description.units, description.with_topology(world_size=2))
    with pytest.raises(SelectionError, match="every episode that could fill the batches of rank 0 is damaged"):
        deliver_locally(dataset, description, planned, ranks=[0], max_steps=None, digests=False)


@pytest.mark.parametrize("tail", ["exact", "pad"])
def test_an_epoch_that_loses_every_episode_ends_like_any_other(damaged: tuple[Path, int, int], tail: Any) -> None:
    root, episode, frame = damaged
    plan = PlanSettings(strategy="sequential", batch_size=2, tail=tail)
    description, _ = open_stream(root, StreamConfig(plan=plan, episodes=(episode,), damage="skip_episode", stall_s=5))
    with open_rank(description, 0, 1) as stream:
        found = [batch["frame_index"][~batch["is_pad"]].tolist() for batch in stream]
        assert [one for frames in found for one in frames] == list(range(frame - frame % 2))
        assert [record.frames for record in stream.damage.records] == [12 - frame + frame % 2]
        assert list(stream) == []
        state = stream.state_dict()
    assert state["cursor"]["epoch"] == 1
    with open_rank(description, 0, 1) as stream, pytest.raises(PlanError, match="no frames to deliver"):
        stream.load_state_dict(state)


def test_damage_stops_by_default(damaged: tuple[Path, int, int]) -> None:
    root, episode, _ = damaged
    description, _ = config(root, strategy="sequential", batch_size=4)
    with open_rank(description, 0, 1) as stream:
        seen: list[int] = []
        with pytest.raises(DecodeError, match=f"episode {episode}"):
            seen += [index for batch in stream for index in batch["index"].tolist()]
        assert stream.cursor().batches <= (episode * 12 + 12) // 4


def test_an_error_is_raised_again_by_every_iteration(damaged: tuple[Path, int, int]) -> None:
    root, episode, _ = damaged
    description, _ = config(root, strategy="sequential", batch_size=4, stall_s=5)
    with open_rank(description, 0, 1) as stream:
        steps: list[int] = []
        for _ in range(3):
            with pytest.raises(DecodeError, match=f"episode {episode}"):  # noqa: PT012 - what came before it counts
                for _ in stream:
                    steps.append(stream.step)
        assert steps == list(range(1, stream.step + 1)), "each goes on behind the last batch"
