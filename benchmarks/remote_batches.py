"""Batches from a remote dataset, decoded, on the way that streams take: units fetched ahead in the order of need."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ingest.datasource import in_order
from ingest.engine.dataset import open_dataset, planned_batches
from ingest.engine.decoded import DecodedUnits
from ingest.engine.fetch import UnitReader, UnitRequest
from ingest.engine.unit import UnitData
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings, RankPlan, Units, plan_epoch
from ingest.storage.base import Store
from ingest.storage.http import close_connections
from ingest.storage.locations import parse_location
from ingest.storage.stores import open_store

DATASET = MakeOptions(episodes=64, frames="40:60", cameras=1, size=(192, 256), gop=10, video_files=8, data_files=2, pattern="noise")
RANKS, LANES, BATCH, PASSES = 4, 4, 8, 5
FETCH_THREADS, AHEAD_BYTES = 16, 24 << 20

Serve = Callable[[float, float | None], Any]
"""A context that serves the dataset with a latency in seconds and a bandwidth in bytes/s: its address and a count of what was sent."""


def dataset_files(folder: Path) -> dict[str, bytes]:
    """The dataset as a server holds it."""
    make_dataset(folder, DATASET)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _AheadReader:
    """Reads units in threads in the order in which a rank needs them, as a read task does."""

    def __init__(self, reader: UnitReader, units: Units, rank: RankPlan) -> None:
        numbers = list(dict.fromkeys(number for batch in rank.batches() for number in batch.unit.tolist()))
        requests = [UnitRequest(0, int(units.episode[n]), int(units.lo[n]), int(units.hi[n])) for n in numbers]
        read = in_order(lambda at: reader.read(requests[at]), units.bytes[np.array(numbers)], FETCH_THREADS, AHEAD_BYTES)
        self._coming: Iterator[tuple[UnitRequest, UnitData]] = zip(requests, read, strict=True)
        self._ready: dict[UnitRequest, UnitData] = {}

    def read(self, request: UnitRequest) -> UnitData:
        while request not in self._ready:
            key, unit = next(self._coming)
            self._ready[key] = unit
        return self._ready.pop(request)


def _epoch(store: Store, began: float) -> tuple[float, float, int]:
    """Seconds from ``began`` to the first batch, seconds from there to the last, and samples after the first batch."""
    dataset = open_dataset(store, return_uint8=True)
    settings = PlanSettings(strategy="lanes", lanes=LANES, world_size=RANKS, batch_size=BATCH, dataset=dataset.fingerprint())
    plan = plan_epoch(dataset.units(lane_frames=64), settings)
    reader = _AheadReader(dataset.reader(), plan.units, plan.rank(0))
    pictures = DecodedUnits(dataset.spec, (dataset.location,), dataset.counters)
    first, samples = 0.0, 0
    for batch, _ in planned_batches(plan, 0, reader, dataset.assembler(), pictures, dataset.counters):
        if not first:
            first = time.perf_counter() - began
        else:
            samples += len(batch)
    return first, time.perf_counter() - began - first, samples


def by_ranges(url: str) -> tuple[float, float, int]:
    """Straight from the server."""
    began = time.perf_counter()
    return _epoch(open_store(parse_location(url)), began)


def by_files(url: str) -> tuple[float, float, int]:
    """Whole files first: what the rank's episodes lie in, with as many threads, then the local directory."""
    began = time.perf_counter()
    remote = open_store(parse_location(url))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(FETCH_THREADS) as threads:

        def fetch(path: str) -> None:
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(remote.read_ranges(path, [(0, remote.size(path))])[0])

        list(threads.map(fetch, [item.path for item in remote.list()]))
        return _epoch(open_store(folder), began)


def compare(serve: Serve, latency_s: float, bytes_per_s: float | None) -> dict[str, Any]:
    """Both ways at one latency and bandwidth, alternating, the best of each; the sidecar is there already."""
    results: dict[str, Any] = {"latency_ms": latency_s * 1e3, "bandwidth_mb_per_s": None if bytes_per_s is None else bytes_per_s / 1e6}
    with serve(latency_s, bytes_per_s) as (url, count):
        began = time.perf_counter()
        open_dataset(url)
        results["first_opening_s"] = round(time.perf_counter() - began, 3)
        ways = {"ranges": by_ranges, "whole_files": by_files}
        times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
        traffic: dict[str, tuple[int, int]] = {}
        for _ in range(PASSES):
            for name, run in ways.items():
                close_connections()
                count()
                times[name].append(run(url))
                traffic[name] = count()
    for name, rows in times.items():
        first, rest = (min(row[place] for row in rows) for place in (0, 1))
        results[name] = {
            "first_batch_s": round(first, 3),
            "samples_per_s": round(rows[0][2] / rest, 1),
            "epoch_s": round(first + rest, 3),
            "requests": traffic[name][0],
            "megabytes": round(traffic[name][1] / 1e6, 2),
        }
    return results
