"""What a stream delivers and within which means: one frozen description that the driver ships to every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingest.datasource import ReadJob
from ingest.engine.assemble import Transform
from ingest.engine.damage import DamagePolicy, DamageReport
from ingest.engine.dataset import Dataset, open_dataset
from ingest.engine.modes import DecodeMode
from ingest.engine.rendering import RenderStage
from ingest.engine.spec import ReadOptions
from ingest.errors import SettingsError
from ingest.language.stage import RecipeLike
from ingest.plan import PlanSettings, Units
from ingest.storage.base import Store
from ingest.storage.processes import usable_memory
from ingest.storage.transfer import TransferOptions
from train_integration.credits import DEFAULT_WINDOW
from train_integration.option_checks import require_positive
from train_integration.worklist import EpisodeLengths

Decode = Literal["auto", "pool", "inline"]
FrameStoreName = Literal["slab", "object_store"]
_RUNS_PER_EPISODE = 8
"""Runs of frames, into which the native orders cut episodes, that count as one episode fetched ahead."""
_POSITIVE = (
    "byte_budget_gb",
    "prefetch_batches",
    "prefetch_units",
    "fetch_threads",
    "decode_threads",
    "stall_s",
    "decoded_budget_gb",
    "lane_frames",
    "epochs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How samples are delivered. Order is decided by ``plan`` and the units alone; the rest decides cost.

    Attributes:
        plan: strategy, seed, topology and the other settings of the order.
        read: what a sample consists of.
        episodes: episodes to read; None reads all.
        exclude_episodes: episodes to leave out.
        epochs: epochs to deliver; None goes on for ever.
        damage: what to do about damaged episodes.
        image_transforms: picture transform: ``(picture HWC, SampleKey)``, one of `train_integration.transforms`, or a
            callable in torchvision's style (uint8 tensor CHW), which is seeded for every sample; must pickle.
        recipe: language recipe (see `open_dataset`): a file, a shipped name, a `TrainingRecipe`, or a
            `ingest.language.RenderStage` with policies and key names. Frames without supervision leave the selection.
        render: injected sample stage; must pickle; it gets what the recipe renders.
        return_uint8: uint8 pictures (default) or float32 in [0, 1].
        decode: ``pool``: by the node's decode actors; ``inline``: by threads of the rank; ``auto``: by threads where the node has
            few CPUs for each rank, and by actors where it has more than the threads of one process make good use of.
        decode_mode: ``auto`` decodes units whole where the decoded budget holds them, those first that save most, and the others
            sample by sample; ``once`` refuses a budget that does not hold all; ``on_demand`` decodes every sample by itself.
        decode_threads: most threads of ``inline`` decoding.
        frame_store: where decode actors leave their pictures: ``slab``: in memory of the rank, that they share with it;
            ``object_store``: in Ray's object store, which costs more per picture and needs no shared memory, so that decoders
            on other nodes are asked directly. It needs decode actors, so ``auto`` decodes in them.
        decoded_budget_gb: GiB of decoded pictures per rank; None takes a share of the node's memory.
        byte_budget_gb: GiB of fetched compressed pictures per rank.
        prefetch_batches: finished batches kept ahead of the training loop.
        prefetch_units: units that may be under way at a time: granted, and not yet arrived.
        fetch_threads: units fetched at once by one read task.
        lane_frames: frames of one unit in ``lanes`` and ``reservoir``, at most, cut where pictures decode independently;
            None keeps whole episodes.
        stall_s: seconds without a batch after which the stream gives up.
    """

    plan: PlanSettings = field(default_factory=PlanSettings)
    read: ReadOptions = field(default_factory=ReadOptions)
    episodes: tuple[int, ...] | None = None
    exclude_episodes: tuple[int, ...] | None = None
    epochs: int | None = 1
    damage: DamagePolicy = "error"
    image_transforms: Transform | Callable[..., Any] | None = None
    recipe: RecipeLike | None = None
    render: RenderStage | None = None
    return_uint8: bool = True
    decode: Decode = "auto"
    decode_mode: DecodeMode = "auto"
    decode_threads: int = 2
    frame_store: FrameStoreName = "slab"
    decoded_budget_gb: float | None = None
    byte_budget_gb: float = 8.0
    prefetch_batches: int = 4
    prefetch_units: int = DEFAULT_WINDOW
    fetch_threads: int = 4
    lane_frames: int | None = 64
    stall_s: float = 300.0

    def __post_init__(self) -> None:
        require_positive({name: getattr(self, name) for name in _POSITIVE})
        if self.plan.tail == "loop" and self.damage == "skip_episode":
            raise SettingsError(
                "damage 'skip_episode' and tail 'loop' exclude each other: nothing can be taken out of an order without end"
            )
        if self.decode not in {"auto", "pool", "inline"}:
            raise SettingsError(f"decode must be auto, pool or inline, found {self.decode!r}")
        if self.frame_store not in {"slab", "object_store"}:
            raise SettingsError(f"frame_store must be slab or object_store, found {self.frame_store!r}")
        if self.frame_store == "object_store" and self.decode == "inline":
            raise SettingsError("frame_store 'object_store' needs decode actors, and decode 'inline' has none: use pool or auto")
        if self.decode_mode not in {"auto", "once", "on_demand"}:
            raise SettingsError(f"decode_mode must be auto, once or on_demand, found {self.decode_mode!r}")

    @property
    def needs_actors(self) -> bool:
        """Whether nothing but decode actors will do."""
        return self.decode == "pool" or self.frame_store == "object_store"

    def for_evaluation(self, **changes: Any) -> StreamConfig:
        """A configuration for an evaluation stream beside the training stream: in selection order, every frame once, then over.

        ``set_epoch(0)`` begins another evaluation. Ranks may end at different steps; image transforms are left out.

        Args:
            **changes: further fields of this class, for example other ``episodes``.
        """
        plan = replace(self.plan, strategy="sequential", tail="exact", shuffle=False, share="frame_exact", weights=None)
        return replace(self, **({"plan": plan, "epochs": 1, "image_transforms": None} | changes))


