"""The cases stage: which images, their captions, and the prepared JPEGs."""

from __future__ import annotations

import hashlib
import io
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ingest.errors import DamagedDataError, DatasetError, MetadataError
from ingest.prefeature import layout
from ingest.prefeature.config import Case, describe_changes, make_config
from ingest.prefeature.durable import FileDigest, hash_file, write_bytes, write_tensors
from ingest.prefeature.jsonio import canonical_json, json_lines, read_json
from ingest.prefeature.schedule import draw_noise, tensor_sha256
from ingest.prefeature.schema import noise_schema
from ingest.prefeature.sizes import DATASET_NAME, Sizes
from ingest.prefeature.teacher import TeacherSpec

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
MAX_PIXELS = 400_000_000
"""Largest source picture that is decoded, in pixels."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Every candidate image, sorted bytewise by POSIX path relative to the root."""

    root: Path
    paths: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hash of the sorted list; the sample depends on all of it."""
        return hashlib.sha256("".join(path + "\n" for path in self.paths).encode("utf-8", "surrogateescape")).hexdigest()


def list_images(root: Path) -> Listing:
    """Lists the images below ``root``; hidden files and folders are skipped.

    Raises:
        DatasetError: ``root`` is not a folder or holds no image.
    """
    if not root.is_dir():
        raise DatasetError(f"image source {root} is not a folder")
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kept = [name for name in names if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS]
        found.extend(Path(folder, name).relative_to(root).as_posix() for name in kept)
    if not found:
        raise DatasetError(f"image source {root} holds no {', '.join(sorted(EXTENSIONS))} file")
    return Listing(root, tuple(sorted(found, key=os.fsencode)))


def choose(listing: Listing, count: int, seed: int) -> list[str]:
    """``count`` paths in the order of ``random.Random(seed).sample``; the position is the case id.

    Raises:
        DatasetError: the listing is shorter than ``count``, or a chosen name is not text.
    """
    if len(listing.paths) < count:
        raise DatasetError(f"image source {listing.root} holds {len(listing.paths)} images, {count} cases are wanted")
    chosen = random.Random(seed).sample(list(listing.paths), count)
    for path in chosen:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"image source {listing.root}: the name {os.fsencode(path)!r} is not UTF-8; rename the file") from error
    return chosen


def caption_of(path: str) -> str:
    """The file name without its extension."""
    return os.path.splitext(path.rsplit("/", 1)[-1])[0]


def cover_and_crop(picture: Image.Image, width: int, height: int) -> Image.Image:
    """EXIF orientation, RGB, Lanczos resize that covers ``width`` x ``height``, centre crop."""
    upright = ImageOps.exif_transpose(picture).convert("RGB")
    scale = max(width / upright.width, height / upright.height)
    size = (max(width, round(upright.width * scale)), max(height, round(upright.height * scale)))
    if size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"{upright.width}x{upright.height} would be resized to {size[0]}x{size[1]}")
    resized = upright.resize(size, Image.Resampling.LANCZOS)
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return resized.crop((left, top, left + width, top + height))


def prepare_jpeg(source: Path, width: int, height: int) -> bytes:
    """The prepared JPEG, quality 95 without chroma subsampling.

    Raises:
        DamagedDataError: the source cannot be decoded or is too large.
    """
    try:
        with Image.open(source) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise DamagedDataError(f"{source}: {picture.width}x{picture.height} exceeds {MAX_PIXELS} pixels", file=str(source))
            prepared = cover_and_crop(picture, width, height)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DamagedDataError):
            raise
        raise DamagedDataError(f"{source}: cannot be decoded as an image ({error}); remove or replace it", file=str(source)) from error
    stream = io.BytesIO()
    prepared.save(stream, "JPEG", quality=95, subsampling=0)
    return stream.getvalue()


def read_image(root: Path, case: Case) -> NDArray[np.uint8]:
    """The prepared picture of a case, uint8 ``[H, W, 3]``.

    Raises:
        DamagedDataError: missing, changed since the cases stage, or of another size.
    """
    path = root / case.input_image
    if not path.is_file() or hash_file(path).sha256 != case.image_sha256:
        raise DamagedDataError(
            f"{case.input_image}: missing or changed since the cases stage; restore it from the remote", file=case.input_image
        )
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    if pixels.shape != (case.height, case.width, 3):
        raise DamagedDataError(
            f"{case.input_image}: {pixels.shape[1]}x{pixels.shape[0]}, expected {case.width}x{case.height}", file=case.input_image
        )
    return pixels


def prepare_cases(
    source: Path,
    root: Path,
    sizes: Sizes,
    spec: TeacherSpec,
    *,
    seed: int = 0,
    sample_seed: int = 0,
    noise_device: str = "cpu",
    dataset: str = DATASET_NAME,
) -> list[Case]:
    """Writes ``input_images/``, ``noise.safetensors``, ``cases.jsonl`` and ``dataset_config.json``.

    Running it again over the same inputs writes the same bytes; anything that would differ is refused.

    Raises:
        DatasetError: the source is unusable.
        MetadataError: the folder already holds a dataset made from something else; the message names each difference.
    """
    listing = list_images(source)
    positions = {path: index for index, path in enumerate(listing.paths)}
    jpegs: list[bytes] = []
    cases: list[Case] = []
    for case_id, path in enumerate(choose(listing, sizes.cases, sample_seed)):
        jpeg = prepare_jpeg(source / path, sizes.width, sizes.height)
        jpegs.append(jpeg)
        cases.append(
            Case(
                case_id,
                path,
                positions[path],
                hash_file(source / path).sha256,
                caption_of(path),
                layout.image_path(case_id),
                hashlib.sha256(jpeg).hexdigest(),
                sizes.width,
                sizes.height,
            )
        )
    noise = draw_noise(sizes, seed, noise_device)
    raw = make_config(
        sizes,
        spec,
        cases,
        seed=seed,
        noise_device=noise_device,
        noise_sha256=tensor_sha256(noise),
        listing_sha256=listing.sha256,
        listing_count=len(listing.paths),
        sample_seed=sample_seed,
        dataset=dataset,
    )
    _refuse_other(root, raw, cases)
    for case, jpeg in zip(cases, jpegs, strict=True):
        if not _same(root / case.input_image, FileDigest(len(jpeg), case.image_sha256)):
            write_bytes(root / case.input_image, jpeg)
    metadata = {"schema": raw["schema"], "kind": "noise", "key": "noise", "build_fingerprint": raw["fingerprint"]}
    write_tensors(root / layout.NOISE, noise_schema(sizes), {"noise": noise}, metadata)
    write_bytes(root / layout.CASES, json_lines(case.to_json() for case in cases))
    write_bytes(root / layout.CONFIG, (canonical_json(raw, indent=2) + "\n").encode())
    return cases


def _same(path: Path, digest: FileDigest) -> bool:
    return path.is_file() and path.stat().st_size == digest.size and hash_file(path) == digest


def _refuse_other(root: Path, raw: dict[str, object], cases: list[Case]) -> None:
    if (root / layout.CONFIG).exists():
        changes = describe_changes(read_json(root / layout.CONFIG), raw)
        if changes:
            raise MetadataError(f"{root} already holds another dataset and is left untouched; differences: " + "; ".join(changes))
    path = root / layout.CASES
    if path.exists() and path.read_bytes() != json_lines(case.to_json() for case in cases):
        raise MetadataError(f"{root / layout.CASES} differs from what this run would write; it is the authority on case ids and is kept")
