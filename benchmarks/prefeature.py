"""Figures of the teacher-tensor dataset: ``python -m benchmarks.prefeature [--out FILE]``.

Every figure is measured in this run on records of the real sizes (310 to 719 MB each); about 4 GB of disk are used meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import ray.train
import safetensors.torch
import torch
from numpy.typing import NDArray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks.prefeature_records import RealSizeWriter
from ingest.prefeature import layout
from ingest.prefeature.durable import write_tensors
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.prefetch import buffer_bytes
from ingest.prefeature.reader import PIECE, HeaderCache, read_tensors
from ingest.prefeature.records import PreviousHidden, RecordIndex
from ingest.prefeature.rollout import ChunkResult
from ingest.prefeature.scan import first_nonfinite, first_zero_run
from ingest.prefeature.schema import step_schema
from ingest.prefeature.tensorfile import file_bytes
from ingest.prefeature.validate import WHOLE_CASE, check_part
from train_integration.cluster import ray_session
from train_integration.prefeature_stream import PrefeatureStream, PrefeatureStreamConfig, plan_records

RECORDS, GPUS = 2800, 8
STEP_S = 0.45
"""Assumed seconds of one step on an H100-class GPU: three pairs through four blocks."""

BANDWIDTHS = (1.0, 2.0, 3.5, 7.0, 10.0, 14.0, 28.0)
"""GB/s of the disk that the GPUs of one node share."""


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_figures(root: Path, path: str) -> dict[str, float]:
    """The reader against a bare ``preadv`` into one warm buffer, alternating; the best of each, as others use this machine."""
    size = (root / path).stat().st_size
    buffer = torch.empty(size + 4096, dtype=torch.uint8)
    raw: NDArray[np.uint8] = np.asarray(buffer.numpy(), np.uint8)
    cache = HeaderCache()

    def bare() -> None:
        descriptor = os.open(root / path, os.O_RDONLY)
        done = 0
        while done < size:
            done += os.preadv(descriptor, [raw[done : min(done + PIECE, size)].data], done)
        os.close(descriptor)

    def own() -> None:
        read_tensors(root, path, cache=cache, buffer=buffer)

    bare()
    own()
    pairs = [(seconds(bare), seconds(own)) for _ in range(25)]
    ceiling, reader = (min(values) for values in zip(*pairs, strict=True))
    library = min(seconds(lambda: {k: v.clone() for k, v in safetensors.torch.load_file(root / path).items()}) for _ in range(3))
    return {
        "preadv_gb_s": size / ceiling / 1e9,
        "reader_gb_s": size / reader / 1e9,
        "reader_over_preadv": ceiling / reader,
        "library_load_gb_s": size / library / 1e9,
    }


def write_figures(root: Path, writer: RealSizeWriter, result: ChunkResult) -> dict[str, float]:
    """One durable, hashed step file against the library's ``save_file``, plain and with the same duties, alternating."""
    specs = step_schema(writer.sizes)
    tensors = {name: tensor.clone() for name, tensor in result.step.items()}
    size = file_bytes(specs)
    plain, own = root / "library.safetensors", root / "own.safetensors"

    def dutiful() -> None:
        safetensors.torch.save_file(tensors, plain)
        with open(plain, "rb") as handle:
            os.fsync(handle.fileno())
            hashlib.file_digest(handle, "sha256")

    works: dict[str, Callable[[], object]] = {
        "writer": lambda: write_tensors(own, specs, tensors, {}),
        "save_file": lambda: safetensors.torch.save_file(tensors, plain),
        "save_file_fsync_sha256": dutiful,
    }
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(7)]
    best = {name: min(times[name] for times in rounds) for name in works}
    plain.unlink()
    own.unlink()
    return {
        **{f"{name}_gb_s": size / taken / 1e9 for name, taken in best.items()},
        "overhead_over_save_file": best["writer"] / best["save_file"] - 1,
        "overhead_over_save_file_fsync_sha256": best["writer"] / best["save_file_fsync_sha256"] - 1,
    }


