"""Several datasets in one stream, against samples of each dataset opened alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from streams import opened

from ingest.engine import ReadOptions, open_dataset
from ingest.errors import DecodeError, SelectionError, SettingsError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, plan_epoch
from train_integration.delivery import deliver_locally
from train_integration.mixtures import Member, open_mixture
from train_integration.options import StreamConfig

CAMERA = "observation.images.cam0"
OTHER = "observation.images.wrist"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixture")
    make_dataset(folder / "a", MakeOptions(episodes=4, frames="10:16", cameras=1, size=(32, 64), fps=10, gop=4, seed=1))
    make_dataset(folder / "b", MakeOptions(episodes=3, frames="8:12", cameras=2, size=(32, 64), fps=10, gop=3, seed=2))
    return folder / "a", folder / "b"


def members(roots: tuple[Path, Path], **second: Any) -> list[Member]:
    options = {"rename": {CAMERA: OTHER, "observation.images.cam1": CAMERA}, "drop": (CAMERA,)} | second
    if "drop" in options and CAMERA in options["drop"]:
        options["rename"] = {"observation.images.cam1": CAMERA}
    return [Member(source=roots[0]), Member(source=roots[1], **options)]


def config(**plan: Any) -> StreamConfig:
    extra = {name: plan.pop(name) for name in ("read", "epochs", "lane_frames") if name in plan}
    return StreamConfig(plan=PlanSettings(clamp_workers=True, **plan), decode="inline", **extra)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("strategy", "weights"), [("lanes", "frames"), ("sequential", None), ("remaining", None)])
def test_every_sample_is_that_of_its_dataset(roots: tuple[Path, Path], strategy: str, weights: Any, world: int) -> None:
    read = ReadOptions(delta_timestamps={CAMERA: [-0.1, 0.0], "action": [0.0, 0.1]})
    description, mixture = open_mixture(members(roots), config(strategy=strategy, weights=weights, batch_size=4, read=read, lane_frames=5))
    alone = [
        open_dataset(roots[0], options=read, return_uint8=True),
        open_dataset(roots[1], delta_timestamps={"observation.images.cam1": [-0.1, 0.0], "action": [0.0, 0.1]}, return_uint8=True),
    ]
    seen: list[tuple[int, int]] = []
    for rank in range(world):
        with opened(description, rank, world) as stream:
            for batch in stream:
                delivery = stream.delivery
                assert delivery is not None
                for place, number in enumerate(delivery.dataset.tolist()):
                    wanted = alone[number].sample(int(delivery.episode[place]), int(delivery.frame[place]))
                    camera = CAMERA if number == 0 else "observation.images.cam1"
                    np.testing.assert_array_equal(batch[CAMERA][place], wanted[camera])
                    np.testing.assert_array_equal(batch[f"{CAMERA}_is_pad"][place], wanted[f"{camera}_is_pad"])
                    for key in ("action", "action_is_pad", "index", "timestamp"):
                        np.testing.assert_array_equal(batch[key][place], wanted[key])
                    assert batch["task"][place] == wanted["task"]
                    seen.append((number, int(wanted["index"])))
    assert sorted(seen) == [(number, index) for number, one in enumerate(mixture.datasets) for index in range(one.num_frames)]


def test_explicit_weights_hold_in_every_block_and_resume(roots: tuple[Path, Path]) -> None:
    plan = {"strategy": "lanes", "weights": (1.0, 3.0), "mixture_block": 8, "batch_size": 8, "read": ReadOptions(cameras=())}
    description, _ = open_mixture(members(roots), config(**plan, epochs=2))
    rows: list[list[tuple[int, int]]] = []
    states = []
    with opened(description) as stream:
        for _ in range(2):
            for batch in stream:
                assert stream.delivery is not None
                rows.append(list(zip(stream.delivery.dataset.tolist(), batch["index"].tolist(), strict=True)))
                states.append(stream.state_dict())
    for row in rows:
        if len(row) == 8:
            assert [number for number, _ in row].count(1) == 6
    with opened(description) as stream:
        stream.load_state_dict(states[2])
        first = next(iter(stream))
        assert first["index"].tolist() == [index for _, index in rows[3]]


def test_vectors_are_padded_and_statistics_merged(roots: tuple[Path, Path]) -> None:
    mine, other = members(roots)
    wide = [
        Member(source=mine.source, pad={"action": 9, "extra": 2}),
        Member(source=other.source, rename=other.rename, drop=other.drop, pad={"action": 9, "extra": 2}),
    ]
    description, mixture = open_mixture(wide, config(strategy="sequential", batch_size=3, read=ReadOptions(cameras=())))
    with opened(description) as stream:
        for batch in stream:
            assert batch["action"].shape[1:] == (9,)
            assert batch["extra"].shape[1:] == (2,)
            assert not batch["extra"].any()
    alone = [open_dataset(root) for root in roots]
    actions = [np.stack([np.asarray(one[number]["action"]) for number in range(len(one))]) for one in alone]
    width = actions[0].shape[1]
    merged = mixture.statistics()
    assert merged["action"]["mean"].shape == (9,)
    everything = np.concatenate(actions)
    np.testing.assert_allclose(merged["action"]["mean"][:width], everything.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(merged["action"]["std"][:width], everything.std(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(merged["action"]["max"][:width], everything.max(0), rtol=1e-5)
    assert merged["action"]["count"] == len(everything)
    even = mixture.statistics([1, 1])
    np.testing.assert_allclose(even["action"]["mean"][:width], (actions[0].mean(0) + actions[1].mean(0)) / 2, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_named(roots: tuple[Path, Path], tmp_path: Path) -> None:
    settings = config(strategy="sequential")
    mine = Member(source=roots[0])

    def refused(match: str, *others: Member, **options: Any) -> None:
        with pytest.raises(SelectionError, match=match):
            open_mixture([mine, *others], config(strategy="sequential", **options))

    refused(r"dataset 0 .* has no feature 'observation.images.cam1'.*rename", Member(source=roots[1]))
    refused("rename or drop names nothing", Member(source=roots[1], rename={"nothing": "x"}))
    refused("would be there twice", Member(source=roots[1], rename={"observation.images.cam1": CAMERA}))
    refused("cannot be padded", Member(source=roots[1], drop=("observation.images.cam1",), pad={"action": 1}))
    refused(
        r"action has shape .* pad=\{'action': 30\}",
        Member(source=roots[1], drop=("observation.images.cam1",), pad={"action": 30}),
    )
    refused("the mixture has", Member(source=roots[1], drop=("observation.images.cam1",)), read=ReadOptions(cameras=("nowhere",)))
    make_dataset(tmp_path / "fast", MakeOptions(episodes=1, frames="5:5", cameras=1, size=(32, 64), fps=20, gop=4))
    refused("20 frames per second", Member(source=tmp_path / "fast"))
    make_dataset(tmp_path / "large", MakeOptions(episodes=1, frames="5:5", cameras=1, size=(64, 64), fps=10, gop=4))
    refused("set image_size", Member(source=tmp_path / "large"))
    open_mixture([mine, Member(source=tmp_path / "large")], config(strategy="sequential", read=ReadOptions(image_size=(32, 32))))
    with pytest.raises(SettingsError, match="at least one"):
        open_mixture([], settings)
    with pytest.raises(SettingsError, match="3 weights for 2"):
        open_mixture(members(roots), config(strategy="lanes", weights=(1.0, 1.0, 1.0)))


def test_the_mapping_is_part_of_the_plan(roots: tuple[Path, Path]) -> None:
    settings = config(strategy="lanes", batch_size=4)
    one, _ = open_mixture(members(roots), settings)
    other, _ = open_mixture(members(roots, pad={"extra": 2})[1:], settings)
    prints = [json.dumps(dict(plan_epoch(each.units, each.with_topology(world_size=1)).fingerprint)) for each in (one, other)]
    assert prints[0] != prints[1]


def with_pictures_beside_the_rows(root: Path, shade: int) -> Path:
    """A dataset whose rows name files of its own, which look alike from outside and hold another shade."""
    make_dataset(root, MakeOptions(episodes=2, frames="3:3", cameras=1, size=(32, 64), fps=10, seed=1))
    for path in sorted((root / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        names = [f"images/{row}.png" for row in table.column("index").to_pylist()]
        for row, name in enumerate(names):
            (root / name).parent.mkdir(exist_ok=True)
            Image.fromarray(np.full((4, 6, 3), shade + row, np.uint8)).save(root / name)
        pq.write_table(table.append_column("look", pa.array([{"bytes": None, "path": name} for name in names])), path)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["look"] = {"dtype": "image", "shape": [4, 6, 3], "names": ["height", "width", "channels"]}
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def test_pictures_that_rows_name_come_from_their_own_dataset(tmp_path: Path) -> None:
    roots = [with_pictures_beside_the_rows(tmp_path / name, shade) for name, shade in (("a", 10), ("b", 100))]
    description, mixture = open_mixture([Member(source=root) for root in roots], config(strategy="sequential", batch_size=4))
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    local = [batch for _, batch in mixture.iter_batches(plan)]
    with opened(description) as stream:
        streamed = list(stream)
    for batches in (local, streamed):
        shades = [int(picture[0, 0, 0]) for batch in batches for picture in batch["look"]]
        assert shades == [*range(10, 16), *range(100, 106)]


def test_damage_names_its_dataset_and_leaves_the_episode_out_of_all_that_hold_it(damaged: tuple[Path, int, int]) -> None:
    broken, episode, _ = damaged
    parts = [Member(source=broken), Member(source=broken, episodes=(1, episode)), Member(source=broken, episodes=(0, 2))]
    settings = config(strategy="lanes", batch_size=4)
    description, mixture = open_mixture(parts, settings)
    with opened(description) as stream, pytest.raises(DecodeError, match=rf"^{broken}: episode {episode}, {CAMERA}: ") as caught:
        list(stream)
    assert (caught.value.dataset, caught.value.episode) == (str(broken), episode)
    description, mixture = open_mixture(parts, replace(settings, damage="skip_episode"))
    with opened(description) as stream:
        seen: list[tuple[int, int]] = []
        for _ in stream:
            assert stream.delivery is not None
            seen += zip(stream.delivery.dataset.tolist(), stream.delivery.episode.tolist(), strict=True)
        assert {(0, 2), (1, 1), (2, 0), (2, 2)} <= set(seen)
        assert {(record.dataset, record.episode) for record in stream.damage.records} == {(0, episode), (1, episode)}
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    done = deliver_locally(mixture, description, plan, ranks=[0], max_steps=None, digests=False)
    assert {(record["dataset"], record["episode"]) for record in done.skipped} == {(0, episode), (1, episode)}


def test_a_mixture_of_the_smallest_datasets(tmp_path: Path) -> None:
    for number, frames in enumerate(("1:1", "2:2")):
        make_dataset(tmp_path / str(number), MakeOptions(episodes=1, frames=frames, cameras=1, size=(32, 64), fps=10, gop=4, seed=number))
    parts = [Member(source=tmp_path / "0"), Member(source=tmp_path / "1")]
    for weights, shares in (((1.0, 1.0), (4, 4)), ((3.0, 1.0), (6, 2)), ((0.0, 1.0), (0, 8)), ("frames", (1, 2)), (None, (1, 2))):
        for world in (1, 2):
            settings = config(strategy="lanes", weights=weights, mixture_block=8, batch_size=3, share="frame_exact")
            description, _ = open_mixture(parts, settings)
            seen = [0, 0]
            for rank in range(world):
                with opened(description, rank, world) as stream:
                    for _ in stream:
                        assert stream.delivery is not None
                        for dataset in stream.delivery.dataset[~stream.delivery.is_pad].tolist():
                            seen[dataset] += 1
            assert tuple(seen) == shares


@pytest.mark.parametrize("workers", [0, 2])
def test_mixtures_go_through_plain_loaders_and_go_on(roots: tuple[Path, Path], workers: int) -> None:
    loaders = pytest.importorskip("torch.utils.data")
    from train_integration.iterable import EpisodeIterableDataset

    options = {"strategy": "lanes", "weights": (1.0, 2.0), "mixture_block": 6, "batch_size": 4, "workers": workers}
    description, _ = open_mixture(members(roots), config(**options, read=ReadOptions(cameras=()), epochs=2))
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    index = description.global_index
    wanted = [index(plan.units.dataset[one.unit], plan.units.episode[one.unit], one.frame).tolist() for one in plan.rank(0).batches()]
    dataset = EpisodeIterableDataset(description, rank=0, world_size=1)

    def batches() -> list[list[int]]:
        return [batch["index"].tolist() for batch in loaders.DataLoader(dataset, batch_size=4, num_workers=workers)]

    assert batches() == wanted
    dataset.set_epoch(0)
    taken = iter(loaders.DataLoader(dataset, batch_size=4, num_workers=workers))
    head = [next(taken)["index"].tolist() for _ in range(3)]
    state = dataset.state_dict(batches=3)
    del taken
    dataset.load_state_dict(json.loads(json.dumps(state)))
    assert head + batches() == wanted
