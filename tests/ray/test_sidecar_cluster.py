"""Sidecars built by a cluster, and the cache of a node: built once whoever asks, and kills leave nothing to do twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ingest.engine import open_dataset
from ingest.engine.indexing import IndexedSource, IndexOptions
from ingest.errors import VideoFormatError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.source import open_source
from ingest.storage.base import ByteRange
from ingest.storage.local import LocalStore
from ingest.video.sidecar.build import build_sidecar

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

VIDEO = "videos/observation.images.cam0/chunk-000/file-00{}.mp4"


@dataclass(frozen=True, slots=True)
class FatalStore:
    """Reads like the store inside, writes down every read, and once kills the process that reads a given file."""

    inner: LocalStore
    log: Path
    fatal: str | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    @property
    def url(self) -> str:
        return self.inner.url

    def identity(self, path: str) -> object:
        return self.inner.identity(path)

    def size(self, path: str) -> int:
        return self.inner.size(path)

    def read_ranges(self, path: str, ranges: list[ByteRange]) -> list[bytes]:
        with self.log.open("a") as log:
            log.write(f"{path}\n")
        marker = self.log.with_suffix(".killed")
        if path == self.fatal and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.read_ranges(path, ranges)

    def reads(self, path: str) -> int:
        return self.log.read_text().splitlines().count(path)

    def __reduce__(self) -> tuple[object, ...]:
        return (FatalStore, (self.inner, self.log, self.fatal))


@pytest.fixture(scope="module", autouse=True)
def _classes_travel(ray_cluster: None) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def filmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filmed") / "ds"
    make_dataset(root, MakeOptions(episodes=10, frames="6:9", cameras=1, size=(32, 64), gop=3, video_files=10))
    return root


def indexed(root: Path, store: object = None) -> IndexedSource:
    return IndexedSource.of(open_source(LocalStore.at(root)), store=store)  # pyright: ignore[reportArgumentType]


def alone(videos: IndexedSource, target: Path) -> bytes:
    """What one process builds."""
    build_sidecar(videos.store, videos.paths, target, **videos.identity())
    return target.read_bytes()


def test_a_cluster_builds_what_one_process_builds_and_only_once(filmed: Path, tmp_path: Path) -> None:
    from actors.sidecar_build import ClusterSettings, build_on_cluster

    videos, seen = indexed(filmed), []
    how = ClusterSettings(tasks=3, files_per_task=2, cache_home=tmp_path / "home")
    first = build_on_cluster(videos, how, progress=seen.append)
    assert first.build.path.read_bytes() == alone(videos, tmp_path / "one.npz")
    assert (first.build.reused, first.build.files, first.resumed, first.tasks, first.nodes) == (False, 10, 0, 5, ())
    assert first.build.bytes_read > 0
    assert [progress.total for progress in seen] == [10] * 5
    assert seen[-1].done == 10
    assert list(first.build.path.parent.glob(".*.parts")) == []
    assert list((tmp_path / "home/streaming-indexes").glob("*.bin"))
    again = build_on_cluster(videos, how)
    assert (again.build.reused, again.tasks) == (True, 0)
    checked = build_on_cluster(videos, ClusterSettings(tasks=2, checksums=True, cache_home=tmp_path / "home"))
    assert (checked.build.reused, checked.build.checksums) == (False, True)


def test_a_killed_task_runs_again(filmed: Path, tmp_path: Path) -> None:
    from actors.sidecar_build import ClusterSettings, build_on_cluster

    store = FatalStore(LocalStore.at(filmed), tmp_path / "reads.log", VIDEO.format(4))
    videos = indexed(filmed, store)
    report = build_on_cluster(videos, ClusterSettings(tasks=2, files_per_task=2, cache_home=tmp_path / "home"))
    assert (tmp_path / "reads.killed").exists()
    assert report.build.path.read_bytes() == alone(indexed(filmed), tmp_path / "one.npz")
    assert store.reads(VIDEO.format(4)) == 2
    assert store.reads(VIDEO.format(9)) == 1


def test_a_killed_build_goes_on_where_it_was(filmed: Path, tmp_path: Path) -> None:
    import ray

    from actors.sidecar_build import ClusterSettings, build_on_cluster

    script = """
        import os, signal, sys
        from pathlib import Path
        import ray
        from actors.sidecar_build import ClusterSettings, build_on_cluster
        from ingest.engine.indexing import IndexedSource
        from ingest.lerobot.source import open_source
        from ingest.storage.local import LocalStore
        ray.init(address=sys.argv[1], log_to_driver=False)
        def progress(made):
            if made.done >= 4:
                os.kill(os.getpid(), signal.SIGKILL)
        videos = IndexedSource.of(open_source(LocalStore.at(sys.argv[2])))
        build_on_cluster(videos, ClusterSettings(tasks=1, files_per_task=2, cache_home=Path(sys.argv[3])), progress=progress)
    """
    home = tmp_path / "home"
    address = ray.get_runtime_context().gcs_address
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), address, str(filmed), str(home)], check=False, cwd=os.getcwd(), capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not list(home.glob("streaming-sidecars/*/*.npz"))
    (parts,) = home.glob("streaming-sidecars/*/.*.parts")
    assert len(list(parts.iterdir())) == 4
    spoilt = sorted(parts.iterdir())[0]
    spoilt.write_bytes(spoilt.read_bytes()[:-9])
    store = FatalStore(LocalStore.at(filmed), tmp_path / "reads.log")
    report = build_on_cluster(indexed(filmed, store), ClusterSettings(tasks=2, cache_home=home))
    assert report.resumed == 3
    assert len(store.log.read_text().splitlines()) == 7
    assert report.build.path.read_bytes() == alone(indexed(filmed), tmp_path / "one.npz")
    assert not parts.exists()


def test_a_file_that_cannot_be_indexed_stops_the_build_but_not_what_was_done(tmp_path: Path) -> None:
    from actors.sidecar_build import ClusterSettings, build_on_cluster

    root = tmp_path / "ds"
    make_dataset(root, MakeOptions(episodes=4, frames="4:4", cameras=1, size=(32, 64), gop=2, video_files=4))
    whole = (root / VIDEO.format(2)).read_bytes()
    (root / VIDEO.format(2)).write_bytes(whole[:40])
    how = ClusterSettings(tasks=1, files_per_task=4, cache_home=tmp_path / "home")
    with pytest.raises(VideoFormatError, match=VIDEO.format(2)):
        build_on_cluster(indexed(root), how)
    assert len(list(tmp_path.glob("home/streaming-sidecars/*/.*.parts/*.npz"))) == 2
    (root / VIDEO.format(2)).write_bytes(whole)
    assert build_on_cluster(indexed(root), how).build.files == 4


def test_processes_of_a_node_share_one_index(filmed: Path, tmp_path: Path) -> None:
    import ray

    from actors.manager import start_manager, stop_services
    from actors.node_cache import NodeIndex

    store = FatalStore(LocalStore.at(filmed), tmp_path / "reads.log", VIDEO.format(3))
    request = indexed(filmed, store).request(cache_home=tmp_path / "home", workers=1)
    manager = start_manager()

    @ray.remote(num_cpus=0)
    def pictures(index: NodeIndex, path: str) -> tuple[int, str, int]:
        table = index.table(path)
        assert NodeIndex is type(index)
        return table.pictures, str(index.opened().mapped.path), os.getpid()

    try:
        index = NodeIndex(manager, request)
        # The cache itself is killed while it builds: whoever asked asks again, and the build begins anew.
        answers = ray.get([pictures.remote(index, VIDEO.format(number)) for number in range(6)])
        assert (tmp_path / "reads.killed").exists()
        expected = [open_dataset(filmed).index.table(VIDEO.format(number)).pictures for number in range(6)]
        assert [count for count, _, _ in answers] == expected
        assert len({path for _, path, _ in answers}) == 1
        assert store.reads(VIDEO.format(9)) == 1
        cache = ray.get(manager.node_cache.remote(ray.get_runtime_context().get_node_id()))
        (place,) = ray.get(cache.places.remote()).values()
        assert (place.origin, place.cache_home) == ("built", tmp_path / "home")
        assert index.opened().has_checksums is False
    finally:
        stop_services(manager)


def test_streams_ask_the_cache_of_their_node(filmed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from actors.manager import PoolSettings, start_manager, stop_services
    from actors.node_cache import NodeIndex
    from train_integration.config import publish_stream
    from train_integration.options import StreamConfig, open_stream

    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    description, dataset = open_stream(filmed, StreamConfig(), indexing=IndexOptions(workers=2))
    assert not dataset.payload_checked
    manager = start_manager(PoolSettings(actors=1))
    try:
        handles = publish_stream(description, manager)
        job = ray.get(handles.job)
        assert isinstance(job.index, NodeIndex)
        assert job.index.table(VIDEO.format(1)).pictures == dataset.index.table(VIDEO.format(1)).pictures
    finally:
        stop_services(manager)
    inline = publish_stream(replace(description, config=StreamConfig(decode="inline")), None)
    assert ray.get(inline.job).index.table(VIDEO.format(1)).pictures == dataset.index.table(VIDEO.format(1)).pictures


def test_the_module_is_a_command(filmed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from actors.build_sidecars import main

    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    assert main([str(filmed), "--tasks", "2"]) == 0
    assert "built from 10 files" in capsys.readouterr().out
    assert main([str(filmed)]) == 0
    assert "was there" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
