"""A cluster of several nodes on this machine, whose nodes and processes can be killed.

The nodes are real raylets with object stores of their own (`ray.cluster_utils.Cluster`). Import this before Ray's
libraries: it sets what they read of the environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

import ray
from ray.cluster_utils import Cluster

NODES = 3
NAMESPACE = "faults"
"""Where a training driver finds the ledger, which outlives it."""


class Nodes:
    """A cluster of a head without CPUs and some worker nodes, and the processes of each.

    Args:
        workers: worker nodes.
        dashboard_port: port of the dashboard on the head; None starts none.
    """

    def __init__(self, workers: int = NODES, dashboard_port: int | None = None) -> None:
        head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 120_000_000, "include_dashboard": dashboard_port is not None}
        self.cluster = Cluster(initialize_head=True, head_node_args=head | ({"dashboard_port": dashboard_port} if dashboard_port else {}))
        self.workers: list[Any] = []
        for _ in range(workers):
            self.add()

    def add(self) -> None:
        """Adds a worker node."""
        self.workers.append(self.cluster.add_node(num_cpus=4, object_store_memory=120_000_000))

    def lose(self, node: Any) -> None:
        """Kills a node and everything on it."""
        processes = [child for raylet in _raylets(node) for child in raylet.children(recursive=True)]
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        for process in processes:
            # A machine that is gone does not let its processes finish what they were at.
            kill(process.pid)

    def processes(self, title: str) -> list[int]:
        """Processes on the worker nodes whose title begins so, in the order of their ids."""
        found: list[int] = []
        for node in self.workers:
            for raylet in _raylets(node):
                for process in raylet.children(recursive=True):
                    try:
                        if " ".join(process.cmdline()).startswith(title):
                            found.append(process.pid)
                    except psutil.NoSuchProcess:
                        continue
        return sorted(found)

    def node_of(self, pid: int) -> Any | None:
        """The worker node that a process runs on."""
        try:
            parents = {process.pid for process in psutil.Process(pid).parents()}
        except psutil.NoSuchProcess:
            return None
        return next((node for node in self.workers if any(raylet.pid in parents for raylet in _raylets(node))), None)

    def shutdown(self) -> None:
        """Ends everything."""
        ray.shutdown()
        self.cluster.shutdown()


def _raylets(node: Any) -> list[psutil.Process]:
    started = node.all_processes.get("raylet", [])
    return [psutil.Process(info.process.pid) for info in started if psutil.pid_exists(info.process.pid)]


def kill(pid: int) -> bool:
    """Sends SIGKILL; False if there is no such process any more."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def nodes(workers: int = NODES, dashboard_port: int | None = None) -> Iterator[Nodes]:
    """A cluster that this process is connected to; see `Nodes`."""
    made = Nodes(workers, dashboard_port)
    try:
        ray.init(address=made.cluster.address, log_to_driver=False, logging_level="error", namespace=NAMESPACE)
        yield made
    finally:
        made.shutdown()
