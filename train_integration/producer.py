"""The thread behind a stream: it keeps finished batches ready, across stretches and epochs, and can be looked at."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.stream_metrics import StreamReading, describe_wait, watch_stream
from ingest.engine.assemble import BatchAssembler, BufferPool, Sample
from ingest.engine.counters import Counters
from ingest.engine.rendering import render_batch
from ingest.errors import BudgetError, DamagedDataError, IngestStalledError, PlanError, ReservationError, SelectionError, StreamClosedError
from ingest.plan import EpochPlan, plan_epoch
from train_integration.credits import ByteLedger
from train_integration.decoding import DecodeBackend
from train_integration.feed import Feed
from train_integration.memory import Budgets, FrameStores
from train_integration.options import StreamDescription
from train_integration.reservations import LeadIns
from train_integration.scheduler import BatchScheduler, UnitFailure
from train_integration.stretches import Stretch
from train_integration.worklist import PlannedStep, work_list


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
class Ready:
    """What the producer hands over: a batch, or the end of an epoch.

    Attributes:
        stretch: what it belongs to; after the end of an epoch, what comes next.
        delivery: which samples it holds; None at the end of an epoch.
        batch: the samples; None at the end of an epoch.
    """

    stretch: Stretch
    delivery: Delivery | None
    batch: Sample | None


@dataclass(frozen=True, slots=True, eq=False)
class Production:
    """What a producer works with, and whom it tells.

    Attributes:
        description: what to deliver.
        feed: where units come from.
        backend: makes the one who decodes.
        counters: receives totals.
        decoded_bytes: bytes of decoded pictures that the rank may hold.
        rank: data-parallel rank.
        worker: deliver only the batches of one consumer of the rank; None delivers all.
        loop_transforms: whether pictures are transformed on the loop's thread, and not here.
        skipped: told the dataset, episode, step, frames and error of an episode that is left out.
        reading: a look at the whole stream, for metrics.
    """

    description: StreamDescription
    feed: Feed
    backend: Callable[[Counters], DecodeBackend]
    counters: Counters
    decoded_bytes: int
    rank: int
    worker: int | None
    loop_transforms: bool
    skipped: Callable[[int, int, int, int, DamagedDataError], None]
    reading: Callable[[], StreamReading]


class Producer:
    """The thread that keeps finished batches ready, across epochs, so that no bubble separates them.

    Args:
        production: what to work with.
        stretch: where to start.
        epochs_done: epochs that the stream delivered before.
        paused: start everything that has to start, and read nothing until `resume`.
    """

    def __init__(self, production: Production, stretch: Stretch, epochs_done: int, *, paused: bool = False) -> None:
        config = production.description.config
        self._of = production
        self._config = config
        self._epochs_done = epochs_done
        self._ready: queue.Queue[Ready | BaseException] = queue.Queue(maxsize=config.prefetch_batches)
        self._stop = threading.Event()
        self._started = threading.Event()
        self._failed = False
        self._backend = production.backend(production.counters)
        self._assembler = BatchAssembler(
            production.description.job.spec,
            [source.store for source in production.description.job.sources],
            # What runs on the loop's thread gets uint8 pictures, and makes floats of them itself.
            as_uint8=config.return_uint8 or production.loop_transforms,
            transform=None if production.loop_transforms else config.image_transforms,
            # Queued, in hand, and with the loop: a batch is only reused when nobody refers to it.
            buffers=BufferPool(keep=config.prefetch_batches + 3),
        )
        self._stores: FrameStores | None = None
        self._lead_ins = LeadIns(production.description.job)
        self._suspects: set[tuple[int, int]] = set()
        self._ledger = ByteLedger(int(config.byte_budget_gb * 2**30), window=config.prefetch_units, paused=paused)
        self._schedulers: list[BatchScheduler] = []
        self._thread = threading.Thread(target=self._run, args=(stretch,), name="reelray-producer", daemon=True)
        self._thread.start()
        self._metrics = watch_stream(production.description.job.location, production.rank, production.reading)

    def held(self) -> dict[str, Any]:
        """Fields of a `StreamReading` that say what is held and under way. May be called from any thread."""
        stores = self._stores
        slots, free = (0, 0) if stores is None else (stores.slots, stores.free)
        return {
            "ready_batches": self._ready.qsize(),
            "budget_limit_bytes": self._ledger.limit_bytes,
            "budget_used_bytes": self._ledger.held_bytes,
            "units_under_way": self._ledger.under_way,
            "slots": slots,
            "slots_used": slots - free,
            "pool": self._backend.load(),
        }

    def await_start(self, timeout_s: float) -> bool:
        """Waits until plan and memory are ready, or cannot be; whether they are."""
        return self._started.wait(timeout_s) and not self._failed

    @property
    def failed(self) -> bool:
        """Whether production ended with an error: `take` raises it behind the batches that were ready, and nothing comes after it."""
        return self._failed

    def resume(self) -> None:
        """Ends the pause that this was made with."""
        self._ledger.resume()

    def take(self, place: str) -> Ready:
        """The next batch or epoch end, waiting for it.

        Args:
            place: where the stream stands, for messages.

        Raises:
            IngestStalledError: nothing came for half as long again as the steps behind it may take.
            Exception: what ended production.
        """
        stall_s = self._config.stall_s * 1.5
        try:
            ready = self._ready.get(timeout=stall_s)
        except queue.Empty:
            states = "; ".join(self._backend.states())
            raise IngestStalledError(f"no batch for {stall_s:.0f} s after {place}: {describe_wait(self._of.reading())}; {states}") from None
        if isinstance(ready, BaseException):
            raise ready
        return ready

    def _run(self, stretch: Stretch) -> None:
        try:
            epochs = self._config.epochs
            done = self._epochs_done
            scheduler = self._schedule(stretch)
            if self._ledger.paused:
                scheduler.stores.warm(self._backend)
                # A full collection walks all that torch and Ray have loaded, some 0.2 s: better now than among the first batches.
                gc.collect()
            self._started.set()
            while not self._stop.is_set():
                last_pass = epochs is not None and done + 1 >= epochs
                stretch, following = self._deliver(stretch, scheduler, last=last_pass and stretch.is_last)
                after = self._behind(stretch, last=last_pass and stretch.is_last)
                if stretch.is_last:
                    done += 1
                    self._put(Ready(after, None, None))
                    if last_pass:
                        return
                scheduler = following or self._schedule(after)
                stretch = after
        except BaseException as error:
            # After a close there is nobody to tell.
            self._failed = True
            self._started.set()
            self._put(error)

    @staticmethod
    def _behind(stretch: Stretch, *, last: bool) -> Stretch:
        """What comes after a stretch; the end of this one where nothing has to come."""
        try:
            return stretch.following()
        except PlanError:
            # Every episode was left out, so there is no next epoch: only those who want one need to hear of it.
            if not last:
                raise
            return replace(stretch, start=stretch.stop)

    def _schedule(self, stretch: Stretch) -> BatchScheduler:
        of, config, plan = self._of, self._config, stretch.plan
        budgets = Budgets(
            decoded_bytes=of.decoded_bytes,
            mode=config.decode_mode,
            ahead=config.prefetch_batches,
            stall_s=config.stall_s,
        )
        work = work_list(
            plan,
            stretch.ranked,
            of.description.job.spec,
            of.description.lengths,
            of.description.unit_bytes,
            start=stretch.start,
            stop=stretch.stop,
            worker=of.worker,
        )
        scheduler = BatchScheduler(
            of.description.job.spec,
            self._lead_ins.reserve(work),
            of.feed,
            self._backend,
            self._assembler,
            of.counters,
            budgets,
            self._ledger,
            stretch.open_units,
            plan.settings.seed,
            of.description.job.decoding_saved,
            self._stores,
            self._suspects,
        )
        self._stores = scheduler.stores
        self._schedulers.append(scheduler)
        if self._stop.is_set():
            # Whoever closes this may have looked before it was there.
            self._give_up()
        return scheduler

    def _deliver(self, stretch: Stretch, scheduler: BatchScheduler, *, last: bool) -> tuple[Stretch, BatchScheduler | None]:
        """Delivers a stretch; the next one's units start to arrive as soon as this one's have."""
        following: BatchScheduler | None = None
        while True:
            try:
                for step, batch in scheduler:
                    self._put(Ready(stretch, self._delivery(stretch.plan, scheduler, step), self._rendered(batch)))
                    if self._stop.is_set():
                        raise StreamClosedError("the stream was closed")
                    if following is None and not last and scheduler.fed.is_set():
                        following = self._schedule(stretch.following())
                self._retire(scheduler)
                return stretch, following
            except UnitFailure as failure:
                stretch, scheduler = self._recovered(stretch, scheduler, failure)
                following = None
                last = last and stretch.is_last

    def _rendered(self, batch: Sample) -> Sample:
        render = self._of.description.render
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

    def _recovered(self, stretch: Stretch, scheduler: BatchScheduler, failure: UnitFailure) -> tuple[Stretch, BatchScheduler]:
        """What is delivered from the failing step on."""
        again = self._without(stretch, scheduler, failure)
        self._drop_all()
        try:
            return again, self._schedule(again)
        except BudgetError:
            if not failure.whole:
                raise
            # The compressed pictures of the damaged episode do not fit beside the others: it is left out from here on.
            failure.whole = False
            again = self._without(stretch, scheduler, failure)
            return again, self._schedule(again)

    def _without(self, stretch: Stretch, scheduler: BatchScheduler, failure: UnitFailure) -> Stretch:
        """The plan from the failing step on without the damaged episode, or the error where the policy says so.

        Where nothing is damaged, but more bytes are needed than were reserved, the same plan from that step on. So too where the
        picture that failed was decoded for later batches: which pictures are decoded together depends on where a stream begins and
        on its budget, and the step at which an episode is left out must not.
        """
        error, plan, units = failure.error, stretch.plan, scheduler.units
        dataset, episode = int(units.dataset[failure.key]), int(units.episode[failure.key])
        if isinstance(error, ReservationError):
            if not self._lead_ins.learn(dataset, error.leads):
                raise error
            return stretch.from_step(failure.step)
        sources = self._of.description.job.sources
        if isinstance(error, DamagedDataError) and len(sources) > 1:
            _say_dataset(error, sources[dataset].store.url)
        if self._config.damage != "skip_episode" or not isinstance(error, DamagedDataError):
            raise error
        if failure.whole:
            self._suspects.add((dataset, episode))
            return stretch.from_step(failure.step)
        self._suspects.discard((dataset, episode))
        cursor = plan.cursor.advance(failure.step - plan.cursor.batches)
        if cursor.skip(dataset, episode, failure.step) == cursor:
            # It was only there to make this rank's batches as many as the others', for want of anything else.
            raise nothing_to_fill_with(sources[dataset].store.url, self._of.rank, error) from error
        cursor = cursor.skip(dataset, episode, failure.step)
        frames = stretch.frames_left(dataset, episode, failure.step)
        self._of.skipped(dataset, episode, failure.step, frames, error)
        return stretch.again(plan_epoch(plan.units, plan.settings, cursor))

    def _retire(self, scheduler: BatchScheduler) -> None:
        scheduler.close()
        self._of.counters.at_least("reelray_compressed_bytes_peak", self._ledger.peak_bytes)
        self._of.counters.at_least("reelray_decoded_bytes_peak", scheduler.stores.peak_bytes)
        self._schedulers.remove(scheduler)

    def _drop_all(self) -> None:
        if self._stores is not None:
            self._stores.close()
            self._stores = None
        for scheduler in self._schedulers:
            scheduler.close()
        self._schedulers.clear()

    def _put(self, item: Ready | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=1.0)
                return
            except queue.Full:
                continue

    def close(self) -> None:
        """Stops the thread and frees slots, threads and calls."""
        self._metrics.close()
        self._stop.set()
        self._give_up()
        self._thread.join(timeout=10)
        # A loop that goes on nevertheless must not take what was ready for the position before.
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        # Whoever waits in another thread would wait for its whole time otherwise.
        with contextlib.suppress(queue.Full):
            self._ready.put_nowait(StreamClosedError("the stream was closed while a batch was waited for"))
        self._drop_all()
        self._backend.close()

    def _give_up(self) -> None:
        """Wakes all who wait for memory or units."""
        stores = self._stores
        if stores is not None:
            stores.close()
        for scheduler in list(self._schedulers):
            scheduler.give_up()


def nothing_to_fill_with(location: str, rank: int, error: DamagedDataError) -> SelectionError:
    """The error where what fills a rank's batches is damaged too, and left out already."""
    return SelectionError(f"{location}: every episode that could fill the batches of rank {rank} is damaged; the last: {error}")


def _say_dataset(error: DamagedDataError, location: str) -> None:
    """Names the dataset of a mixture that an error is about; decoders know the mixture alone."""
    text = str(error) if error.dataset is None else str(error).removeprefix(f"{error.dataset}: ")
    error.args = (f"{location}: {text}", *error.args[1:])
    error.dataset = location
