"""Hashing and transfers of a dataset's files as Ray tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from actors.prefeature_build import cause_of
from ingest.prefeature.sync import Runner, in_threads

_BATCHES_PER_TASK_SLOT = 4
"""Several batches for each slot, so that a slow one does not keep the others waiting at the end."""


@ray.remote(num_cpus=1, max_retries=3)
def _work(work: Callable[[str], Any], paths: Sequence[str], threads: int) -> list[Any]:
    return list(in_threads(threads)(work, paths))


def ray_runner(*, tasks: int, threads: int = 4) -> Runner:
    """Spreads work over the connected cluster, whose nodes must see the dataset.

    Args:
        tasks: tasks at a time.
        threads: threads of each task.
    """

    def run(work: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        if not paths:
            return []
        size = max(1, -(-len(paths) // (tasks * _BATCHES_PER_TASK_SLOT)))
        shared = ray.put(work)
        waiting: list[ray.ObjectRef[list[Any]]] = []
        results: dict[ray.ObjectRef[list[Any]], list[Any]] = {}
        order: list[ray.ObjectRef[list[Any]]] = []
        try:
            for start in range(0, len(paths), size):
                if len(waiting) >= tasks:
                    done, waiting = ray.wait(waiting, num_returns=1)
                    results[done[0]] = ray.get(done[0])
                ref = _work.remote(shared, list(paths[start : start + size]), threads)
                waiting.append(ref)
                order.append(ref)
            results |= dict(zip(waiting, ray.get(waiting), strict=True))
        except RayTaskError as error:
            for ref in waiting:
                ray.cancel(ref)
            raise cause_of(error) from error
        return [value for ref in order for value in results[ref]]

    return run
