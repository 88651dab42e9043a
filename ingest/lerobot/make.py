"""Makes small LeRobotDataset v3 directories whose every picture says whose it is."""

# pyarrow carries no type information.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SettingsError
from ingest.lerobot.barcode import CELL, HEIGHT, WIDTH
from ingest.lerobot.info import DEFAULT_DATA_PATH, DEFAULT_VIDEO_PATH, SUPPORTED_VERSION
from ingest.lerobot.make_scene import ACTION_NAMES, STATE_NAMES, Pattern, Scene
from ingest.lerobot.make_tables import (
    column_stats,
    data_table,
    encode_png,
    picture_stats,
    write_data,
    write_episodes,
    write_json,
    write_tasks,
)
from ingest.lerobot.make_video import Encoding, Painter, encode, join
from ingest.storage.paths import expand_template

Progress = Callable[[int, int], None]
"""Called with (pictures done, pictures in all)."""

_KEY_DTYPES = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"}
_SAMPLED_PICTURES = 4


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """What to make.

    Attributes:
        episodes: number of episodes.
        frames: ``lo:hi``, both inclusive, drawn per episode; or one number.
        cameras: number of cameras, named ``observation.images.cam0`` and so on.
        size: (height, width), even, at least 32x64.
        fps: frames per second.
        codec: h264, hevc, av1, mpeg4 or vp9.
        gop: pictures from one key picture to the next.
        bframes: pictures stored out of presentation order.
        data_files, video_files: files that the episodes are spread over; cameras roll over at different episodes.
        encode: ``episode``: one encode per episode, joined by stream copy, as recorders do; ``file``: one per file.
        pattern: ``barcode`` shows a disc from which the action follows, ``noise`` shows noise over the same rows.
        storage: ``video``, or ``image`` for PNG pictures inside the parquet files.
        tasks: task texts, given to episodes in turn.
        seed: decides lengths, paths and noise; equal options give equal files.
    """

    episodes: int = 10
    frames: str = "40:60"
    cameras: int = 2
    size: tuple[int, int] = (96, 128)
    fps: float = 30.0
    codec: str = "h264"
    gop: int = 10
    bframes: int = 0
    data_files: int = 1
    video_files: int = 1
    encode: Literal["episode", "file"] = "episode"
    pattern: Pattern = "barcode"
    storage: Literal["video", "image"] = "video"
    tasks: tuple[str, ...] = ("follow the disc",)
    seed: int = 0

    def frame_range(self) -> tuple[int, int]:
        """Smallest and largest episode length.

        Raises:
            SettingsError: ``frames`` is not ``lo:hi``.
        """
        low, _, high = self.frames.partition(":")
        if not (low.strip().isdecimal() and (high or low).strip().isdecimal()) or not 1 <= int(low) <= int(high or low):
            raise SettingsError(f"frames is {self.frames!r}, expected a range such as 40:60 with 1 <= lo <= hi")
        return int(low), int(high or low)

    def check(self) -> None:
        """Raises ``SettingsError`` for values that no dataset can have; the message names the field."""
        self.frame_range()
        for name in ("episodes", "cameras", "gop", "data_files", "video_files"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}, expected 1 or more")
        for name in ("data_files", "video_files"):
            if getattr(self, name) > self.episodes:
                raise SettingsError(f"{name} is {getattr(self, name)}, more than the {self.episodes} episodes")
        if self.bframes < 0 or self.bframes >= max(1, self.gop):
            raise SettingsError(f"bframes is {self.bframes}, expected 0 or more and less than gop = {self.gop}")
        height, width = self.size
        if height < HEIGHT + CELL or width < WIDTH or height % 2 or width % 2:
            raise SettingsError(f"size is {height}x{width} (height x width), expected even numbers of at least 32x64")
        if not 0.001 <= self.fps <= 1000:
            raise SettingsError(f"fps is {self.fps}, expected a number from 0.001 to 1000")
        if not self.tasks or not all(self.tasks):
            raise SettingsError("tasks is empty, expected at least one task text")
        if self.seed < 0:
            raise SettingsError(f"seed is {self.seed}, expected 0 or more")
        if self.storage == "video":
            self.encoding()

    def encoding(self) -> Encoding:
        """How the pictures are encoded.

        Raises:
            SettingsError: a codec that is unknown, that cannot be written here, or that has no B-frames.
        """
        return Encoding(self.codec, *self.size, Fraction(self.fps).limit_denominator(1001), self.gop, self.bframes)


