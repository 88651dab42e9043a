"""Saying early, and by name, that a cluster cannot give what is asked of it. Ray itself would wait without a word."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ingest.errors import ResourceUnavailableError

SCHEDULE_TIMEOUT_S = 10.0
"""Seconds that a start may wait for resources which others hold."""


def wait_for_resources(
    needed: Mapping[str, float],
    what: str,
    *,
    available: Callable[[], Mapping[str, float]] = ray.available_resources,
    timeout_s: float = SCHEDULE_TIMEOUT_S,
) -> None:
    """Waits until the cluster has what is needed free.

    Args:
        needed: amounts by resource name, all together.
        what: what needs them, for the message.
        available: what is free at present; the whole cluster's by default.
        timeout_s: longest wait.

    Raises:
        ResourceUnavailableError: it did not come free; the message names resource, amounts and what the cluster has in all.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        free = available()
        short = {name: amount for name, amount in needed.items() if free.get(name, 0.0) + 1e-6 < amount}
        if not short:
            return
        if time.monotonic() >= deadline:
            total: Any = ray.cluster_resources()
            parts = [
                f"{amount:g} {name} wanted, {free.get(name, 0.0):g} free of {total.get(name, 0.0):g}" for name, amount in short.items()
            ]
            raise ResourceUnavailableError(
                f"{what} cannot be scheduled: {'; '.join(parts)}. Free them, add nodes, or ask for less "
                "(--world-size, --decode-actors, CPUs or GPUs of each worker)"
            )
        time.sleep(0.25)


def await_nodes(bundles: Sequence[Mapping[str, float]], wait_s: float) -> None:
    """Lets an autoscaler see what is needed, and waits for its nodes.

    The request is taken back in any case, and ends with the job: what comes, or does not, asks for nothing afterwards. Call
    `wait_for_resources` next, which says what is short.

    Args:
        bundles: amounts by resource name, each to be had on one node.
        wait_s: longest wait, in seconds; 0 asks for nothing.
    """
    if wait_s > 0:
        group = placement_group([dict(bundle) for bundle in bundles], name=f"reelray-nodes-{uuid4().hex[:8]}")
        try:
            group.wait(wait_s)
        finally:
            remove_placement_group(group)


def beside_caller(role: str) -> dict[str, Any]:
    """Options of a helper actor that reserves no CPU: on the node of the calling process, with a name that people can read.

    What a process owns ends with it. An actor of 0 CPUs may be placed on any node, and would end with that one too.

    Args:
        role: what the actor is for, in one word.
    """
    return {
        "num_cpus": 0,
        "name": f"reelray-{role}-{uuid4().hex[:8]}",
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
