"""The training job as a driver runs it: open, publish, train through Ray Train, keep what a person wants to see."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from actors.causes import raise_typed
from actors.manager import PoolSettings, stop_services
from actors.resources import await_nodes, wait_for_resources
from ingest.engine.dataset import Dataset
from ingest.errors import SettingsError
from ingest.plan import EpochPlan, plan_epoch
from ingest.settings import defaults_of_environment
from train_integration.accounting import FrameAccount
from train_integration.clamping import log_clamped_workers
from train_integration.config import EpisodeDataConfig, node_services, placeholder, publish_stream
from train_integration.feature_stats import feature_statistics
from train_integration.ledger import Rows, start_ledger, write_order
from train_integration.mixtures import Mixture
from train_integration.options import StreamDescription
from train_integration.preemption import start_stop_board, stop_on_sigterm
from train_integration.snapshots import SnapshotKeeper, mend_snapshot
from train_integration.training import TrainingPlan, train_worker

POLICIES = ("bc",)
"""Policy types that the training job knows."""

_RUN = "run"

_ELASTIC = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
"""Ray Train learns up to 20 s late that a node is gone, and asks for a group of the old size until then, for a minute each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """How the job runs.

    Attributes:
        output_dir: where checkpoints, the order and the log go.
        world_size: Train workers, or ``(least, most)`` for an elastic group.
        resize_after_s: seconds between looks at whether an elastic group can have another size.
        use_gpu: one GPU per worker.
        cpus_per_worker: logical CPUs that each worker reserves.
        node_wait_s: seconds to wait for nodes that an autoscaler starts for the workers; 0 asks for none.
        max_failures: worker groups that may be lost.
        pool: decode actors per node.
        resume: go on from the newest checkpoint in ``output_dir``.
    """

    output_dir: Path
    world_size: int | tuple[int, int]
    resize_after_s: float = 60.0
    use_gpu: bool = False
    cpus_per_worker: float = 1.0
    node_wait_s: float = 0.0
    max_failures: int = 8
    pool: PoolSettings | None = None
    resume: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a training job did.

    Attributes:
        rows: order rows of every rank and attempt, ``committed`` filled in.
        steps: optimiser steps done in all, those of earlier runs included.
        log: one entry per logged step of rank 0, replayed steps included.
        attempts: worker groups that were started.
        world_sizes: ranks of each of them, in order.
        counts: counter totals of the last worker group.
        first_batch_s: seconds to the first batch of its slowest rank.
        checkpoint: path of the newest checkpoint, or None.
        stopped: whether SIGTERM ended it early; it has saved, and goes on with ``resume``.
    """

    rows: Rows
    steps: int
    log: list[dict[str, float]]
    attempts: int
    world_sizes: tuple[int, ...]
    counts: dict[str, float]
    first_batch_s: float | None
    checkpoint: str | None
    stopped: bool = False


def make_plan(
    dataset: Dataset | Mixture, *, steps: int, chunk: int, seed: int, save_every: int, learning_rate: float = 1e-3, **more: Any
) -> TrainingPlan:
    """A training plan for a dataset: all its delivered cameras, its state, and its actions.

    Raises:
        SettingsError: the dataset has no ``action``.
    """
    spec = dataset.spec
    if "action" not in spec.columns:
        raise SettingsError(f"{dataset.location} has no 'action' to learn; its columns are {', '.join(spec.columns)}")
    state = next((key for key in ("observation.state", "observation.environment_state") if key in spec.columns), None)
    keys = [key for key in ("action", state) if key is not None]
    statistics = dataset.feature_statistics(keys) if isinstance(dataset, Mixture) else feature_statistics(dataset, keys)
    return TrainingPlan(
        cameras=spec.cameras,
        state_key=state,
        chunk=chunk,
        statistics=statistics,
        steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        save_every=save_every,
        **more,
    )


def check_start(description: StreamDescription, settings: JobSettings) -> None:
    """Refuses what cannot be started, before anything is written.

    A run that is gone on with is refused by its cursor: it may have more ranks than episodes, which a start may not.

    Raises:
        SettingsError: the output directory holds another run.
        PlanError: a rank would own nothing.
        BudgetError: an episode exceeds the byte budget.
    """
    if settings.resume:
        return
    output = settings.output_dir.resolve()
    if (output / _RUN).exists():
        raise SettingsError(f"{output} holds an earlier run: pass --resume to go on with it, or another --output_dir")
    plan_epoch(description.units, description.config.plan)


def run_training(description: StreamDescription, plan: TrainingPlan, settings: JobSettings, *, ledger: Any = None) -> JobResult:
    """Trains, through losses of workers, until the plan's steps are done.

    Args:
        description: what to deliver.
        plan: what to do with it.
        settings: how to run.
        ledger: an order ledger that the caller watches; None starts one.

    Raises:
        SettingsError: the output directory holds another run.
        ReelrayError: of the kind that stopped a worker.
    """
    check_start(description, settings)
    output = settings.output_dir.resolve()
    output.mkdir(parents=True, exist_ok=True)
    mend_snapshot(output / _RUN)
    if not settings.resume:
        log_clamped_workers(plan_epoch(description.units, description.config.plan))
    least = settings.world_size if isinstance(settings.world_size, int) else settings.world_size[0]
    each = {"CPU": settings.cpus_per_worker} | ({"GPU": 1.0} if settings.use_gpu else {})
    await_nodes([each] * least, settings.node_wait_s)
    wait_for_resources({name: least * amount for name, amount in each.items()}, f"{least} Train workers")
    ledger = ledger if ledger is not None else start_ledger()
    board = start_stop_board()
    description, manager = node_services(description, settings.pool)
    scaling: Any = ScalingConfig(
        num_workers=settings.world_size,  # pyright: ignore[reportArgumentType]
        elastic_resize_monitor_interval_s=settings.resize_after_s,
        use_gpu=settings.use_gpu,
        resources_per_worker=each,
    )
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"plan": plan, "ledger": ledger, "stop_board": board},
        scaling_config=scaling,
        datasets=placeholder(),
        dataset_config=EpisodeDataConfig(publish_stream(description, manager)),
        run_config=RunConfig(
            name=_RUN,
            storage_path=str(output),
            failure_config=FailureConfig(max_failures=settings.max_failures),
            callbacks=[SnapshotKeeper(output / _RUN)],
        ),
    )
    try:
        elastic = not isinstance(settings.world_size, int)
        with stop_on_sigterm(lambda: board.ask.remote()) as asked, defaults_of_environment(_ELASTIC if elastic else {}):
            result: Any = trainer.fit()
            steps = int((result.metrics or {}).get("step", 0))
            stopped = asked() and steps < plan.steps
    except Exception as error:
        raise_typed(error)
    finally:
        stop_services(manager)
        stop_services(board)
    rows: Rows = ray.get(ledger.columns.remote())
    summary: dict[str, Any] = ray.get(ledger.summary.remote())
    log: list[dict[str, float]] = ray.get(ledger.training_log.remote())
    write_order(output / "order.parquet", rows)
    (output / "log.json").write_text(json.dumps(log), encoding="utf-8")
    checkpoint = result.checkpoint.path if result.checkpoint is not None else None
    sizes = tuple(summary["world_sizes"])
    return JobResult(rows, steps, log, summary["attempts"], sizes, summary["counts"], summary["first_batch_s"], checkpoint, stopped)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was committed of one epoch, against what the plan holds.

    Attributes:
        epoch: epoch number.
        complete: whether the epoch was delivered to its end.
        selected: deliveries that the epoch asks for: the selected frames, unless weights repeat or leave out some.
        delivered: committed rows, padding excluded.
        missing: deliveries that the epoch asks for and that were not made; 0 while it is not complete.
        duplicated: deliveries of a frame beyond those that the epoch asks for.
        in_order: whether every rank's committed rows come in the order of the plan; None where the world size changes,
            because an order file does not say when.
    """

    epoch: int
    complete: bool
    selected: int
    delivered: int
    missing: int
    duplicated: int
    in_order: bool | None