def validation_figures(root: Path) -> dict[str, Any]:
    """Every check of a case and of a trajectory, per core of CPU time, and the passes over the bytes one by one.

    Raises:
        RuntimeError: the records are not valid, so the figures would mean nothing.
    """
    found: dict[str, Any] = {}
    for name, action in (("case", WHOLE_CASE), ("trajectory", 0)):
        started, cpu = time.perf_counter(), time.process_time()
        report = check_part(root, 0, action, full=True).report
        if not report.ok:
            raise RuntimeError(report.to_text())
        found[f"{name}_gb"] = report.bytes_read / 1e9
        found[f"{name}_gb_s_per_core"] = report.bytes_read / (time.process_time() - cpu) / 1e9
        found[f"{name}_seconds"] = time.perf_counter() - started
    tensor = read_tensors(root, layout.context_path(RecordKey(0, 0, 7), 0), ["img_modulated"])["img_modulated"]
    raw: NDArray[np.uint8] = np.asarray(tensor.reshape(-1).view(torch.uint8).numpy(), np.uint8)
    passes: dict[str, Callable[[], object]] = {
        "finite": lambda: first_nonfinite(raw, "BF16"),
        "hole": lambda: first_zero_run(raw),
        "sha256": lambda: hashlib.sha256(raw.data).hexdigest(),
    }
    for name, work in passes.items():
        found[f"{name}_gb_s"] = len(raw) / min(seconds(work) for _ in range(3)) / 1e9
    dataset = 1403.56
    found["dataset_core_hours"] = dataset / found["trajectory_gb_s_per_core"] / 3600
    return found


def read_worker(settings: Mapping[str, Any]) -> None:
    """Takes every record of some epochs as training does and writes down how fast they came."""
    torch.set_num_threads(1)
    config: PrefeatureStreamConfig = settings["config"]
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    process = psutil.Process()
    epochs: list[dict[str, float]] = []
    before = peak = process.memory_info().rss
    ring = 0
    for epoch in range(settings["epochs"]):
        stream = PrefeatureStream(config, rank=rank, world_size=world, epoch=epoch)
        started, records, nbytes = time.perf_counter(), 0, 0
        for item in stream:
            for key, pad in zip(item.batch.keys, item.batch.is_pad.tolist(), strict=True):
                records += not pad
                nbytes += 0 if pad else int(stream.index.nbytes[stream.index.keys.index(key)])
            peak = max(peak, process.memory_info().rss)
            stream.commit(item.step)
        epochs.append({"seconds": time.perf_counter() - started, "records": records, "bytes": nbytes})
        ring = max(ring, stream.peak_bytes)
    value = {"epochs": epochs, "rss_growth": peak - before, "buffers": ring}
    Path(settings["folder"], f"rank-{rank}.json").write_text(json.dumps(value), encoding="utf-8")


def train_figures(folder: Path, root: Path, workers: int) -> dict[str, Any]:
    """Real-size records through Ray Train: the first epoch from the disk, the second from the page cache."""
    config = PrefeatureStreamConfig(str(root), previous=PreviousHidden.BOTH, threads=2)
    index = RecordIndex(root, previous=PreviousHidden.BOTH)
    budget = 3 * buffer_bytes(int(index.nbytes.max()))
    results = folder / "ranks"
    results.mkdir()
    trainer = TorchTrainer(
        read_worker,
        train_loop_config={"config": replace(config, byte_budget=budget), "folder": str(results), "epochs": 2},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1.0}),
        run_config=RunConfig(name="read", storage_path=str(folder / "run")),
    )
    trainer.fit()
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.iterdir())]
    found: dict[str, Any] = {
        "workers": workers,
        "least_record_mb": int(index.nbytes.min()) / 1e6,
        "most_record_mb": int(index.nbytes.max()) / 1e6,
        "budget_mb_per_rank": budget / 1e6,
        "most_buffers_mb": max(rank["buffers"] for rank in ranks) / 1e6,
        "most_memory_growth_mb": max(rank["rss_growth"] for rank in ranks) / 1e6,
    }
    for number, name in enumerate(("from_disk", "from_page_cache")):
        parts = [rank["epochs"][number] for rank in ranks]
        taken = max(part["seconds"] for part in parts)
        found[f"{name}_records_s"] = sum(part["records"] for part in parts) / taken
        found[f"{name}_gb_s"] = sum(part["bytes"] for part in parts) / taken / 1e9
    return found


