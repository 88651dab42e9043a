"""The build on a local Ray cluster: kills, hangs, stops and worker counts change nothing about the bytes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import own_processes
import pytest
import ray
from servers.s3 import find_moto
from tinydata import KEY, SHORT, STEP, prepare, tree_digest

from actors.prefeature_build import BuildSettings, BuildState, run_build
from actors.prefeature_holdout import run_holdout
from actors.prefeature_transfer import ray_runner
from actors.prefeature_validate import ray_mapper
from ingest.errors import MetadataError, ObjectNotFoundError, PoisonedWorkError, ResourceUnavailableError
from ingest.prefeature import layout
from ingest.prefeature.config import read_cases, read_config
from ingest.prefeature.holdout import HoldoutItem
from ingest.prefeature.journal import read_journals
from ingest.prefeature.merge import merge
from ingest.prefeature.remote import Remote
from ingest.prefeature.sizes import resized
from ingest.prefeature.sync import ensure, sync
from ingest.prefeature.teachers import TeacherChoice
from ingest.prefeature.validate import validate
from train_integration.demo_prefeature import run_demo
from train_integration.demo_s3 import s3_server
from train_integration.prefeature_stream import PrefeatureStreamConfig
from train_integration.prefeature_training import PrefeatureTraining, train

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CHOICE = TeacherChoice("reference", SHORT.to_json())


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """The session's cluster, or one of our own."""
    if ray.is_initialized():
        yield
        return
    root = Path(__file__).resolve().parents[2]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}}
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    ray.init(
        address="local", num_cpus=6, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False, runtime_env=environment
    )
    yield
    ray.shutdown()


def settings(workers: int, **options: object) -> BuildSettings:
    """Small CPU workers."""
    return BuildSettings(workers=workers, num_gpus=0, num_cpus=0.5, threads=1, **({"stall_timeout_s": 60.0} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "kills"), [(1, 1), (2, 2), (4, 2), (5, 0)])
def test_any_number_of_workers_and_kills_gives_the_same_bytes(short_built: Path, tmp_path: Path, workers: int, kills: int) -> None:
    root, _ = prepare(tmp_path)
    chosen = random.Random(workers)
    killed: list[int] = []

    def chaos(state: BuildState) -> None:
        alive = [pid for pid in state.pids.values() if pid not in killed]
        if len(killed) < kills and state.chunks + 3 * state.done >= 5 * (len(killed) + 1) and alive:
            killed.append(chosen.choice(alive))
            os.kill(killed[-1], signal.SIGKILL)

    state, reports, finished = run_build(root, CHOICE, settings(workers, attempts=6), on_progress=chaos)
    assert finished
    assert len(killed) == kills
    assert state.done == state.total == 8
    assert len({(report.case_id, report.action_id) for report in reports}) == 8
    merge(root, verify_hashes=True)
    report = validate(root, mapper=ray_mapper(root, full=True))
    assert report.ok, report.to_text()
    assert tree_digest(root) == tree_digest(short_built)


def test_a_killed_driver_leaves_a_build_that_goes_on(dataset: Path, short_built: Path) -> None:
    """What a driver leaves is what its workers committed: drop the tail of every journal and some files, then build again."""
    path = dataset / layout.journal_path(0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))
    (dataset / STEP).unlink()
    run_build(dataset, CHOICE, settings(2))
    merge(dataset)
    assert validate(dataset).ok
    assert tree_digest(dataset) == tree_digest(short_built)


def test_a_stop_ends_after_the_chunks_under_way_and_can_be_continued(tmp_path: Path, short_built: Path) -> None:
    root, _ = prepare(tmp_path)
    seen: list[int] = []

    def note(state: BuildState) -> None:
        seen.append(state.chunks + state.done)

    _, reports, finished = run_build(root, CHOICE, settings(2), on_progress=note, should_stop=lambda: bool(seen) and seen[-1] > 0)
    assert not finished
    assert len(read_journals(root, read_config(root).fingerprint).lines) > 0
    with pytest.raises(MetadataError, match="pieces are missing"):
        merge(root)
    _, reports, finished = run_build(root, CHOICE, settings(2))
    assert finished
    assert len(reports) == 8
    merge(root)
    assert validate(root).ok
    assert tree_digest(root) == tree_digest(short_built)


def test_a_hanging_worker_is_replaced(tmp_path: Path) -> None:
    root, _ = prepare(tmp_path)
    frozen: list[int] = []

    def freeze(state: BuildState) -> None:
        if not frozen and state.chunks + state.done > 0:
            frozen.append(next(iter(state.pids.values())))
            os.kill(frozen[0], signal.SIGSTOP)

    started = time.monotonic()
    state, _, finished = run_build(root, CHOICE, settings(2, stall_timeout_s=6.0), on_progress=freeze)
    assert finished
    assert state.restarts >= 1
    assert time.monotonic() - started < 120
    assert merge(root).records == 24


