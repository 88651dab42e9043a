"""Several datasets in one stream: features aligned by an explicit mapping, statistics merged.

Nothing is guessed. Every feature of every dataset is delivered under one name, or dropped, or filled up by name; what does
not fit is an error that says which dataset, which feature and what to write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingest.datasource import ReadJob
from ingest.engine.assemble import BatchAssembler, Sample, Transform
from ingest.engine.checks import refuse_transform_of_planes
from ingest.engine.counters import Counters
from ingest.engine.damage import DamageReport
from ingest.engine.dataset import Dataset, open_dataset, planned_batches
from ingest.engine.decoded import DECODED_CACHE_BYTES, DecodedUnits
from ingest.engine.fetch import UnitReader, UnitRequest
from ingest.engine.spec import SampleSpec
from ingest.engine.unit import UnitData
from ingest.errors import SelectionError, SettingsError
from ingest.plan import Batch, EpochPlan, Units
from ingest.storage.base import Store
from ingest.video.index import VideoIndex
from train_integration.feature_stats import Statistics, feature_statistics, merged_statistics, padded, stored_statistics
from train_integration.mixture_features import Member, common_spec
from train_integration.mixture_file import is_mixture_file, read_mixture
from train_integration.options import StreamConfig, StreamDescription, open_stream, transferred, transform_of
from train_integration.worklist import EpisodeLengths

__all__ = ["Member", "Mixture", "MixtureJob", "MixtureReader", "open_described", "open_mixture"]


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
    def jobs(self) -> tuple[ReadJob, ...]:
        """How each dataset is read."""
        return tuple(job for job, _ in self.members)

    @property
    def location(self) -> str:
        """All locations."""
        return f"mixture of {', '.join(source.store.url for source in self.sources)}"

    def reader(self, counters: Counters) -> Any:
        """A reader of all datasets."""
        return MixtureReader([(job.reader(counters), adapt) for job, adapt in self.members])

    def indexed(self, change: Callable[[VideoIndex], VideoIndex]) -> MixtureJob:
        """The same job with every dataset's index changed."""
        members = tuple((job.indexed(change), adapt) for job, adapt in self.members)
        return replace(self, index=members[0][0].index, members=members)

    def stored(self, change: Callable[[Store], Store]) -> MixtureJob:
        """The same job with every dataset's store changed."""
        members = tuple((job.stored(change), adapt) for job, adapt in self.members)
        return replace(self, source=members[0][0].source, members=members)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Opened datasets with one form of sample. Stands where a `Dataset` does in reports and in single-process delivery.

    Attributes:
        members: as given.
        datasets: opened, each with its own names.
        spec: the mixture's form of a sample.
        job: how units are read.
        as_uint8: whether pictures are uint8 instead of float32 in [0, 1].
        transform: picture transform.
        weights: shares of the datasets, ``frames``, or None where all their frames are one selection.
        counters: running totals of single-process delivery.
    """

    members: tuple[Member, ...]
    datasets: tuple[Dataset, ...]
    spec: SampleSpec
    job: MixtureJob
    as_uint8: bool
    transform: Transform | None
    weights: tuple[float, ...] | Literal["frames"] | None
    counters: Counters = field(default_factory=Counters)

    @property
    def location(self) -> str:
        """All locations."""
        return self.job.location

    @property
    def num_episodes(self) -> int:
        """Selected episodes of all datasets."""
        return sum(dataset.num_episodes for dataset in self.datasets)

    @property
    def num_frames(self) -> int:
        """Selected frames of all datasets, whatever their weights are."""
        return sum(dataset.num_frames for dataset in self.datasets)

    @property
    def payload_checked(self) -> bool:
        """Whether all fetched video bytes are compared with checksums before they are decoded."""
        return all(dataset.payload_checked for dataset in self.datasets)

    @property
    def recipe(self) -> None:
        """Mixtures have no recipe."""
        return

    @property
    def language(self) -> None:
        """Mixtures have no recipe."""
        return

    def iter_batches(
        self, plan: EpochPlan, rank: int = 0, *, max_steps: int | None = None, decoded_bytes: int = DECODED_CACHE_BYTES
    ) -> Iterator[tuple[Batch, Sample]]:
        """Delivers one rank's planned batches in this process; see `Dataset.iter_batches`."""
        sources = self.job.sources
        assembler = BatchAssembler(self.spec, [source.store for source in sources], as_uint8=self.as_uint8, transform=self.transform)
        pictures = DecodedUnits(self.spec, [source.store.url for source in sources], self.counters, decoded_bytes)
        return planned_batches(plan, rank, self.job.reader(self.counters), assembler, pictures, self.counters, max_steps=max_steps)

    def statistics(self, weights: Sequence[float] | None = None) -> dict[str, Statistics]:
        """Count, mean, std, min and max of every feature for which all datasets store them, as if they were one dataset.

        Args:
            weights: shares of the datasets; None counts each by its frames.
        """
        merged: dict[str, Statistics] = {}
        own = [stored_statistics(member, dataset) for member, dataset in zip(self.members, self.datasets, strict=True)]
        for key in own[0]:
            parts = [stats[key] for stats in own if key in stats]
            if len(parts) == len(own):
                merged[key] = merged_statistics(parts, weights)
        return merged

    def feature_statistics(self, keys: Sequence[str]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Mean and standard deviation of vector features, in the shares in which the datasets are mixed.

        Raises:
            DatasetError: a feature has no numbers in one of the datasets.
        """
        found: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        weights = None if self.weights == "frames" else self.weights
        for key in keys:
            parts: list[Statistics] = []
            for member, dataset in zip(self.members, self.datasets, strict=True):
                width = member.pad.get(key, 0)
                own = next((name for name in dataset.spec.columns if member.name(name) == key), None)
                mean, std = feature_statistics(dataset, [own])[own] if own is not None else (np.zeros(width), np.zeros(width))
                parts.append({"count": np.array([float(dataset.num_frames)]), "mean": padded(mean, width), "std": padded(std, width)})
            merged = merged_statistics(parts, weights)
            found[key] = (merged["mean"], merged["std"])
        return found


def open_described(source: str | Path | Store, config: StreamConfig, **dataset_options: Any) -> tuple[StreamDescription, Dataset | Mixture]:
    """Describes a stream over a dataset, or over the datasets that a mixture file names.

    Args:
        source: dataset location, or path of a mixture file (``.yaml``).
        config: how to deliver; a mixture file adds weights and block.
        **dataset_options: further arguments of `open_dataset`; those that say where a dataset is belong into the file.

    Raises:
        SettingsError: the file is no mixture, or options contradict it.
        DatasetError: a dataset cannot be read as asked.
    """
    if not isinstance(source, str | Path) or not is_mixture_file(source):
        return open_stream(source, config, **dataset_options)
    given = [name for name in ("revision", "repo_type", "root") if dataset_options.get(name) is not None]
    if given:
        raise SettingsError(f"{source} names several datasets: {', '.join(given)} belongs to each of them, in the file")
    mixed = read_mixture(Path(source))
    common = {name: value for name, value in dataset_options.items() if name not in {"revision", "repo_type", "root"}}
    members = [replace(member, options={**common, **member.options}) for member in mixed.members]
    plan = replace(config.plan, weights=mixed.weights, **({} if mixed.block is None else {"mixture_block": mixed.block}))
    return open_mixture(members, replace(config, plan=plan))


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
    spec = common_spec(members, datasets, config.read)
    refuse_transform_of_planes(spec, config.image_transforms)
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
    mixture = Mixture(tuple(members), datasets, spec, job, config.return_uint8, config.image_transforms, weights)
    damage = DamageReport([replace(record, dataset=number) for number, dataset in enumerate(datasets) for record in dataset.damage.records])
    parts = [dataset.units(lane_frames=lane_frames) for dataset in datasets]
    reserved = np.concatenate([np.maximum(part.bytes, dataset.payload_bytes(part)) for part, dataset in zip(parts, datasets, strict=True)])
    return StreamDescription(config, job, _joined(parts), _lengths(datasets), damage, None, reserved), mixture


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
        **transferred(member.options, config),
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


def _joined(parts: Sequence[Units]) -> Units:
    numbers = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("episode", "lo", "hi", "bytes", "cost")}
    return Units(numbers, **columns)


def _lengths(datasets: Sequence[Dataset]) -> EpisodeLengths:
    orders = [np.argsort(dataset.selection) for dataset in datasets]
    return EpisodeLengths(
        tuple(dataset.selection[order] for dataset, order in zip(datasets, orders, strict=True)),
        tuple(dataset.lengths[order] for dataset, order in zip(datasets, orders, strict=True)),
    )
