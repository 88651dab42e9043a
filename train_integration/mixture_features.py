"""How the features of several datasets become those of one mixture, or why they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.engine.dataset import Dataset
from ingest.engine.spec import ReadOptions, SampleSpec
from ingest.errors import SelectionError
from ingest.lerobot.info import Feature
from ingest.lerobot.windows import Windows
from ingest.storage.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One dataset of a mixture, and how its features get the mixture's names.

    Attributes:
        source: location, or an opened store.
        rename: own name → name in the mixture.
        drop: own names that are not delivered.
        pad: name in the mixture → width of a vector that is filled up with zeros to it; a vector that the dataset lacks
            altogether becomes zeros.
        episodes: episodes to read; None reads all.
        exclude_episodes: episodes to leave out.
        options: further arguments of `ingest.engine.open_dataset`, for example ``revision``.
    """

    source: str | Path | Store
    rename: Mapping[str, str] = field(default_factory=dict[str, str])
    drop: tuple[str, ...] = ()
    pad: Mapping[str, int] = field(default_factory=dict[str, int])
    episodes: tuple[int, ...] | None = None
    exclude_episodes: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def name(self, key: str) -> str:
        """The mixture's name of a feature."""
        return self.rename.get(key, key)


def common_spec(members: Sequence[Member], datasets: Sequence[Dataset], read: ReadOptions) -> SampleSpec:
    """The form of the mixture's samples.

    Raises:
        SelectionError: names the first dataset and feature that do not fit, and what to write.
    """
    first = datasets[0].spec
    shared = [_features(member, dataset) for member, dataset in zip(members, datasets, strict=True)]
    names = list(dict.fromkeys(key for features in shared for key in features))
    unknown = sorted({*(read.cameras or ()), *(read.columns or ()), *(read.delta_timestamps or {})} - {*names})
    if unknown:
        raise SelectionError(f"cameras, columns or delta_timestamps name {', '.join(unknown)}; the mixture has {', '.join(names)}")
    merged: dict[str, Feature] = {}
    windows: dict[str, NDArray[np.int64]] = {}
    for number, (member, dataset, features) in enumerate(zip(members, datasets, shared, strict=True)):
        where = f"dataset {number} ({dataset.source.store.url})"
        if dataset.fps != first.fps:
            raise SelectionError(
                f"{where} has {dataset.fps:g} frames per second, dataset 0 has {first.fps:g}: windows would differ in time"
            )
        missing = [key for key in names if key not in features]
        if missing:
            raise SelectionError(
                f"{where} has no feature {missing[0]!r}, which another dataset delivers: rename one of "
                f"{', '.join(sorted(features))} to it, pad it if it is a vector, or drop it in the others"
            )
        for key in names:
            merged.setdefault(key, features[key])
            _refuse_difference(where, key, features[key], merged[key], resized=(read.image_size or read.image_crop) is not None)
        windows |= {member.name(key): deltas for key, deltas in dataset.spec.windows.deltas.items()}
    cameras = tuple(key for key in names if merged[key].is_video)
    images = tuple(key for key in names if merged[key].is_image)
    columns = tuple(key for key in names if not (merged[key].is_video or merged[key].is_image))
    return SampleSpec(read, merged, cameras, images, columns, Windows(windows), first.fps)


def _features(member: Member, dataset: Dataset) -> dict[str, Feature]:
    spec = dataset.spec
    where = dataset.source.store.url
    found = {member.name(key): replace(spec.features[key], key=member.name(key)) for key in (*spec.cameras, *spec.images, *spec.columns)}
    for key, width in member.pad.items():
        own = found.get(key)
        if own is None:
            found[key] = Feature(key, "float32", (width,), (), is_depth=False, details={})
        elif not own.is_numeric or len(own.shape) != 1 or own.shape[0] > width:
            raise SelectionError(f"{where}: {key} is {own.dtype} of shape {own.shape}, which cannot be padded to a vector of {width}")
        else:
            found[key] = replace(own, shape=(width,), names=())
    return found


def _refuse_difference(where: str, key: str, own: Feature, other: Feature, *, resized: bool) -> None:
    pictures = own.is_video or own.is_image
    if pictures != (other.is_video or other.is_image) or own.is_video != other.is_video or own.is_depth != other.is_depth:
        raise SelectionError(f"{where}: {key} is a {own.dtype} feature, in another dataset a {other.dtype} one: rename or drop it")
    if pictures and not resized and own.picture_shape != other.picture_shape:
        raise SelectionError(f"{where}: {key} has pictures of {own.picture_shape}, another dataset {other.picture_shape}: set image_size")
    if not pictures and own.item_dtype != other.item_dtype:
        raise SelectionError(f"{where}: {key} is {own.dtype}, in another dataset {other.dtype}: rename or drop it")
    if not pictures and own.shape != other.shape:
        width = max((*own.shape, *other.shape), default=1)
        raise SelectionError(
            f"{where}: {key} has shape {own.shape}, in another dataset {other.shape}: pad={{'{key}': {width}}}, or drop it"
        )