def test_a_worker_that_dies_while_loading_is_started_again(tmp_path: Path) -> None:
    root, _ = prepare(tmp_path)
    # Workers of the build before are told to end, which they do a moment later: killing one of those would prove nothing.
    deadline = time.monotonic() + 60
    while own_processes.workers("PrefeatureWorker") and time.monotonic() < deadline:
        time.sleep(0.05)
    ended = threading.Event()
    killed: list[int] = []

    def kill_the_first() -> None:
        while not killed and not ended.wait(0.01):
            for pid in own_processes.workers("PrefeatureWorker")[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    try:
        state, _, finished = run_build(root, CHOICE, settings(1), cases_only=True)
    finally:
        ended.set()
        killer.join()
    assert finished
    assert len(killed) == 1
    assert state.restarts == 1


def test_work_that_always_ends_its_worker_is_named(tmp_path: Path) -> None:
    root, _ = prepare(tmp_path)

    def kill(state: BuildState) -> None:
        for pid in list(state.pids.values()):
            if state.done == 0 and (root / "cases").exists() and state.restarts < 3:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(PoisonedWorkError, match="ended its worker 2 times"):
        run_build(root, CHOICE, settings(1, attempts=2), on_progress=kill)


def test_errors_of_workers_arrive_as_themselves(tmp_path: Path) -> None:
    root, _ = prepare(tmp_path)
    with pytest.raises(MetadataError, match="teacher_checkpoint_sha256: recorded"):
        run_build(root, TeacherChoice("reference", SHORT.to_json(), seed=5), settings(1))
    with pytest.raises(ResourceUnavailableError, match="64 workers need 64 CPU"):
        run_build(root, CHOICE, BuildSettings(workers=64, num_gpus=0, num_cpus=1))


def test_holdout_videos_on_the_cluster(short_built: Path, tmp_path: Path) -> None:
    config = read_config(short_built)
    case = read_cases(short_built, config)[0]
    images = short_built.parent / "source"
    item = HoldoutItem("test", 0, case.source_image, case.caption, case.source_sha256)
    options = {"policy": "reuse_hidden", "workers": 1, "num_gpus": 0, "num_cpus": 0.5, "threads": 1}
    root = tmp_path / "holdout"
    root.mkdir()
    assert run_holdout(root, images, [item], short_built, CHOICE, **options) == 8  # type: ignore[arg-type]
    assert run_holdout(root, images, [item], short_built, CHOICE, **options) == 0  # type: ignore[arg-type]


def test_the_demo_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = find_moto()
    with contextlib.ExitStack() as stack:
        remote = None
        if executable is not None:
            for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.delenv(name, raising=False)
            stack.enter_context(s3_server(Path(executable), "durable"))
            remote = "s3://durable/datasets/v4"
        assert run_demo(tmp_path, resized(SHORT, cases=1), workers=2, kills=1, remote=remote, seed=3)
    assert "AWS_ENDPOINT_URL" not in os.environ or executable is None


def test_transfers_as_ray_tasks(dataset: Path, tmp_path: Path) -> None:
    remote, run = Remote(f"file://{tmp_path / 'durable' / 'v4'}"), ray_runner(tasks=2, threads=2)
    assert list(run(len, [])) == []
    assert list(run(len, [letter * length for length, letter in enumerate("abcdefghijk")])) == list(range(11))
    before = tree_digest(dataset)
    assert sync(dataset, remote, execute=True, runner=run).success
    shutil.rmtree(dataset)
    assert ensure(dataset, remote, parts="all", deep=True, runner=run).complete
    assert tree_digest(dataset) == before
    (dataset / STEP).write_bytes(b"damaged")
    assert ensure(dataset, remote, deep=True, runner=run).restored == (STEP,)
    (tmp_path / "durable" / "v4" / STEP).unlink()
    (dataset / STEP).unlink()
    with pytest.raises(ObjectNotFoundError, match="chunk_02"):
        ensure(dataset, remote, runner=run)


def watch_object_store(used: list[float], ended: threading.Event) -> None:
    """Notes how many bytes the object store holds, several times a second."""
    while not ended.wait(0.2):
        used.append(ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0.0))


def test_training_survives_a_killed_rank_with_exact_coverage(short_built: Path, tmp_path: Path) -> None:
    stream = PrefeatureStreamConfig(str(short_built), batch_size=1)
    plan = PrefeatureTraining(stream=stream, epochs=2, save_every=2, crash_step=5, crash_marker=str(tmp_path / "crashed"))
    used: list[float] = []
    ended = threading.Event()
    watcher = threading.Thread(target=watch_object_store, args=(used, ended))
    watcher.start()
    result = train(plan, tmp_path / "run", workers=2, cpus_per_worker=0.5)
    ended.set()
    watcher.join()
    assert len(used) > 5
    assert max(used) - used[0] < 1_000_000, "records entered the object store"
    assert result.resumed
    assert result.exact
    assert result.losses[1] < result.losses[0]
    assert KEY in result.delivered
