"""Opened datasets and their MP4 sidecars: found, built once, and never in the way of reading."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from ingest.engine import open_dataset
from ingest.engine.fetch import UnitRequest
from ingest.engine.indexing import IndexedSource, IndexOptions
from ingest.errors import ChecksumError, LockTimeoutError, ObjectChangedError, SettingsError, VideoFormatError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.storage.local import LocalStore
from ingest.storage.locations import parse_location
from ingest.video.index import ProbingIndex, VideoIndex
from ingest.video.sidecar.build import BuildProgress, build_sidecar
from ingest.video.sidecar.lookup import SidecarIndex
from ingest.video.sidecar.spec import describe_source
from ingest.video.tables import SampleTable

CAMERA = "observation.images.cam0"


@dataclass(frozen=True)
class Unwatched:
    """The tables of an index that does not look at the files again."""

    inner: VideoIndex

    def table(self, path: str) -> SampleTable:
        return self.inner.table(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def films(tmp_path: Path) -> Path:
    root = tmp_path / "films"
    make_dataset(root, MakeOptions(episodes=4, frames="6:6", cameras=1, size=(32, 64), gop=3, video_files=4))
    return root


def test_built_once_then_found(films: Path, home: Path) -> None:
    seen: list[BuildProgress] = []
    first = open_dataset(films, indexing=IndexOptions(progress=seen.append)).index
    assert isinstance(first, SidecarIndex)
    assert (first.origin, [progress.done for progress in seen]) == ("built", [1, 2, 3, 4])
    again = open_dataset(films, indexing=IndexOptions(progress=seen.append)).index
    assert isinstance(again, SidecarIndex)
    assert (again.origin, again.sidecar, len(seen)) == ("cache", first.sidecar, 4)
    assert len(list(home.glob("streaming-sidecars/films/mp4-v3-v3.0-*.npz"))) == 1
    probed = open_dataset(films, indexing=IndexOptions(use_sidecar=False))
    assert isinstance(probed.index, ProbingIndex)
    for number in range(4):
        path = f"videos/{CAMERA}/chunk-000/file-00{number}.mp4"
        for name in ("offsets", "sizes", "presented", "dts", "starts"):
            np.testing.assert_array_equal(getattr(first.table(path), name), getattr(probed.index.table(path), name))


def test_every_way_of_naming_a_dataset_finds_the_same_file(films: Path, home: Path) -> None:
    source = open_source(LocalStore.at(films))
    by_store, by_path = IndexedSource.of(source), IndexedSource.of(source, parse_location(str(films)))
    assert by_store.identity() == by_path.identity() == {"repo_id": "films", "revision": "v3.0", "data_root": str(films)}
    target = describe_source(by_path.store, by_path.paths, **by_path.identity()).cache_path(home)
    build_sidecar(by_path.store, by_path.paths, target, **by_path.identity(), checksums=True)
    for spelling in (films, str(films), f"{films}/", LocalStore.at(films)):
        dataset = open_dataset(spelling)
        assert isinstance(dataset.index, SidecarIndex)
        assert (dataset.index.origin, dataset.index.sidecar, dataset.payload_checked) == ("cache", target, True)
    named = IndexedSource.of(source, parse_location("owner/name", root=films))
    assert named.repo_id == "owner/name"


def test_bits_that_flip_are_found_before_decoding(films: Path, home: Path) -> None:
    videos = IndexedSource.of(open_source(LocalStore.at(films)))
    target = describe_source(videos.store, videos.paths, **videos.identity()).cache_path(home)
    build_sidecar(videos.store, videos.paths, target, **videos.identity(), checksums=True)
    dataset = open_dataset(films, return_uint8=True)
    path = films / f"videos/{CAMERA}/chunk-000/file-002.mp4"
    stat, table = path.stat(), dataset.index.table(f"videos/{CAMERA}/chunk-000/file-002.mp4")
    content = bytearray(path.read_bytes())
    content[int(table.offsets[4])] ^= 16
    path.write_bytes(content)
    assert path.stat().st_size == stat.st_size
    dataset.sample(1, 0)
    # A file that was written to is told by its times; one whose bits changed on the disk only by its checksums.
    with pytest.raises(ObjectChangedError, match="changed under a running stream"):
        dataset.sample(2, 5)
    with pytest.raises(ChecksumError, match=r"episode 2: observation.images.cam0: .*file-002.mp4: samples 3..5"):
        open_dataset(films, index=Unwatched(dataset.index)).sample(2, 5)


@pytest.mark.parametrize("again", ["stream", "build"])
def test_damage_does_not_become_the_truth_when_a_file_is_indexed_anew(films: Path, home: Path, again: str) -> None:
    videos = IndexedSource.of(open_source(LocalStore.at(films)))

    def build(**options: bool) -> None:
        target = describe_source(videos.store, videos.paths, **videos.identity()).cache_path(home)
        build_sidecar(videos.store, videos.paths, target, **videos.identity(), **options)

    build(checksums=True)
    index = open_dataset(films).index
    damaged, coded = (films / f"videos/{CAMERA}/chunk-000/file-00{number}.mp4" for number in (1, 2))
    content = bytearray(damaged.read_bytes())
    content[int(index.table(f"videos/{CAMERA}/chunk-000/file-001.mp4").offsets[5])] ^= 1
    damaged.write_bytes(content)
    other = films.parent / "other"
    make_dataset(other, MakeOptions(episodes=1, frames="6:6", cameras=1, size=(32, 64), gop=2, seed=7))
    shutil.copy(other / f"videos/{CAMERA}/chunk-000/file-000.mp4", coded)
    if again == "build":
        build()
    dataset = open_dataset(films)
    assert dataset.payload_checked
    dataset.sample(0, 5)
    dataset.sample(2, 5)
    with pytest.raises(ChecksumError, match=r"episode 1: .*file-001.mp4: samples 3..5"):
        dataset.sample(1, 5)
    build(checksums=True, force=True)
    assert open_dataset(films).reader().read(UnitRequest(0, 1, 0, 6)).payload_bytes


def test_a_cache_that_cannot_be_written_is_one_warning(films: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.write_text("a file, where a folder is wanted")
    with caplog.at_level(logging.WARNING):
        dataset = open_dataset(films)
    assert isinstance(dataset.index, ProbingIndex)
    (record,) = caplog.records
    assert "no MP4 sidecar, file heads are read as they are needed" in record.message
    assert "check permissions and free space in HF_LEROBOT_HOME" in record.message
    assert not dataset.payload_checked
    dataset.sample(0, 0)


def test_a_file_that_cannot_be_indexed_leaves_the_others_readable(films: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (films / f"videos/{CAMERA}/chunk-000/file-003.mp4").write_bytes(b"no film")
    with caplog.at_level(logging.WARNING):
        dataset = open_dataset(films, episodes=[0, 1])
    assert [record.message.count("file-003.mp4") for record in caplog.records if "no MP4 sidecar" in record.message] == [1]
    dataset.sample(1, 2)
    with pytest.raises(VideoFormatError, match=r"file-003\.mp4"):
        open_dataset(films)
    assert open_dataset(films, damage="skip_episode").num_episodes == 3
    assert not list(home.glob("streaming-sidecars/*/*.npz"))


def test_changed_files_are_indexed_anew(films: Path, home: Path) -> None:
    before = open_dataset(films).index
    path = f"videos/{CAMERA}/chunk-000/file-000.mp4"
    other = films.parent / "other"
    make_dataset(other, MakeOptions(episodes=1, frames="6:6", cameras=1, size=(32, 64), gop=2))
    shutil.copy(other / path, films / path)
    after = open_dataset(films).index
    assert isinstance(after, SidecarIndex)
    assert after.origin == "built"
    assert before.table(path).starts.tolist() == [0, 3]
    assert after.table(path).starts.tolist() == [0, 2, 4]


def test_a_lock_held_elsewhere_is_an_error_in_time(films: Path, home: Path) -> None:
    videos = IndexedSource.of(open_source(LocalStore.at(films)))
    target = describe_source(videos.store, videos.paths, **videos.identity()).cache_path(home)
    target.parent.mkdir(parents=True)
    with FileLock(f"{target}.lock"), pytest.raises(LockTimeoutError, match=r"Timed out waiting 0.2 s for MP4 sidecar lock .*\.npz\.lock"):
        open_dataset(films, indexing=IndexOptions(lock_timeout_s=0.2))


def test_options_are_checked() -> None:
    with pytest.raises(SettingsError, match="sidecar_workers must be positive"):
        IndexOptions(workers=0)
    with pytest.raises(SettingsError, match="sidecar_lock_timeout_s"):
        IndexOptions(lock_timeout_s=-1)
    with pytest.raises(SettingsError, match="sidecar_lock_timeout_s"):
        IndexOptions(lock_timeout_s=float("nan"))


def test_datasets_without_videos_need_none(tmp_path: Path, home: Path) -> None:
    root = tmp_path / "stills"
    make_dataset(root, MakeOptions(episodes=2, frames="3:3", cameras=1, size=(32, 64), storage="image"))
    open_dataset(root).sample(1, 1)
    assert not home.exists()
