"""Options that several commands share, and how they become settings."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingest.engine.spec import ReadOptions
from ingest.errors import SettingsError
from ingest.lerobot.selection import parse_episodes
from ingest.plan import PlanSettings
from ingest.settings import DEFAULT_STREAMING_SEED
from ingest.storage.transfer import TransferOptions
from ingest.video.backends import PYAV, PictureDecoder

if TYPE_CHECKING:
    from ingest.engine.dataset import Dataset
    from ingest.engine.indexing import IndexOptions
    from ingest.language.stage import RenderStage
    from ingest.plan import Cursor
    from ingest.storage.base import Store
    from ingest.storage.locations import Location
    from ingest.video.sidecar.build import BuildProgress
    from train_integration.mixtures import Mixture

Source = Annotated[str, tyro.conf.Positional]
"""Location of a dataset: a directory, OWNER/NAME, hf://…, s3://…, https://…, or another fsspec URL."""

Flat = tyro.conf.OmitArgPrefixes
Strategy = Literal["lanes", "remaining", "round_robin", "sequential", "episode_sequential", "reservoir"]
Tail = Literal["exact", "drop_tail", "pad", "loop"]
Share = Literal["episodes", "frame_exact", "cost"]
RecipePolicy = Literal["error", "fallback", "drop"]

