"""Streams and training through Ray from every kind of place: the same order and pictures as from the local directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest
from servers.hub import HubEmulator
from servers.ranges import Fault, RangeServer
from servers.s3 import S3Server, find_moto

from actors.manager import PoolSettings
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, plan_epoch
from ingest.storage.transfer import TransferOptions
from train_integration.delivery import deliver_locally, deliver_through_ray
from train_integration.ledger import order_table
from train_integration.options import StreamConfig, open_stream

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(700)]

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = "hf_PLANTEDWRITE"

PLAN = PlanSettings(strategy="lanes", batch_size=4, clamp_workers=True)

Place = tuple[list[str], dict[str, str]]
"""Arguments that name the dataset, and environment that it needs."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "set"
    make_dataset(root, MakeOptions(episodes=4, frames="8:14", cameras=1, size=(32, 64), gop=4, video_files=2))
    return root


@pytest.fixture(params=["hub", "bucket", "http", "s3"])
def place(request: pytest.FixtureRequest, made: Path) -> Iterator[Place]:
    kind: str = request.param
    placed = {f"a/set/{path.relative_to(made).as_posix()}": path.read_bytes() for path in made.rglob("*") if path.is_file()}
    if kind in {"hub", "bucket"}:
        with HubEmulator() as hub:
            hub.tokens = {TOKEN: "write"}
            hub.add_dataset("o/n", placed, private=True)
            hub.add_bucket("o/b", placed, private=True)
            where = "hf://datasets/o/n@main/a/set" if kind == "hub" else "hf://buckets/o/b/a/set"
            yield [where], {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
            assert hub.leaked == []
    elif kind == "http":
        with RangeServer(placed) as server:
            yield [f"{server.url}/a/set"], {}
    else:
        executable = find_moto()
        if executable is None:
            pytest.skip("no moto_server: set REELRAY_MOTO_SERVER")
        pytest.importorskip("obstore")
        moto = S3Server(executable)
        moto.make_bucket("robots")
        for path, data in placed.items():
            moto.put("robots", path, data)
        names = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1", "ENDPOINT_URL": moto.endpoint}
        yield ["s3://robots/a/set"], {f"AWS_{name}": value for name, value in names.items()}
        moto.close()


def reelray(environment: dict[str, str], *arguments: object) -> Any:
    result = subprocess.run(
        [sys.executable, "-m", "reelray.cli", *(str(argument) for argument in arguments), "--json"],
        env={**os.environ, **environment, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert TOKEN not in result.stdout + result.stderr
    return json.loads(result.stdout)


def local_order(made: Path, folder: Path) -> Any:
    order = folder / "local.parquet"
    reelray({}, "stream", made, "--engine", "local", "--world-size", 2, "--batch-size", 4, "--strategy", "lanes", "--order", order)
    return pq.read_table(order).drop_columns(["t_ns"])


def test_a_stream_through_ray_is_that_of_the_local_directory(place: Place, made: Path, tmp_path: Path) -> None:
    where, environment = place
    order = tmp_path / "found.parquet"
    report = reelray(environment, "stream", *where, "--world-size", 2, "--batch-size", 4, "--strategy", "lanes", "--order", order)
    assert pq.read_table(order).drop_columns(["t_ns"]).equals(local_order(made, tmp_path))
    counters = report["counters"]
    assert counters["reelray_payload_bytes_read"] <= 1.02 * counters["reelray_payload_bytes_needed"]


@pytest.mark.parametrize(
    "place", ["hub", "s3", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("bucket", "http"))], indirect=True
)
def test_training_reads_from_there_too(place: Place, tmp_path: Path) -> None:
    where, environment = place
    options = ("--steps", 12, "--batch_size", 4, "--world_size", 2, "--save_freq", 6, "--log_freq", 1, "--output_dir", tmp_path / "out")
    report = reelray(environment, "train", f"--dataset.repo_id={where[0]}", "--dataset.streaming_sampling_strategy=lanes", *options)
    assert report["steps"] == 12
    assert [one["duplicated"] for one in report["epochs"]] == [0] * len(report["epochs"])
    assert report["epochs"][0]["missing"] == 0
    for written in (tmp_path / "out").rglob("*"):
        if written.is_file():
            assert TOKEN.encode() not in written.read_bytes(), written


@pytest.mark.usefixtures("ray_cluster")
def test_a_dataset_in_memory_travels_with_its_description(made: Path, tmp_path: Path) -> None:
    memory: Any = fsspec.filesystem("memory")
    memory.pipe({f"/a/set/{path.relative_to(made).as_posix()}": path.read_bytes() for path in made.rglob("*") if path.is_file()})
    description, _ = open_stream("memory://a/set", StreamConfig(plan=PlanSettings(strategy="lanes", batch_size=4, clamp_workers=True)))
    found = deliver_through_ray(description, world_size=2, cursor=None, epoch=0, max_steps=None, digests=True, pool=PoolSettings(actors=2))
    assert order_table(found.rows).drop_columns(["t_ns"]).equals(local_order(made, tmp_path))
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


Delivered = Callable[[int], Any]
"""Delivers an epoch through Ray: its order with digests of pictures, without times."""


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Iterator[tuple[RangeServer, Path, Delivered]]:
    """A web server, the folder where a node keeps what it fetched from there, and epochs through Ray by two ranks."""
    placed = {f"a/set/{path.relative_to(made).as_posix()}": path.read_bytes() for path in made.rglob("*") if path.is_file()}
    folder = tmp_path / "kept"
    with RangeServer(placed) as server:
        transfer = TransferOptions(cache_gb=0.1, cache_dir=folder)
        description, _ = open_stream(f"{server.url}/a/set", StreamConfig(plan=PLAN), transfer=transfer)

        def deliver(epoch: int) -> Any:
            how = {"world_size": 2, "cursor": None, "max_steps": None, "digests": True, "pool": PoolSettings(actors=2)}
            return order_table(deliver_through_ray(description, epoch=epoch, **how).rows).drop_columns(["t_ns"])

        yield server, folder, deliver


def local_epoch(made: Path, epoch: int) -> Any:
    description, dataset = open_stream(made, StreamConfig(plan=PLAN))
    plan = plan_epoch(description.units, description.with_topology(world_size=2), epoch=epoch)
    found = deliver_locally(dataset, description, plan, ranks=[0, 1], max_steps=None, digests=True)
    return order_table(found.rows).drop_columns(["t_ns"])


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_epoch_needs_no_server(kept: tuple[RangeServer, Path, Delivered], made: Path) -> None:
    server, folder, deliver = kept
    assert deliver(0).equals(local_epoch(made, 0))
    payload = [span for request in server.requests if request.path.endswith(".mp4") and (span := request.range)]
    assert payload
    assert list(folder.glob("??/*"))
    server.forget()
    server.fault = lambda _: Fault("status", 403)
    second = local_epoch(made, 1)
    assert second.column("index").to_pylist() != local_epoch(made, 0).column("index").to_pylist()
    assert deliver(1).equals(second)
    assert server.requests == []


@pytest.mark.usefixtures("ray_cluster")
def test_what_is_kept_may_be_deleted_while_it_is_used(kept: tuple[RangeServer, Path, Delivered], made: Path) -> None:
    server, folder, deliver = kept
    expected, ended = local_epoch(made, 0), threading.Event()

    def delete() -> None:
        while not ended.wait(0.01):
            shutil.rmtree(folder, ignore_errors=True)

    assert deliver(0).equals(expected)
    server.forget()
    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        assert deliver(0).equals(expected)
    finally:
        ended.set()
        deleting.join()
    assert any(request.path.endswith(".mp4") for request in server.requests), "what was deleted is fetched again"
