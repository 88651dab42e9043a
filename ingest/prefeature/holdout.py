"""The independent evaluation set: which pairs, and Full and Reuse videos of each."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image
from torch import Tensor

from ingest.errors import DamagedDataError, MetadataError
from ingest.prefeature.cases import caption_of, cover_and_crop
from ingest.prefeature.config import Case, DatasetConfig
from ingest.prefeature.durable import hash_file, write_bytes
from ingest.prefeature.jsonio import MAX_JSON_BYTES, as_object, canonical_json, json_lines
from ingest.prefeature.kvmath import FrozenTeacher
from ingest.prefeature.rollout import CaseTensors, StepMode, Trajectory, roll_latents
from ingest.prefeature.teacher import Teacher
from ingest.prefeature.videos import check_video, write_video
from ingest.storage.paths import check_relative

SEED = 20260718
VALIDATION, TEST = 25, 50
SPLIT = "split.jsonl"
FULL = (StepMode.FULL, StepMode.FULL, StepMode.FULL, StepMode.FULL)
POLICIES = {
    "reuse_hidden": (StepMode.FULL, StepMode.REUSE_HIDDEN, StepMode.REUSE_HIDDEN, StepMode.FULL),
    "reuse_velocity": (StepMode.FULL, StepMode.REUSE_VELOCITY, StepMode.REUSE_VELOCITY, StepMode.FULL),
}
"""Named reuse policies: full at steps 0 and 3, reuse at 1 and 2."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One image-text pair of the source's metadata; the path is relative to the image folder."""

    image: str
    caption: str