@dataclass(frozen=True, slots=True)
class MadeDataset:
    """What was made.

    Attributes:
        root: the directory.
        episodes, frames: totals.
        cameras: camera keys.
        nbytes: bytes written.
    """

    root: Path
    episodes: int
    frames: int
    cameras: tuple[str, ...]
    nbytes: int


@dataclass(slots=True)
class _Plan:
    """Everything derived from the options before anything is written."""

    options: MakeOptions
    root: Path
    lengths: NDArray[np.int64]
    scenes: list[Scene]
    cameras: tuple[str, ...]
    fps: Fraction
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths


def make_dataset(directory: str | os.PathLike[str], options: MakeOptions, *, progress: Progress | None = None) -> MadeDataset:
    """Writes a dataset.

    Args:
        directory: a folder that is empty or does not exist.
        options: what to make.
        progress: told about pictures done.

    Raises:
        SettingsError: an option without a usable value, or a folder that holds something.
    """
    options.check()
    root = Path(directory).expanduser()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise SettingsError(f"{root} is not an empty folder; give a new one, nothing is overwritten")
    plan = _plan(root, options)
    _write_rows(plan, progress)
    if options.storage == "video":
        _write_videos(plan, progress)
    _write_metadata(plan)
    nbytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return MadeDataset(root, options.episodes, int(plan.lengths.sum()), plan.cameras, nbytes)


