"""The holdout set: exclusion, seeded choice, Full and Reuse videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from ingest.errors import DamagedDataError, DatasetError, MetadataError
from ingest.prefeature import holdout
from ingest.prefeature.config import read_cases, read_config
from ingest.prefeature.holdout import Pair, build_holdout_item, choose_holdout, read_pairs, write_split
from ingest.prefeature.reference import ReferenceTeacher
from ingest.prefeature.rollout import CaseTensors, StepMode, Trajectory, roll_latents
from ingest.prefeature.storefiles import load_case, load_frozen, load_noise


@pytest.fixture
def pairs(short_built: Path, tmp_path: Path) -> tuple[Path, list[Pair]]:
    """An image folder with everything that training saw and ten more."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    source = short_built.parent / "source"
    train = read_cases(short_built, read_config(short_built))
    for case in train:
        (folder / case.source_image).write_bytes((source / case.source_image).read_bytes())
    for number in range(10):
        Image.effect_noise((70, 60), 20 + number).convert("RGB").save(folder / f"new {number}.png")
    return folder, [Pair(path.name, path.stem) for path in sorted(folder.iterdir())]


def test_holdout_excludes_training_by_stem_and_content(short_built: Path, pairs: tuple[Path, list[Pair]]) -> None:
    folder, listed = pairs
    train = read_cases(short_built, read_config(short_built))
    items = choose_holdout(listed, folder, train, validation=3, test=4)
    assert [item.split for item in items] == ["validation"] * 3 + ["test"] * 4
    assert len({item.image for item in items}) == 7
    assert not {item.sha256 for item in items} & {case.source_sha256 for case in train}
    assert choose_holdout(list(reversed(listed)), folder, train, validation=3, test=4) == items
    assert choose_holdout(listed, folder, train, validation=3, test=4, seed=1) != items
    # the same picture under another name is still training data
    (folder / "renamed.png").write_bytes((folder / train[0].source_image).read_bytes())
    with pytest.raises(MetadataError, match="3 of 13 metadata pairs belong to training, expected 2"):
        choose_holdout([*listed, Pair("renamed.png", "x")], folder, train, validation=3, test=4)
    chosen = choose_holdout([*listed, Pair("renamed.png", "x")], folder, train, validation=3, test=4, expected_overlap=3)
    assert "renamed.png" not in {item.image for item in chosen}
    with pytest.raises(MetadataError, match="only 10 pairs remain"):
        choose_holdout(listed, folder, train)
    with pytest.raises(DamagedDataError, match="not found"):
        choose_holdout([*listed, Pair("gone.png", "x")], folder, train)


def test_counts_of_the_real_holdout() -> None:
    assert (holdout.SEED, holdout.VALIDATION, holdout.TEST) == (20260718, 25, 50)
    assert [mode is StepMode.FULL for mode in holdout.POLICIES["reuse_hidden"]] == [True, False, False, True]


def test_metadata_is_read_from_arrays_and_lines(tmp_path: Path) -> None:
    rows = [{"file_name": "a.jpg", "caption": "one"}, {"file_name": "b/c.jpg"}]
    for name, text in (("x.json", json.dumps(rows)), ("x.jsonl", "\n".join(map(json.dumps, rows)))):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_pairs(tmp_path / name) == [Pair("a.jpg", "one"), Pair("b/c.jpg", "c")]
    for text in ("[1]", "{", '[{"file_name": "../a.jpg"}]', '[{"image": "a.jpg"}]'):
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError):
            read_pairs(tmp_path / "x.json")


def test_holdout_videos(short_built: Path, pairs: tuple[Path, list[Pair]], tmp_path: Path, short_teacher: ReferenceTeacher) -> None:
    folder, listed = pairs
    config = read_config(short_built)
    items = choose_holdout(listed, folder, read_cases(short_built, config), validation=1, test=1)
    root = tmp_path / "holdout"
    root.mkdir()
    write_split(root, items, config, "reuse_hidden", 1)
    noise = load_noise(short_built, config)
    written = build_holdout_item(root, folder, items[0], config, short_teacher, noise)
    assert len(written) == 8
    assert build_holdout_item(root, folder, items[0], config, short_teacher, noise) == []
    full, reuse = (root / holdout.video_path(items[0], 0, variant) for variant in ("full", "reuse-reuse_hidden"))
    assert full.read_bytes() != reuse.read_bytes()
    with pytest.raises(MetadataError, match="another holdout set"):
        write_split(root, items, config, "reuse_velocity", 1)


def test_the_full_policy_is_the_rollout_that_was_stored(short_built: Path, short_teacher: ReferenceTeacher) -> None:
    config = read_config(short_built)
    case: CaseTensors = load_case(short_built, config, 1)
    frozen, noise = load_frozen(short_built, config), load_noise(short_built, config)
    trajectory = Trajectory.of(config, 2)
    full = roll_latents(short_teacher, frozen, trajectory, case, noise, holdout.FULL)
    pictures = b"".join(picture.tobytes() for picture in short_teacher.decode(full))
    reuse = roll_latents(short_teacher, frozen, trajectory, case, noise, holdout.POLICIES["reuse_velocity"])
    assert pictures != b"".join(picture.tobytes() for picture in short_teacher.decode(reuse))
    with pytest.raises(DatasetError, match="the first one full"):
        roll_latents(short_teacher, frozen, trajectory, case, noise, (StepMode.REUSE_HIDDEN,) * 4)