@dataclass(frozen=True, slots=True)
class HoldoutItem:
    """One chosen pair."""

    split: str
    item_id: int
    image: str
    caption: str
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def read_pairs(path: Path, *, image_field: str = "file_name", caption_field: str = "caption") -> list[Pair]:
    """Pairs from a JSON array or JSON lines; a missing caption is the file's stem.

    Raises:
        MetadataError: not readable, or an entry without the image field.
        UnsafeInputError: an image path leaves its folder.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise MetadataError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        rows: Any = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, MetadataError):
            raise
        raise MetadataError(f"{path}: cannot be read as JSON pairs ({error})") from error
    pairs: list[Pair] = []
    for number, row in enumerate(cast("list[Any]", rows), 1):
        entry = as_object(row, f"{path.name} entry {number}")
        image = entry.get(image_field)
        if not isinstance(image, str):
            raise MetadataError(f"{path.name} entry {number}: no {image_field!r}; name the field with --image-field")
        pairs.append(Pair(check_relative(image), str(entry.get(caption_field) or caption_of(image))))
    return pairs


def stem(path: str) -> str:
    """The name by which a pair is excluded: no folder, no extension, case and spaces folded."""
    return " ".join(caption_of(path).casefold().split())


def choose_holdout(
    pairs: Sequence[Pair],
    images: Path,
    train: Sequence[Case],
    *,
    seed: int = SEED,
    validation: int = VALIDATION,
    test: int = TEST,
    expected_overlap: int | None = None,
) -> list[HoldoutItem]:
    """Chooses the evaluation pairs: nothing of training by stem or by content, seeded, splits disjoint.

    Args:
        pairs: the metadata.
        images: folder of the images.
        train: the training cases.
        seed: of the choice.
        validation, test: sizes of the splits.
        expected_overlap: how many metadata pairs must belong to training; the number of training cases when None.

    Raises:
        DamagedDataError: an image is missing.
        MetadataError: pairs repeat, too few remain, or the overlap is not the expected one.
    """
    hashes: dict[str, str] = {}
    for pair in pairs:
        if not (images / pair.image).is_file():
            raise DamagedDataError(f"{pair.image}: named by the metadata, not found below {images}", file=pair.image)
        hashes[pair.image] = hash_file(images / pair.image).sha256
    if len(hashes) != len(pairs):
        raise MetadataError(f"the metadata names {len(pairs)} pairs but only {len(hashes)} different images")
    stems, contents = {stem(case.source_image) for case in train}, {case.source_sha256 for case in train}
    inside = [pair for pair in pairs if stem(pair.image) in stems or hashes[pair.image] in contents]
    wanted = len(train) if expected_overlap is None else expected_overlap
    if len(inside) != wanted:
        raise MetadataError(
            f"{len(inside)} of {len(pairs)} metadata pairs belong to training, expected {wanted}; the folder that training sampled "
            "and this metadata differ: check both, or state the overlap with --expected-overlap"
        )
    used = {pair.image for pair in inside}
    remaining = sorted((pair for pair in pairs if pair.image not in used), key=lambda pair: pair.image)
    if len(remaining) < validation + test:
        raise MetadataError(f"only {len(remaining)} pairs remain, {validation + test} are wanted")
    chosen = random.Random(seed).sample(remaining, validation + test)
    splits = ["validation"] * validation + ["test"] * test
    return [
        HoldoutItem(split, number, pair.image, pair.caption, hashes[pair.image])
        for number, (split, pair) in enumerate(zip(splits, chosen, strict=True))
    ]


def video_path(item: HoldoutItem, action: int, variant: str) -> str:
    """Where one evaluation video lives."""
    return f"videos/{variant}/{item.split}/item_{item.item_id:04d}/action_{action:02d}.mp4"


def write_split(root: Path, items: Sequence[HoldoutItem], config: DatasetConfig, policy: str, seed: int) -> None:
    """Writes ``split.jsonl`` and ``holdout_config.json``; a different earlier choice is refused.

    Raises:
        MetadataError: the folder holds another holdout set.
    """
    lines = json_lines(item.to_json() for item in items)
    head = {"train_fingerprint": config.fingerprint, "seed": seed, "reuse_policy": policy, "full_steps": [0, 1, 2, 3]}
    head["reuse_steps"] = [number for number, mode in enumerate(POLICIES[policy]) if mode is not StepMode.FULL]
    text = (canonical_json(head, indent=2) + "\n").encode()
    for name, data in ((SPLIT, lines), ("holdout_config.json", text)):
        if (root / name).exists() and (root / name).read_bytes() != data:
            raise MetadataError(f"{root / name} holds another holdout set; use another folder")
    write_bytes(root / SPLIT, lines)
    write_bytes(root / "holdout_config.json", text)


def build_holdout_item(
    root: Path, images: Path, item: HoldoutItem, config: DatasetConfig, teacher: Teacher, noise: Tensor, policy: str = "reuse_hidden"
) -> list[str]:
    """Full and Reuse videos of one pair, all actions; existing good videos are kept.

    Args:
        root: holdout folder.
        images: folder of the images.
        item: the pair.
        config: of the training dataset.
        teacher: the recorded teacher.
        noise: the training dataset's recorded noise.
        policy: name of the reuse policy.

    Returns:
        The paths written.

    Raises:
        DamagedDataError: the image changed since the choice.
    """
    if hash_file(images / item.image).sha256 != item.sha256:
        raise DamagedDataError(f"{item.image}: changed since the holdout was chosen", file=item.image)
    config.require_teacher(teacher.spec)
    sizes = config.sizes
    with Image.open(images / item.image) as picture:
        pixels = np.asarray(cover_and_crop(picture, sizes.width, sizes.height))
    inputs = teacher.encode_case(pixels, item.caption)
    case = CaseTensors(inputs.image_latent.cpu(), teacher.text_prefill(inputs))
    frozen = FrozenTeacher(sizes, teacher.frozen_parts())
    written: list[str] = []
    for action in range(len(config.actions)):
        for variant, modes in (("full", FULL), (f"reuse-{policy}", POLICIES[policy])):
            name = video_path(item, action, variant)
            if (root / name).exists():
                try:
                    check_video(root / name, name, sizes)
                    continue
                except DamagedDataError:
                    pass  # rewritten below
            latents = roll_latents(teacher, frozen, Trajectory.of(config, action), case, noise, modes)
            write_video(root / name, teacher.decode(latents), sizes)
            written.append(name)
    return written
