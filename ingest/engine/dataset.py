"""A dataset opened for reading, in one process: the oracle that every other way of delivery is compared with."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.engine.assemble import BatchAssembler, PlannedSamples, Sample, Transform
from ingest.engine.checks import check_selection, first_of, refuse_transform_of_planes
from ingest.engine.counters import Counters
from ingest.engine.damage import DamagePolicy, DamageReport
from ingest.engine.decoded import DECODED_CACHE_BYTES, DecodedUnits
from ingest.engine.fetch import UnitReader, UnitRequest
from ingest.engine.indexing import IndexedSource, IndexOptions, open_index
from ingest.engine.recipes import FrameRuns, check_anchor, plan_recipe, rendering_options
from ingest.engine.rendering import RenderStage, chain, render_batch, render_one
from ingest.engine.spec import ReadOptions, SampleSpec
from ingest.engine.unit import UnitData
from ingest.engine.units import cut_into_runs, dataset_fingerprint, episode_units, keep_runs, payload_bytes
from ingest.errors import DatasetError, SelectionError, SettingsError
from ingest.language.audit import AnnotationFinding
from ingest.language.coverage import LanguagePlan
from ingest.language.episode import check_declared
from ingest.language.stage import RecipeLike, stage_of
from ingest.language.stage import RenderStage as LanguageStage
from ingest.lerobot.rows import RowReader
from ingest.lerobot.selection import select_episodes
from ingest.lerobot.source import Source, open_source
from ingest.plan import Batch, EpochPlan, PlanSettings, Units, plan_epoch
from ingest.settings import DEFAULT_STREAMING_SEED
from ingest.storage.base import Store
from ingest.storage.locations import parse_location
from ingest.storage.stores import open_store
from ingest.storage.transfer import TransferOptions
from ingest.video.index import VideoIndex
from ingest.video.sidecar.lookup import SidecarIndex

_LOG = logging.getLogger("reelray.engine")


_FINDINGS_LOGGED = 10

_HELD_UNITS = 256
"""Fetched units that the single-process engine keeps, at most."""


class ReadsUnits(Protocol):
    """Whatever reads the units of one dataset, or of several."""

    def read(self, request: UnitRequest) -> UnitData:
        """Fetches one unit; see `UnitReader.read`."""
        ...


@dataclass(slots=True, eq=False)
class Dataset:
    """An opened dataset. Random access by `sample`; epochs by `iter_samples` and `iter_batches`.

    Attributes:
        source: metadata.
        index: sample tables of the video files.
        spec: what samples consist of.
        selection: int64[E], selected episodes in selection order, damaged ones excluded.
        as_uint8: whether pictures are uint8 instead of float32 in [0, 1].
        transform: injected picture transform.
        render: sample stage: the recipe's, the injected one, or both in this order.
        damage: episodes that the damage policy dropped.
        counters: running totals.
        language: what the recipe makes of every frame, and which frames leave the selection; None without a recipe.
    """

    source: Source
    index: VideoIndex
    spec: SampleSpec
    selection: NDArray[np.int64]
    as_uint8: bool
    transform: Transform | None
    render: RenderStage | None
    damage: DamageReport
    counters: Counters
    language: LanguagePlan | None = None
    _lengths: NDArray[np.int64] = field(init=False)
    _runs: FrameRuns = field(init=False)
    _starts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        rows = np.array([self.source.episodes.row(int(episode)) for episode in self.selection], dtype=np.int64)
        self._lengths = self.source.episode_frames()[rows].astype(np.int64)
        self._runs = FrameRuns.whole(self._lengths) if self.language is None else FrameRuns.kept(self.selection, self.language)
        self._starts = np.concatenate([[0], np.cumsum(self._runs.frames)]).astype(np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Frames of each selected episode, int64[E]; those that a recipe leaves out count too, since windows reach them."""
        return self._lengths

    @property
    def recipe(self) -> LanguageStage | None:
        """The recipe's stage, or None."""
        return None if self.language is None else self.language.stage

    @property
    def num_episodes(self) -> int:
        """Selected episodes."""
        return len(self.selection)

    @property
    def num_frames(self) -> int:
        """Selected frames; those that a recipe leaves out do not count."""
        return int(self._starts[-1])

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.spec.fps

    @property
    def location(self) -> str:
        """Where the dataset is, for messages."""
        return self.source.store.url

    def __len__(self) -> int:
        return self.num_frames

    def __getitem__(self, position: int) -> Sample:
        """The sample at a position of the selection, frame by frame in selection order."""
        if not -len(self) <= position < len(self):
            raise IndexError(f"position {position} of a selection of {len(self)} frames")
        position %= len(self)
        run = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self.sample(int(self.selection[self._runs.row[run]]), position - int(self._starts[run]) + int(self._runs.lo[run]))

    def sample(self, episode: int, frame: int) -> Sample:
        """One sample, equal to the map-style item of LeRobot in keys, shapes, dtypes and values.

        Args:
            episode: episode index; it must be selected.
            frame: frame of the episode, from 0.

        Raises:
            SelectionError: the episode is not selected, has no such frame, or the recipe leaves the frame out.
            DamagedDataError: what the sample needs is missing or wrong.
        """
        place = np.flatnonzero(self.selection == episode)
        if not len(place):
            raise SelectionError(f"{self.source.store.url}: episode {episode} is not selected")
        length = int(self._lengths[place[0]])
        if not 0 <= frame < length:
            raise SelectionError(f"{self.source.store.url}: episode {episode} has frames 0..{length - 1}, frame {frame} was asked for")
        if not self._runs.has(int(place[0]), frame):
            raise SelectionError(
                f"{self.source.store.url}: episode {episode}, frame {frame} has no supervision by the recipe and is left out"
            )
        reader = UnitReader(self.source, self.index, self.spec, self.counters)
        unit = reader.read(UnitRequest(0, episode, frame, frame + 1))
        pictures = DecodedUnits(self.spec, (self.location,), self.counters)
        sample = self.assembler().sample(unit, frame, pictures.bind({0: unit}), seed=DEFAULT_STREAMING_SEED, epoch=0)
        return sample if self.render is None else render_one(self.render, sample)

    def assembler(self, **options: Any) -> BatchAssembler:
        """An assembler for this dataset's samples."""
        return BatchAssembler(self.spec, (self.source.store,), as_uint8=self.as_uint8, transform=self.transform, **options)

    def reader(self) -> UnitReader:
        """A reader for this dataset's units."""
        return UnitReader(self.source, self.index, self.spec, self.counters)

    def row_reader(self) -> RowReader:
        """A reader of tabular rows alone."""
        return RowReader(self.source)

    @property
    def payload_checked(self) -> bool:
        """Whether fetched video bytes are compared with checksums before they are decoded."""
        return isinstance(self.index, SidecarIndex) and self.index.has_checksums

    def fingerprint(self) -> str:
        """Digest of what an order over this dataset depends on, the recipe included; equal for every copy of the dataset."""
        digest = dataset_fingerprint(self.source)
        return digest if self.language is None else f"{digest}:{self.language.fingerprint()}"

    def units(self, *, lane_frames: int | None = None) -> Units:
        """The planner's units: whole episodes in selection order, or runs of at most ``lane_frames`` frames of them.

        Frames that a recipe leaves out are in no unit: an episode that loses some becomes one unit for each run that stays.
        """
        whole = episode_units(self.source, self.index, self.spec, self.selection, self.lengths)
        units = whole if self.language is None else keep_runs(whole, self._runs.row, self._runs.lo, self._runs.hi)
        if lane_frames is not None:
            units = cut_into_runs(units, self.source, self.index, self.spec.cameras, lane_frames)
        # Whole episodes keep LeRobot's measure, which decides the order of pools.
        return units if units is whole else units.with_bytes(self.payload_bytes(units))

    def payload_bytes(self, units: Units) -> NDArray[np.int64]:
        """Bytes of compressed pictures that reading each of some units brings into memory, int64[U]."""
        return payload_bytes(units, self.source, self.index, self.spec)

    def iter_batches(
        self, plan: EpochPlan, rank: int = 0, *, max_steps: int | None = None, decoded_bytes: int = DECODED_CACHE_BYTES
    ) -> Iterator[tuple[Batch, Sample]]:
        """Delivers one rank's planned batches, one after another, in this process.

        Args:
            plan: a plan over ``units``.
            rank: data-parallel rank.
            max_steps: deliver at most that many batches.
            decoded_bytes: decoded pictures kept beside the batch, at most; fewer are decoded more often.

        Raises:
            BudgetError: ``decoded_bytes`` does not hold one picture.

        Yields:
            The planned batch and its samples.
        """
        pictures = DecodedUnits(self.spec, (self.location,), self.counters, decoded_bytes)
        return planned_batches(
            plan, rank, self.reader(), self.assembler(), pictures, self.counters, render=self.render, max_steps=max_steps
        )


