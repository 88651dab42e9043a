"""Nodes that come on demand: asked for, waited for, and no longer asked for afterwards. The test plays the autoscaler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(280)]

REPOSITORY = Path(__file__).resolve().parents[2]
ASK = """
import json, time
import ray
from ray.util import placement_group_table
from actors.resources import await_nodes, wait_for_resources
from ingest.errors import ResourceUnavailableError

ray.init(log_to_driver=False, logging_level="error")
before = sum(node["Alive"] for node in ray.nodes())
print("asking", flush=True)
await_nodes([{"CPU": 1.0}] * 3, 120.0)
wait_for_resources({"CPU": 3.0}, "3 Train workers")
after = sum(node["Alive"] for node in ray.nodes())
start = time.monotonic()
await_nodes([{"CPU": 64.0}], 2.0)
try:
    wait_for_resources({"CPU": 64.0}, "a Train worker", timeout_s=1.0)
    refused = ""
except ResourceUnavailableError as error:
    refused = str(error)
asked = [group["state"] for group in placement_group_table().values()]
print(json.dumps({"before": before, "after": after, "refused": refused, "waited": time.monotonic() - start, "asked": asked}))
"""


def test_nodes_come_when_they_are_asked_for_and_the_request_ends() -> None:
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    cluster = Cluster()
    cluster.add_node(num_cpus=0, object_store_memory=80_000_000, include_dashboard=False)
    try:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": str(cluster.address)}
        with subprocess.Popen([sys.executable, "-c", ASK], env=environment, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            assert asking.stdout.readline() == "asking\n"
            for _ in range(2):
                cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
            answer, _ = asking.communicate(timeout=200)
    finally:
        cluster.shutdown()
    assert asking.returncode == 0
    found = json.loads(answer.splitlines()[-1])
    assert (found["before"], found["after"]) == (1, 3)
    assert "64 CPU wanted" in found["refused"]
    assert set(found["asked"]) == {"REMOVED"}
