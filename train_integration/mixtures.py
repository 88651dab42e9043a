"""Several datasets in one stream: features aligned by an explicit mapping, statistics merged.

Nothing is guessed. Every feature of every dataset is delivered under one name, or dropped, or filled up by name; what does
not fit is an error that says which dataset, which feature and what to write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.datasource import ReadJob
from ingest.engine.counters import Counters
from ingest.engine.damage import DamageReport
from ingest.engine.dataset import Dataset, open_dataset
from ingest.engine.fetch import UnitReader, UnitRequest
from ingest.engine.spec import ReadOptions, SampleSpec
from ingest.engine.unit import UnitData
from ingest.errors import SelectionError, SettingsError
from ingest.lerobot.info import Feature
from ingest.lerobot.source import Source
from ingest.lerobot.windows import Windows
from ingest.plan import Units
from ingest.storage.base import Store
from train_integration.options import StreamConfig, StreamDescription, transform_of
from train_integration.worklist import EpisodeLengths

_STATISTICS = ("count", "mean", "std", "min", "max")


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


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Turns a member's units into the mixture's."""

    rename: Mapping[str, str]
    pad: Mapping[str, int]

    def __call__(self, unit: UnitData) -> UnitData:
        rows = unit.rows
        numbers = {self.rename.get(key, key): values for key, values in rows.numbers.items()}
        for key, width in self.pad.items():
            stored = numbers.get(key)
            if stored is None:
                numbers[key] = np.zeros((rows.length, width), dtype=np.float32)
            elif stored.shape[1] < width:
                numbers[key] = np.pad(stored, ((0, 0), (0, width - stored.shape[1])))
        others = rows.others.rename_columns([self.rename.get(key, key) for key in rows.others.column_names])
        tracks = {self.rename.get(key, key): replace(track, camera=self.rename.get(key, key)) for key, track in unit.tracks.items()}
        return replace(unit, rows=replace(rows, numbers=numbers, others=others), tracks=tracks)


class MixtureReader:
    """Reads units of any of the datasets. Thread-safe."""

    def __init__(self, readers: Sequence[tuple[UnitReader, _Adapter]]) -> None:
        self._readers = readers

    def read(self, request: UnitRequest) -> UnitData:
        """As `UnitReader.read`, with the mixture's names."""
        reader, adapt = self._readers[request.dataset]
        return adapt(reader.read(request))