_EPISODES_SHOWN = 20
_LOG = logging.getLogger("reelray")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceArguments:
    """Where a dataset is, beside its location."""

    revision: str | None = None
    """Branch, tag or commit of a dataset on the Hub."""
    repo_type: Literal["dataset", "bucket"] | None = None
    """What OWNER/NAME names on the Hub; taken from the spelling when unset."""
    root: str | None = None
    """Local directory (or hf://buckets/OWNER/BUCKET) that holds the dataset which SRC names."""
    allow_unknown_version: bool = False
    """Also read a missing or newer codebase version."""

    def location(self, src: str) -> Location:
        """The parsed location.

        Raises:
            LocationError: it is none, or contradicts the options.
        """
        from ingest.storage.locations import parse_location

        return parse_location(src, revision=self.revision, repo_type=self.repo_type, root=self.root)

    def store(self, src: str) -> Store:
        """The opened store.

        Raises:
            LocationError: the location is none.
            StorageError: there is nothing, or it cannot be read.
        """
        from ingest.storage.stores import open_store

        return open_store(self.location(src))

    def keywords(self) -> dict[str, Any]:
        """As keyword arguments of `open_dataset`."""
        return {
            "revision": self.revision,
            "repo_type": self.repo_type,
            "root": self.root,
            "allow_unknown_version": self.allow_unknown_version,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadArguments(PlaceArguments):
    """What is read of a dataset."""

    episodes: str | None = None
    """Episodes to read, for example 1,3; their order is the selection order."""
    exclude_episodes: str | None = None
    """Episodes to leave out."""
    cameras: str | None = None
    """Cameras to deliver, separated by commas; all by default."""
    delta_timestamps: str | None = None
    """Windows as JSON: {"observation.images.top": [-0.1, 0.0], "action": [0.0, 0.1]} (seconds)."""
    tolerance_s: float = 1e-4
    """Most that a window offset or a picture time may deviate, in seconds."""
    strict_time: bool = False
    """Picture times off by more than tolerance_s are errors instead of warnings."""
    image_crop: tuple[int, int, int, int] | None = None
    """Top row, left column, height and width of the part of every video picture to deliver; cut out before resizing."""
    image_size: tuple[int, int] | None = None
    """Height and width to which pictures are resized while they are decoded."""
    resize_filter: Literal["fast_bilinear", "bilinear", "bicubic", "area", "lanczos", "point"] = "bilinear"
    """Filter of the resizing; depth pictures take the nearest pixel."""
    pixel_format: Literal["rgb24", "yuv420p"] = "rgb24"
    """Form of colour pictures: exact RGB, or planes for conversion on the device."""
    depth_output_unit: Literal["mm", "m"] = "mm"
    """Depth as uint16 millimetres or float32 metres."""
    video_backend: Literal["pyav", "torchcodec", "nvdec"] = "pyav"
    """What decodes colour cameras; torchcodec and nvdec need torchcodec."""
    damage: Literal["error", "skip_episode"] = "error"
    """What to do about damaged episodes."""
    use_sidecar: bool = True
    """Find or build the MP4 sidecar; off reads the heads of video files as they are needed."""
    sidecar_lock_timeout_s: float = 1800.0
    """Longest wait for another process that builds the same sidecar, in seconds."""
    sidecar_workers: int = 8
    """Video files indexed at once when the sidecar must be built."""
    native_http_connections: int | None = None
    """Range reads at once in each process, from remote datasets; when unset 8, or as many as units are fetched at once if more."""
    native_http_subranges: int = 1
    """Most parts of one range of 16 MiB or more that are read at once; no part is smaller than 8 MiB."""
    payload_cache_gb: float | None = None
    """GiB of fetched payload kept on each node's disk, so that later epochs need no network; none is kept when unset."""
    payload_cache_dir: Path | None = None
    """Where it is kept; streaming-payload in HF_LEROBOT_HOME when unset. Safe to delete at any time."""

    def options(self) -> ReadOptions:
        """As the engine's options."""
        return ReadOptions(
            cameras=None if self.cameras is None else tuple(part.strip() for part in self.cameras.split(",") if part.strip()),
            delta_timestamps=parse_windows(self.delta_timestamps),
            tolerance_s=self.tolerance_s,
            strict_time=self.strict_time,
            image_crop=self.image_crop,
            image_size=self.image_size,
            resize_filter=self.resize_filter,
            pixel_format=self.pixel_format,
            depth_output_unit=self.depth_output_unit,
            decoder=decoder_of(self.video_backend),
        )

    def keywords(self) -> dict[str, Any]:
        """As keyword arguments of `open_dataset`."""
        place = PlaceArguments.keywords(self)  # slots make the class anew, so super() would not find it
        transfer = TransferOptions(
            connections=self.native_http_connections,
            subranges=self.native_http_subranges,
            cache_gb=self.payload_cache_gb,
            cache_dir=self.payload_cache_dir,
        )
        return place | {
            "indexing": index_options(self.use_sidecar, self.sidecar_lock_timeout_s, self.sidecar_workers),
            "transfer": transfer,
        }

    def selected(self, text: str | None) -> tuple[int, ...] | None:
        """Episode numbers out of an option's text."""
        return None if text is None else tuple(parse_episodes(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeArguments:
    """Which language recipe renders the samples."""

    recipe: str | None = None
    """Language recipe: a YAML file, or a shipped one (subtask, subtask_joint, subtask_mem, subtask_mem_vqa_speech)."""
    recipe_policy: RecipePolicy = "fallback"
    """Annotated frames on which the recipe does not apply: their task alone trains (or they leave without one), they leave, or an error."""
    on_ambiguous: RecipePolicy = "error"
    """Frames whose rows are ambiguous or malformed."""
    messages_key: str = "messages"
    """Key of the messages in a batch."""
    streams_key: str = "message_streams"
    """Key of the stream of each message."""
    targets_key: str = "target_message_indices"
    """Key of the positions of the supervised messages."""
    rephrasings_win: bool = False
    """Let task_aug rows replace the sample's task."""
    lerobot_batches: bool = False
    """Render frames without rows by the recipe, as LeRobot does inside batches."""

    def stage(self) -> RenderStage | None:
        """The recipe's stage, or None without a recipe.

        Raises:
            ObjectNotFoundError: no such recipe.
            RecipeError: the recipe is invalid; names line and place.
            SettingsError: an option that has no meaning without a recipe.
        """
        if self.recipe is None:
            idle = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
            if idle:
                raise SettingsError(f"{', '.join(idle)} has no meaning without --recipe")
            return None
        from ingest.language.recipe_file import load_recipe
        from ingest.language.stage import RenderStage

        return RenderStage(
            load_recipe(self.recipe),
            self.recipe_policy,
            self.on_ambiguous,
            messages_key=self.messages_key,
            streams_key=self.streams_key,
            targets_key=self.targets_key,
            rephrasings_win=self.rephrasings_win,
            lerobot_batches=self.lerobot_batches,
        )


def language_report(dataset: Dataset | Mixture) -> dict[str, Any] | None:
    """What a recipe makes of the selection: coverage, ambiguous frames and the frames that leave; None without one."""
    from ingest.language.coverage import coverage_summary

    return None if dataset.language is None else coverage_summary(dataset.language)


def print_language(report: Mapping[str, Any] | None) -> None:
    """Writes what a person needs to know of ``language_report``."""
    if report is None:
        return
    shares = [f"{entry['outcome']} {entry['frames']:,}" for entry in report["outcomes"] if entry["frames"]]
    print(f"recipe: {report['kept_frames']:,} of {report['frames']:,} frames stay; {', '.join(shares)}")
    for name in report["never_rendered"]:
        print(f"recipe branch {name} renders on no frame")
    for episode, ranges in list(report["leaving"].items())[:_EPISODES_SHOWN]:
        print(f"episode {episode}: frames {', '.join(f'{start}..{stop - 1}' for start, stop in ranges)} leave the selection")
    if len(report["leaving"]) > _EPISODES_SHOWN:
        print(f"… {len(report['leaving']) - _EPISODES_SHOWN} more episodes lose frames (--json lists all)")
    for fault in report["faults"][:_EPISODES_SHOWN]:
        print(f"ambiguous: episode {fault['episode']}, frame {fault['frame']}: {fault['message']}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderArguments:
    """What decides the order."""

    world_size: int = 1
    """Training ranks."""
    workers: int = 0
    """Consumers inside each rank, each with its own pool and share; more than a rank has episodes are clamped."""
    batch_size: int = 8
    """Samples of a batch."""
    epoch: int = 0
    """Epoch number; with a cursor, the epoch is the cursor's."""
    seed: int | None = DEFAULT_STREAMING_SEED
    """Order seed; None is the fixed streaming seed 42."""
    strategy: Strategy = "remaining"
    """Order mode; lanes is the native one."""
    pool_size: int | None = None
    """Episodes mixed by each worker; 32 / workers when unset."""
    byte_budget_gb: float = 8.0
    """GiB of compressed pictures per rank."""
    lanes: int | None = None
    """Lanes of the native order."""
    lane_frames: int | None = 64
    """Frames of one unit of the native order, at most; None keeps whole episodes."""
    share: Share = "episodes"
    """How ranks share the episodes."""
    tail: Tail = "exact"
    """What happens at the end of an epoch where ranks differ."""
    shuffle: bool = True
    """Off replays epoch 0 in every epoch."""
    dp_rank: int | None = None
    """Deliver only this data-parallel rank."""
    dp_size: int | None = None
    """Data-parallel size, where it differs from the world size."""

    @property
    def ranks(self) -> int:
        """Data-parallel size."""
        return self.world_size if self.dp_size is None else self.dp_size

    def settings(self) -> PlanSettings:
        """As the planner's settings."""
        if self.dp_rank is not None and not 0 <= self.dp_rank < self.ranks:
            raise SettingsError(f"dp_rank must be in 0..{self.ranks - 1}, found {self.dp_rank}")
        if not 0 < self.byte_budget_gb * 2**30 < math.inf:
            raise SettingsError(f"byte_budget_gb must be positive, found {self.byte_budget_gb}")
        return PlanSettings(
            strategy=self.strategy,
            seed=DEFAULT_STREAMING_SEED if self.seed is None else self.seed,
            world_size=self.ranks,
            workers=self.workers,
            batch_size=self.batch_size,
            pool_size=self.pool_size,
            byte_budget=int(self.byte_budget_gb * 2**30),
            lanes=self.lanes,
            share=self.share,
            tail=self.tail,
            shuffle=self.shuffle,
            clamp_workers=True,
        )


def cursor_of(path: Path | None, epoch: int) -> Cursor | None:
    """The position in a cursor file, if there is one; says so where another epoch was asked for beside it.

    Raises:
        CursorError: the file cannot be read or is no cursor.
    """
    from train_integration.delivery import read_cursor

    if path is None:
        return None
    cursor = read_cursor(path)
    if epoch not in (0, cursor.epoch):
        _LOG.warning("epoch %d has no effect: the cursor stands in epoch %d", epoch, cursor.epoch)
    return cursor


def check_outputs(**paths: Path | None) -> None:
    """Refuses files that cannot be written, before the work that they would hold is done.

    Args:
        **paths: files by option; None is not asked for.

    Raises:
        SettingsError: a path is a folder or a device, lies inside a file, may not be written, or is given twice.
    """
    known: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        whole = Path(os.path.realpath(path))
        if whole.is_dir():
            raise SettingsError(f"{name}: {path} is a directory; name a file in it")
        if path.exists() and not path.is_file():
            # A finished file is renamed into place, which would remove the device itself.
            raise SettingsError(f"{name}: {path} is a device or pipe; name a file")
        folder = next(parent for parent in whole.parents if parent.exists())
        if not folder.is_dir():
            raise SettingsError(f"{name}: {path} cannot be written, because {folder} is a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SettingsError(f"{name}: {path} cannot be written, for want of permission in {folder}")
        if whole in known:
            raise SettingsError(f"{known[whole]} and {name} are the same file {path}; give each its own")
        known[whole] = name


def decoder_of(backend: Literal["pyav", "torchcodec", "nvdec"]) -> PictureDecoder:
    """What decodes colour cameras.

    Raises:
        SettingsError: it is not installed.
    """
    if backend == "pyav":
        return PYAV
    from train_integration.backends import open_decoder

    return open_decoder(backend)


def parse_windows(text: str | None) -> dict[str, list[float]] | None:
    """Windows from JSON text.

    Raises:
        SettingsError: it is not an object of lists of numbers.
    """
    if text is None:
        return None
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"delta_timestamps is not JSON: {error}") from None
    if not isinstance(loaded, dict) or not all(isinstance(offsets, list) for offsets in loaded.values()):
        raise SettingsError("delta_timestamps must be a JSON object with a list of seconds for each feature")
    return loaded


def index_options(use_sidecar: bool, lock_timeout_s: float, workers: int) -> IndexOptions:
    """How an opened dataset gets its index: with a bar on a terminal, with log lines elsewhere."""
    from ingest.engine.indexing import IndexOptions

    progress = _IndexBar() if sys.stderr.isatty() else None
    return IndexOptions(use_sidecar=use_sidecar, lock_timeout_s=lock_timeout_s, workers=workers, progress=progress)


class _IndexBar:
    """A bar that appears with the first indexed file and goes with the last."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, progress: BuildProgress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=progress.total, unit=" files", desc="indexing videos", leave=False)
        self._bar.update(progress.done - self._bar.n)
        if progress.done == progress.total:
            self._bar.close()
            self._bar = None


@contextmanager
def progress_bar(total: int | None, unit: str, what: str) -> Generator[Any]:
    """A progress bar on standard error; silent where that is no terminal."""
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, desc=what, disable=None, leave=False, unit_scale=True) as bar:
        yield bar


def human_bytes(count: float) -> str:
    """A number of bytes with a unit that a person can read."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def print_json(value: object) -> None:
    """Writes one JSON document to standard output."""
    json.dump(value, sys.stdout, indent=2, default=str)
    print()


def print_table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> None:
    """Writes a plain table with aligned columns; numbers to the right."""
    texts = [list(header)] if header else []
    texts += [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))] if texts else []
    for number, row in enumerate(texts):
        source = rows[number - bool(header)] if not header or number else ()
        cells = [
            text.rjust(width)
            if source and isinstance(source[column], int | float) and not isinstance(source[column], bool)
            else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def print_facts(facts: Mapping[str, object]) -> None:
    """Writes names and values, one pair on a line."""
    print_table([(name, value if isinstance(value, str) else _text(value)) for name, value in facts.items()])
