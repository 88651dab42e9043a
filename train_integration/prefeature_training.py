"""Training on teacher records through Ray Train: resumable at any committed step, on any number of workers."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

from actors.causes import raise_typed
from ingest.errors import CursorError, DatasetError
from ingest.prefeature.layout import RecordKey
from ingest.prefeature.records import RecordIndex, View
from ingest.prefeature.storefiles import load_frozen
from train_integration.prefeature_predictor import SmallPredictor, record_loss
from train_integration.prefeature_stream import PrefeatureStream, PrefeatureStreamConfig

_WEIGHTS = "training.pt"
_RUN = "prefeature"
_REHEARSAL_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefeatureTraining:
    """What the loop does.

    Attributes:
        stream: what to deliver to every rank.
        epochs: passes over the records.
        learning_rate: of AdamW.
        seed: of the predictor's weights.
        save_every: steps between checkpoints.
        crash_step: rank 0 ends its process once before this step; None never does. For rehearsals.
        crash_marker: file that remembers that it did.
    """

    stream: PrefeatureStreamConfig
    epochs: int = 1
    learning_rate: float = 3e-3
    seed: int = 0
    save_every: int = 8
    crash_step: int | None = None
    crash_marker: str = ""


@dataclass(frozen=True, slots=True)
class PrefeatureResult:
    """What a training run did.

    Attributes:
        losses: mean training loss by epoch.
        delivered: how often each record was committed.
        expected: how often it should have been.
        resumed: whether the run went on from a checkpoint.
        peak_bytes: most buffer bytes of one rank.
    """

    losses: tuple[float, ...]
    delivered: Mapping[RecordKey, int]
    expected: Mapping[RecordKey, int]
    resumed: bool
    peak_bytes: int

    @property
    def exact(self) -> bool:
        """Whether every record was committed exactly once per epoch."""
        return dict(self.delivered) == dict(self.expected)


class _State:
    """What a checkpoint holds: weights, the stream's position, and what this rank committed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cursor: str | None = None
        self.epoch = 0
        self.weights: dict[str, Any] = {}
        self.delivered: list[tuple[int, int, int, int]] = []
        self.losses: list[tuple[int, float]] = []
        self.resumed = False
        self.peak_bytes = 0

    @classmethod
    def restored(cls, rank: int) -> _State:
        """The state of the last checkpoint; rank 0 takes over what all former ranks had committed."""
        state = cls(rank)
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return state
        with checkpoint.as_directory() as folder:
            parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank-*.json"))]
            if not parts or len({part["cursor"] for part in parts}) != 1:
                raise CursorError(f"{checkpoint.path}: the ranks of this checkpoint do not agree on a position")
            state.weights = torch.load(Path(folder) / _WEIGHTS, map_location="cpu", weights_only=True)
        state.cursor, state.epoch, state.resumed = parts[0]["cursor"], parts[0]["epoch"], True
        if rank == 0:
            state.delivered = [tuple(row) for part in parts for row in part["delivered"]]  # pyright: ignore[reportAttributeAccessIssue]
            state.losses = [tuple(row) for part in parts for row in part["losses"]]  # pyright: ignore[reportAttributeAccessIssue]
        return state

    def save(self, metrics: Mapping[str, Any], weights: Mapping[str, Any] | None) -> None:
        """Reports through Ray Train; every rank calls it at the same step."""
        with TemporaryDirectory(prefix="reelray-prefeature-") as folder:
            part = {
                "cursor": self.cursor,
                "epoch": self.epoch,
                "delivered": self.delivered,
                "losses": self.losses,
                "resumed": self.resumed,
                "peak_bytes": self.peak_bytes,
            }
            Path(folder, f"rank-{self.rank:05d}.json").write_text(json.dumps(part), encoding="utf-8")
            if weights is not None:
                torch.save(dict(weights), Path(folder, _WEIGHTS))
            ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder))


def _crash_once(marker: Path) -> None:
    if marker.exists():
        return
    marker.touch()
    # checkpoints are stored in the background; the rehearsal is about resuming from one
    time.sleep(_REHEARSAL_S)
    os._exit(1)


