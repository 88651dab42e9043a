"""Made datasets: every picture names its row, files repeat, and the action can be learnt only by looking."""

from __future__ import annotations

import hashlib
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import SettingsError
from ingest.lerobot.barcode import HEIGHT, WIDTH, paint_barcode, picture_code, read_barcode
from ingest.lerobot.doctor import audit
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.make_video import CODECS, Encoding, encode
from ingest.lerobot.rows import read_rows
from ingest.lerobot.source import Source, open_source
from ingest.storage.local import LocalStore

SMALL: dict[str, Any] = {"episodes": 4, "frames": "5:9", "cameras": 2, "size": (32, 64), "fps": 10}


def make(tmp_path: Path, name: str = "made", **options: Any) -> Source:
    make_dataset(tmp_path / name, MakeOptions(**{**SMALL, **options}))
    return open_source(LocalStore.at(tmp_path / name))


def decoded(source: Source, path: str) -> list[tuple[float, int | None, bool]]:
    """(seconds, barcode, is key) of every presented picture."""
    with av.open(str(Path(source.store.url) / path)) as container:
        return [
            (float(frame.time or 0), read_barcode(frame.to_ndarray(format="rgb24")), frame.key_frame) for frame in container.decode(video=0)
        ]


def assert_barcodes(source: Source) -> None:
    assert audit(source.store, strict_time=True).findings == ()
    for number, camera in enumerate(source.cameras):
        mapped = source.maps[camera]
        for file, path in enumerate(mapped.paths):
            pictures = decoded(source, path)
            source.check_pictures(path, camera, len(pictures))
            for row in mapped.rows_of(file):
                for frame in range(int(source.episodes.length[row])):
                    seconds, code, _ = pictures[int(mapped.first_picture[row]) + frame]
                    assert code == picture_code(int(source.episodes.dataset_from[row]) + frame, number)
                    assert abs(seconds - source.episodes.cameras[camera].from_timestamp[row] - frame / source.info.fps) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_files": 3, "video_files": 4},
        {"bframes": 2, "gop": 6, "video_files": 2},
        {"bframes": 2, "gop": 6, "encode": "file"},
        {"fps": 29.97, "encode": "file"},
        {"fps": 1000 / 3},
        {"pattern": "noise", "size": (64, 96)},
        {"frames": "1:2", "episodes": 5, "video_files": 5, "gop": 1},
        {"cameras": 1, "episodes": 1},
    ],
)
def test_every_picture_names_its_row(tmp_path: Path, options: dict[str, Any]) -> None:
    source = make(tmp_path, **options)
    assert source.warnings == ()
    assert_barcodes(source)


@pytest.mark.parametrize("codec", [name for name in CODECS if CODECS[name] in av.codecs_available])
def test_every_codec(tmp_path: Path, codec: str) -> None:
    source = make(tmp_path, codec=codec, video_files=2, gop=3)
    assert_barcodes(source)
    with av.open(str(tmp_path / "made" / source.maps[source.cameras[0]].paths[0])) as container:
        name = container.streams.video[0].codec_context.codec.canonical_name
    assert name == codec