def coverage(description: StreamDescription, rows: Rows, world_size: int | None) -> list[Coverage]:
    """Compares committed rows with the plan, epoch by epoch.

    Args:
        description: what was delivered.
        rows: order rows of every rank and attempt.
        world_size: ranks; None for an elastic group.
    """
    found: list[Coverage] = []
    account = FrameAccount(description)
    last = int(rows["epoch"].max(initial=0))
    for epoch in np.unique(rows["epoch"]).tolist():
        mine = (rows["epoch"] == epoch) & rows["committed"]
        real = mine & ~rows["is_pad"]
        tally = account.tally(rows["dataset"][real], rows["index"][real], epoch)
        reached = int(rows["step"][mine].max()) + 1 if mine.any() else 0
        plan = None if world_size is None else plan_epoch(description.units, description.with_topology(world_size=world_size), epoch=epoch)
        # A later epoch begins when all ranks have ended this one.
        complete = epoch < last or tally.missing == 0 if plan is None else reached >= plan.steps
        found.append(
            Coverage(
                epoch,
                complete,
                tally.delivered + tally.missing - tally.duplicated,
                tally.delivered,
                tally.missing if complete else 0,
                tally.duplicated,
                None if plan is None else _in_order(plan, rows, mine),
            )
        )
    return found


def _in_order(plan: EpochPlan, rows: Rows, mine: Any) -> bool:
    for rank in range(plan.world_size):
        here = np.flatnonzero(mine & (rows["rank"] == rank))
        if not len(here):
            continue
        table = plan.rank(rank).table(0, int(rows["step"][here].max()) + 1)
        same = len(table.frame) == len(here) and np.array_equal(table.frame, rows["frame_index"][here])
        if not same or not np.array_equal(plan.units.episode[table.unit], rows["episode_index"][here]):
            return False
        if not np.array_equal(plan.units.dataset[table.unit], rows["dataset"][here]):
            return False
    return True
