"""Decoding on nodes without GPUs for ranks on others: the same samples, also when a decoder over there is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(280)]

REPOSITORY = Path(__file__).resolve().parents[2]
DELIVER = """
import json, os, signal, sys, threading, time
import numpy as np, ray
from actors.manager import PoolSettings, start_manager
from ingest.plan import PlanSettings, plan_epoch
from train_integration.delivery import deliver_locally, deliver_through_ray
from train_integration.options import StreamConfig, open_stream

ray.init(log_to_driver=False, logging_level="error")
plan = PlanSettings(strategy="lanes", batch_size=4, clamp_workers=True)
description, dataset = open_stream(sys.argv[1], StreamConfig(plan=plan, decoded_budget_gb=0.01, lane_frames=12, frame_store=sys.argv[2]))
of_node = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
decoding, killed, over = {}, [], threading.Event()

def watch():
    while not over.wait(0.2):
        for actor in ray._private.state.actors().values():
            if actor["State"] == "ALIVE" and actor["Name"].startswith(("reelray-decode-", "reelray-landing-")):
                decoding[actor["Name"]] = "GPU" in of_node[actor["Address"]["NodeID"]]
                if not killed and len(decoding) >= int(sys.argv[3]) and actor["Name"].startswith("reelray-decode-"):
                    killed.append(actor["Pid"])
                    os.kill(actor["Pid"], signal.SIGKILL)

watcher = threading.Thread(target=watch)
watcher.start()
pool = PoolSettings(actors=2, cpus=0.5, cpu_nodes=True)
options = {"cursor": None, "epoch": 0, "max_steps": None, "digests": True}
found = deliver_through_ray(description, world_size=2, pool=pool, step_s=0.2, **options)
over.set()
watcher.join()
expected = deliver_locally(
    dataset, description, plan_epoch(description.units, description.with_topology(world_size=2)), ranks=[0, 1], max_steps=None, digests=True
)
names = [name for name in expected.rows if name.startswith("digest:")] + ["rank", "step", "position", "index"]
kept = found.rows["committed"]
same = all(np.array_equal(found.rows[name][kept], expected.rows[name]) for name in names)
print(json.dumps({"same": same, "rows": int(kept.sum()), "decoding": decoding, "killed": killed}))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A node with a GPU, as Ray counts them, and one without."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    cluster = Cluster()
    environment = {"PYTHONPATH": str(REPOSITORY)}
    cluster.add_node(num_cpus=4, num_gpus=1, object_store_memory=80_000_000, include_dashboard=False, env_vars=environment)
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000, env_vars=environment)
    cluster.wait_for_nodes()
    yield str(cluster.address)
    cluster.shutdown()


@pytest.mark.parametrize(("frame_store", "beside_ranks"), [("slab", {"landing"}), ("object_store", set())])
def test_samples_are_those_of_one_process(address: str, streamed: Path, frame_store: str, beside_ranks: set[str]) -> None:
    actors = 2 + 2 * len(beside_ranks)
    ended = subprocess.run(
        [sys.executable, "-c", DELIVER, str(streamed), frame_store, str(actors)],
        env=os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(REPOSITORY), "RAY_TRAIN_V2_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["same"]
    assert found["rows"] > 0
    assert {name.split("-")[1] for name, on_gpu_node in found["decoding"].items() if not on_gpu_node} == {"decode"}
    assert {name.split("-")[1] for name, on_gpu_node in found["decoding"].items() if on_gpu_node} == beside_ranks
    assert len(found["killed"]) == 1
