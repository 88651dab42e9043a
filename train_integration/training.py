"""The training loop that every Train worker runs: behaviour cloning over a sample stream, resumable at any step."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from numpy.typing import NDArray

from ingest.errors import SettingsError
from ingest.language.stage import stage_of
from train_integration.checkpoints import load_checkpoint, load_pools, save_checkpoint
from train_integration.collate import to_torch
from train_integration.config import RankShard
from train_integration.policy import BehaviourCloning, LossOf
from train_integration.preemption import Demand, StopRequest
from train_integration.recording import order_rows
from train_integration.stream import SampleStream


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What the loop does. Pickles; statistics are float64 arrays.

    Attributes:
        cameras: cameras that the policy sees.
        state_key: vector feature that it sees, or None.
        chunk: actions predicted per sample.
        statistics: ``{key: (mean [D], std [D])}``.
        steps: optimiser steps in all.
        learning_rate: of AdamW.
        seed: of the policy's weights.
        save_every: steps between checkpoints.
        log_every: steps between log lines.
        digests: whether recorded rows carry picture digests.
        step_s: least seconds of a step, to imitate a larger model.
        other_recipe: whether a checkpoint of another recipe may be gone on with; see `SampleStream.load_state_dict`.
    """

    cameras: tuple[str, ...]
    state_key: str | None
    chunk: int
    statistics: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    steps: int
    learning_rate: float
    seed: int
    save_every: int
    log_every: int = 1
    digests: bool = False
    step_s: float = 0.0
    other_recipe: bool = False


def train_worker(config: dict[str, Any]) -> None:
    """What each Train worker runs. ``config`` holds ``plan`` (a `TrainingPlan`), ``ledger`` and ``stop_board`` (actors or None)."""
    plan: TrainingPlan = config["plan"]
    ledger: Any = config["ledger"]
    shard: Any = ray.train.get_dataset_shard("train")
    if not isinstance(shard, RankShard):
        raise SettingsError("the trainer's dataset 'train' is not a reelray stream: pass dataset_config=EpisodeDataConfig(...)")
    with shard.open(output="numpy") as stream:
        checkpoint = ray.train.get_checkpoint()
        training: dict[str, Any] | None = None
        if checkpoint is not None:
            state, training = load_checkpoint(checkpoint)
            stream.load_state_dict(state, other_recipe=plan.other_recipe, pool_state=load_pools(checkpoint, shard.rank))
        stream.prepare()
        torch.manual_seed(plan.seed)
        statistics = {key: (torch.from_numpy(mean), torch.from_numpy(std)) for key, (mean, std) in plan.statistics.items()}
        policy = BehaviourCloning(plan.cameras, plan.state_key, statistics, plan.chunk)
        model: Any = ray.train.torch.prepare_model(LossOf(policy))
        optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate)
        step = 0
        if training is not None:
            policy.load_state_dict(training["policy"])
            optimizer.load_state_dict(training["optimizer"])
            step = int(training["step"])
        recorder = None if ledger is None else _Recorder(ledger, shard, stream, plan)
        device = ray.train.torch.get_device()
        stop = StopRequest(config.get("stop_board"), shard.attempt)
        last = step >= plan.steps
        while not last:
            for batch in stream:
                stop.begin(step + 1)
                started = time.perf_counter()
                loss = _step(model, optimizer, to_torch(batch, device=device))
                step += 1
                _pause(started, plan.step_s)
                if recorder is not None:
                    recorder.add(batch, step, loss)
                demand = stop.after(step)
                last = demand is Demand.STOP or step >= plan.steps
                if last or demand is Demand.SAVE or step % plan.save_every == 0:
                    if recorder is not None:
                        recorder.flush()
                    weights = (
                        {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "step": step} if shard.rank == 0 else None
                    )
                    save_checkpoint({"step": step, "epoch": stream.epoch, "loss": loss}, stream, weights)
                if last:
                    break
        if recorder is not None:
            recorder.finish()


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = model(batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _pause(started: float, step_s: float) -> None:
    left = step_s - (time.perf_counter() - started)
    if left > 0:
        time.sleep(left)


class _Recorder:
    """Sends a rank's rows and log lines to the ledger."""

    def __init__(self, ledger: Any, shard: RankShard, stream: SampleStream, plan: TrainingPlan) -> None:
        self._ledger = ledger
        self._rank = shard.rank
        self._stream = stream
        self._plan = plan
        self._pending: Any = None
        cursor = stream.cursor()
        batches = tuple(one.batches for one in cursor.segments)
        self._attempt: Any = ray.get(ledger.begin_group.remote(shard.attempt, shard.world_size, cursor.epoch, batches))
        ray.get(ledger.started.remote(shard.rank, os.getpid()))

    def add(self, batch: dict[str, Any], step: int, loss: float) -> None:
        """Records one step."""
        delivery = self._stream.delivery
        assert delivery is not None  # set with every batch
        description = self._stream.description
        recipe = stage_of(description.config.recipe)
        rows = order_rows(description, delivery, self._rank, batch, self._plan.cameras, digests=self._plan.digests, recipe=recipe)
        self._pending = self._ledger.add_rows.remote(self._attempt, delivery.segment, self._rank, rows, None)
        if self._rank == 0 and step % self._plan.log_every == 0:
            totals = self._stream.counters.totals()
            entry = {"step": float(step), "epoch": float(delivery.epoch), "loss": loss, "time_s": time.time()}
            entry |= {"waited_s": totals["reelray_wait_seconds"], "samples": totals["reelray_samples_delivered"]}
            self._ledger.log.remote(entry)

    def finish(self) -> None:
        """Sends the rank's totals, once every row has arrived."""
        self.flush()
        ray.get(self._ledger.finish_rank.remote(self._stream.counters.totals(), self._stream.first_batch_s))

    def flush(self) -> None:
        """Waits until every row has arrived: what a checkpoint commits must be on record."""
        if self._pending is not None:
            ray.get(self._pending)
