"""The cases stage: listing, choice, captions, JPEGs, and refusal of reruns that would differ."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tinydata import SHORT, make_images, prepare, tree_digest

from ingest.errors import DamagedDataError, DatasetError, MetadataError
from ingest.prefeature import layout
from ingest.prefeature.cases import caption_of, choose, cover_and_crop, list_images, prepare_cases, prepare_jpeg
from ingest.prefeature.config import read_cases, read_config


def test_listing_is_bytewise_skips_hidden_and_folds_extensions(tmp_path: Path) -> None:
    for name in ("b.JPG", "a/z.png", "a.png", "Z.webp", ".hidden.png", ".git/x.png", "note.txt", "é.bmp"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert list_images(tmp_path).paths == ("Z.webp", "a.png", "a/z.png", "b.JPG", "é.bmp")
    with pytest.raises(DatasetError, match="6 cases are wanted"):
        choose(list_images(tmp_path), 6, 0)
    with pytest.raises(DatasetError, match="not a folder"):
        list_images(tmp_path / "none")


def test_the_choice_is_pythons_sample(tmp_path: Path) -> None:

    listing = list_images(make_images(tmp_path / "images", 9))
    assert choose(listing, 4, 0) == random.Random(0).sample(list(listing.paths), 4)


@pytest.mark.parametrize(
    ("size", "expected"), [((1000, 480), (832, 480)), ((832, 480), (832, 480)), ((100, 400), (832, 480)), ((4000, 3000), (832, 480))]
)
def test_cover_and_crop(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert cover_and_crop(Image.new("L", size), 832, 480).size == expected


def test_the_crop_is_central_and_follows_exif(tmp_path: Path) -> None:
    picture = Image.new("RGB", (64, 40))
    picture.paste((255, 0, 0), (0, 0, 32, 40))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    picture.save(tmp_path / "x.jpg", exif=exif, quality=100)
    made = np.asarray(Image.open(io.BytesIO(prepare_jpeg(tmp_path / "x.jpg", 32, 40))))
    assert made.shape == (40, 32, 3)
    assert made[20, 4, 0] < 60
    assert made[20, 28, 0] > 200


def test_jpegs_have_no_chroma_subsampling(tmp_path: Path) -> None:
    source = make_images(tmp_path / "images", 1) / caption_file(0)
    picture = Image.open(io.BytesIO(prepare_jpeg(source, 64, 48)))
    assert all(sampling[1:3] == (1, 1) for sampling in picture.layer)  # type: ignore[attr-defined]


def caption_file(number: int) -> str:
    """Name that ``make_images`` gives."""
    return f"a quiet street, number {number} é.png"


def test_captions_are_stems() -> None:
    assert caption_of("a/b/one. two.three.jpg") == "one. two.three"


def test_a_rerun_writes_the_same_bytes_and_a_different_one_is_refused(tmp_path: Path) -> None:
    root, teacher = prepare(tmp_path)
    before = tree_digest(root)
    prepare_cases(tmp_path / "source", root, SHORT, teacher.spec)
    assert tree_digest(root) == before
    with pytest.raises(MetadataError, match=r"seed: recorded 0, now 1"):
        prepare_cases(tmp_path / "source", root, SHORT, teacher.spec, seed=1)
    Image.new("RGB", (90, 90)).save(tmp_path / "source" / "one more.png")
    with pytest.raises(MetadataError, match="listing_count: recorded 5, now 6"):
        prepare_cases(tmp_path / "source", root, SHORT, teacher.spec)
    assert tree_digest(root) == before


def test_an_unreadable_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
    with pytest.raises(DamagedDataError, match=r"broken\.png: cannot be decoded"):
        prepare_jpeg(tmp_path / "broken.png", 64, 48)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    (tmp_path / "x.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    listing = list_images(tmp_path)
    assert len(listing.sha256) == 64
    with pytest.raises(DatasetError, match="not UTF-8; rename the file"):
        choose(listing, 1, 0)


def test_a_sliver_is_not_blown_up(tmp_path: Path) -> None:
    Image.new("RGB", (40_000, 1)).save(tmp_path / "sliver.png")
    with pytest.raises(DamagedDataError, match="would be resized to 19200000x480"):
        prepare_jpeg(tmp_path / "sliver.png", 832, 480)


def test_config_and_cases_hold_what_they_must(short_built: Path) -> None:
    raw = json.loads((short_built / layout.CONFIG).read_text(encoding="utf-8"))
    assert raw["context_prefill"] == "joint_noncausal_full_dit_prefill"
    assert raw["counts"] == {"cases": 2, "trajectories": 8, "records": 24, "train_records": 16}
    assert not any(raw["exactness_flags"].values())
    case = read_cases(short_built, read_config(short_built))[0]
    assert (case.width, case.height, case.caption) == (64, 48, caption_of(case.source_image))
