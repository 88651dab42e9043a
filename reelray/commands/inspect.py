"""``reelray inspect``: what a dataset is, from its metadata and the heads of its video files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingest.errors import ReelrayError
from ingest.lerobot.source import Source as OpenedSource
from ingest.lerobot.source import open_source
from ingest.video.index import ProbingIndex
from ingest.video.spans import gop_starts
from reelray.commands.common import Flat, PlaceArguments, Source, human_bytes, print_facts, print_json, print_table, progress_bar
from train_integration.option_checks import require_non_negative

_TASKS_SHOWN = 20
_WARNINGS_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """What a dataset is: version, features, cameras, tasks."""

    src: Source
    """Location of the dataset."""
    place: Flat[PlaceArguments] = field(default_factory=PlaceArguments)
    files: int | None = 16
    """Video files of each camera whose heads are read; None reads all."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Prints the description."""
        require_non_negative({"files": self.files or 0})
        source = open_source(self.place.store(self.src), allow_unknown_version=self.place.allow_unknown_version)
        cameras = [_camera(source, camera, self.files) for camera in source.cameras]
        described = describe(source) | {"cameras": cameras, "warnings": [str(warning) for warning in source.warnings]}
        if self.json:
            print_json(described)
        else:
            _show(described)
        return 0


def describe(source: OpenedSource) -> dict[str, Any]:
    """What the metadata say, JSON-ready."""
    info, frames = source.info, source.episode_frames()
    return {
        "location": source.store.url,
        "version": info.version,
        "robot_type": info.robot_type,
        "fps": info.fps,
        "episodes": len(source.episodes),
        "frames": int(frames.sum()),
        "episode_frames": {
            "min": int(frames.min()) if len(frames) else 0,
            "median": float(np.median(frames)) if len(frames) else 0.0,
            "max": int(frames.max(initial=0)),
        },
        "data_files": len({source.listed_data_file(int(episode)) for episode in source.episodes.episode_index}),
        "features": {
            key: {"dtype": feature.dtype, "shape": list(feature.shape), "delivered_as": feature.item_dtype}
            for key, feature in info.features.items()
        },
        "tasks": list(source.tasks.texts),
    }


def _camera(source: OpenedSource, camera: str, limit: int | None) -> dict[str, Any]:
    """One camera: its files by count, and codec, size, GOP and bytes of those whose heads are read."""
    index = ProbingIndex(source.store)
    paths = source.camera_map(camera).paths
    read = paths[:limit]
    codecs: set[str] = set()
    sizes: set[tuple[int, int]] = set()
    gops: list[int] = []
    rates: list[float] = []
    nbytes = pictures = 0
    unreadable: list[str] = []
    with progress_bar(len(read), " files", camera) as bar:
        for path in read:
            try:
                table = index.table(path)
            except ReelrayError as error:
                unreadable.append(str(error))
                continue
            finally:
                bar.update()
            codecs.add(table.codec)
            sizes.add((table.height, table.width))
            nbytes += table.file_size
            pictures += table.pictures
            gops += np.diff(np.append(gop_starts(table), table.pictures)).tolist()
            if table.pictures > 1:
                ticks = int(np.median(np.diff(table.presented_pts.astype(np.int64))))
                rates.append(table.ticks_per_second / ticks if ticks > 0 else 0.0)
    readable = len(read) - len(unreadable)
    feature = source.info.features[camera]
    height, width, channels = feature.picture_shape
    return {
        "camera": camera,
        "codecs": sorted(codecs),
        "sizes": [list(size) for size in sorted(sizes)],
        "declared": {"height": height, "width": width, "channels": channels, "depth": feature.is_depth},
        "gop_median": float(np.median(gops)) if gops else None,
        "gop_max": max(gops, default=None),
        "fps": float(np.median(rates)) if rates else None,
        "files": len(paths),
        "files_read": readable,
        "pictures_read": pictures,
        "bytes_read": nbytes,
        "bytes": round(nbytes * len(paths) / readable) if readable else None,
        "unreadable": unreadable,
    }


def _show(described: dict[str, Any]) -> None:
    lengths = described["episode_frames"]
    print_facts(
        {
            "location": described["location"],
            "version": described["version"] or "missing",
            "robot": described["robot_type"] or "not named",
            "fps": f"{described['fps']:g}",
            "episodes": described["episodes"],
            "frames": f"{described['frames']:,} ({lengths['min']}..{lengths['max']} per episode, median {lengths['median']:g})",
            "data files": described["data_files"],
        }
    )
    print()
    print_table(
        [(key, one["dtype"], "×".join(map(str, one["shape"])) or "-") for key, one in described["features"].items()],
        ("feature", "dtype", "shape"),
    )
    if described["cameras"]:
        print()
        print_table([_camera_row(one) for one in described["cameras"]], ("camera", "codec", "size", "GOP", "fps", "files", "bytes"))
    if described["tasks"]:
        print()
        print_table([(number, text) for number, text in enumerate(described["tasks"][:_TASKS_SHOWN])], ("task", "text"))
        if len(described["tasks"]) > _TASKS_SHOWN:
            print(f"… {len(described['tasks']) - _TASKS_SHOWN} more tasks")
    problems = [*described["warnings"], *(text for camera in described["cameras"] for text in camera["unreadable"])]
    for text in problems[:_WARNINGS_SHOWN]:
        print(f"\nwarning: {text}")
    if len(problems) > _WARNINGS_SHOWN:
        print(f"\n… {len(problems) - _WARNINGS_SHOWN} more warnings: `reelray doctor` lists them")


def _camera_row(camera: dict[str, Any]) -> tuple[object, ...]:
    about = "" if camera["files_read"] == camera["files"] else "about "
    return (
        camera["camera"],
        " ".join(camera["codecs"]) or "-",
        " ".join(f"{height}×{width}" for height, width in camera["sizes"]) or "-",
        "-" if camera["gop_median"] is None else f"{camera['gop_median']:g} (max {camera['gop_max']})",
        "-" if camera["fps"] is None else f"{camera['fps']:.4g}",
        camera["files"],
        "-" if camera["bytes"] is None else about + human_bytes(camera["bytes"]),
    )