def train_worker(settings: Mapping[str, Any]) -> None:
    """The loop of one rank: three supervised pairs per record, one optimiser step per batch."""
    plan: PrefeatureTraining = settings["plan"]
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    torch.manual_seed(plan.seed)
    state = _State.restored(rank)
    device = get_device()
    index = RecordIndex(Path(plan.stream.root), plan.stream.view, plan.stream.previous)
    frozen = load_frozen(index.root, index.config).to(device)
    bare = SmallPredictor(index.config.sizes, with_context=plan.stream.view is not View.PREDICTOR_DISCA)
    if state.weights:
        bare.load_state_dict(state.weights["model"])
    unused = {"find_unused_parameters": True}
    model = prepare_model(bare, parallel_strategy_kwargs=unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate)
    if state.weights:
        optimizer.load_state_dict(state.weights["optimizer"])
    while state.epoch < plan.epochs:
        stream = PrefeatureStream(plan.stream, rank=rank, world_size=world, cursor=state.cursor, epoch=state.epoch)
        for item in stream:
            if plan.crash_step == item.step and rank == 0:
                _crash_once(Path(plan.crash_marker))
            batch = item.batch.to(device)
            kv = batch.rebuild_kv(frozen)
            optimizer.zero_grad()
            total = 0.0
            for pair in batch.pairs:
                loss = record_loss(model(batch, pair, kv), batch, pair[1]) / len(batch.pairs)
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            stream.commit(item.step)
            state.peak_bytes = max(state.peak_bytes, stream.peak_bytes)
            real = [key for key, pad in zip(batch.keys, batch.is_pad.tolist(), strict=True) if not pad]
            state.delivered += [(state.epoch, key.case_id, key.action_id, key.chunk_id) for key in real]
            if real:
                state.losses.append((state.epoch, total))
            last = item.step + 1 == stream.steps
            if last or (item.step + 1) % plan.save_every == 0:
                epoch, state.cursor = state.epoch, stream.state_dict()["cursor"]
                state.epoch += last
                weights = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()} if rank == 0 else None
                state.save({"epoch": epoch, "step": item.step, "loss": total}, weights)


def train(
    plan: PrefeatureTraining, output: Path, *, workers: int = 2, use_gpu: bool = False, cpus_per_worker: float = 1.0, max_failures: int = 2
) -> PrefeatureResult:
    """Runs the training job on the connected cluster.

    Args:
        plan: what to train.
        output: folder of the run; an earlier run in it goes on from its last checkpoint.
        workers: ranks.
        use_gpu: one GPU per rank.
        cpus_per_worker: logical CPUs per rank.
        max_failures: losses of workers to survive.

    Raises:
        DatasetError: the run left no checkpoint.
        ReelrayError: what ended a rank once too often.
    """
    resources = {"CPU": cpus_per_worker} | ({"GPU": 1.0} if use_gpu else {})
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"plan": plan},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=RunConfig(name=_RUN, storage_path=str(output.resolve()), failure_config=FailureConfig(max_failures=max_failures)),
    )
    try:
        result: Any = trainer.fit()
    except Exception as error:
        raise_typed(error)
    if result.checkpoint is None:
        raise DatasetError(f"{output}: the run ended without a checkpoint")
    with result.checkpoint.as_directory() as folder:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank-*.json"))]
    delivered = Counter(RecordKey(*row[1:]) for part in parts for row in part["delivered"])
    losses: dict[int, list[float]] = {}
    for part in parts:
        for epoch, loss in part["losses"]:
            losses.setdefault(epoch, []).append(loss)
    index = RecordIndex(Path(plan.stream.root), plan.stream.view, plan.stream.previous)
    return PrefeatureResult(
        tuple(sum(values) / len(values) for _, values in sorted(losses.items())),
        dict(delivered),
        dict.fromkeys(index.keys, plan.epochs),
        any(part["resumed"] for part in parts),
        max(part["peak_bytes"] for part in parts),
    )