@pytest.mark.skipif(sys.platform != "linux", reason="real-time scheduling is looked at through /proc")
@pytest.mark.parametrize("codec", CODECS)
def test_encoding_leaves_the_scheduling_of_the_process_alone(codec: str) -> None:
    before = {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
    seen: set[int] = set()

    def paint(luma: np.ndarray) -> None:
        luma[:] = 90
        seen.update(os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task"))

    encode([paint] * 3, Encoding(codec, 64, 64, Fraction(10), 2, 0))
    seen.update(os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task"))
    assert seen <= before | {os.SCHED_OTHER}


def test_keys_come_where_the_gop_says(tmp_path: Path) -> None:
    for how in ("episode", "file"):
        source = make(tmp_path, how, frames="9", gop=4, encode=how)
        keys = [number for number, picture in enumerate(decoded(source, source.maps[source.cameras[0]].paths[0])) if picture[2]]
        assert keys == ([0, 4, 8, 9, 13, 17, 18, 22, 26, 27, 31, 35] if how == "episode" else list(range(0, 36, 4)))


def test_equal_options_give_equal_files_and_seeds_differ(tmp_path: Path) -> None:
    def digests(name: str) -> dict[str, str]:
        root = tmp_path / name
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path, name, seed=seed, video_files=2, bframes=1)
    assert digests("a") == digests("b")
    assert digests("a") != digests("c")


def test_cameras_roll_over_at_different_episodes(tmp_path: Path) -> None:
    source = make(tmp_path, episodes=9, frames="2:3", cameras=3, data_files=2, video_files=3)
    borders = [tuple(source.maps[camera].file.tolist()) for camera in source.cameras]
    assert len(set(borders)) == 3
    assert all(sorted(border) == list(border) and max(border) == 2 for border in borders)


def test_noise_has_the_same_rows(tmp_path: Path) -> None:
    sources = [make(tmp_path, pattern, pattern=pattern) for pattern in ("barcode", "noise")]
    for episode in range(4):
        plain, noise = (read_rows(source, episode) for source in sources)
        for key, values in plain.numbers.items():
            np.testing.assert_array_equal(values, noise.numbers[key])


def test_the_action_follows_from_the_picture_and_not_from_the_state(tmp_path: Path) -> None:
    source = make(tmp_path, episodes=12, frames="60", cameras=1, size=(64, 96), fps=30)
    rows = [read_rows(source, episode) for episode in range(12)]
    action = np.concatenate([part.numbers["action"] for part in rows])[:, 0]
    state = np.concatenate([part.numbers["observation.state"] for part in rows])
    with av.open(str(tmp_path / "made" / source.maps[source.cameras[0]].paths[0])) as container:
        pictures = np.stack([frame.to_ndarray(format="gray")[HEIGHT:] for frame in container.decode(video=0)])
    bright = pictures > 150
    centre = (bright * np.arange(pictures.shape[2])).sum(axis=(1, 2)) / bright.sum(axis=(1, 2))

    def unexplained(inputs: np.ndarray) -> float:
        design = np.column_stack([inputs, np.ones(len(action))])
        residual = action - design @ np.linalg.lstsq(design, action, rcond=None)[0]
        return float(residual.var() / action.var())

    assert unexplained(centre) < 0.02
    assert unexplained(np.column_stack([state, state**2])) > 0.5


def test_statistics_and_metadata_are_those_of_the_rows(tmp_path: Path) -> None:
    source = make(tmp_path, tasks=("a", "b"))
    actions = np.concatenate([read_rows(source, episode).numbers["action"] for episode in range(4)]).astype(np.float64)
    np.testing.assert_allclose(source.stats["action"]["mean"], actions.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(source.stats["action"]["q10"], np.quantile(actions, 0.1, axis=0), rtol=1e-6)
    assert source.stats["action"]["count"].tolist() == [len(actions)]
    assert source.stats[source.cameras[0]]["mean"].shape == (3, 1, 1)
    meta = pq.read_table(tmp_path / "made/meta/episodes/chunk-000/file-000.parquet")
    assert meta.column("stats/action/min")[1].as_py() == pytest.approx(read_rows(source, 1).numbers["action"].min(axis=0).tolist())
    assert meta.column("tasks").to_pylist() == [["a"], ["b"], ["a"], ["b"]]
    assert [source.tasks.text(number) for number in (0, 1)] == ["a", "b"]
    assert pq.ParquetFile(tmp_path / "made/data/chunk-000/file-000.parquet").metadata.num_row_groups == 4
    with av.open(str(tmp_path / "made" / source.maps[source.cameras[0]].paths[0])) as container:
        real = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).mean() / 255
    assert float(source.stats[source.cameras[0]]["mean"].mean()) == pytest.approx(real, abs=0.05)


def test_pictures_inside_the_parquet_files(tmp_path: Path) -> None:
    source = make(tmp_path, storage="image")
    assert source.cameras == ()
    assert source.info.images == ("observation.images.cam0", "observation.images.cam1")
    rows = read_rows(source, 2)
    for number, key in enumerate(source.info.images):
        picture = rows.image(key, 1)
        assert picture.shape == (32, 64, 3)
        assert read_barcode(picture) == picture_code(int(rows.numbers["index"][1]), number)


def test_progress_counts_pictures(tmp_path: Path) -> None:
    for storage in ("video", "image"):
        calls: list[tuple[int, int]] = []
        options = MakeOptions(**{**SMALL, "storage": storage})
        made = make_dataset(tmp_path / storage, options, progress=lambda done, total, calls=calls: calls.append((done, total)))
        assert calls[-1] == (made.frames * 2, made.frames * 2)
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert made.nbytes == sum(path.stat().st_size for path in made.root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"frames": "9:5"}, "frames"),
        ({"frames": "a"}, "frames"),
        ({"frames": "0:5"}, "frames"),
        ({"frames": "5:"}, None),
        ({"episodes": 0}, "episodes"),
        ({"size": (30, 64)}, "32x64"),
        ({"size": (33, 65)}, "even"),
        ({"codec": "mjpeg"}, "known are h264"),
        ({"codec": "av1", "bframes": 2}, "no B-frames"),
        ({"bframes": 10, "gop": 10}, "bframes"),
        ({"video_files": 5}, "video_files"),
        ({"fps": 0}, "fps"),
        ({"tasks": ()}, "tasks"),
        ({"seed": -1}, "seed"),
    ],
)
def test_options_that_no_dataset_can_have(tmp_path: Path, options: dict[str, Any], word: str | None) -> None:
    if word is None:
        assert MakeOptions(**options).frame_range() == (5, 5)
        return
    with pytest.raises(SettingsError, match=word):
        make(tmp_path, **options)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(SettingsError, match="not an empty folder"):
        make(tmp_path)


@settings(max_examples=100, deadline=None)
@given(code=st.integers(0, 65_535), layout=st.sampled_from(["hwc", "chw", "grey"]))
def test_barcodes_survive_any_layout_and_noise(code: int, layout: str) -> None:
    luma = np.full((HEIGHT + 8, WIDTH + 6), 100, dtype=np.uint8)
    paint_barcode(luma, code)
    noisy = np.clip(luma.astype(int) + np.random.default_rng(code).integers(-40, 40, luma.shape), 0, 255).astype(np.uint8)
    picture = {"hwc": np.stack([noisy] * 3, axis=-1), "chw": np.stack([noisy] * 3), "grey": noisy}[layout]
    assert read_barcode(picture) == code


def test_pictures_without_a_barcode() -> None:
    for picture in (np.zeros((64, 64, 3)), np.full((64, 64), 255), np.zeros((10, 64, 3)), np.zeros((64, 10)), np.zeros(5)):
        assert read_barcode(picture.astype(np.uint8)) is None