def _plan(root: Path, options: MakeOptions) -> _Plan:
    low, high = options.frame_range()
    lengths = np.random.default_rng(options.seed).integers(low, high + 1, size=options.episodes)
    starts = np.cumsum(lengths) - lengths
    scenes = [
        Scene.of_episode(options.seed, episode, int(length), options.fps, int(start))
        for episode, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    cameras = tuple(f"observation.images.cam{number}" for number in range(options.cameras))
    return _Plan(options, root, lengths, scenes, cameras, Fraction(options.fps).limit_denominator(1001))


def _spread(episodes: int, files: int, turn: int) -> list[list[int]]:
    """Episodes of each file; ``turn`` moves the borders, so that cameras roll over at different episodes."""
    borders = [-(-number * episodes // files) for number in range(files + 1)]
    shift = (0, 1, -1)[turn % 3]
    if files > 1 and borders[1] + shift > 0 and borders[-2] + shift < episodes:
        borders[1:-1] = [border + shift for border in borders[1:-1]]
    return [list(range(start, stop)) for start, stop in pairwise(borders)]


def _columns(plan: _Plan, episode: int) -> dict[str, NDArray[Any]]:
    length = int(plan.lengths[episode])
    frames = np.arange(length, dtype=np.int64)
    return {
        "observation.state": plan.scenes[episode].state(),
        "action": plan.scenes[episode].action(),
        "timestamp": (frames / float(plan.fps)).astype(np.float32),
        "frame_index": frames,
        "episode_index": np.full(length, episode, dtype=np.int64),
        "index": frames + plan.scenes[episode].first_index,
        "task_index": np.full(length, episode % len(plan.options.tasks), dtype=np.int64),
    }


def _luma(plan: _Plan, episode: int, frame: int, camera: int) -> NDArray[np.uint8]:
    luma = np.empty(plan.options.size, dtype=np.uint8)
    plan.scenes[episode].paint(luma, frame, camera, plan.options.pattern)
    return luma


def _write_rows(plan: _Plan, progress: Progress | None) -> None:
    options, done, total = plan.options, 0, _pictures(plan)
    for number, group in enumerate(_spread(options.episodes, options.data_files, 0)):
        tables: list[Any] = []
        for episode in group:
            images: dict[str, list[bytes]] = {}
            if options.storage == "image":
                for camera, key in enumerate(plan.cameras):
                    images[key] = [encode_png(_luma(plan, episode, frame, camera)) for frame in range(int(plan.lengths[episode]))]
                    done += len(images[key])
                    if progress:
                        progress(done, total)
            columns = _columns(plan, episode)
            tables.append(data_table(columns, images))
            plan.rows.append(_episode_row(plan, episode, number, columns))
        write_data(plan.root / expand_template(DEFAULT_DATA_PATH, {"chunk_index": 0, "file_index": number}), tables)


def _episode_row(plan: _Plan, episode: int, file: int, columns: dict[str, NDArray[Any]]) -> dict[str, Any]:
    start, length = int(plan.starts[episode]), int(plan.lengths[episode])
    row: dict[str, Any] = {
        "episode_index": episode,
        "tasks": [plan.options.tasks[episode % len(plan.options.tasks)]],
        "length": length,
        "data/chunk_index": 0,
        "data/file_index": file,
        "dataset_from_index": start,
        "dataset_to_index": start + length,
    }
    for name, values in columns.items():
        row |= {f"stats/{name}/{stat}": value for stat, value in column_stats(values).items()}
    for camera, key in enumerate(plan.cameras):
        sampled = np.stack([_luma(plan, episode, frame, camera) for frame in _sampled(length)])
        row |= {f"stats/{key}/{stat}": value for stat, value in picture_stats(sampled).items()}
    return row


def _sampled(length: int) -> list[int]:
    return sorted(set(np.linspace(0, length - 1, _SAMPLED_PICTURES).astype(int).tolist()))


def _pictures(plan: _Plan) -> int:
    return int(plan.lengths.sum()) * len(plan.cameras)


def _write_videos(plan: _Plan, progress: Progress | None) -> None:
    options = plan.options
    encoding = options.encoding()
    done, total = 0, _pictures(plan)
    for camera, key in enumerate(plan.cameras):
        for number, group in enumerate(_spread(options.episodes, options.video_files, camera)):
            runs = [[episode] for episode in group] if options.encode == "episode" else [group]
            parts: list[tuple[bytes, int]] = []
            for run in runs:
                count = int(plan.lengths[run].sum())
                parts.append((encode(_painters(plan, run, camera), encoding), count))
                done += count
                if progress:
                    progress(done, total)
            fields: dict[str, str | int] = {"video_key": key, "chunk_index": 0, "file_index": number}
            join(parts, plan.root / expand_template(DEFAULT_VIDEO_PATH, fields), plan.fps)
            before = 0
            for episode in group:
                after = before + int(plan.lengths[episode])
                plan.rows[episode] |= {
                    f"videos/{key}/chunk_index": 0,
                    f"videos/{key}/file_index": number,
                    f"videos/{key}/from_timestamp": float(before / plan.fps),
                    f"videos/{key}/to_timestamp": float(after / plan.fps),
                }
                before = after


def _painters(plan: _Plan, episodes: Sequence[int], camera: int) -> Iterator[Painter]:
    for episode in episodes:
        scene = plan.scenes[episode]
        for frame in range(int(plan.lengths[episode])):

            def paint(luma: NDArray[np.uint8], scene: Scene = scene, frame: int = frame) -> None:
                scene.paint(luma, frame, camera, plan.options.pattern)

            yield paint


def _write_metadata(plan: _Plan) -> None:
    options = plan.options
    meta = plan.root / "meta"
    for row in plan.rows:
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
    write_episodes(meta / "episodes" / "chunk-000" / "file-000.parquet", plan.rows)
    write_tasks(meta / "tasks.parquet", options.tasks)
    every = [_columns(plan, episode) for episode in range(options.episodes)]
    stats = {name: column_stats(np.concatenate([columns[name] for columns in every])) for name in every[0]}
    middle = [(episode, int(plan.lengths[episode]) // 2) for episode in range(options.episodes)][:64]
    for camera, key in enumerate(plan.cameras):
        stats[key] = picture_stats(np.stack([_luma(plan, episode, frame, camera) for episode, frame in middle]))
    write_json(meta / "stats.json", stats)
    write_json(meta / "info.json", _info(plan))


def _info(plan: _Plan) -> dict[str, Any]:
    options = plan.options
    height, width = options.size
    fps = int(options.fps) if float(options.fps).is_integer() else options.fps
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [len(STATE_NAMES)], "names": list(STATE_NAMES)},
        "action": {"dtype": "float32", "shape": [len(ACTION_NAMES)], "names": list(ACTION_NAMES)},
    }
    for key in plan.cameras:
        picture: dict[str, Any] = {"dtype": options.storage, "shape": [height, width, 3], "names": ["height", "width", "channels"]}
        if options.storage == "video":
            picture["info"] = {
                "video.height": height,
                "video.width": width,
                "video.codec": options.codec,
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": fps,
                "video.channels": 3,
                "has_audio": False,
                "video.g": options.gop,
            }
        features[key] = picture
    features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _KEY_DTYPES.items()}
    return {
        "codebase_version": SUPPORTED_VERSION,
        "robot_type": "synthetic",
        "total_episodes": options.episodes,
        "total_frames": int(plan.lengths.sum()),
        "total_tasks": len(options.tasks),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{options.episodes}"},
        "data_path": DEFAULT_DATA_PATH,
        "video_path": DEFAULT_VIDEO_PATH if options.storage == "video" else None,
        "features": features,
    }
