"""What reading ranges buys over reading whole files, at several latencies and bandwidths; and what a cold start costs.

First payload alone, then decoded batches of one rank of four; times are the best of five passes, for other work on the machine only
ever slows one down. Run from the checkout: ``python -m benchmarks.storage``; writes
``benchmarks/results/storage.json``. The server runs in a process of its own on this machine, so figures at latency 0 and full
bandwidth are those of a Python web server, not of a network.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from servers.hub import HubEmulator
from servers.ranges import RangeServer

from benchmarks import remote_batches
from ingest.storage.base import Store
from ingest.storage.http import close_connections
from ingest.storage.locations import parse_location
from ingest.storage.payloads import PayloadPool
from ingest.storage.stores import open_store

FILES, FILE_BYTES, EPISODES_PER_FILE = 8, 12 << 20, 8
RANKS = 4
THREADS = 16
BUDGET_BYTES = 24 << 20
LATENCIES_S = (0.0, 0.02, 0.1)
BANDWIDTHS = (None, 40e6)
BATCH_BANDWIDTHS = (None, 5e6)
PASSES = 5


def _serve(pipe: Connection, latency_s: float, bytes_per_s: float | None, objects: dict[str, bytes] | None) -> None:
    random = Random(0)
    with RangeServer(objects or {f"videos/file-{number:03d}.mp4": random.randbytes(FILE_BYTES) for number in range(FILES)}) as server:
        server.latency_s, server.bytes_per_s = latency_s, bytes_per_s
        pipe.send(server.url)
        while pipe.recv() == "count":
            pipe.send((len(server.requests), server.sent_bytes))
            server.forget()


@contextmanager
def server(
    latency_s: float, bytes_per_s: float | None, objects: dict[str, bytes] | None = None
) -> Iterator[tuple[str, Callable[[], tuple[int, int]]]]:
    """A range server in its own process: its address, and a call that returns and resets (requests, bytes sent)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, latency_s, bytes_per_s, objects))
    process.start()

    def count() -> tuple[int, int]:
        here.send("count")
        return here.recv()

    try:
        yield here.recv(), count
    finally:
        here.send("stop")
        process.join()


def spans(rank: int) -> list[tuple[str, int, int]]:
    """The rank's episodes in admission order: (file, start, stop)."""
    length = FILE_BYTES // EPISODES_PER_FILE
    everything = [
        (f"videos/file-{file:03d}.mp4", number * length, (number + 1) * length)
        for file in range(FILES)
        for number in range(EPISODES_PER_FILE)
    ]
    Random(1).shuffle(everything)
    return everything[rank::RANKS]


def by_ranges(store: Store) -> tuple[float, float]:
    """Seconds to the first episode and to the last, each fetched ahead under the byte budget and used in order."""
    wanted = spans(0)
    pool = PayloadPool[int](
        BUDGET_BYTES,
        lambda key: {"video": wanted[key][2] - wanted[key][1]},
        lambda key, _: store.read_ranges(wanted[key][0], [wanted[key][1:]])[0],
        threads=THREADS,
    )
    started = time.perf_counter()
    first, ahead = 0.0, 0
    for key in range(len(wanted)):
        while ahead < len(wanted) and pool.submit_prefetch(ahead):
            ahead += 1
        pool.retain(key, wait=True)
        ahead = max(ahead, key + 1)
        pool.get(key, "video")
        first = first or time.perf_counter() - started
        pool.release(key, drop=True)
    total = time.perf_counter() - started
    pool.close()
    return first, total


def by_files(store: Store) -> tuple[float, float]:
    """The same episodes by fetching each file that holds one, whole, in the order of need and with as many threads."""
    wanted = spans(0)
    files = list(dict.fromkeys(file for file, _, _ in wanted))
    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        futures = [threads.submit(store.read_ranges, file, [(0, FILE_BYTES)]) for file in files]
        futures[0].result()
        first = time.perf_counter() - started
        for future in futures:
            future.result()
    return first, time.perf_counter() - started


def compare(latency_s: float, bytes_per_s: float | None) -> dict[str, Any]:
    """Both ways at one latency and bandwidth, alternating, the best of each."""
    span_bytes = sum(stop - start for _, start, stop in spans(0))
    results: dict[str, Any] = {"latency_ms": latency_s * 1e3, "bandwidth_mb_per_s": None if bytes_per_s is None else bytes_per_s / 1e6}
    with server(latency_s, bytes_per_s) as (url, count):
        ways = {"ranges": by_ranges, "whole_files": by_files}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        traffic: dict[str, tuple[int, int]] = {}
        for _ in range(PASSES):
            for name, run in ways.items():
                close_connections()
                store = open_store(parse_location(url))
                count()
                times[name].append(run(store))
                traffic[name] = count()
    for name, pairs in times.items():
        total = min(pair[1] for pair in pairs)
        results[name] = {
            "first_episode_s": round(min(pair[0] for pair in pairs), 4),
            "epoch_s": round(total, 4),
            "useful_mb_per_s": round(span_bytes / total / 1e6, 1),
            "requests": traffic[name][0],
            "read_amplification": round(traffic[name][1] / span_bytes, 3),
        }
    return results


def batches() -> dict[str, Any]:
    """Decoded batches at every latency, the bandwidth limited and not."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_LEROBOT_HOME"] = str(Path(folder, "home"))
        files = remote_batches.dataset_files(Path(folder, "made"))
        rows = [
            remote_batches.compare(functools.partial(server, objects=files), latency_s, bytes_per_s)
            for bytes_per_s in BATCH_BANDWIDTHS
            for latency_s in LATENCIES_S
        ]
        megabytes = sum(map(len, files.values())) / 1e6
    return {"dataset_megabytes": round(megabytes, 2), "ranks": remote_batches.RANKS, "batch_size": remote_batches.BATCH, "compared": rows}


def cold_start() -> dict[str, Any]:
    """Requests and seconds to open a Hub dataset of 1,000 videos: first process of a host, then the next."""
    files = {
        "meta/info.json": b"{}",
        "meta/stats.json": b"{}",
        "meta/tasks.parquet": b"PAR1",
        "meta/episodes/chunk-000/file-000.parquet": b"PAR1",
    }
    files |= {f"videos/cam/chunk-{number // 500:03d}/file-{number:03d}.mp4": b"v" for number in range(1000)}
    found: dict[str, Any] = {"files": len(files)}
    with HubEmulator() as hub, tempfile.TemporaryDirectory() as home:
        os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": home}
        hub.add_dataset("o/n", files)
        for name in ("first_process", "second_process"):
            hub.forget()
            started = time.perf_counter()
            store = open_store(parse_location("o/n"))
            for item in store.list("meta"):
                store.read_all(item.path)
            store.size("videos/cam/chunk-000/file-000.mp4")
            requests = len(hub.hub.requests) + len(hub.storage.requests)
            found[name] = {"seconds": round(time.perf_counter() - started, 3), "requests": requests}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "storage.json")
    arguments = parser.parse_args()
    report = {
        "machine": {"python": platform.python_version(), "processor": platform.machine(), "cores": os.cpu_count()},
        "dataset": {
            "files": FILES,
            "file_bytes": FILE_BYTES,
            "episodes_per_file": EPISODES_PER_FILE,
            "ranks": RANKS,
            "measured": "rank 0, one epoch, no decoding",
            "threads": THREADS,
            "byte_budget": BUDGET_BYTES,
            "passes": PASSES,
        },
        "compared": [compare(latency_s, bytes_per_s) for bytes_per_s in BANDWIDTHS for latency_s in LATENCIES_S],
        "batches": batches(),
        "cold_start": cold_start(),
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
