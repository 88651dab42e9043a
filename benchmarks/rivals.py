"""Delivers one epoch by LeRobot's streaming loader or by ``ray.data.read_lerobot``; run by ``benchmarks.compare`` in LeRobot's environment.

    python benchmarks/rivals.py streaming|read_lerobot DIR

Prints ``go`` when the epoch begins, waits for a line, and ends with a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

BATCH = 16


def streaming(root: str) -> Callable[[], Iterator[int]]:
    """Samples of LeRobot's loader, one process, pictures as uint8."""
    from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset

    dataset = StreamingLeRobotDataset("rival/dataset", root=root, buffer_size=200, max_num_shards=1, return_uint8=True)

    def epoch() -> Iterator[int]:
        for item in dataset:
            assert any(key.startswith("observation.images.") for key in item)
            yield 1

    return epoch


def read_lerobot(root: str) -> Callable[[], Iterator[int]]:
    """Batches of Ray Data's reader on the cores of this machine; its workers are started and have their imports before."""
    import ray

    ray.init(address="local", include_dashboard=False, object_store_memory=1 << 30, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def batches(**options: Any) -> Iterator[int]:
        for batch in ray.data.read_lerobot(root, read_granularity="episode", **options).iter_batches(
            batch_size=BATCH, batch_format="numpy"
        ):
            yield len(batch["index"])

    for _ in batches(episodes=[0, 1]):
        pass
    return batches


def main() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ["HF_HUB_OFFLINE"] = "1"
    epoch = {"streaming": streaming, "read_lerobot": read_lerobot}[sys.argv[1]](sys.argv[2])
    print("go", flush=True)
    sys.stdin.readline()
    started, first, rows = time.perf_counter(), 0.0, 0
    for count in epoch():
        rows += count
        if rows >= BATCH and not first:
            first = time.perf_counter() - started
    print(json.dumps({"rows": rows, "first_batch_s": first, "wall_s": time.perf_counter() - started}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