@dataclass(frozen=True, slots=True)
class MixtureJob(ReadJob):
    """A read job over several datasets; ``source`` is the first one's, ``spec`` the mixture's.

    Attributes:
        members: source, index, own form of a sample, and adapter of each dataset.
    """

    members: tuple[tuple[ReadJob, _Adapter], ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """All datasets."""
        return tuple(job.source for job, _ in self.members)

    @property
    def location(self) -> str:
        """All locations."""
        return f"mixture of {', '.join(source.store.url for source in self.sources)}"

    def reader(self, counters: Counters) -> Any:
        """A reader of all datasets."""
        return MixtureReader([(job.reader(counters), adapt) for job, adapt in self.members])


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Opened datasets with one form of sample.

    Attributes:
        members: as given.
        datasets: opened, each with its own names.
        spec: the mixture's form of a sample.
    """

    members: tuple[Member, ...]
    datasets: tuple[Dataset, ...]
    spec: SampleSpec

    def statistics(self, weights: Sequence[float] | None = None) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Count, mean, std, min and max of every feature for which all datasets have them, as if they were one dataset.

        Args:
            weights: shares of the datasets; None counts each by its own ``count``.
        """
        merged: dict[str, dict[str, NDArray[np.float64]]] = {}
        own = [_statistics_of(member, dataset) for member, dataset in zip(self.members, self.datasets, strict=True)]
        for key in own[0]:
            parts = [stats[key] for stats in own if key in stats]
            if len(parts) == len(own):
                merged[key] = _merged(parts, weights)
        return merged


def open_mixture(members: Sequence[Member], config: StreamConfig) -> tuple[StreamDescription, Mixture]:
    """Opens several datasets and describes one stream over all of them.

    ``config.plan.weights`` says in which shares they are mixed; without weights all their frames are one selection.
    ``config.read`` holds the mixture's names.

    Args:
        members: the datasets, in the order that their numbers follow.
        config: how to deliver; selections are the members'.

    Raises:
        SettingsError: fewer than one dataset, selections in ``config``, or weights for another number of datasets.
        SelectionError: features that do not fit; dataset and feature are named.
    """
    weights = config.plan.weights
    if not members:
        raise SettingsError("a mixture needs at least one dataset")
    if config.episodes is not None or config.exclude_episodes is not None:
        raise SettingsError("in a mixture, episodes and exclude_episodes belong to each dataset: give them to its Member")
    if config.recipe is not None or config.render is not None:
        raise SettingsError("recipes and render stages are not available in mixtures: datasets differ in language columns")
    if weights not in (None, "frames") and len(weights) != len(members):
        raise SettingsError(f"{len(weights)} weights for {len(members)} datasets")
    datasets = tuple(_opened(member, config) for member in members)
    spec = _common_spec(members, datasets, config.read)
    mixture = Mixture(tuple(members), datasets, spec)
    digest = hashlib.blake2b(digest_size=16)
    for member, dataset in zip(members, datasets, strict=True):
        digest.update(
            repr((dataset.fingerprint(), sorted(member.rename.items()), sorted(member.pad.items()), sorted(member.drop))).encode()
        )
    plan = replace(config.plan, dataset=digest.hexdigest())
    config = replace(config, plan=plan, image_transforms=transform_of(config))
    lane_frames = config.lane_frames if config.plan.strategy in {"lanes", "reservoir"} else None
    jobs = tuple(
        (ReadJob.of(dataset), _Adapter({key: member.name(key) for key in member.rename}, member.pad))
        for member, dataset in zip(members, datasets, strict=True)
    )
    job = MixtureJob(datasets[0].source, datasets[0].index, spec, threads=config.fetch_threads, members=jobs)
    damage = DamageReport([replace(record, dataset=number) for number, dataset in enumerate(datasets) for record in dataset.damage.records])
    return StreamDescription(config, job, _units(datasets, lane_frames), _lengths(datasets), damage), mixture


def _opened(member: Member, config: StreamConfig) -> Dataset:
    read = config.read
    back = {shared: own for own, shared in member.rename.items()}
    if len(back) < len(member.rename):
        raise SettingsError(f"{member.source}: rename gives several features one name: {dict(member.rename)}")
    delta = {back.get(key, key): offsets for key, offsets in (read.delta_timestamps or {}).items() if key not in member.pad or key in back}
    probe = open_dataset(
        member.source,
        episodes=member.episodes,
        exclude_episodes=member.exclude_episodes,
        options=replace(read, cameras=None, columns=None, delta_timestamps=None, action_chunk=None),
        return_uint8=config.return_uint8,
        damage=config.damage,
        **member.options,
    )
    features = probe.source.info.features
    unknown = sorted({*member.rename, *member.drop} - features.keys())
    if unknown:
        raise SelectionError(f"{probe.source.store.url}: rename or drop names {', '.join(unknown)}; it has {', '.join(features)}")
    taken = features.keys() - member.rename.keys() - {*member.drop}
    clashes = sorted(taken & {*member.rename.values()})
    if clashes:
        raise SelectionError(f"{probe.source.store.url}: {', '.join(clashes)} would be there twice: rename or drop its own one")
    loose = sorted(key for key in member.pad if key in (read.delta_timestamps or {}) and back.get(key, key) not in features)
    if loose:
        raise SelectionError(
            f"{probe.source.store.url} lacks {', '.join(loose)}, which has a window: zeros cannot have one; drop the feature"
        )

    def kept(keys: Sequence[str], chosen: Sequence[str] | None) -> tuple[str, ...]:
        return tuple(key for key in keys if key not in member.drop and (chosen is None or member.name(key) in chosen))

    stored = [key for key, feature in features.items() if not feature.is_video]
    options = replace(
        read,
        cameras=kept(probe.source.cameras, read.cameras),
        columns=kept(stored, read.columns),
        delta_timestamps={key: offsets for key, offsets in delta.items() if key in features and key not in member.drop},
    )
    own = SampleSpec.resolve(probe.source.info, options)
    probe.spec = own
    return probe


def _common_spec(members: Sequence[Member], datasets: Sequence[Dataset], read: ReadOptions) -> SampleSpec:
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
            _refuse_difference(where, key, features[key], merged[key], resized=read.image_size is not None)
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


def _units(datasets: Sequence[Dataset], lane_frames: int | None) -> Units:
    parts = [dataset.units(lane_frames=lane_frames) for dataset in datasets]
    numbers = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("episode", "lo", "hi", "bytes", "cost")}
    return Units(numbers, **columns)


def _lengths(datasets: Sequence[Dataset]) -> EpisodeLengths:
    orders = [np.argsort(dataset.selection) for dataset in datasets]
    return EpisodeLengths(
        tuple(dataset.selection[order] for dataset, order in zip(datasets, orders, strict=True)),
        tuple(dataset.lengths[order] for dataset, order in zip(datasets, orders, strict=True)),
    )


def _statistics_of(member: Member, dataset: Dataset) -> dict[str, dict[str, NDArray[np.float64]]]:
    found: dict[str, dict[str, NDArray[np.float64]]] = {}
    frames = np.array([dataset.num_frames], dtype=np.float64)
    for key, stored in dataset.source.stats.items():
        if key in member.drop or not {"mean", "std"} <= stored.keys():
            continue
        one = {name: np.asarray(stored[name], dtype=np.float64) for name in _STATISTICS if name in stored}
        width = member.pad.get(member.name(key))
        if width is not None:
            one = {
                name: np.pad(values.reshape(-1), (0, width - values.size)) if name != "count" else values for name, values in one.items()
            }
        found[member.name(key)] = {"count": frames} | one
    for key, width in member.pad.items():
        zeros = dict.fromkeys(("mean", "std", "min", "max"), np.zeros(width))
        found.setdefault(key, {"count": frames, **zeros})
    return found


def _merged(parts: Sequence[Mapping[str, NDArray[np.float64]]], weights: Sequence[float] | None) -> dict[str, NDArray[np.float64]]:
    counts = np.array([float(part["count"].reshape(-1)[0]) for part in parts])
    share = counts if weights is None else np.asarray(weights, dtype=np.float64)
    share = share / share.sum()
    mean = sum(weight * part["mean"] for weight, part in zip(share, parts, strict=True))
    # The variance of the whole: what each part varies by, and how far its mean lies from the common one.
    square = sum(weight * (part["std"] ** 2 + (part["mean"] - mean) ** 2) for weight, part in zip(share, parts, strict=True))
    merged = {"count": np.array([counts.sum()]), "mean": np.asarray(mean), "std": np.sqrt(square)}
    for name, smallest in (("min", np.minimum), ("max", np.maximum)):
        if all(name in part for part in parts):
            merged[name] = smallest.reduce([part[name] for part in parts])
    return merged
