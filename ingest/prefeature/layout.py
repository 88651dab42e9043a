"""Where every file of the dataset lives: the one set of path functions for writer, reader, validator and sync.

All paths are relative to the dataset root, POSIX, with two digits for actions, chunks and blocks and four for cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ingest.prefeature.sizes import Sizes

CONFIG = "dataset_config.json"
CASES = "cases.jsonl"
MANIFEST = "manifest.jsonl"
TRAIN_MANIFEST = "train_eval_manifest.jsonl"
PARTIAL_MANIFEST = "manifest.partial.jsonl"
INVENTORY = "_inventory.jsonl"
SUCCESS = "_SUCCESS.json"
FROZEN = "teacher_frozen.safetensors"
NOISE = "noise.safetensors"
JOURNALS = "manifests"
LOGS = "logs"
TEXT_KV = "text_kv_exact_all54_bf16"
CONTEXT = "context_prefeature"

DATA_FOLDERS = ("input_images", "cases", TEXT_KV, "steps", CONTEXT, "videos")
"""Folders whose whole content is known from the sizes; anything else in them is unexpected."""

LAST_FILES = (CONFIG, CASES, INVENTORY, MANIFEST, TRAIN_MANIFEST, SUCCESS)
"""Files that are published after the data, in this order; the success mark comes last."""


@dataclass(frozen=True, slots=True, order=True)
class RecordKey:
    """The primary key of a record."""

    case_id: int
    action_id: int
    chunk_id: int

    def __str__(self) -> str:
        return f"case_{self.case_id:04d}/action_{self.action_id:02d}/chunk_{self.chunk_id:02d}"


def image_path(case: int) -> str:
    """The prepared JPEG of a case."""
    return f"input_images/case_{case:04d}.jpg"


def case_path(case: int) -> str:
    """Image latent and four-block text K/V of a case."""
    return f"cases/case_{case:04d}.safetensors"


def text_kv_path(case: int) -> str:
    """Text K/V of all blocks of a case."""
    return f"{TEXT_KV}/case_{case:04d}_text_kv_exact_all54_bf16.safetensors"


def step_path(key: RecordKey) -> str:
    """Supervision tensors of a chunk."""
    return f"steps/{key}.safetensors"


def context_path(key: RecordKey, block: int) -> str:
    """Context pre-feature of a chunk at one block."""
    return f"{CONTEXT}/block_{block:02d}/{key}.safetensors"


def video_path(case: int, action: int) -> str:
    """The reference video of a trajectory."""
    return f"videos/case_{case:04d}/action_{action:02d}.mp4"


def journal_path(worker: int) -> str:
    """The journal (worker manifest) of one worker."""
    return f"{JOURNALS}/worker_{worker}.jsonl"


def record_paths(key: RecordKey, sizes: Sizes) -> list[str]:
    """The files of one record in commit order: context files, then the step file."""
    return [*(context_path(key, block) for block in sizes.blocks), step_path(key)]


def trajectories(sizes: Sizes, actions: int) -> Iterator[tuple[int, int]]:
    """Every ``(case_id, action_id)`` in key order."""
    for case in range(sizes.cases):
        for action in range(actions):
            yield case, action


def record_keys(sizes: Sizes, actions: int) -> Iterator[RecordKey]:
    """Every record key in order."""
    for case, action in trajectories(sizes, actions):
        for chunk in range(sizes.chunks):
            yield RecordKey(case, action, chunk)


def data_files(sizes: Sizes, actions: int) -> set[str]:
    """Every file that a complete dataset holds below ``DATA_FOLDERS``."""
    expected: set[str] = set()
    for case in range(sizes.cases):
        expected.update((image_path(case), case_path(case), text_kv_path(case)))
    expected.update(video_path(case, action) for case, action in trajectories(sizes, actions))
    for key in record_keys(sizes, actions):
        expected.update(record_paths(key, sizes))
    return expected


def is_temporary(path: str) -> bool:
    """Whether a path is a half-written or hidden file that is never part of the dataset."""
    name = path.rsplit("/", 1)[-1]
    return name.startswith(".") or ".tmp" in name
