"""Units that begin where a file's key pictures cannot be trusted: every picture equals a linear decode, or damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from video.forge import Movie, encode, linear, pictures

from ingest.engine import Dataset, iter_samples, open_dataset
from ingest.engine.fetch import UnitRequest
from ingest.engine.pictures import PictureForm, check_shape, decode_run, runs
from ingest.engine.unit import excerpt
from ingest.errors import ChecksumError, DecodeError, LeadInError, SelectionError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.video.boxes import read_sample_table
from ingest.video.checksums import add_checksums
from ingest.video.tables import SampleTable

CAMERA = "observation.images.cam0"
EPISODES, LENGTH = 6, 11
COUNT = EPISODES * LENGTH
SIZE = (48, 64)


def table_of(data: bytes) -> SampleTable:
    return read_sample_table(lambda start, stop: data[start:stop], len(data), "a.mp4")


def lying() -> bytes:
    """An honest file whose list of key pictures names others, too."""
    data = encode(pictures(COUNT, *SIZE), options={"g": "13", "bf": "0", "sc_threshold": "0"})
    table = table_of(data)
    samples = [data[o : o + s] for o, s in zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)]
    sync = sorted({*table.sync.tolist(), 5, 12, 23, 24, 37, 50})
    movie = Movie(
        [len(s) for s in samples], [512] * COUNT, sync=sync, entries=[table.stsd[8:]], payload=lambda number, size: samples[number]
    )
    return movie.build()[0]


FILES = {
    "h264 intra refresh": lambda: encode(pictures(COUNT, *SIZE), "libx264", {"x264-params": "intra-refresh=1:keyint=12:bframes=0"}),
    "h264 lying list": lying,
    "h264 open GOP": lambda: encode(
        pictures(COUNT, *SIZE),
        "libx264",
        {"x264-params": "keyint=8:min-keyint=8:bframes=3:b-pyramid=2:open-gop=1:scenecut=0:b-adapt=0"},
    ),
    "hevc open GOP": lambda: encode(pictures(COUNT, *SIZE), "libx265", {"x265-params": "open-gop=1:keyint=8:bframes=3:log-level=none"}),
    "mpeg4 with B": lambda: encode(pictures(COUNT, *SIZE), "mpeg4", {"g": "9", "bf": "2"}),
}


@pytest.fixture(scope="module", params=list(FILES))
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[np.ndarray]]:
    """A dataset whose one video file is replaced by an odd one of the same length; its linear decode."""
    root = tmp_path_factory.mktemp("odd") / "ds"
    make_dataset(root, MakeOptions(episodes=EPISODES, frames=str(LENGTH), cameras=1, size=SIZE, gop=5))
    data = FILES[request.param]()
    (root / f"videos/{CAMERA}/chunk-000/file-000.mp4").write_bytes(data)
    expected = linear(data)
    assert len(expected) == COUNT
    return request.param, root, expected


def test_samples_equal_a_linear_decode(odd: tuple[str, Path, list[np.ndarray]]) -> None:
    _, root, expected = odd
    dataset = open_dataset(root, return_uint8=True)
    order = np.random.default_rng(0).permutation(COUNT).tolist()
    for number in order:
        episode, frame = divmod(number, LENGTH)
        np.testing.assert_array_equal(np.asarray(dataset.sample(episode, frame)[CAMERA]).transpose(1, 2, 0), expected[number])


@pytest.mark.parametrize(("lo", "hi"), [(0, LENGTH), (4, 9), (10, 11)])
def test_runs_of_cut_out_tracks_decode_apart(odd: tuple[str, Path, list[np.ndarray]], lo: int, hi: int) -> None:
    """As decode actors get them: a run of a fetched unit, with no more bytes than it needs."""
    name, root, expected = odd
    dataset = open_dataset(root, return_uint8=True)
    form = PictureForm("rgb24", None, "bilinear")
    reader, cuts = dataset.reader(), 0
    for episode in range(EPISODES):
        track = reader.read(UnitRequest(0, episode, lo, hi)).tracks[CAMERA]
        for run in runs(track, np.arange(track.pictures), 1):
            part = excerpt(track, run)
            out = [np.zeros((*SIZE, 3), np.uint8) for _ in run]
            decode_run(part, np.arange(len(run)), form, out)
            for local, picture in zip(run.tolist(), out, strict=True):
                np.testing.assert_array_equal(picture, expected[episode * LENGTH + lo + local])
            cuts += part.table.samples_before > 0
    assert cuts, name


def test_a_run_that_starts_too_late_is_an_error_that_says_so(tmp_path: Path) -> None:
    root = tmp_path / "ds"
    make_dataset(root, MakeOptions(episodes=EPISODES, frames=str(LENGTH), cameras=1, size=SIZE, gop=5))
    (root / f"videos/{CAMERA}/chunk-000/file-000.mp4").write_bytes(FILES["h264 intra refresh"]())
    dataset = open_dataset(root, return_uint8=True)
    track = dataset.reader().read(UnitRequest(0, 3, 0, LENGTH)).tracks[CAMERA]
    # What a decoder would get that trusted the list of the file.
    whole = dataset.index.table(track.path)
    inside = whole.starts[(whole.starts > track.table.samples_before) & (whole.starts < track.table.samples_before + track.table.samples)]
    trusting = replace(track, table=replace(track.table, starts=inside.astype(np.int64) - track.table.samples_before))
    out = [np.zeros((*SIZE, 3), np.uint8)]
    local = int(inside[-1]) - track.table.samples_before
    shown = int(np.flatnonzero(track.table.presented == local)[0])
    cut = excerpt(trusting, np.array([shown]))
    with pytest.raises(LeadInError):
        decode_run(cut, np.zeros(1, np.int64), PictureForm("rgb24", None, "bilinear"), out)


class WithChecksums:
    """The index of a dataset, with the checksums of its payload as it was at first."""

    def __init__(self, dataset: Dataset) -> None:
        self._tables = {
            path: add_checksums(dataset.source.store, dataset.index.table(path))[0] for path in dataset.source.camera_map(CAMERA).paths
        }

    def table(self, path: str) -> SampleTable:
        return self._tables[path]


def test_damage_is_found_before_the_first_frame(tmp_path: Path) -> None:
    root = tmp_path / "ds"
    make_dataset(root, MakeOptions(episodes=4, frames="12", cameras=1, size=SIZE, gop=4))
    index = WithChecksums(open_dataset(root))
    dataset = open_dataset(root, index=index)
    path, picture = dataset.source.locate(2, 7, CAMERA)
    table = index.table(path)
    sample = int(table.presented[picture])
    with (root / path).open("r+b") as file:
        file.seek(int(table.offsets[sample]) + int(table.sizes[sample]) // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    dataset.sample(1, 3)
    with pytest.raises(ChecksumError, match=rf"episode 2: {CAMERA}: {path}: samples .* the payload is damaged") as caught:
        dataset.reader().read(UnitRequest(0, 2, 0, 12))
    assert (caught.value.episode, caught.value.camera, caught.value.file) == (2, CAMERA, path)
    assert dataset.counters.totals()["reelray_pictures_decoded"] > 0


def test_coded_sizes_count_not_the_ones_to_show_pictures_at(tmp_path: Path) -> None:
    root = tmp_path / "ds"
    make_dataset(root, MakeOptions(episodes=1, frames="5", cameras=1, size=SIZE, gop=5))
    dataset = open_dataset(root)
    track = dataset.reader().read(UnitRequest(0, 0, 0, 5)).tracks[CAMERA]
    form, feature = PictureForm("rgb24", None, "bilinear"), dataset.spec.features[CAMERA]
    check_shape(replace(track.table, width=2 * SIZE[1], height=SIZE[0]), form, feature)
    larger = table_of(encode(pictures(5, 96, 128)))
    with pytest.raises(DecodeError, match=rf"pictures are 128x96, but {CAMERA} is declared as 64x48"):
        check_shape(larger, form, feature)


def test_a_declared_size_that_lies_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    root = tmp_path / "ds"
    make_dataset(root, MakeOptions(episodes=4, frames="5", cameras=2, size=SIZE, gop=5))
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][CAMERA]["shape"] = [9999, 9999, 3]
    (root / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DecodeError, match=rf"pictures are 64x48, but {CAMERA} is declared as 9999x9999") as caught:
        open_dataset(root)
    assert caught.value.episodes == (0, 1, 2, 3)
    with pytest.raises(SelectionError, match=r"every selected episode is damaged.*declared as 9999x9999"):
        open_dataset(root, episodes=[2], damage="skip_episode")
    other = "observation.images.cam1"
    for dataset in (open_dataset(root, cameras=[other]), open_dataset(root, image_size=(24, 32))):
        assert len(list(iter_samples(dataset))) == 20, "neither a camera that is not read is judged, nor a size that is replaced"