@dataclass(frozen=True, slots=True, eq=False)
class StreamDescription:
    """A stream as data: what every rank needs beside its rank. Pickles.

    Attributes:
        config: as given; its ``plan`` holds the topology asked for.
        job: how units are read.
        units: the planner's table.
        lengths: frames of whole episodes.
        damage: episodes dropped before the first frame.
        render: what is done to every sample: the recipe, the injected stage, or both.
        reserved: int64[U], bytes that each unit may hold in memory, against which the byte budget is kept; None takes the
            planner's own.
    """

    config: StreamConfig
    job: ReadJob
    units: Units
    lengths: EpisodeLengths
    damage: DamageReport
    render: RenderStage | None = None
    reserved: NDArray[np.int64] | None = None

    @property
    def unit_bytes(self) -> NDArray[np.int64]:
        """Bytes to reserve for each unit, int64[U]."""
        return self.units.bytes if self.reserved is None else self.reserved

    def with_topology(self, *, world_size: int) -> PlanSettings:
        """The plan's settings for another number of ranks."""
        return replace(self.config.plan, world_size=world_size)

    def global_index(self, dataset: NDArray[Any], episode: NDArray[np.int64], frame: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of each frame inside its dataset, int64[N], from dataset numbers, episode indices and episode frame numbers."""
        found = frame.astype(np.int64)
        for number, source in enumerate(self.job.sources):
            here = dataset == number
            found[here] += source.episodes.dataset_from[source.episodes.rows(episode[here])]
        return found


def open_stream(source: str | Path | Store, config: StreamConfig, **dataset_options: Any) -> tuple[StreamDescription, Dataset]:
    """Opens a dataset and describes a stream over it.

    Args:
        source: dataset location.
        config: how to deliver.
        **dataset_options: further arguments of `open_dataset`.

    Raises:
        DatasetError: the dataset cannot be read as asked.
    """
    config = replace(config, image_transforms=transform_of(config))
    dataset = open_dataset(
        source,
        episodes=config.episodes,
        exclude_episodes=config.exclude_episodes,
        options=config.read,
        image_transforms=config.image_transforms,
        recipe=config.recipe,
        render=config.render,
        return_uint8=config.return_uint8,
        damage=config.damage,
        **transferred(dataset_options, config),
    )
    return describe_stream(dataset, config), dataset


def transferred(dataset_options: Mapping[str, Any], config: StreamConfig) -> dict[str, Any]:
    """Arguments of `open_dataset` with as many connections as units are fetched at once, where nothing else is said."""
    transfer = dataset_options.get("transfer") or TransferOptions()
    return {**dataset_options, "transfer": replace(transfer, fetch_threads=config.fetch_threads)}


def describe_stream(dataset: Dataset, config: StreamConfig) -> StreamDescription:
    """Describes a stream over an opened dataset.

    The dataset decides what is rendered; ``config.render`` only counts where it was opened without any stage.
    """
    plan = replace(config.plan, dataset=dataset.fingerprint())
    config = replace(config, plan=plan, recipe=dataset.recipe, image_transforms=transform_of(config))
    units = dataset.units(lane_frames=config.lane_frames if config.plan.strategy in {"lanes", "reservoir"} else None)
    order = np.argsort(dataset.selection)
    lengths = EpisodeLengths((dataset.selection[order],), (dataset.lengths[order],))
    # The store's error says more than the watchdog's, so it comes first.
    job = ReadJob.of(dataset, threads=config.fetch_threads, outage_s=0.8 * config.stall_s)
    # Files whose times disagree with their pictures can hold more of an episode than LeRobot's measure, which goes by time.
    reserved = np.maximum(units.bytes, dataset.payload_bytes(units))
    return StreamDescription(config, job, units, lengths, dataset.damage, dataset.render or config.render, reserved)


def units_under_way(plan: PlanSettings, prefetch_episodes: int, workers: int = 1) -> int:
    """Units that some consumers may have under way at a time: those of their pools, and the episodes fetched ahead of each pool.

    The native orders have no pool, and count eight runs of frames as one episode.
    """
    if plan.pooled:
        return workers * (plan.pool_share(workers) + prefetch_episodes)
    return max(1, prefetch_episodes * _RUNS_PER_EPISODE)


def transform_of(config: StreamConfig) -> Transform | None:
    """The picture transform that a configuration asks for, in the form that streams call."""
    if config.image_transforms is None:
        return None
    # Only transforms need torch here.
    from train_integration.transforms import as_transform

    return as_transform(config.image_transforms)


def decoded_budget_bytes(config: StreamConfig, ranks_on_node: int) -> int:
    """Bytes of decoded pictures that one rank may hold: as configured, or a quarter of the memory of the
    node, or of its container, over its ranks."""
    if config.decoded_budget_gb is not None:
        return int(config.decoded_budget_gb * 2**30)
    return int(usable_memory() * 0.25 / max(1, ranks_on_node))
