"""``reelray make-dataset``: a synthetic dataset whose pictures say which row they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from reelray.commands.common import human_bytes, print_facts, print_json, progress_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeDataset:
    """Write a LeRobotDataset v3 with a barcode of (index, camera) in every picture."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """New or empty folder."""
    episodes: int = 10
    """Number of episodes."""
    frames: str = "40:60"
    """Frames of an episode, LO:HI with both included, or one number."""
    cameras: int = 2
    """Number of cameras."""
    size: tuple[int, int] = (96, 128)
    """Height and width of the pictures; even, at least 32 and 64."""
    fps: float = 30.0
    """Frames per second."""
    codec: str = "h264"
    """h264, hevc, av1, mpeg4 or vp9."""
    gop: int = 10
    """Pictures from one key picture to the next."""
    bframes: int = 0
    """Pictures stored out of presentation order between two others."""
    files: int = 1
    """Video files per camera; cameras roll over to new files at different episodes."""
    data_files: int = 1
    """Parquet files for the rows."""
    encode: Literal["episode", "file"] = "episode"
    """One encode per episode, joined by stream copy as recorders do, or one per file."""
    pattern: Literal["barcode", "noise"] = "barcode"
    """A disc from which the action follows, or noise over the same rows."""
    storage: Literal["video", "image"] = "video"
    """Pictures in MP4 files, or as PNG inside the parquet files."""
    tasks: tuple[str, ...] = ("follow the disc",)
    """Task texts, given to episodes in turn."""
    seed: int = 0
    """Decides lengths, paths and noise."""
    json: bool = False
    """Print what was made as JSON."""

    def run(self) -> int:
        """Makes the dataset and says what was made."""
        from ingest.lerobot.make import MakeOptions, make_dataset

        options = MakeOptions(
            episodes=self.episodes,
            frames=self.frames,
            cameras=self.cameras,
            size=self.size,
            fps=self.fps,
            codec=self.codec,
            gop=self.gop,
            bframes=self.bframes,
            data_files=self.data_files,
            video_files=self.files,
            encode=self.encode,
            pattern=self.pattern,
            storage=self.storage,
            tasks=self.tasks,
            seed=self.seed,
        )
        with progress_bar(None, " pictures", "painting") as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            made = make_dataset(self.directory, options, progress=progress)
        facts = {
            "directory": str(made.root),
            "episodes": made.episodes,
            "frames": made.frames,
            "cameras": list(made.cameras),
            "bytes": made.nbytes,
        }
        if self.json:
            print_json(facts)
        else:
            print_facts(facts | {"cameras": ", ".join(made.cameras), "bytes": human_bytes(made.nbytes)})
        return 0
