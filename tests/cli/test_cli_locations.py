"""The same commands on the same dataset wherever it lies: a folder, a web server, the Hub, a bucket, memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
import pyarrow.parquet as pq
import pytest
from servers.hub import HubEmulator
from servers.ranges import RangeServer

from ingest.errors import AccessDeniedError, MetadataError
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.storage.executor import close_executor, configure_executor, shared_executor
from ingest.storage.http import close_connections
from reelray.cli import main
from train_integration.lerobot_dataset import StreamingLeRobotDataset

CAMERA = "observation.images.cam0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "set"
    make_dataset(root, MakeOptions(episodes=3, frames="6:9", cameras=1, size=(32, 64), gop=3, video_files=2))
    return root


@pytest.fixture
def hub(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubEmulator]:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    files = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with HubEmulator() as emulator:
        emulator.tokens = {"hf_PLANTEDREAD": "read", "hf_PLANTEDWRITE": "write"}
        emulator.add_dataset("o/n", files, private=True)
        emulator.add_bucket("o/b", {f"a/{path}": data for path, data in files.items()}, private=True)
        monkeypatch.setenv("HF_ENDPOINT", emulator.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDWRITE")
        yield emulator
        assert emulator.leaked == []
        huggingface_hub.close_session()
        configure_executor()
        close_executor()


@pytest.fixture(params=["folder", "web", "hub", "name", "bucket", "memory"])
def place(request: pytest.FixtureRequest, made: Path) -> Iterator[list[str]]:
    """Arguments that name the dataset."""
    kind: str = request.param
    if kind == "folder":
        yield [str(made)]
    elif kind == "web":
        files = {f"a/{path.relative_to(made).as_posix()}": path.read_bytes() for path in made.rglob("*") if path.is_file()}
        with RangeServer(files) as server:
            yield [f"{server.url}/a"]
    elif kind == "memory":
        memory: Any = fsspec.filesystem("memory")
        memory.pipe({f"/a/{path.relative_to(made).as_posix()}": path.read_bytes() for path in made.rglob("*") if path.is_file()})
        yield ["memory://a"]
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
    else:
        request.getfixturevalue("hub")
        yield {"hub": ["hf://datasets/o/n@main"], "name": ["o/n", "--revision", "main"], "bucket": ["hf://buckets/o/b/a"]}[kind]
    close_executor()
    close_connections()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        found = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert found == status, captured.err
        assert "PLANTED" not in captured.out + captured.err
        return captured.err if status else captured.out

    return call


def test_commands_do_not_care_where_a_dataset_is(place: list[str], made: Path, run: Callable[..., str], tmp_path: Path) -> None:
    wanted, found = (json.loads(run("inspect", *where, "--json")) for where in ([made], place))
    assert {key: found[key] for key in wanted if key != "location"} == {key: wanted[key] for key in wanted if key != "location"}
    assert run("doctor", *place)
    orders = []
    for number, where in enumerate(([made], place)):
        order = tmp_path / f"{number}.parquet"
        run("stream", *where, "--engine", "local", "--strategy", "lanes", "--batch-size", 4, "--order", order)
        orders.append(pq.read_table(order).drop_columns(["t_ns"]))
        run("plan", *where, "--strategy", "lanes", "--batch-size", 4, "--order", order)
        planned = pq.read_table(order)
        assert planned.equals(orders[-1].select(planned.column_names))
    assert orders[0].equals(orders[1])
    videos = []
    for number, where in enumerate(([made], place)):
        video = tmp_path / f"{number}.mp4"
        run("episode", "export", where[0], 1, video, "--camera", CAMERA, *where[1:])
        videos.append(video.read_bytes())
    assert videos[0] == videos[1]
    sidecar = tmp_path / "index.npz"
    built = json.loads(run("sidecar", "build", *place, "--output", sidecar, "--json"))
    assert (built["files"], built["samples"]) == (2, wanted["frames"])
    run("sidecar", "verify", sidecar, place[0], *place[1:])


@pytest.mark.parametrize(("text", "branch"), [("hf://datasets/o/n@main", "lerobot-sidecars"), ("hf://buckets/o/b/a", "none")])
def test_sidecars_are_published_beside_their_dataset(hub: HubEmulator, run: Callable[..., str], text: str, branch: str) -> None:
    published = json.loads(run("sidecar", "push", text, "--json"))
    assert published["branch"] == branch
    assert published["path"].startswith("meta/mp4-sidecars/mp4-v3-")
    if branch == "none":
        data = hub.buckets["o/b"].objects[f"a/{published['path']}"].data
    else:
        assert set(hub.repos["o/n"].branches) == {"main", branch}
        data = None
    if data is not None:
        assert data == Path(published["sidecar"]).read_bytes()
    again = json.loads(run("sidecar", "build", text, "--push", "--json"))
    assert again["reused"]
    assert again["published"].endswith(published["path"])


def test_the_options_of_lerobots_builder_mean_the_same(hub: HubEmulator, run: Callable[..., str], tmp_path: Path) -> None:
    commit = hub.repos["o/n"].branches["main"]
    pinned, bucket = f"hf://datasets/o/n@{commit}", "hf://buckets/o/b/a"
    for number, (options, recorded) in enumerate(
        (
            (["--repo-id", "o/n", "--revision", "main", "--data-root", pinned], ("o/n", "main", pinned)),
            (["--repo-id", "o/n", "--revision", "main", "--data-root", "hf://datasets/o/n"], ("o/n", "main", pinned)),
            (["--repo-id", "o/b", "--repo-type", "bucket", "--revision", "v3.0", "--data-root", bucket], ("o/b", "v3.0", bucket)),
        )
    ):
        sidecar = tmp_path / f"{number}.npz"
        built = json.loads(run("sidecar", "build", *options, "--output", sidecar, "--workers", 2, "--max-probe-mb", 8, "--json"))
        assert (built["repo_id"], built["revision"], built["data_root"]) == recorded
        assert json.loads(run("sidecar", "show", sidecar, "--json"))["revision"] == recorded[1]
    line = run("sidecar", "build", f"{pinned}", "--revision", "main", "--output", tmp_path / "x.npz", status=1)
    assert "give one of them" in line


def test_publishing_without_permission_says_so_first(hub: HubEmulator, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_PLANTEDREAD")
    line = run("sidecar", "push", "hf://datasets/o/n@main", status=1)
    assert "write permission" in line
    assert "complete dataset sidecar" in run("sidecar", "build", "hf://datasets/o/n@main", "--episodes", 1, "--push", status=1)
    assert set(hub.repos["o/n"].branches) == {"main"}


@pytest.mark.parametrize("text", ["hf://datasets/o/n@main", "hf://buckets/o/b/a"])
def test_a_second_epoch_from_the_cache_needs_no_network(
    hub: HubEmulator, made: Path, run: Callable[..., str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    options = ("--engine", "local", "--strategy", "lanes", "--batch-size", 4, "--order")
    cached = (*options[:-1], "--payload-cache-gb", 1, "--native-http-connections", 2, "--order")
    for epoch in (0, 1):
        run("stream", made, "--epoch", epoch, *options, tmp_path / f"local{epoch}.parquet")
    run("stream", text, *cached, tmp_path / "0.parquet")
    assert shared_executor().limits.connections == 2
    kept = sum(path.stat().st_size for path in (tmp_path / "home" / "streaming-payload").rglob("*") if path.is_file())
    assert kept > sum(path.stat().st_size for path in made.rglob("*.mp4"))
    hub.forget()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run("stream", text, "--epoch", 1, *cached, tmp_path / "1.parquet")
    assert hub.hub.requests + hub.storage.requests == []
    for epoch in (0, 1):
        found, wanted = (pq.read_table(tmp_path / f"{name}{epoch}.parquet").drop_columns(["t_ns"]) for name in ("", "local"))
        assert found.equals(wanted)


def test_training_takes_the_same_settings(run: Callable[..., str], made: Path, tmp_path: Path) -> None:
    options = ("--output_dir", tmp_path / "out", "--steps", 1)
    for name, value, message in (
        ("--dataset.streaming_native_http_connections", 0, "native_http_connections must be positive, found 0"),
        ("--dataset.streaming_native_http_subranges", -1, "native_http_subranges must be positive, found -1"),
        ("--payload_cache_gb", 0, "payload_cache_gb must be positive, found 0"),
        ("--payload_cache_dir", tmp_path, "payload_cache_dir has no meaning without payload_cache_gb"),
    ):
        assert message in run("train", "--dataset.repo_id", made, name, value, *options, status=1)
    line = run("train", "--dataset.repo_id=o/b", "--dataset.root=hf://buckets/o/other", "--dataset.repo_type=bucket", *options, status=1)
    assert "name different buckets" in line


def test_the_class_of_lerobot_reads_with_its_token_in_this_process_and_in_loader_workers(
    hub: HubEmulator, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = pytest.importorskip("torch.utils.data")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "")
    with pytest.raises(AccessDeniedError):
        StreamingLeRobotDataset("o/n")

    def indices(dataset: StreamingLeRobotDataset) -> list[int]:
        return [int(index) for batch in loading.DataLoader(dataset, batch_size=4, num_workers=1) for index in batch["index"]]

    expected = indices(StreamingLeRobotDataset(str(made)))
    assert indices(StreamingLeRobotDataset("o/n", token="hf_PLANTEDREAD")) == expected
    assert indices(StreamingLeRobotDataset("o/n", revision="main", native_http_connections=2)) == expected
    commit = hub.repos["o/n"].branches["main"]
    shutil.copytree(made / "meta", tmp_path / "meta")
    dataset = StreamingLeRobotDataset("o/n", tmp_path, data_root="hf://datasets/o/n@main")
    assert dataset.meta.source.store.url == f"hf://datasets/o/n@{commit}"
    assert indices(dataset) == expected
    for options in ({"repo_type": "bucket"}, {"root": "hf://buckets/o/b"}):
        with pytest.raises(MetadataError, match=r"hf://buckets/o/b: meta/info\.json is missing"):
            StreamingLeRobotDataset("o/b", **options)
