"""Image transforms: the same sample gets the same augmentation in every topology, after a resume, and in the oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from streams import described, opened

from ingest.engine import ReadOptions
from ingest.engine.assemble import SampleKey
from ingest.errors import SettingsError
from ingest.plan import plan_epoch

torch = pytest.importorskip("torch")

from train_integration.transforms import SeededTransform, TorchTransform, as_transform, generator_of, seed_of  # noqa: E402

CAMERA = "observation.images.cam0"


def noisy(picture: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
    return (picture.astype(np.int64) + generator.integers(0, 256)).astype(np.uint8)


class Jitter(torch.nn.Module):
    """What torchvision's modules do: draw from the global generators, in whatever way."""

    def forward(self, picture: Any) -> Any:
        shift = int(torch.randint(0, 256, ())) + random.randrange(256) + int(np.random.randint(256))
        return ((picture.to(torch.int64) + shift) % 256).to(torch.uint8)[:, ::2, :]


def gathered(stream: Any) -> dict[int, NDArray[Any]]:
    return {int(i): picture.copy() for batch in stream for i, picture in zip(batch["index"], batch[CAMERA], strict=True)}


@pytest.mark.parametrize("transform", [SeededTransform(noisy), Jitter(), TorchTransform(Jitter())], ids=["seeded", "module", "wrapped"])
def test_augmentation_depends_on_the_sample_alone(small: Path, transform: Any) -> None:
    found: list[dict[int, NDArray[Any]]] = []
    for world, batch, strategy in ((1, 5, "lanes"), (2, 3, "remaining"), (3, 1, "sequential")):
        read = ReadOptions(cameras=(CAMERA,))
        description, _ = described(
            small, strategy=strategy, world_size=world, batch_size=batch, image_transforms=transform, lane_frames=4, read=read
        )
        seen: dict[int, NDArray[Any]] = {}
        for rank in range(world):
            torch.manual_seed(rank)
            with opened(description, rank, world) as stream:
                batches = iter(stream)
                next(batches)
                state = stream.state_dict()
            with opened(description, rank, world) as stream:
                seen |= gathered(stream)
            with opened(description, rank, world) as stream:
                stream.load_state_dict(state)
                rest = gathered(stream)
            assert all(np.array_equal(rest[index], seen[index]) for index in rest)
        found.append(seen)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(np.array_equal(other[index], found[0][index]) for index in other)
    # Different samples, and different epochs, are augmented differently.
    description, _ = described(small, strategy="sequential", image_transforms=transform, read=ReadOptions(cameras=(CAMERA,)))
    with opened(description) as stream:
        stream.set_epoch(1)
        again = gathered(stream)
    assert any(not np.array_equal(again[index], found[0][index]) for index in again)


@pytest.mark.parametrize(("as_uint8", "columns"), [(True, ("action",)), (False, ("action",)), (True, ("action", "index"))])
def test_streams_and_oracle_transform_alike(small: Path, as_uint8: bool, columns: tuple[str, ...]) -> None:
    read = ReadOptions(delta_timestamps={CAMERA: [-0.1, 0.0], "index": [-0.1, 0.0]}, columns=columns)
    description, dataset = described(small, strategy="lanes", batch_size=4, image_transforms=Jitter(), read=read)
    description = replace(description, config=replace(description.config, return_uint8=as_uint8))
    dataset.as_uint8 = as_uint8
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    with opened(description) as stream:
        for batch, (_, wanted) in zip(stream, dataset.iter_batches(plan), strict=True):
            assert batch[CAMERA].shape[1:] == (2, 3, 16, 64)
            assert batch[CAMERA].dtype == wanted[CAMERA].dtype
            for key in (CAMERA, "observation.images.cam1"):
                np.testing.assert_array_equal(batch[key], wanted[key])


