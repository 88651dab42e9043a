"""Evaluation videos on the cluster: one teacher per actor, one pair at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from ray.util.actor_pool import ActorPool
from torch import Tensor

from actors.prefeature_build import cause_of, require_workers
from ingest.prefeature.config import DatasetConfig, read_config
from ingest.prefeature.holdout import HoldoutItem, build_holdout_item
from ingest.prefeature.storefiles import load_noise
from ingest.prefeature.teacher import Teacher
from ingest.prefeature.teachers import TeacherChoice


@ray.remote(max_restarts=2, max_task_retries=2)
class HoldoutWorker:
    """Holds a teacher; videos are written atomically, so a retry is safe.

    Args:
        train: root of the training dataset.
        choice: the recorded teacher.
        threads: torch threads.
    """

    def __init__(self, train: str, choice: TeacherChoice, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._train = Path(train)
        self._choice = choice
        self._opened: tuple[DatasetConfig, Teacher, Tensor] | None = None

    def build(self, root: str, images: str, item: HoldoutItem, policy: str) -> list[str]:
        """Writes the videos of one pair and returns their paths."""
        if self._opened is None:  # here, since an error of a constructor would reach callers as a dead actor
            config = read_config(self._train)
            self._opened = config, self._choice.make(), load_noise(self._train, config)
        return build_holdout_item(Path(root), Path(images), item, *self._opened, policy)


def run_holdout(
    root: Path,
    images: Path,
    items: Sequence[HoldoutItem],
    train: Path,
    choice: TeacherChoice,
    *,
    policy: str,
    workers: int,
    num_gpus: float,
    num_cpus: float = 1.0,
    threads: int | None = None,
    runtime_env: dict[str, Any] | None = None,
) -> int:
    """Builds all missing videos on the connected cluster and returns how many were written.

    Raises:
        ResourceUnavailableError: the cluster cannot hold the workers.
        ReelrayError: whatever a worker raised.
    """
    require_workers(workers, num_gpus, num_cpus)
    options = {"num_gpus": num_gpus, "num_cpus": num_cpus, "runtime_env": runtime_env}
    actor: Any = HoldoutWorker
    actors: list[Any] = [actor.options(**options).remote(str(train), choice, threads) for _ in range(workers)]
    where = str(root), str(images)
    try:
        results: Any = ActorPool(actors).map_unordered(lambda worker, item: worker.build.remote(*where, item, policy), list(items))
        return sum(len(written) for written in results)
    except RayTaskError as error:
        raise cause_of(error) from error
    finally:
        for worker in actors:
            ray.kill(worker)