def planned_batches(
    plan: EpochPlan,
    rank: int,
    reader: ReadsUnits,
    assembler: BatchAssembler,
    pictures: DecodedUnits,
    counters: Counters,
    *,
    render: RenderStage | None = None,
    max_steps: int | None = None,
) -> Iterator[tuple[Batch, Sample]]:
    """Delivers one rank's planned batches, one after another, in this process.

    Args:
        plan: the epoch's plan.
        rank: data-parallel rank.
        reader: reads the plan's units.
        assembler: makes batches of them.
        pictures: decodes them.
        counters: receives totals.
        render: sample stage.
        max_steps: deliver at most that many batches.

    Yields:
        The planned batch and its samples.
    """
    held: OrderedDict[int, UnitData] = OrderedDict()
    ranked = plan.rank(rank)
    stop = None if max_steps is None else ranked.start_step + max_steps
    units, settings = plan.units, plan.settings
    for planned in ranked.batches(stop=stop):
        for number in dict.fromkeys(planned.unit.tolist()):
            if number not in held:
                held[number] = reader.read(
                    UnitRequest(int(units.dataset[number]), int(units.episode[number]), int(units.lo[number]), int(units.hi[number]))
                )
            held.move_to_end(number)
        while len(held) > max(_HELD_UNITS, len(planned)):
            pictures.drop(held.popitem(last=False)[0])
        samples = PlannedSamples(planned.unit, planned.frame, planned.is_pad, settings.seed, plan.epoch)
        batch = assembler.batch(samples, held, pictures.bind(held))
        counters.add("reelray_samples_delivered", int(np.count_nonzero(~planned.is_pad)))
        yield planned, batch if render is None else render_batch(render, batch)


