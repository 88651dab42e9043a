"""The stream that a training loop iterates over: batches in plan order, prefetched, resumable, equal in every topology."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingest.engine.assemble import BatchAssembler, BufferPool, Sample
from ingest.engine.counters import Counters
from ingest.engine.damage import DamageReport
from ingest.engine.rendering import render_batch
from ingest.errors import CursorError, DamagedDataError, IngestStalledError, StreamClosedError
from ingest.language.stage import stage_differences, stage_of
from ingest.plan import Cursor, EpochPlan, RankPlan, plan_epoch
from train_integration.collate import to_torch
from train_integration.credits import ByteLedger
from train_integration.decoding import DecodeBackend
from train_integration.feed import Feed
from train_integration.options import StreamDescription
from train_integration.poolstate import dump_pool_state, load_pool_state
from train_integration.scheduler import BatchScheduler, Budgets, FrameStores, UnitFailure
from train_integration.state import STATE_VERSION
from train_integration.stretches import FIRST_STRETCH_SAMPLES, Stretch
from train_integration.transforms import TorchTransform, transform_batch
from train_integration.worklist import PlannedStep, work_list

_LOG = logging.getLogger("reelray.stream")


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """Which samples the last batch holds, for ledgers and reports.

    Attributes:
        epoch: epoch number.
        segment: number of the topology segment inside the epoch.
        step: batch number inside the rank's segment.
        worker: consumer inside the rank.
        dataset: int32[B], dataset numbers.
        episode: int64[B], episode indices.
        frame: int64[B], episode frame numbers.
        position: int64[B], sample numbers in the rank's order.
        is_pad: bool[B], masked repeats.
    """

    epoch: int
    segment: int
    step: int
    worker: int
    dataset: NDArray[np.int32]
    episode: NDArray[np.int64]
    frame: NDArray[np.int64]
    position: NDArray[np.int64]
    is_pad: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """What the producer hands over: a batch, or the end of an epoch."""

    stretch: Stretch
    delivery: Delivery | None
    batch: Sample | None


class SampleStream:
    """Batches of one rank.

    ``for batch in stream`` delivers one epoch (the rest of one after a resume) and ends; iterating again delivers the
    next. ``state_dict()``, taken after a training step, counts the batches handed out so far: a stream that loads it
    goes on with the next one. Prefetched batches never count.

    Args:
        description: what to deliver.
        rank: data-parallel rank.
        world_size: data-parallel size.
        feed: where units come from.
        backend: who decodes; closed with the stream.
        decoded_bytes: bytes of decoded pictures that this rank may hold.
        counters: receives totals.
        cursor: where to start; None for the start of epoch 0.
        max_steps: end each epoch after that many batches.
        output: ``torch`` tensors or ``numpy`` arrays.
        stretch_samples: samples planned at a time, to begin with.
        worker: deliver only the batches of one consumer of the rank; None delivers all, in turns.
    """

    def __init__(
        self,
        description: StreamDescription,
        rank: int,
        world_size: int,
        feed: Feed,
        backend: Callable[[Counters], DecodeBackend],
        *,
        decoded_bytes: int,
        cursor: Cursor | None = None,
        max_steps: int | None = None,
        output: Literal["torch", "numpy"] = "torch",
        stretch_samples: int = FIRST_STRETCH_SAMPLES,
        worker: int | None = None,
    ) -> None:
        self.description = description
        self.rank = rank
        self.world_size = world_size
        self.counters = Counters()
        self.damage = DamageReport(list(description.damage.records))
        self.delivery: Delivery | None = None
        transform = description.config.image_transforms
        self.loop_transform = transform if isinstance(transform, TorchTransform) else None
        self._feed = feed
        self._make_backend = backend
        self._decoded_bytes = decoded_bytes
        self._max_steps = max_steps
        self._output = output
        self._stretch_samples = stretch_samples
        self._worker = worker
        self._settings = description.with_topology(world_size=world_size)
        # Without a cursor the plan waits: a state that is loaded next may be legal where a start would not be.
        self._made: EpochPlan | None = None if cursor is None else self._make_plan(cursor)
        self._ranked: RankPlan | None = None
        self._pool_state: bytes | None = None
        self._batches = 0 if self._made is None else self._made.cursor.batches
        self._skips: list[tuple[int, int, int]] = []
        self._producer: _Producer | None = None
        self._first_batch_s: float | None = None
        self._epochs_done = 0

    @property
    def _plan(self) -> EpochPlan:
        if self._made is None:
            self._made = self._make_plan(None)
        return self._made

    # --- state ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch that is being delivered, or that comes next."""
        return self._plan.epoch

    @property
    def steps(self) -> int:
        """Batches of this rank in the present segment, those before the cursor included."""
        return self._plan.rank(self.rank).steps

    @property
    def step(self) -> int:
        """Batches of the present segment that were handed out."""
        return self._batches

    @property
    def segment(self) -> int:
        """Number of the present topology segment inside the epoch."""
        return len(self._plan.cursor.segments) - 1

    @property
    def first_batch_s(self) -> float | None:
        """Seconds from the first ``iter()`` to the first batch, once it has come."""
        return self._first_batch_s

    def cursor(self) -> Cursor:
        """The resumable position after the batches handed out so far."""
        cursor = self._plan.cursor
        for dataset, episode, step in self._skips:
            cursor = cursor.skip(dataset, episode, step)
        if self._batches >= self._plan.steps and self._plan.settings.tail != "loop":
            return cursor.next_epoch()
        return cursor.advance(self._batches - self._plan.cursor.batches)

    def state_dict(self) -> dict[str, Any]:
        """Small JSON-ready state: the cursor, and the recipe where there is one. Call it after a training step."""
        state: dict[str, Any] = {"version": STATE_VERSION, "cursor": json.loads(self.cursor().to_json())}
        recipe = self._recipe()
        return state if recipe is None else state | {"recipe": recipe}

    def pool_state(self) -> bytes | None:
        """State of the rank's coverage pools after the batches handed out so far, or None where nothing needs it.

        A few kilobytes per worker. A stream of the same rank and topology that gets it with `load_state_dict` need not
        replay the draws before its position; without it the position alone is enough.
        """
        ranked = self._ranked
        if ranked is None or self._skips or self._batches >= ranked.steps:
            return None
        return dump_pool_state(ranked, self._batches)

    def _recipe(self) -> dict[str, Any] | None:
        stage = stage_of(self.description.config.recipe)
        return None if stage is None else json.loads(json.dumps(stage.describe()))

    def load_state_dict(self, state: Mapping[str, Any], *, other_recipe: bool = False, pool_state: bytes | None = None) -> None:
        """Goes on after the batches that the state counts. World size, workers and batch size may differ.

        Args:
            state: from ``state_dict``.
            other_recipe: whether the recipe may differ from the state's; other frames may then be in the selection, so the
                state's epoch begins again.
            pool_state: from `pool_state` of the same rank, saved with the state; one that does not fit is left aside.

        Raises:
            CursorError: the state is malformed, or belongs to another plan or recipe; the field that differs is named.
        """
        if state.get("version") != STATE_VERSION or "cursor" not in state:
            raise CursorError(f"stream state: expected version {STATE_VERSION} with a cursor, found {sorted(state)}")
        differences = stage_differences(state.get("recipe"), self._recipe())
        if differences and not other_recipe:
            raise CursorError(f"the state belongs to another recipe ({'; '.join(differences)}); restore it, or ask for other_recipe")
        if differences:
            epoch = Cursor.from_json(json.dumps(state["cursor"])).epoch
            _LOG.warning("the recipe differs (%s): epoch %d begins again", "; ".join(differences), epoch)
            self.set_epoch(epoch)
            return
        self.close()
        self._made = self._make_plan(Cursor.from_json(json.dumps(state["cursor"])))
        self._ranked, self._pool_state = None, pool_state
        self._batches = self._plan.cursor.batches
        self._skips = []
        self._epochs_done = 0

    def set_epoch(self, epoch: int) -> None:
        """Starts at the beginning of an epoch. Whatever was prefetched is dropped."""
        self.close()
        self._made = plan_epoch(self.description.units, self._settings, epoch=epoch)
        self._ranked = self._pool_state = None
        self._batches = 0
        self._skips = []
        self._epochs_done = 0

    def _make_plan(self, cursor: Cursor | None) -> EpochPlan:
        return plan_epoch(self.description.units, self._settings, cursor)

    # --- iteration ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:
        limit = self.description.config.epochs
        if limit is not None and self._epochs_done >= limit:
            return
        start = perf_counter()
        if self._producer is None:
            self._producer = _Producer(self, self._stretch_now())
        producer = self._producer
        while True:
            waited = perf_counter()
            ready = producer.take()
            self.counters.add("reelray_wait_seconds", perf_counter() - waited)
            self._ranked = ready.stretch.ranked
            if ready.batch is None or ready.delivery is None:
                self._made, self._batches = ready.stretch.plan, ready.stretch.start
                self._skips = []
                self._epochs_done += 1
                if limit is not None and self._epochs_done >= limit:
                    self.close()
                return
            if self._first_batch_s is None:
                self._first_batch_s = perf_counter() - start
            self._batches = ready.delivery.step + 1
            self.delivery = ready.delivery
            real = int(np.count_nonzero(~ready.delivery.is_pad))
            self.counters.add("reelray_samples_delivered", real)
            self.counters.add("reelray_samples_padded", len(ready.delivery.is_pad) - real)
            batch = self._transformed(ready.batch, ready.delivery)
            yield to_torch(batch) if self._output == "torch" else batch

    def _transformed(self, batch: Sample, delivery: Delivery) -> Sample:
        if self.loop_transform is None:
            return batch
        spec, config = self.description.job.spec, self.description.config
        return transform_batch(
            batch,
            self.loop_transform,
            (*spec.cameras, *spec.images),
            self._index(batch, delivery),
            seed=config.plan.seed,
            epoch=delivery.epoch,
            as_uint8=config.return_uint8,
        )

    def _index(self, batch: Sample, delivery: Delivery) -> NDArray[np.int64]:
        """Global frame index of every sample, also where ``index`` is not among the delivered columns."""
        if isinstance(batch.get("index"), np.ndarray):
            return batch["index"]
        found = delivery.frame.copy()
        for number, source in enumerate(self.description.job.sources):
            here = delivery.dataset == number
            found[here] += source.episodes.dataset_from[source.episodes.rows(delivery.episode[here])]
        return found

    def _stretch_now(self) -> Stretch:
        """Where production starts: the present position; with the plan at hand when nothing was handed out yet."""
        plan = self._plan
        if self._batches != plan.cursor.batches or self._skips:
            plan = self._made = self._make_plan(self.cursor())
            self._batches, self._skips = plan.cursor.batches, []
        stretch = Stretch.begin(plan, self.rank, self._max_steps, self._stretch_samples)
        state, self._pool_state = self._pool_state, None
        if state is not None and not load_pool_state(stretch.ranked, state):
            _LOG.info("the stored pool state does not belong to this position: the draws before it are replayed")
        return stretch

    def record_skip(self, dataset: int, episode: int, step: int, frames: int, error: DamagedDataError) -> None:
        """Notes an episode that is left out from a step on; part of the state from now on."""
        self._skips.append((dataset, episode, step))
        self.damage.add(error, dataset=dataset, episode=episode, step=step, frames=frames)
        self.counters.add("reelray_episodes_skipped")
        _LOG.warning("episode %d is dropped from step %d on: %s", episode, step, error)

    def close(self) -> None:
        """Stops everything that runs for the stream. It may be iterated again, from where it stands."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Producer:
    """The thread that keeps finished batches ready, across epochs, so that no bubble separates them."""

    def __init__(self, stream: SampleStream, stretch: Stretch) -> None:
        config = stream.description.config
        self._stream = stream
        self._config = config
        self._ready: queue.Queue[_Ready | BaseException] = queue.Queue(maxsize=config.prefetch_batches)
        self._stop = threading.Event()
        self._backend = stream._make_backend(stream.counters)  # pyright: ignore[reportPrivateUsage]
        self._assembler = BatchAssembler(
            stream.description.job.spec,
            stream.description.job.source.store,
            # What runs on the loop's thread gets uint8 pictures, and makes floats of them itself.
            as_uint8=config.return_uint8 or stream.loop_transform is not None,
            transform=None if stream.loop_transform is not None else config.image_transforms,
            # Queued, in hand, and with the loop: a batch is only reused when nobody refers to it.
            buffers=BufferPool(keep=config.prefetch_batches + 3),
        )
        self._stores: FrameStores | None = None
        self._ledger = ByteLedger(int(config.byte_budget_gb * 2**30))
        self._schedulers: list[BatchScheduler] = []
        self._thread = threading.Thread(target=self._run, args=(stretch,), name="reelray-producer", daemon=True)
        self._thread.start()

    def take(self) -> _Ready:
        """The next batch or epoch end, waiting for it."""
        stall_s = self._config.stall_s * 1.5
        try:
            ready = self._ready.get(timeout=stall_s)
        except queue.Empty:
            place = f"step {self._stream.step} of epoch {self._stream.epoch}"
            raise IngestStalledError(f"no batch for {stall_s:.0f} s after {place}: {'; '.join(self._backend.states())}") from None
        if isinstance(ready, BaseException):
            raise ready
        return ready

    def _run(self, stretch: Stretch) -> None:
        try:
            epochs = self._config.epochs
            done = self._stream._epochs_done  # pyright: ignore[reportPrivateUsage]
            scheduler = self._schedule(stretch)
            while not self._stop.is_set():
                last_pass = epochs is not None and done + 1 >= epochs
                stretch, following = self._deliver(stretch, scheduler, last=last_pass and stretch.is_last)
                after = stretch.following()
                if stretch.is_last:
                    done += 1
                    self._put(_Ready(after, None, None))
                    if last_pass:
                        return
                scheduler = following or self._schedule(after)
                stretch = after
        except StreamClosedError as error:
            if not self._stop.is_set():
                self._put(error)
        except BaseException as error:
            self._put(error)

    def _schedule(self, stretch: Stretch) -> BatchScheduler:
        stream, config, plan = self._stream, self._config, stretch.plan
        budgets = Budgets(
            decoded_bytes=stream._decoded_bytes,  # pyright: ignore[reportPrivateUsage]
            ahead=config.prefetch_batches,
            stall_s=config.stall_s,
        )
        scheduler = BatchScheduler(
            stream.description.job.spec,
            work_list(
                plan,
                stretch.ranked,
                stream.description.job.spec,
                stream.description.lengths,
                start=stretch.start,
                stop=stretch.stop,
                worker=stream._worker,  # pyright: ignore[reportPrivateUsage]
            ),
            stream._feed,  # pyright: ignore[reportPrivateUsage]
            self._backend,
            self._assembler,
            stream.counters,
            budgets,
            self._ledger,
            stretch.open_units,
            plan.settings.seed,
            self._stores,
        )
        self._stores = scheduler.stores
        self._schedulers.append(scheduler)
        return scheduler

    def _deliver(self, stretch: Stretch, scheduler: BatchScheduler, *, last: bool) -> tuple[Stretch, BatchScheduler | None]:
        """Delivers a stretch; the next one's units start to arrive as soon as this one's have."""
        following: BatchScheduler | None = None
        while True:
            try:
                for step, batch in scheduler:
                    self._put(_Ready(stretch, self._delivery(stretch.plan, scheduler, step), self._rendered(batch)))
                    if self._stop.is_set():
                        raise StreamClosedError("the stream was closed")
                    if following is None and not last and scheduler.fed.is_set():
                        following = self._schedule(stretch.following())
                self._retire(scheduler)
                return stretch, following
            except UnitFailure as failure:
                stretch = self._without(stretch, scheduler, failure)
                self._drop_all()
                following = None
                last = last and stretch.is_last
                scheduler = self._schedule(stretch)

    def _rendered(self, batch: Sample) -> Sample:
        render = self._stream.description.render
        return batch if render is None else render_batch(render, batch)

    def _delivery(self, plan: EpochPlan, scheduler: BatchScheduler, step: PlannedStep) -> Delivery:
        units = scheduler.units
        return Delivery(
            plan.epoch,
            len(plan.cursor.segments) - 1,
            step.step,
            step.worker,
            units.dataset[step.key],
            units.episode[step.key],
            step.frame,
            step.position,
            step.is_pad,
        )

    def _without(self, stretch: Stretch, scheduler: BatchScheduler, failure: UnitFailure) -> Stretch:
        """The plan from the failing step on without the damaged episode, or the error where the policy says so."""
        error, plan = failure.error, stretch.plan
        if self._config.damage != "skip_episode" or not isinstance(error, DamagedDataError):
            raise error
        units = scheduler.units
        dataset, episode = int(units.dataset[failure.key]), int(units.episode[failure.key])
        frames = stretch.frames_left(dataset, episode, failure.step)
        self._stream.record_skip(dataset, episode, failure.step, frames, error)
        cursor = plan.cursor.advance(failure.step - plan.cursor.batches).skip(dataset, episode, failure.step)
        return stretch.again(plan_epoch(plan.units, plan.settings, cursor))

    def _retire(self, scheduler: BatchScheduler) -> None:
        scheduler.close()
        self._stream.counters.at_least("reelray_compressed_bytes_peak", self._ledger.peak_bytes)
        self._stream.counters.at_least("reelray_decoded_bytes_peak", scheduler.stores.peak_bytes)
        self._schedulers.remove(scheduler)

    def _drop_all(self) -> None:
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        for scheduler in self._schedulers:
            scheduler.close()
        self._schedulers.clear()

    def _put(self, item: _Ready | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=1.0)
                return
            except queue.Full:
                continue

    def close(self) -> None:
        """Stops the thread and frees slots, threads and calls."""
        self._stop.set()
        if self._stores is not None:
            self._stores.close()
        self._thread.join(timeout=10)
        self._drop_all()
        self._backend.close()