def inverted_in_place(picture: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
    np.bitwise_xor(picture, np.uint8(generator.integers(1, 256)), out=picture)
    return picture


class InvertInPlace(torch.nn.Module):
    """What `RandomErasing(inplace=True)` and many hand-written augmentations do."""

    def forward(self, picture: Any) -> Any:
        return picture.bitwise_xor_(torch.randint(1, 256, (), dtype=torch.uint8))


@pytest.mark.parametrize("transform", [SeededTransform(inverted_in_place), InvertInPlace()], ids=["seeded", "module"])
@pytest.mark.parametrize("decode_mode", ["once", "on_demand"])
def test_transforms_may_write_to_what_they_get(small: Path, transform: Any, decode_mode: Any) -> None:
    # Windows overlap, so that most pictures are shown in several samples.
    read = ReadOptions(delta_timestamps={CAMERA: [-0.2, -0.1, 0.0]}, cameras=(CAMERA,), columns=("action",))
    _, plain = described(small, strategy="lanes", batch_size=4, lane_frames=4, read=read)
    description, dataset = described(small, strategy="lanes", batch_size=4, image_transforms=transform, lane_frames=4, read=read)
    description = replace(description, config=replace(description.config, decode_mode=decode_mode))
    dataset.as_uint8 = plain.as_uint8 = True
    plan = plan_epoch(description.units, description.with_topology(world_size=1))
    with opened(description) as stream:
        for batch, (_, oracle), (_, shown) in zip(stream, dataset.iter_batches(plan), plain.iter_batches(plan), strict=True):
            np.testing.assert_array_equal(batch[CAMERA], oracle[CAMERA])
            for picture, pixels in zip(batch[CAMERA].reshape(-1, 3, 32, 64), shown[CAMERA].reshape(-1, 3, 32, 64), strict=True):
                changed = np.unique(picture ^ pixels)
                assert len(changed) == 1, "every picture is inverted with one value, and once"
                assert changed[0] != 0


def test_the_loop_keeps_its_own_randomness(small: Path) -> None:
    description, _ = described(small, strategy="lanes", batch_size=4, image_transforms=Jitter())
    drawn = []
    for touched in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        with opened(description) as stream:
            batches = iter(stream)
            if touched:
                next(batches)
            drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))
    assert drawn[0] == drawn[1]


def test_every_kind_of_callable_is_understood() -> None:
    key = SampleKey(1, 2, 3, "cam")
    picture = np.full((4, 6, 3), 7, np.uint8)

    def plain(picture: NDArray[Any], key: SampleKey) -> NDArray[Any]:
        return picture + np.uint8(key.index)

    assert as_transform(plain)(picture, key)[0, 0, 0] == 10
    assert as_transform(lambda tensor: tensor.float() / 2)(picture, key).dtype == np.float32
    assert as_transform(lambda tensor: tensor[:, :2])(picture, key).shape == (2, 6, 3)
    for wrong in (lambda _: None, lambda tensor: tensor[0]):
        with pytest.raises(SettingsError, match="image_transforms must return"):
            as_transform(wrong)(picture, key)
    assert seed_of(key) == seed_of(SampleKey(1, 2, 3, "cam"))
    others = [SampleKey(2, 2, 3, "cam"), SampleKey(1, 3, 3, "cam"), SampleKey(1, 2, 4, "cam"), SampleKey(1, 2, 3, "cam1")]
    assert len({seed_of(one) for one in [key, *others]}) == 5
    assert 0 <= generator_of(key).random() < 1


@pytest.mark.parametrize("other", ["dtype", "shape"])
@pytest.mark.parametrize("wrap", [SeededTransform, TorchTransform])
def test_pictures_that_come_out_differently_are_refused(small: Path, wrap: Any, other: str) -> None:
    calls = iter(range(1000))

    def torch_function(picture: Any) -> Any:
        if next(calls) == 0:
            return picture
        return picture / 255 if other == "dtype" else picture[:, :1]

    def function(picture: NDArray[Any], _: np.random.Generator) -> NDArray[Any]:
        if next(calls) == 0:
            return picture
        return picture / 255 if other == "dtype" else picture[:1]

    transform = wrap(torch_function if wrap is TorchTransform else function)
    description, _ = described(small, strategy="lanes", batch_size=4, image_transforms=transform, read=ReadOptions(cameras=(CAMERA,)))
    with opened(description) as stream, pytest.raises(SettingsError, match=f"{CAMERA}: image_transforms returned a picture"):
        next(iter(stream))