def iter_samples(dataset: Dataset, settings: PlanSettings | None = None, *, epoch: int = 0, rank: int = 0) -> Iterator[Sample]:
    """Delivers the samples of one rank's epoch one by one, in one process.

    Args:
        dataset: the opened dataset.
        settings: order; None delivers the selection in order.
        epoch: epoch number.
        rank: data-parallel rank.

    Yields:
        Samples with the keys, shapes and dtypes of the map-style item; masked repeats are left out.
    """
    settings = settings or PlanSettings(strategy="sequential")
    plan = plan_epoch(dataset.units(), replace(settings, dataset=dataset.fingerprint()), epoch=epoch)
    for planned, batch in dataset.iter_batches(plan, rank):
        for place in np.flatnonzero(~planned.is_pad).tolist():
            yield {key: value[place] for key, value in batch.items() if key != "is_pad"}


def open_dataset(
    source: str | Path | Store,
    *,
    revision: str | None = None,
    repo_type: str | None = None,
    root: str | Path | None = None,
    data_root: str | Path | None = None,
    episodes: Sequence[int] | None = None,
    exclude_episodes: Sequence[int] | None = None,
    options: ReadOptions | None = None,
    image_transforms: Transform | None = None,
    recipe: RecipeLike | None = None,
    render: RenderStage | None = None,
    return_uint8: bool = False,
    damage: DamagePolicy = "error",
    allow_unknown_version: bool = False,
    index: VideoIndex | None = None,
    indexing: IndexOptions | None = None,
    transfer: TransferOptions | None = None,
    **read_options: Any,
) -> Dataset:
    """Opens a LeRobotDataset v3 for reading.

    Args:
        source: a location (local directory, ``OWNER/NAME``, a URL; see `ingest.storage.locations`), or an opened store.
        revision: branch, tag or commit of a dataset on the Hub.
        repo_type: ``dataset`` or ``bucket``; None takes it from the spelling.
        root: directory that holds the dataset which ``source`` names.
        data_root: location of rows and videos where they are not beside the metadata: any location, with the same files below it.
        episodes: episodes to read, in the order to read them; None reads all.
        exclude_episodes: episodes to leave out.
        options: how to read; or give the fields of `ReadOptions` as keywords.
        image_transforms: injected picture transform.
        recipe: language recipe: a file, the name of a shipped one, YAML text, nested mappings, a `TrainingRecipe`, or a
            `ingest.language.RenderStage`, which also says what becomes of frames that it does not render, and the keys.
            The language columns are read at once, and frames without supervision leave the selection.
        render: injected sample stage; it gets what the recipe renders.
        return_uint8: deliver uint8 pictures instead of float32 in [0, 1].
        damage: ``error`` refuses a dataset whose files do not hold the selected rows and their pictures;
            ``skip_episode`` drops those episodes whole and reports them in ``Dataset.damage``.
        allow_unknown_version: also read a missing or future codebase version.
        index: sample tables; None finds or builds the dataset's MP4 sidecar as ``indexing`` says.
        indexing: whether and how a sidecar is found or built.
        transfer: connections, and a cache of payload on disk, for a remote dataset.
        **read_options: fields of `ReadOptions`.

    Raises:
        DatasetError: the dataset cannot be read as asked; see its subclasses.
        LocationError: the location is none, or contradicts the other arguments.
        StorageError: there is nothing, or it cannot be read.
    """
    if options is not None and read_options:
        raise SettingsError(f"give either options or {', '.join(read_options)}, not both")
    location = None
    if not isinstance(source, str | Path):
        store = source
    else:
        location = parse_location(source, repo_type=repo_type, root=root, revision=revision)
        store = open_store(location)
    transfer = transfer or TransferOptions()
    store = transfer.limited(store)
    stage = stage_of(recipe)
    opened = open_source(transfer.cached(store), allow_unknown_version=allow_unknown_version)
    if data_root is not None:
        store = transfer.limited(open_store(parse_location(data_root)))
        opened = replace(opened, store=transfer.cached(store))
    for warning in opened.warnings:
        _LOG.warning("%s: %s", store.url, warning)
    options = options or ReadOptions(**read_options)
    spec = SampleSpec.resolve(opened.info, options if stage is None else rendering_options(options, opened.info))
    refuse_transform_of_planes(spec, image_transforms)
    if stage is not None:
        check_anchor(spec)
    selection = select_episodes(opened, episodes, exclude_episodes)
    index = index or open_index(IndexedSource.of(opened, location, store=store), indexing or IndexOptions())
    repairs = len(opened.warnings)
    opened, damaged = check_selection(opened, index, spec, selection)
    for warning in opened.warnings[repairs:]:
        _LOG.warning("%s: %s", store.url, warning)
    if damaged and damage == "error":
        raise first_of(damaged)
    report = DamageReport()

    def drop(episode: int, error: DatasetError) -> None:
        frames = int(opened.episodes.length[opened.episodes.row(episode)])
        report.add(error, dataset=0, episode=episode, step=0, frames=frames)
        _LOG.warning("episode %d (%d frames) is dropped: %s", episode, frames, error)

    for episode, error in damaged.items():
        drop(episode, error)
    kept = _without_dropped(opened, selection, report)
    check_declared(opened, int(kept[0]))
    language = None
    if stage is not None and stage.recipe is not None:
        findings: list[AnnotationFinding] = []
        language = plan_recipe(opened, stage, kept, None if damage == "error" else drop, findings.append)
        for finding in findings[:_FINDINGS_LOGGED]:
            _LOG.warning("%s: %s", store.url, finding)
        if len(findings) > _FINDINGS_LOGGED:
            _LOG.warning(
                "%s: %d more annotations are questionable: `reelray recipe styles` lists them", store.url, len(findings) - _FINDINGS_LOGGED
            )
        kept = _without_dropped(opened, kept, report)
        kept = _supervised(opened, kept, language)
    render = chain(stage if language is None else language.stage, render)
    return Dataset(opened, index, spec, kept, return_uint8, image_transforms, render, report, Counters(), language)


def _without_dropped(source: Source, selection: NDArray[np.int64], report: DamageReport) -> NDArray[np.int64]:
    kept = selection[~np.isin(selection, report.episodes)] if report.records else selection
    if not len(kept):
        raise SelectionError(f"{source.store.url}: every selected episode is damaged; the first: {report.records[0].message}")
    return kept


def _supervised(source: Source, selection: NDArray[np.int64], plan: LanguagePlan) -> NDArray[np.int64]:
    """The episodes of which the recipe leaves something."""
    leaving = plan.leaving()
    if leaving:
        frames, policy = sum(len(frames) for frames in leaving.values()), plan.stage.policy
        _LOG.warning("%s: %d of %d frames have no supervision and are left out (policy %s)", source.store.url, frames, plan.frames, policy)
    kept = selection[np.isin(selection, [part.episode for part in plan.episodes if part.kept.any()])]
    if not len(kept):
        raise SelectionError(
            f"{source.store.url}: the recipe has supervision for none of the {plan.frames} selected frames (policy {plan.stage.policy}); "
            "`reelray recipe coverage` shows why"
        )
    return kept