class _Records:
    """All records of the real dataset by their bytes, as the planner sees them."""

    def __init__(self, chunks: Mapping[int, int]) -> None:
        self.config = SimpleNamespace(fingerprint="simulated")
        self.nbytes = np.array([chunks[1 + number % len(chunks)] for number in range(RECORDS)], np.int64)

    def __len__(self) -> int:
        return len(self.nbytes)


def simulate_epoch(nbytes: NDArray[np.int64], bandwidth: float, ahead: int = 3) -> tuple[float, float]:
    """One epoch in lock step with a shared disk.

    Args:
        nbytes: int64 ``[ranks, steps]``, bytes that each rank reads for each step.
        bandwidth: bytes per second, shared by the ranks that are reading.
        ahead: records that a rank's buffers hold, the one in use included.

    Returns:
        Seconds of the epoch and the share of them in which the GPUs waited.
    """
    ranks, steps = nbytes.shape
    have = np.zeros(ranks, np.int64)
    left = nbytes[:, 0].astype(np.float64)
    now = busy_until = 0.0
    done, running = 0, False
    while done < steps:
        if not running and (have > done).all():
            running, busy_until = True, now + STEP_S
        reading = (have < steps) & (have < done + ahead)
        each = bandwidth / max(1, reading.sum())
        arrival = now + left[reading].min() / each if reading.any() else np.inf
        until = min(arrival, busy_until if running else np.inf)
        left[reading] -= (until - now) * each
        now = until
        for rank in np.flatnonzero(reading & (left <= 1.0)):
            have[rank] += 1
            left[rank] = nbytes[rank, have[rank]] if have[rank] < steps else 0.0
        if running and now >= busy_until:
            running, done = False, done + 1
    return now, 1 - steps * STEP_S / now


def epoch_figures(index: RecordIndex) -> dict[str, Any]:
    """Simulated epochs of 2,800 records on 8 GPUs, planned by the planner that training uses, by the disk's bandwidth."""
    chunks = {key.chunk_id: int(size) for key, size in zip(index.keys, index.nbytes, strict=True)}
    records: Any = _Records(chunks)
    plan = plan_records(records, PrefeatureStreamConfig(""), GPUS)
    nbytes = np.stack([records.nbytes[plan.rank(rank).table(0, plan.steps).unit] for rank in range(GPUS)])
    found: dict[str, Any] = {"records": RECORDS, "gpus": GPUS, "step_s": STEP_S, "steps": plan.steps, "read_tb": nbytes.sum() / 1e12}
    for bandwidth in BANDWIDTHS:
        taken, waiting = simulate_epoch(nbytes, bandwidth * 1e9)
        found[f"{bandwidth:g}_gb_s"] = {"minutes": round(taken / 60, 2), "gpu_waiting": round(waiting, 3)}
    return found


def measure(folder: Path, workers: int) -> dict[str, Any]:
    """All figures, in an empty folder."""
    writer = RealSizeWriter(folder)
    chunks = writer.chunks()
    started = time.perf_counter()
    written = sum(writer.write(key, result) for key, result in chunks)
    taken = time.perf_counter() - started
    writer.finish()
    figures: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "kernel": platform.release(), "torch": torch.__version__},
        "read": read_figures(writer.root, layout.step_path(RecordKey(0, 0, 7))),
        "write": write_figures(folder, writer, chunks[-1][1]) | {"trajectory_gb": written / 1e9, "trajectory_gb_s": written / taken / 1e9},
    }
    del chunks
    figures["validate"] = validation_figures(writer.root)
    writer.drop_cache()
    figures["ray_train"] = train_figures(folder, writer.root, workers)
    figures["simulated_epoch"] = epoch_figures(RecordIndex(writer.root, previous=PreviousHidden.BOTH))
    return figures


def main() -> None:
    """Measures and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "prefeature.json")
    parser.add_argument("--folder", type=Path, default=None, help="where to measure; the disk that training reads from")
    parser.add_argument("--workers", type=int, default=2, help="ranks of the Ray Train part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="reelray-bench-", dir=options.folder) as name, ray_session(cpus=options.workers + 2):
        figures = measure(Path(name), options.workers)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
