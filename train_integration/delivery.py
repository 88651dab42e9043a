"""Deliver an epoch without training on it: through Ray Train workers, or in one process.

Behind `reelray stream`. Every rank's rows go to the ledger as they are delivered; when the group of ranks starts again
after a loss, it goes on where all ranks had delivered, and what was delivered beyond is marked as not committed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
from ray.exceptions import RayError, RayTaskError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from actors.causes import raise_typed
from actors.manager import PoolSettings, stop_services
from actors.resources import wait_for_resources
from ingest.engine.damage import DamageReport
from ingest.engine.dataset import Dataset
from ingest.engine.decoded import DECODED_CACHE_BYTES
from ingest.errors import CursorError, DamagedDataError, ReelrayError
from ingest.language.stage import stage_of
from ingest.plan import Cursor, EpochPlan, plan_epoch
from ingest.storage.atomic import write_atomic
from train_integration.clamping import log_clamped_workers
from train_integration.config import EpisodeDataConfig, RankShard, node_services, placeholder, publish_stream
from train_integration.ledger import OrderRecord, Rows, start_ledger
from train_integration.mixtures import Mixture
from train_integration.options import StreamDescription
from train_integration.producer import Delivery, nothing_to_fill_with
from train_integration.recording import joined, order_rows
from train_integration.scratch import scratch_folder

_ROWS_PER_MESSAGE = 512


@dataclass(frozen=True, slots=True)
class DeliverySummary:
    """What a delivery did.

    Attributes:
        rows: order rows of every rank and attempt.
        cursor: position after it.
        counts: counter totals of all ranks.
        seconds: wall seconds from the first rank's start to the last batch.
        first_batch_s: seconds to the first batch of the slowest rank; None when nothing was delivered.
        attempts: worker groups that were started.
        skipped: episodes dropped by the damage policy, as plain dictionaries.
    """

    rows: Rows
    cursor: Cursor
    counts: dict[str, float]
    seconds: float
    first_batch_s: float | None
    attempts: int
    skipped: list[dict[str, object]]


def deliver_locally(
    dataset: Dataset | Mixture,
    description: StreamDescription,
    plan: EpochPlan,
    *,
    ranks: list[int],
    max_steps: int | None,
    digests: bool,
    progress: Callable[[int], object] | None = None,
) -> DeliverySummary:
    """Delivers ranks one after another with the single-process engine.

    Args:
        dataset: the opened dataset.
        description: the stream over it; its damage policy holds.
        plan: the epoch's plan.
        ranks: ranks to deliver.
        max_steps: batches per rank, at most.
        digests: whether order rows carry picture digests.
        progress: told the samples of every batch.

    Raises:
        DamagedDataError: an episode is damaged and the policy says to stop.
    """
    log_clamped_workers(plan)
    record = OrderRecord()
    segment = len(plan.cursor.segments) - 1
    attempt = record.begin(plan.epoch, [one.batches for one in plan.cursor.segments])
    stop = plan.end if max_steps is None else min(plan.end, plan.cursor.batches + max_steps)
    damage = DamageReport(list(description.damage.records))
    skips: list[tuple[int, int, int]] = []
    budget = description.config.decoded_budget_gb
    decoded = DECODED_CACHE_BYTES if budget is None else int(budget * 2**30)
    start = time.perf_counter()
    first: float | None = None
    for rank in ranks:
        current, reached = plan, plan.cursor.batches
        while reached < stop:
            try:
                for planned, batch in dataset.iter_batches(current, rank, max_steps=stop - reached, decoded_bytes=decoded):
                    first = time.perf_counter() - start if first is None else first
                    units = current.units
                    delivery = Delivery(
                        current.epoch,
                        segment,
                        planned.step,
                        planned.worker,
                        units.dataset[planned.unit],
                        units.episode[planned.unit],
                        planned.frame,
                        planned.position,
                        planned.is_pad,
                    )
                    record.add(
                        attempt,
                        segment,
                        rank,
                        order_rows(description, delivery, rank, batch, dataset.spec.cameras, digests=digests, recipe=dataset.recipe),
                    )
                    reached = planned.step + 1
                    if progress is not None:
                        progress(len(planned))
                break
            except DamagedDataError as error:
                if description.config.damage != "skip_episode" or error.episode is None:
                    raise
                before = cursor = current.cursor.advance(reached - current.cursor.batches)
                for number in _datasets_of(description, error):
                    frames = _frames_left(current, rank, number, error.episode, reached)
                    damage.add(error, dataset=number, episode=error.episode, step=reached, frames=frames)
                    skips.append((number, error.episode, reached))
                    cursor = cursor.skip(*skips[-1])
                if cursor == before:
                    raise nothing_to_fill_with(dataset.location, rank, error) from error
                current = plan_epoch(plan.units, plan.settings, cursor)
    after = plan.cursor
    for skip in skips:
        after = after.skip(*skip)
    after = _moved(after, plan, stop)
    seconds = time.perf_counter() - start
    return DeliverySummary(record.columns(), after, dataset.counters.totals(), seconds, first, 1, damage.to_json())


def _moved(cursor: Cursor, plan: EpochPlan, reached: int) -> Cursor:
    """A plan's cursor, with what was skipped, after ``reached`` batches; an order without end stays in its epoch."""
    ended = reached >= plan.steps and plan.settings.tail != "loop"
    return cursor.next_epoch() if ended else cursor.advance(reached - plan.cursor.batches)


