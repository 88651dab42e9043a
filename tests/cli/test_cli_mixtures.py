"""Mixture files on the command line: every sample is its dataset's, weights hold, cursors go on, and errors name the entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from calls import Run, failure, loaded

from ingest.engine import open_dataset
from ingest.lerobot.make import MakeOptions, make_dataset
from train_integration.recording import picture_digests

CAMERA = "observation.images.cam0"
WRIST = "observation.images.cam1"

WEIGHTED = """
block: 8
datasets:
  - {source: a, weight: 1}
  - source: b
    weight: 3
    drop: [observation.images.cam0]
    rename: {observation.images.cam1: observation.images.cam0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    make_dataset(folder / "a", MakeOptions(episodes=4, frames="10:16", cameras=1, size=(32, 64), fps=10, gop=4, seed=1))
    make_dataset(folder / "b", MakeOptions(episodes=3, frames="8:12", cameras=2, size=(32, 64), fps=10, gop=3, seed=2))
    (folder / "weighted.yaml").write_text(WEIGHTED)
    (folder / "frames.yaml").write_text(
        WEIGHTED.replace("weight: 1", "episodes: [3, 0]").replace("    weight: 3\n", "") + "weights: frames\n"
    )
    (folder / "plain.yaml").write_text(WEIGHTED.replace(", weight: 1", "").replace("    weight: 3\n", ""))
    return folder


def columns(path: Path) -> dict[str, list[Any]]:
    return pq.read_table(path).to_pydict()


@pytest.mark.parametrize(
    ("name", "strategy"), [("weighted", "lanes"), ("frames", "reservoir"), ("plain", "remaining"), ("plain", "sequential")]
)
def test_a_delivered_mixture_is_the_planned_one_and_holds_its_datasets_pictures(
    run: Run, folder: Path, tmp_path: Path, name: str, strategy: str
) -> None:
    arguments = [folder / f"{name}.yaml", "--strategy", strategy, "--world-size", 2, "--batch-size", 4, "--seed", 3]
    report = loaded(run("plan", *arguments, "--order", tmp_path / "plan.parquet", "--json"))
    delivered = loaded(run("stream", *arguments, "--engine", "local", "--order", tmp_path / "stream.parquet", "--json"))
    planned, found = columns(tmp_path / "plan.parquet"), columns(tmp_path / "stream.parquet")
    assert all(found[key] == planned[key] for key in planned)
    alone = [open_dataset(folder / key, return_uint8=True) for key in ("a", "b")]
    for number, episode, frame, index, digest in zip(
        *(found[key] for key in ("dataset", "episode_index", "frame_index", "index", f"digest:{CAMERA}")), strict=True
    ):
        sample = alone[number].sample(episode, frame)
        assert index == sample["index"]
        assert digest == int(picture_digests(sample[WRIST if number else CAMERA][None])[0])
    assert (delivered["duplicated"], delivered["delivered"]) == (0, len(found["index"]))
    distinct = set(zip(found["dataset"], found["index"], strict=True))
    assert delivered["distinct"] == len(distinct)
    shares = np.bincount(found["dataset"]).tolist()
    assert [entry["samples"] for entry in report["datasets"]] == shares
    if name == "weighted":
        assert shares[1] == 3 * shares[0]
        assert delivered["repeated"] == len(found["index"]) - len(distinct) > 0
    else:
        assert delivered["repeated"] == 0
        assert len(distinct) == report["selected_frames"]
    if name == "frames":
        assert set(zip(found["dataset"], found["episode_index"], strict=True)) == {(0, 0), (0, 3), (1, 0), (1, 1), (1, 2)}


def test_a_mixture_goes_on_from_a_cursor_with_other_ranks(run: Run, folder: Path, tmp_path: Path) -> None:
    cursor, seen = tmp_path / "cursor.json", []
    whole = loaded(run("plan", folder / "weighted.yaml", "--strategy", "lanes", "--json"))["consumers"]["frames"][0]
    for world, steps in ((1, 2), (3, 1), (2, 2), (1, None)):
        limit = [] if steps is None else ["--max-steps", steps]
        given = ["--cursor-in", cursor] if cursor.exists() else []
        arguments = [folder / "weighted.yaml", "--engine", "local", "--strategy", "lanes", "--world-size", world, "--batch-size", 4]
        part = tmp_path / "part.parquet"
        assert loaded(run("stream", *arguments, *limit, *given, "--cursor-out", cursor, "--order", part, "--json"))["duplicated"] == 0
        found = columns(part)
        seen += zip(found["dataset"], found["index"], strict=True)
    assert len(seen) == whole
    frames = [open_dataset(folder / name).num_frames for name in ("a", "b")]
    counts = [np.bincount([index for number, index in seen if number == which], minlength=frames[which]) for which in (0, 1)]
    # Passes over a dataset are whole: no frame comes twice more often than another.
    assert all(count.max() - count.min() <= 1 for count in counts)


def test_cursors_of_other_mixtures_are_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    cursor = tmp_path / "cursor.json"
    loaded(run("plan", folder / "weighted.yaml", "--strategy", "lanes", "--max-steps", 2, "--cursor-out", cursor, "--json"))
    other = folder / "other.yaml"
    other.write_text(WEIGHTED.replace("weight: 3", "weight: 2"))
    assert "weights: cursor has" in failure(run("plan", other, "--strategy", "lanes", "--cursor-in", cursor))
    other.write_text(WEIGHTED.replace("drop: [observation.images.cam0]", "drop: [observation.images.cam0, next.done]"))
    failure(run("plan", other, "--strategy", "lanes", "--cursor-in", cursor))
    assert "dataset: cursor has" in failure(run("plan", folder / "a", "--strategy", "lanes", "--cursor-in", cursor))


def test_damage_in_a_mixture_names_its_dataset_and_leaves_the_episode_out(run: Run, folder: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "b", MakeOptions(episodes=3, frames="9:9", cameras=1, size=(32, 64), fps=10, gop=3, encode="file", seed=2))
    video = next(iter(sorted(tmp_path.rglob("*.mp4"))))
    from ingest.lerobot.source import open_source
    from ingest.storage.local import LocalStore
    from ingest.video.index import ProbingIndex

    store = LocalStore.at(tmp_path / "b")
    path, picture = open_source(store).locate(1, 4, CAMERA)
    table = ProbingIndex(store).table(path)
    sample = int(table.presented[picture])
    with video.open("r+b") as file:
        file.seek(int(table.offsets[sample]))
        file.write(b"\xff" * int(table.sizes[sample]))
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(f"datasets:\n  - source: {folder / 'a'}\n  - source: b\n")
    arguments = [mixed, "--engine", "local", "--batch-size", 4]
    line = failure(run("stream", *arguments))
    assert f"{tmp_path / 'b'}: episode 1, {CAMERA}" in line
    report = loaded(run("stream", *arguments, "--damage", "skip_episode", "--order", tmp_path / "order.parquet", "--json"))
    (record,) = report["skipped"]
    assert (record["dataset"], record["episode"]) == (1, 1)
    assert report["delivered"] + record["frames"] == report["selected_frames"]
    assert (0, 1) in zip(*(columns(tmp_path / "order.parquet")[key] for key in ("dataset", "episode_index")), strict=True)


def test_the_order_names_indices_that_batches_do_not_hold(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "dropped.yaml").write_text("datasets: [{source: a, drop: [index]}]")
    orders = tmp_path / "plan.parquet", tmp_path / "stream.parquet"
    for arguments in ((folder / "dropped.yaml",), (folder / "a", "--delta-timestamps", '{"index": [-0.1, 0.0]}')):
        assert run("plan", *arguments, "--order", orders[0])[0] == 0
        assert run("stream", *arguments, "--engine", "local", "--order", orders[1])[0] == 0
        assert columns(orders[0])["index"] == columns(orders[1])["index"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold a mapping at the top level, found NoneType"),
        ("- a", "must hold a mapping at the top level, found list"),
        ("datasets: []", "datasets must be a list of 1"),
        ("datasets: [a]", r"datasets[0] must be a mapping with a source"),
        ("datasets: [{weight: 1}]", "datasets[0] needs a source"),
        ("datasets: [{source: a, wieght: 1}]", "datasets[0] has unknown entries wieght"),
        ("dataset: [{source: a}]", "a mixture has unknown entries dataset"),
        ("datasets: [{source: a, weight: -1}]", "datasets[0].weight must be a number of 0 or more, found -1"),
        ("datasets: [{source: a, weight: .nan}]", "datasets[0].weight must be a number"),
        (f"datasets: [{{source: a, weight: {10**400}}}]", "datasets[0].weight must be a number"),
        ("datasets: [{source: a, weight: 1}, {source: b}]", "datasets[1] has no weight"),
        ("weights: frames\ndatasets: [{source: a, weight: 1}]", "no dataset can have a weight of its own"),
        ("weights: [1, 2]\ndatasets: [{source: a}]", "weights must be frames or explicit"),
        ("weights: explicit\ndatasets: [{source: a}]", "datasets[0] has no weight"),
        ("block: 0\ndatasets: [{source: a}]", "block must be a positive whole number"),
        ("datasets: [{source: a, pad: {action: 0}}]", "pad must hold positive widths"),
        ("datasets: [{source: a, rename: [x]}]", "datasets[0].rename must be a mapping of str to str"),
        ("datasets: [{source: a, episodes: '1,2'}]", "datasets[0].episodes must be a list of int"),
        ("datasets: [{source: a, revision: 5}]", "datasets[0].revision must be a str, found 5"),
        ("datasets: [{source: a}, {source: a}]\nblock: 4\nblock: 5", "line 3: block is there twice"),
        ("x: &x [1]\ndatasets: *x", "aliases are not read"),
        ("datasets: " + "[" * 40, "nested deeper than 16 levels"),
        ("datasets: [{source: a, since: 2021-99-99}]", "is not plain YAML"),
        ("datasets: !!python/object/apply:os.system [ls]", "is not plain YAML"),
        ("datasets: [{source: '\x00'}]", "is not plain YAML"),
    ],
)
def test_mixture_files_that_are_none(run: Run, folder: Path, text: str, message: str) -> None:
    file = folder / "wrong.yml"
    file.write_text(text)
    line = failure(run("plan", file, "--strategy", "lanes"))
    assert line.startswith("reelray plan: SettingsError:")
    assert message in line


def test_options_that_belong_to_each_dataset(run: Run, folder: Path) -> None:
    file = folder / "plain.yaml"
    assert "revision belongs to each of them" in failure(run("plan", file, "--revision", "main"))
    assert "belong to each dataset" in failure(run("plan", file, "--episodes", "0"))
    assert "recipes and render stages are not available" in failure(run("plan", file, "--recipe", "subtask"))
    assert "found 'remaining'" in failure(run("plan", folder / "weighted.yaml"))
    assert "cannot be read" in failure(run("plan", folder / "none.yaml"))
    assert "more than" in failure(run("plan", _large(folder)))


def _large(folder: Path) -> Path:
    file = folder / "large.yaml"
    file.write_text("datasets: [" + "{source: aaaaaaaaaaaa}, " * 60_000 + "]")
    return file
