"""Teacher records as a stream of batches: the shared planner decides the order, a prefetcher reads, a collator pads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingest.errors import SettingsError
from ingest.plan.cursor import Cursor
from ingest.plan.epoch import EpochPlan, plan_epoch
from ingest.plan.settings import PlanSettings
from ingest.plan.units import Units
from ingest.prefeature.collate import RecordBatch, collate
from ingest.prefeature.prefetch import RecordLease, RecordPrefetcher, buffer_bytes
from ingest.prefeature.reader import network_warning
from ingest.prefeature.records import PreviousHidden, RecordIndex, RecordRequest, View

MIN_LANES = 4


@dataclass(frozen=True, slots=True)
class PrefeatureStreamConfig:
    """How training records are delivered.

    Attributes:
        root: dataset root on a local disk.
        view: what is read of a record.
        previous: which hidden states of the previous chunk.
        batch_size: records of a batch; each holds its three pairs.
        seed: of the order.
        shuffle: False repeats the order of epoch 0.
        byte_budget: bytes of all buffers of one rank; None for two batches of the largest records and one more record.
        threads: concurrent reads of one rank.
        pinned: page-locked buffers, whose copies to a GPU overlap with computing; None where CUDA is available.
        drop_cache: do not keep what was read in the kernel's page cache.
    """

    root: str
    view: View = View.PREDICTOR
    previous: PreviousHidden = PreviousHidden.TARGET
    batch_size: int = 1
    seed: int = 42
    shuffle: bool = True
    byte_budget: int | None = None
    threads: int = 4
    pinned: bool | None = None
    drop_cache: bool = False


def record_units(index: RecordIndex) -> Units:
    """One unit per record, one sample each: the three pairs of a record stay together, so its context is read once.

    The cost is the record's bytes, so ranks are balanced by bytes.
    """
    count = len(index)
    return Units(
        dataset=np.zeros(count, np.int32),
        episode=np.arange(count, dtype=np.int64),
        lo=np.zeros(count, np.int64),
        hi=np.ones(count, np.int64),
        bytes=index.nbytes,
        cost=index.nbytes.astype(np.float64),
    )


def plan_records(
    index: RecordIndex, config: PrefeatureStreamConfig, world_size: int, cursor: Cursor | None = None, epoch: int = 0
) -> EpochPlan:
    """The plan of an epoch: every record exactly once, equal steps on every rank (repeats are marked), balanced by bytes."""
    settings = PlanSettings(
        world_size=world_size,
        batch_size=config.batch_size,
        strategy="lanes",
        lanes=max(MIN_LANES, config.batch_size),
        seed=config.seed,
        shuffle=config.shuffle,
        share="cost",
        tail="pad",
        dataset=index.config.fingerprint,
    )
    return plan_epoch(record_units(index), settings, cursor, epoch=epoch)


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """One step of one rank.

    Attributes:
        step: batch number of the present segment.
        batch: the tensors; valid until the next step is asked for.
    """

    step: int
    batch: RecordBatch


class PrefeatureStream:
    """Batches of one rank for one epoch, or the rest of one.

    Args:
        config: what to deliver.
        rank, world_size: which share.
        cursor: where to continue (JSON); None for the start of ``epoch``.
        epoch: epoch number when there is no cursor.

    Raises:
        MetadataError: the manifest is unusable.
        CursorError: the cursor belongs to another plan.
        BudgetError: a record alone exceeds the byte budget.
    """

    def __init__(
        self, config: PrefeatureStreamConfig, *, rank: int = 0, world_size: int = 1, cursor: str | None = None, epoch: int = 0
    ) -> None:
        self.config = config
        self.index = RecordIndex(Path(config.root), config.view, config.previous)
        self.plan = plan_records(self.index, config, world_size, None if cursor is None else Cursor.from_json(cursor), epoch)
        self._rank = self.plan.rank(rank)
        self._committed = self.plan.cursor.batches
        largest = buffer_bytes(int(self.index.nbytes.max()))
        self._budget = config.byte_budget or (2 * config.batch_size + 1) * largest
        if self._budget < config.batch_size * largest:
            raise SettingsError(
                f"byte budget {self._budget} cannot hold one batch of {config.batch_size} records of up to {largest} bytes; raise it"
            )
        self.peak_bytes = 0
        self.warning = network_warning(Path(config.root))

    @property
    def steps(self) -> int:
        """Batches of the whole segment, equal on every rank."""
        return self.plan.steps

    def _numbers(self) -> Iterator[tuple[int, Sequence[int], Sequence[bool]]]:
        for batch in self._rank.batches():
            yield batch.step, batch.unit.tolist(), batch.is_pad.tolist()

    def _requests(self) -> Iterator[RecordRequest]:
        for _, units, _ in self._numbers():
            yield from (self.index.request(unit) for unit in units)

    def __iter__(self) -> Iterator[StreamBatch]:
        blocks = self.index.text_blocks()
        config = self.config
        with RecordPrefetcher(
            self.index.root,
            self._requests(),
            budget=self._budget,
            threads=config.threads,
            pinned=torch.cuda.is_available() if config.pinned is None else config.pinned,
            drop_cache=config.drop_cache,
        ) as prefetcher:
            leases = iter(prefetcher)
            for step, units, pads in self._numbers():
                held: list[RecordLease] = [next(leases) for _ in units]
                try:
                    yield StreamBatch(step, collate(held, self.index.config.sizes, blocks, pads))
                finally:
                    for lease in held:
                        lease.release()
                    self.peak_bytes = max(self.peak_bytes, prefetcher.ring.peak)

    def commit(self, step: int) -> None:
        """Marks a step as trained; ``state_dict`` then continues after it."""
        self._committed = step + 1

    def state_dict(self) -> dict[str, Any]:
        """The position after the last committed step; the same on every rank."""
        return {"cursor": self.plan.cursor_at(self._committed).to_json()}