def _datasets_of(description: StreamDescription, error: DamagedDataError) -> list[int]:
    """Numbers of the datasets that a damaged episode belongs to: a mixture may hold one dataset several times."""
    sources = description.job.sources
    found = [number for number, source in enumerate(sources) if len(sources) == 1 or source.store.url == error.dataset]
    return [number for number in found if error.episode in description.lengths.episodes[number]]


def _frames_left(plan: EpochPlan, rank: int, dataset: int, episode: int, step: int) -> int:
    """Frames of an episode that a rank would have delivered from a step on."""
    ranked = plan.rank(rank)
    table = ranked.table(step, ranked.steps)
    mine = (plan.units.dataset[table.unit] == dataset) & (plan.units.episode[table.unit] == episode)
    return int(np.count_nonzero(mine & ~table.is_pad))


def deliver_through_ray(
    description: StreamDescription,
    *,
    world_size: int,
    cursor: Cursor | None,
    epoch: int,
    max_steps: int | None,
    digests: bool,
    pool: PoolSettings | None = None,
    max_failures: int = 20,
    step_s: float = 0.0,
    ledger: Any = None,
) -> DeliverySummary:
    """Delivers an epoch through Ray Train workers, Ray Data reads and the decode pool, and survives their loss.

    Args:
        description: what to deliver.
        world_size: Train workers.
        cursor: where to start; None for the start of ``epoch``.
        epoch: epoch number without a cursor.
        max_steps: batches per rank, at most.
        digests: whether order rows carry picture digests.
        pool: decode actors per node.
        max_failures: worker groups that may be lost.
        step_s: seconds that each rank spends on a batch, to imitate a training step.
        ledger: a ledger that the caller watches; None starts one.

    Raises:
        ReelrayError: of the kind that stopped a rank.
    """
    settings = description.with_topology(world_size=world_size)
    plan = plan_epoch(description.units, settings, cursor, epoch=epoch)
    log_clamped_workers(plan)
    wait_for_resources({"CPU": float(world_size)}, f"{world_size} Train workers of 1 CPU")
    description, manager = node_services(description, pool)
    own = start_ledger() if ledger is None else None
    ledger = own if ledger is None else ledger
    shared = replace(description, config=replace(description.config, plan=settings, epochs=1))
    handles = publish_stream(shared, manager, cursor=plan.cursor.to_json(), max_steps=max_steps)
    start = time.perf_counter()
    with scratch_folder("stream") as folder:
        trainer: Any = DataParallelTrainer(
            _deliver,
            train_loop_config={"ledger": ledger, "digests": digests, "max_steps": max_steps, "step_s": step_s},
            scaling_config=ScalingConfig(num_workers=world_size, resources_per_worker={"CPU": 1}),
            datasets=placeholder(),
            dataset_config=EpisodeDataConfig(handles),
            run_config=RunConfig(name="reelray-stream", storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures)),
        )
        try:
            trainer.fit()
        except Exception as error:
            raise_typed(error)
        finally:
            stop_services(manager)
    seconds = time.perf_counter() - start
    failed: Exception | None = ray.get(ledger.error.remote())
    if failed is not None:
        raise failed
    rows: Rows = ray.get(ledger.columns.remote())
    summary: dict[str, Any] = ray.get(ledger.summary.remote())
    # Ray Train's controller may outlive the run, and with it the handle that it was given.
    stop_services(own)
    reached = plan.end if max_steps is None else min(plan.end, plan.cursor.batches + max_steps)
    after = plan.cursor
    for skip in summary["skips"]:
        after = after.skip(*skip)
    after = _moved(after, plan, reached)
    skipped = [*description.damage.to_json(), *summary["damage"]]
    return DeliverySummary(rows, after, summary["counts"], seconds, summary["first_batch_s"], summary["attempts"], skipped)


