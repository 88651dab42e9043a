"""The same streams for people without Ray: a plain `torch.utils.data.IterableDataset`.

Workers of a DataLoader are the plan's workers: each delivers the batches of its own share, and the loader, which takes a
batch from one worker after the other, puts them together in the order of the plan.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from ingest.errors import CursorError, SettingsError
from ingest.plan import Cursor, EpochPlan, PlanSettings, plan_epoch
from ingest.settings import distributed_rank
from ingest.storage.processes import usable_memory
from train_integration.decoding import InlineDecoding
from train_integration.feed import LocalFeed
from train_integration.options import StreamDescription
from train_integration.state import STATE_VERSION
from train_integration.stream import SampleStream

_MOST_WORKERS = 1 << 12
_MEMORY_SHARE = 0.25


def rank_and_world_size() -> tuple[int, int]:
    """Rank and world size: of `torch.distributed` where it is initialised, otherwise of RANK and WORLD_SIZE.

    Raises:
        SettingsError: they contradict each other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return distributed_rank()


def checked_rank(rank: int, world_size: int) -> tuple[int, int]:
    """The pair as given.

    Raises:
        SettingsError: the rank does not exist.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise SettingsError(f"expected 0 <= rank < world_size, found rank {rank} and world_size {world_size}")
    return rank, world_size


class EpisodeIterableDataset(IterableDataset[dict[str, Any]]):
    """Samples, or whole batches, of one rank, for a `torch.utils.data.DataLoader`.

    Give the loader the batch size of the plan, or ``batched=True`` here and ``batch_size=None`` there, which saves the
    collation. Each iteration delivers an epoch and the next one the following epoch; under the plan's ``tail='loop'`` an
    iteration never ends, and every worker goes on with its own next epoch.

    State: without loader workers ``state_dict()`` counts the batches that were handed out. With workers only the training
    loop knows how many of the loader's batches it used: ``state_dict(batches=n)``. Loaders that save the state of each of
    their workers, such as torchdata's ``StatefulDataLoader``, call both methods inside the workers.

    Args:
        description: what to deliver; see `train_integration.options.open_stream`.
        rank: data-parallel rank; None asks `torch.distributed` or the environment.
        world_size: data-parallel size; give both or none.
        batched: deliver whole batches instead of samples.
        decoded_bytes: bytes of decoded pictures that the rank may hold, divided among its workers; None takes a quarter of
            the node's memory over the ranks.

    Raises:
        SettingsError: rank and world size contradict each other, or a setting has no meaning here.
    """

    def __init__(
        self,
        description: StreamDescription,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        batched: bool = False,
        decoded_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if (rank is None) != (world_size is None):
            raise SettingsError("give rank and world_size together")
        if rank is not None and world_size is not None:
            self.rank, self.world_size = checked_rank(rank, world_size)
        else:
            self.rank, self.world_size = rank_and_world_size()
        budget = description.config.decoded_budget_gb
        if decoded_bytes is None:
            total = usable_memory() * _MEMORY_SHARE / self.world_size
            decoded_bytes = int(total if budget is None else budget * 2**30)
        self._description = description
        self._batched = batched
        self._decoded_bytes = decoded_bytes
        self._cursor: Cursor | None = None
        self._logical: int | None = None
        self._position: Cursor | None = None
        # Whether this copy's share of the iteration is over, and whether it was in the state that it goes on from.
        self._over = self._was_over = False
        # Epoch that each loader worker begins with, and iterations that it began since; shared, because workers come and go
        # with every iteration, and what one of them is told the one after it has to know.
        self._first = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._begun = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()
        # Workers of the loader that iterates, for the copy in the training process; -1 while nobody did.
        self._loader = torch.full((1,), -1, dtype=torch.int64).share_memory_()

    @property
    def _endless(self) -> bool:
        return self._description.config.plan.tail == "loop"

    @property
    def epoch(self) -> int:
        """Epoch of the iteration that was begun last, or that comes first."""
        return int((self._first + (self._begun - 1).clamp(min=0)).max())

    def set_epoch(self, epoch: int) -> None:
        """Begins the next iteration at the start of an epoch.

        Raises:
            SettingsError: the epoch is negative.
        """
        if epoch < 0:
            raise SettingsError(f"epoch must be non-negative, found {epoch}")
        self._cursor = self._logical = self._position = None
        self._over = self._was_over = False
        self._begin_with(epoch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position, small and ready for JSON.

        Args:
            batches: batches of the current iteration that the training loop took from the loader; None for those that this
                copy of the dataset handed out.
        """
        info = get_worker_info()
        if batches is not None:
            position = self._start(self.epoch, self._workers_of(None)).cursor
            # A resumed iteration begins at the state's batch.
            position = self._after(position, batches)
        else:
            position = self._position or self._start(self._following(info), self._workers_of(info)).cursor
        state: dict[str, Any] = {"version": STATE_VERSION, "cursor": json.loads(position.to_json())}
        if info is None:
            return state
        # Loaders save what has changed in a state, and may keep a key that goes: this one is always there.
        return state | {"over": self._over} | ({} if info.num_workers < 2 else {"worker": self._logical})

    def _after(self, start: Cursor, batches: int) -> Cursor:
        plan = plan_epoch(self._description.units, self._settings(start.segments[-1].topology.workers), start)
        return plan.cursor_at(start.batches + batches if self._endless else min(start.batches + batches, plan.steps))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the batches that a state counts.

        Raises:
            CursorError: the state is malformed, or belongs to another plan.
        """
        if state.get("version") != STATE_VERSION or "cursor" not in state:
            raise CursorError(f"stream state: expected version {STATE_VERSION} with a cursor, found {sorted(state)}")
        cursor = Cursor.from_json(json.dumps(state["cursor"]))
        self._cursor = self._position = cursor
        self._logical = state.get("worker")
        # Others may have batches of that iteration left, while this worker has none.
        self._over = self._was_over = bool(state.get("over"))
        self._begin_with(cursor.epoch)

    def _following(self, info: Any) -> int:
        """Epoch that a copy which has not begun any begins with."""
        slot = 0 if info is None else info.id
        return int(self._first[slot] + self._begun[slot])

    def _begin_with(self, epoch: int) -> None:
        """Makes an epoch the next one: of the calling loader worker, or of all where none calls."""
        info = get_worker_info()
        own = slice(None) if info is None else slice(info.id, info.id + 1)
        self._first[own] = epoch
        self._begun[own] = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._was_over:
            self._was_over = False
            return iter(())
        self._over = False
        return self._deliver(get_worker_info())

    def _deliver(self, info: Any) -> Iterator[dict[str, Any]]:
        slot = 0 if info is None else info.id
        workers, epoch, begun = self._workers_of(info), self._following(info), int(self._begun[slot])
        self._begun[slot] += 1
        self._loader[0] = -1 if info is None else info.num_workers
        resumed = begun == 0 and self._cursor is not None
        plan = self._start(epoch, workers)
        worker = None if workers < 2 else self._consumer(plan, slot, workers, resumed)
        ranked = plan.rank(self.rank)
        self._logical = worker
        if worker is not None and (worker >= ranked.workers or not plan.segment.worker_frames(self.rank)[worker]):
            self._end(plan, info)
            return
        self._position = plan.cursor
        if self._description.config.plan.tail == "pad" and ranked.workers > 1:
            raise SettingsError("tail 'pad' with several DataLoader workers has no common order: use exact or drop_tail, or fewer workers")
        description = self._local(workers)
        config = description.config
        decoding = lambda counters: InlineDecoding(config.decode_threads, description.job.location, counters)  # noqa: E731
        stream = SampleStream(
            description,
            self.rank,
            self.world_size,
            LocalFeed(description.job),
            decoding,
            decoded_bytes=self._decoded_bytes // max(1, workers),
            cursor=plan.cursor,
            worker=worker,
        )
        with stream:
            for batch in chain.from_iterable(repeat(stream) if self._endless else (stream,)):
                yield from self._handed_out(stream, batch, info)
        self._end(plan, info)

    def _end(self, plan: EpochPlan, info: Any) -> None:
        self._position = plan.cursor.next_epoch()
        self._over = info is not None

    def _handed_out(self, stream: SampleStream, batch: dict[str, Any], info: Any) -> Iterator[dict[str, Any]]:
        after, over = stream.cursor(), info is not None and stream.cursor().epoch != stream.epoch
        if self._batched:
            self._position, self._over = after, over
            yield batch
            return
        padded = self._description.config.plan.tail == "pad"
        size = len(batch["is_pad"])
        for place in range(size):
            if place == size - 1:
                self._position, self._over = after, over
            yield {key: value[place] for key, value in batch.items() if padded or key != "is_pad"}

    def _consumer(self, plan: EpochPlan, slot: int, workers: int, resumed: bool) -> int:
        """The plan's worker whose place a loader worker takes: a fresh loader starts with its worker 0, whoever is next."""
        if resumed and self._logical is not None:
            return self._logical
        turns = plan.rank(self.rank).turns
        batches = plan.cursor.batches
        following = turns.worker_at(batches)[0] if batches < turns.total else 0
        active = plan.rank(self.rank).workers
        return (slot + following) % active if slot < active else workers

    def _workers_of(self, info: Any) -> int:
        """Consumers of the rank: the loader's workers or, outside of any, those that the plan's settings name."""
        if info is not None:
            return info.num_workers
        known = int(self._loader[0])
        return self._description.config.plan.workers if known < 0 else known

    def _settings(self, workers: int) -> PlanSettings:
        """The plan's settings with the consumers that there are."""
        return replace(self._description.with_topology(world_size=self.world_size), workers=workers)

    def _start(self, epoch: int, workers: int) -> EpochPlan:
        cursor = self._cursor if self._cursor is not None and self._cursor.epoch == epoch else None
        skipped = () if self._cursor is None or cursor is not None else self._cursor.next_epoch().skipped
        plan = plan_epoch(self._description.units, self._settings(workers), cursor, epoch=epoch)
        if not skipped:
            return plan
        return plan_epoch(plan.units, plan.settings, replace(plan.cursor, skipped=skipped))

    def _local(self, workers: int) -> StreamDescription:
        """The description for this process: its share of the byte budget, what it iterates over, and connections of its own."""
        config = self._description.config
        plan, epochs = self._settings(workers), None if self._endless else 1
        config = replace(config, plan=plan, epochs=epochs, byte_budget_gb=config.byte_budget_gb / max(1, workers))
        job = copy.deepcopy(self._description.job)
        return replace(self._description, config=config, job=job)
