"""What the ``reelray prefeature`` commands have in common: the teacher, the cluster, sizes and output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from train_integration.option_checks import require_non_negative, require_positive

if TYPE_CHECKING:
    from actors.prefeature_build import BuildSettings
    from ingest.prefeature.teachers import TeacherChoice

TeacherName = Literal["reference", "hy_worldplay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherArguments:
    """Which frozen model the tensors come from."""

    teacher: TeacherName = "reference"
    """``reference`` runs anywhere and is for rehearsals; ``hy_worldplay`` is the real one."""
    teacher_seed: int = 0
    """Weights of the reference teacher."""
    checkpoint: str = ""
    """Action-distilled weights of the real teacher (a .safetensors file)."""
    checkout: str = ""
    """Root of your own HY-WorldPlay checkout; its code is not part of reelray."""
    model_path: str = ""
    """Folder with the real teacher's VAE, encoders and base transformer."""
    device: str = ""
    """Torch device of the transformer; cpu for the reference teacher and cuda for the real one by default."""

    @property
    def on_device(self) -> str:
        """Torch device of the transformer."""
        return self.device or ("cpu" if self.teacher == "reference" else "cuda")

    def choice(self, sizes: dict[str, Any]) -> TeacherChoice:
        """The choice as plain data."""
        from ingest.prefeature.teachers import TeacherChoice

        return TeacherChoice(self.teacher, sizes, self.teacher_seed, self.checkpoint, self.checkout, self.model_path, self.on_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArguments(TeacherArguments):
    """How the work is spread."""

    workers: int = 8
    """Trajectory actors; each loads the teacher once."""
    num_gpus: float | None = None
    """GPUs of each actor; one by default, none where the teacher's device is the CPU."""
    num_cpus: float = 1.0
    """Logical CPUs of each actor."""
    threads: int | None = None
    """Torch threads of each actor; 1 makes CPU results equal on every machine."""
    address: str | None = None
    """Ray cluster to join; RAY_ADDRESS, else a local one."""
    stall_timeout_s: float = 1800.0
    """A worker that finishes no chunk for this long is replaced and its trajectory retried."""
    runtime_env: Path | None = None
    """JSON file with the Ray runtime environment of the actors (the real teacher needs its own packages)."""

    @property
    def gpus(self) -> float:
        """GPUs of each actor."""
        return float(self.on_device != "cpu") if self.num_gpus is None else self.num_gpus

    def settings(self, deep: bool) -> BuildSettings:
        """Build settings."""
        from actors.prefeature_build import BuildSettings
        from ingest.prefeature.jsonio import read_json

        return BuildSettings(
            workers=self.workers,
            num_gpus=self.gpus,
            num_cpus=self.num_cpus,
            deep=deep,
            threads=self.threads,
            stall_timeout_s=self.stall_timeout_s,
            runtime_env=read_json(self.runtime_env) if self.runtime_env else {},
        )

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Joins or starts Ray."""
        from train_integration.cluster import ray_session

        require_positive({name: getattr(self, name) for name in ("workers", "threads", "stall_timeout_s")})
        require_non_negative({"num_cpus": self.num_cpus, "num_gpus": self.gpus})
        with ray_session(cpus=self.workers * self.num_cpus + 1, address=self.address):
            yield


def show(value: Any, as_json: bool, text: str) -> None:
    """Prints a result, as JSON or as text."""
    sys.stdout.write((json.dumps(value, ensure_ascii=False, indent=2, default=str) if as_json else text) + "\n")


def note(text: str) -> None:
    """Tells the user something beside the result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeArguments:
    """Dimensions that differ from the preset's."""

    latent_frames: int | None = None
    """Latent frames of a trajectory."""
    height: int | None = None
    """Rows of images and videos."""
    width: int | None = None
    """Columns of images and videos."""
    latent_channels: int | None = None
    """Channels of a latent."""
    hidden: int | None = None
    """Transformer width."""
    heads: int | None = None
    """Attention heads."""
    depth: int | None = None
    """Transformer blocks."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose context inputs are stored."""
    rope_dims: tuple[int, int, int] | None = None
    """Rotary channels for time, rows and columns."""
    text_pad_tokens: int | None = None
    """Text tokens on disk, padding included."""
    memory_frames: int | None = None
    """Most history frames that a chunk sees."""
    recent_frames: int | None = None
    """How many of them are the newest."""
    fps: int | None = None
    """Frames per second of the videos."""

    def changes(self) -> dict[str, Any]:
        """What was given."""
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}


def amount(nbytes: int) -> str:
    """A number of bytes for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