def _deliver(config: dict[str, Any]) -> None:
    """What each Train worker runs."""
    shard: Any = ray.train.get_dataset_shard("train")
    assert isinstance(shard, RankShard)  # made by EpisodeDataConfig
    ledger, digests, limit = config["ledger"], config["digests"], config["max_steps"]
    base = Cursor.from_json(shard.handles.cursor or "")
    committed = tuple(one.batches for one in base.segments)
    number, batches, skips = ray.get(ledger.join.remote(shard.attempt, shard.world_size, base.epoch, committed))
    ray.get(ledger.started.remote(shard.rank, os.getpid()))
    cursor = base
    for skip in skips:
        cursor = cursor.skip(*skip)
    cursor = cursor.advance(batches - base.batches)
    if limit is not None:
        shard = replace(shard, handles=replace(shard.handles, max_steps=limit - (batches - base.batches)))
    if shard.handles.max_steps == 0:
        return
    try:
        _deliver_rank(shard, cursor, ledger, number, digests=digests, step_s=config["step_s"])
    except Exception as error:
        # What an actor of the job refuses comes as an error of Ray with the reason inside.
        known = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, ReelrayError) else error
        if isinstance(known, RayError):
            raise
        # It would come again at every new start; the driver raises it once all ranks have stopped.
        ray.get(ledger.fail.remote(number, known))


def _deliver_rank(shard: RankShard, cursor: Cursor, ledger: Any, attempt: int, *, digests: bool, step_s: float) -> None:
    parts: list[Rows] = []
    pending: list[ray.ObjectRef[Any]] = []

    def send(*, finished: bool) -> bool:
        rows = joined(parts) if parts else None
        parts.clear()
        pending.append(ledger.add_rows.remote(attempt, stream.segment, shard.rank, rows, cursor.epoch if finished else None))
        # Wait for the message before, so that a slow ledger slows the rank down instead of filling memory.
        return bool(ray.get(pending.pop(0))) if len(pending) > 1 else True

    with shard.open(cursor=cursor, output="numpy") as stream:
        recipe = stage_of(stream.description.config.recipe)
        told = len(stream.damage.records)
        for batch in stream:
            delivery = stream.delivery
            assert delivery is not None  # set with every batch
            if step_s:
                time.sleep(step_s)
            cameras = stream.description.job.spec.cameras
            parts.append(order_rows(stream.description, delivery, shard.rank, batch, cameras, digests=digests, recipe=recipe))
            if (sum(len(part["step"]) for part in parts) >= _ROWS_PER_MESSAGE or step_s) and not send(finished=False):
                return
            for record in stream.damage.records[told:]:
                ledger.skipped.remote(record.dataset, record.episode, record.step, asdict(record))
            told = len(stream.damage.records)
        send(finished=True)
        ray.get(pending)
        ray.get(ledger.finish_rank.remote(stream.counters.totals(), stream.first_batch_s))


def write_cursor(path: Path, cursor: Cursor) -> None:
    """Writes a cursor file, whole or not at all."""
    write_atomic(path, f"{cursor.to_json()}\n".encode())


def read_cursor(path: Path) -> Cursor:
    """Reads a cursor file.

    Raises:
        CursorError: the file cannot be read or is no cursor.
    """
    try:
        return Cursor.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CursorError(f"{path}: the cursor file cannot be read: {error}") from error
