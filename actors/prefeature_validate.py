"""Checks of cases and trajectories as Ray tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import ray
import torch
from ray.exceptions import RayTaskError

from actors.prefeature_build import cause_of
from ingest.prefeature.validate import Mapper, Outcome, check_part


@ray.remote(num_cpus=1, max_retries=3)
def _check(root: str, case_id: int, action_id: int, full: bool) -> Outcome:
    torch.set_num_threads(1)
    return check_part(Path(root), case_id, action_id, full=full)


def ray_mapper(root: Path, *, full: bool, in_flight: int = 64) -> Mapper:
    """Runs one task per case and trajectory, at most ``in_flight`` at a time; only findings and hashes travel back."""

    def run(pairs: list[tuple[int, int]]) -> Iterable[Outcome]:
        return _stream(str(root), pairs, full, in_flight)

    return run


def _stream(root: str, pairs: list[tuple[int, int]], full: bool, in_flight: int) -> Iterator[Outcome]:
    waiting: list[ray.ObjectRef[Outcome]] = []
    for case_id, action_id in pairs:
        if len(waiting) >= in_flight:
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield _outcome(ready[0])
        waiting.append(_check.remote(root, case_id, action_id, full))
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        yield _outcome(ready[0])


def _outcome(ref: ray.ObjectRef[Outcome]) -> Outcome:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise cause_of(error) from error
