"""Builders of tiny datasets for these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from ingest.prefeature import layout
from ingest.prefeature.cases import prepare_cases
from ingest.prefeature.config import read_config
from ingest.prefeature.durable import hash_file, write_bytes, write_tensors
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.merge import inventory_lines, read_inventory
from ingest.prefeature.reader import read_tensors
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.sizes import TINY, Sizes, resized
from ingest.prefeature.tensorfile import read_header

SHORT = resized(TINY, cases=2, latent_frames=12, memory_frames=4, recent_frames=2)
"""Three chunks, so that a whole dataset takes a second."""


def make_images(folder: Path, count: int) -> Path:
    """``count`` pictures of different sizes with captions that hold spaces and non-ASCII letters."""
    folder.mkdir(parents=True)
    for number in range(count):
        generator = np.random.default_rng(number)
        pixels = generator.integers(0, 255, (60 + number, 100, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"a quiet street, number {number} é.png")
    return folder


def prepare(folder: Path, sizes: Sizes = SHORT) -> tuple[Path, ReferenceTeacher]:
    """A dataset root after the cases stage, and its teacher."""
    source = make_images(folder / "source", sizes.cases + 3)
    root = folder / "dataset"
    root.mkdir()
    teacher = ReferenceTeacher(sizes)
    prepare_cases(source, root, sizes, teacher.spec)
    return root, teacher


KEY = RecordKey(1, 2, 2)
STEP = layout.step_path(KEY)


def context(block: int, key: RecordKey = KEY) -> str:
    """Path of a context file of the record that most tests damage."""
    return layout.context_path(key, block)


def refresh_inventory(root: Path, *paths: str) -> None:
    """Makes the inventory agree with some files, so that only the condition under test is broken."""
    inventory = read_inventory(root)
    for path in paths:
        inventory[path] = hash_file(root / path)
    write_bytes(root / layout.INVENTORY, inventory_lines(inventory))


def rewrite(root: Path, path: str, change: Callable[[dict[str, Tensor]], None], metadata: dict[str, str] | None = None) -> None:
    """Changes tensors of a file in place of the old one, keeping schema, metadata and inventory consistent."""
    header = read_header(root, path)
    tensors = {name: tensor.clone() for name, tensor in read_tensors(root, path).items()}
    change(tensors)
    specs = [entry.spec for entry in header.entries.values()]
    write_tensors(root / path, specs, tensors, dict(header.metadata) | (metadata or {}))
    refresh_inventory(root, path)


def record_fingerprint(root: Path) -> str:
    """Fingerprint of a dataset."""
    return read_config(root).fingerprint


def tree_digest(root: Path) -> dict[str, str]:
    """Hash of every file below a dataset root except journals and logs."""
    return {
        path.relative_to(root).as_posix(): hash_file(path).sha256
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] not in (layout.JOURNALS, layout.LOGS)
    }
