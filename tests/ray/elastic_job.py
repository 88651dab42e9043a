"""A training job of one to three workers on a cluster that loses a node in mid-epoch, and gets one again later.

    python elastic_job.py FOLDER STRATEGY

Prints one JSON document: ranks of every worker group, steps, replayed rows, and coverage.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}

import psutil
import ray
from ray.cluster_utils import Cluster

from ingest.engine.spec import ReadOptions
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.plan import PlanSettings
from train_integration.job import JobSettings, coverage, make_plan, run_training
from train_integration.ledger import start_ledger
from train_integration.options import StreamConfig, open_stream

STEPS = 2000
"""More than the test lets it take: it is stopped when the last group has shown that it works."""
MEMORY = 90_000_000


def lose(cluster: Cluster, node: Any) -> None:
    """A node dies with everything on it."""
    raylets = [psutil.Process(one.process.pid) for one in node.all_processes.get("raylet", [])]
    processes = [child for raylet in raylets for child in raylet.children(recursive=True)]
    cluster.remove_node(node, allow_graceful=False)
    for process in processes:
        if process.is_running():
            process.kill()


def when(ledger: Any, ready: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Waits until the ledger's progress is as wanted."""
    while not ready(progress := ray.get(ledger.progress.remote())):
        time.sleep(0.1)
    return progress


def main(folder: Path, strategy: str) -> None:
    root = folder / "ds"
    make_dataset(root, MakeOptions(episodes=9, frames="20:40", cameras=1, size=(32, 64), gop=5, video_files=3, seed=6))
    # Nodes are added by a thread, which may not touch signals.
    cluster = Cluster(
        initialize_head=True,
        shutdown_at_exit=False,
        head_node_args={"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    try:
        train(cluster, root, folder, strategy)
    finally:
        ray.shutdown()
        cluster.shutdown()


def train(cluster: Cluster, root: Path, folder: Path, strategy: str) -> None:
    """Trains through the loss of a node, and tells what came of it."""
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    plan = PlanSettings(strategy=strategy, seed=3, batch_size=3, workers=2, tail="pad", clamp_workers=True)  # type: ignore[arg-type]
    config = StreamConfig(plan=plan, epochs=None, decode="inline", decoded_budget_gb=0.05, read=ReadOptions(action_chunk=2))
    description, dataset = open_stream(root, config)
    training = make_plan(dataset, steps=STEPS, chunk=2, seed=1, save_every=4, digests=True, step_s=0.15)
    settings = JobSettings(output_dir=folder / "run", world_size=(1, 3), resize_after_s=2.0, max_failures=20)
    ledger = start_ledger()

    def trained(world_size: int, rows: int) -> None:
        """Waits until a group of that size has delivered so many rows."""
        start = when(ledger, lambda progress: progress["world_size"] == world_size)["rows"]
        when(ledger, lambda progress: progress["world_size"] == world_size and progress["rows"] >= start + rows)

    def trouble() -> None:
        trained(3, 60)
        lose(cluster, nodes[1])
        trained(2, 45)
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        trained(3, 45)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=trouble, daemon=True).start()
    result = run_training(description, training, settings, ledger=ledger)
    report = {
        "world_sizes": result.world_sizes,
        "steps": result.steps,
        "stopped": result.stopped,
        "replayed": int((~result.rows["committed"]).sum()),
        "coverage": [asdict(one) for one in coverage(description, result.rows, None)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
