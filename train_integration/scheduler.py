"""One rank's epoch, executed: units in, slots, decode calls, batches out, everything in plan order and within budget.

Two threads share this object. The *feeder* takes units as they arrive, reserves slots for those that are decoded whole,
and starts their decode calls. The *assembler* (whoever iterates) asks for pictures of on-demand units a few batches
ahead, waits for what the next batch needs, gathers it, and gives back slots after their last use. Both walk the plan in
the same order, and units hold slots only from their first to their last use, so neither can wait for the other for ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.datasource import UnitList
from ingest.engine.assemble import BatchAssembler, PictureOf, PlannedSamples, Sample
from ingest.engine.blocks import Block, BlockStore
from ingest.engine.counters import Counters
from ingest.engine.frames import FrameStore
from ingest.engine.pictures import PictureForm, groups, runs
from ingest.engine.spec import SampleSpec
from ingest.engine.unit import Track, UnitData
from ingest.errors import DamagedDataError, IngestStalledError, PoisonedWorkError, ReelrayError, StreamClosedError
from train_integration.credits import ByteLedger, UnitCredits
from train_integration.decoding import DecodeBackend
from train_integration.direct import DirectBatches, Start
from train_integration.feed import Feed
from train_integration.fits import refuse_what_never_fits
from train_integration.memory import Budgets, FrameStores, RankMemory
from train_integration.worklist import PlannedStep, WorkList


@dataclass(slots=True, eq=False)
class _Run:
    future: Future[Any]
    slots: NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Resident:
    """A unit that has arrived. ``unit`` loses its compressed pictures once everything is decoded."""

    unit: UnitData
    once: bool
    runs: dict[str, list[_Run]] = field(default_factory=dict)
    run_of: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    place_of: dict[str, NDArray[np.int32]] = field(default_factory=dict)

    def slot(self, camera: str, frame: int) -> int:
        local = frame - self.unit.tracks[camera].first
        return int(self.runs[camera][self.run_of[camera][local]].slots[self.place_of[camera][local]])


@dataclass(slots=True, eq=False)
class _Asked:
    """A batch under way: its on-demand pictures and the calls that bring them."""

    step: PlannedStep
    demand: dict[tuple[int, str, int], tuple[_Run, int]] = field(default_factory=dict)
    runs: list[_Run] = field(default_factory=list)


class UnitFailure(Exception):  # noqa: N818 - a carrier, not an error of its own
    """A unit that a batch needs is damaged: which unit, at which step, the error, and whether more than the batch was decoded with it."""

    def __init__(self, key: int, step: int, error: ReelrayError, *, whole: bool = False) -> None:
        super().__init__(str(error))
        self.key = key
        self.step = step
        self.error = error
        self.whole = whole


class BatchScheduler:
    """Iterates over the batches of one rank and one epoch, from a step on.

    Args:
        spec: what samples consist of.
        work: the rank's units and batches.
        feed: where units come from.
        backend: who decodes; not closed by this object.
        assembler: gathers batches.
        counters: receives totals.
        budgets: what may be held.
        ledger: the rank's budget of compressed pictures.
        open_units: units that the order keeps open at a time, about.
        seed: order seed, for reproducible transforms.
        saved: what decoding each of some units whole saves against decoding its samples one by one.
        stores: slots of the epoch before, to go on with; None makes new ones.
        suspects: (dataset, episode) of those that are decoded sample by sample, so that only samples with a damaged picture fail.
    """

    def __init__(
        self,
        spec: SampleSpec,
        work: WorkList,
        feed: Feed,
        backend: DecodeBackend,
        assembler: BatchAssembler,
        counters: Counters,
        budgets: Budgets,
        ledger: ByteLedger,
        open_units: int,
        seed: int,
        saved: Callable[[UnitList], NDArray[np.float64]],
        stores: FrameStores | None = None,
        suspects: Collection[tuple[int, int]] = (),
    ) -> None:
        self._spec = spec
        self._work = work
        self._feed = feed
        self._backend = backend
        self._assembler = assembler
        self._counters = counters
        self._budgets = budgets
        self._seed = seed
        self._forms = {camera: PictureForm.of(spec, camera) for camera in spec.cameras}
        self._shapes = {camera: form.shape(spec.features[camera]) for camera, form in self._forms.items()}
        self._per_sample = sum(spec.windows.size(camera) or 1 for camera in spec.cameras)
        self._changed = threading.Condition()
        self._residents: dict[int, _Resident | ReelrayError] = {}
        self._closed = False
        self._feeder_error: BaseException | None = None
        self.fed = threading.Event()
        memory = RankMemory(spec, work, self._forms, backend, budgets, open_units, saved, suspects)
        self._once, self.stores = memory.lay_out(stores, direct=assembler.takes_decoded)
        self._whole, self._demand = self.stores.whole, self.stores.demand
        self._direct: DirectBatches | None = None
        if self.stores.batches is not None and self._whole is None and self._demand is None:
            dtypes = {camera: form.writer().dtype for camera, form in self._forms.items()}
            self._direct = DirectBatches(self.stores.batches, work, self._shapes, dtypes, lambda: self._closed)
        self._ledger = ledger
        refuse_what_never_fits(work, self._once, ledger.limit_bytes)
        self._credits = UnitCredits(ledger, work.list.nbytes)
        self._units = self._feed.units(work.list, counters, self._credits)
        self._thread = threading.Thread(target=self._feed_units, name="reelray-feeder", daemon=True)
        self._thread.start()

    @property
    def units(self) -> UnitList:
        """The units of the work list, by key."""
        return self._work.list

    # --- feeder ---------------------------------------------------------------------------------

    def _feed_units(self) -> None:
        try:
            if self._direct is None and self.stores.batches is not None:
                # What the work list before holds counts against the same budget.
                self.stores.batches.open.drained(lambda: self._closed)
            for ordinal, arrived in self._units:
                if self._closed:
                    return
                self._admit(ordinal, arrived)
            self.fed.set()
        except BaseException as error:
            # Also where the stream was closed meanwhile: whoever waits for a unit waits in vain.
            self._feeder_error = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _admit(self, key: int, arrived: UnitData | ReelrayError) -> None:
        resident: _Resident | ReelrayError
        if isinstance(arrived, ReelrayError):
            resident = arrived
            self._credits.arrived(key, 0)
        else:
            once = bool(self._once[key])
            self._credits.arrived(key, arrived.payload_bytes)
            try:
                resident = _Resident(arrived, once)
                if self._direct is not None:
                    self._let_go(key, resident, list(self._direct.decode(key, arrived.tracks, self._starter(resident))))
                elif once:
                    self._decode_whole(key, resident)
            except DamagedDataError as error:
                error.episode = arrived.episode
                resident = error
                self._credits.release(key)
        with self._changed:
            self._residents[key] = resident
            self._changed.notify_all()

    def _decode_whole(self, key: int, resident: _Resident) -> None:
        unit = resident.unit
        left = self._work.needed.get(key)
        for camera, track in unit.tracks.items():
            assert self._whole is not None  # made for once units
            wanted = np.arange(track.pictures, dtype=np.int64)
            if left is not None:
                wanted = np.unique(self._spec.picture_frames(camera, left, unit.episode_length)) - track.first
            resident.run_of[camera] = np.zeros(track.pictures, np.int32)
            resident.place_of[camera] = np.zeros(track.pictures, np.int32)
            resident.runs[camera] = []
            for number, run in enumerate(runs(track, wanted)):
                slots = self._whole.reserve(len(run))
                resident.run_of[camera][run] = number
                resident.place_of[camera][run] = np.arange(len(run), dtype=np.int32)
                resident.runs[camera].append(self._start(self._whole, resident, camera, run, slots))
        self._let_go(key, resident, [run.future for camera_runs in resident.runs.values() for run in camera_runs])

    def _starter(self, resident: _Resident) -> Start:
        unit = resident.unit

        def start(
            store: BlockStore, camera: str, track: Track, wanted: NDArray[np.int64], slots: NDArray[np.int32], kept: dict[int, Block]
        ) -> Future[Any]:
            future = self._backend.submit(
                store, track, unit.episode, wanted, self._forms[camera], self._shapes[camera], slots, lambda _: None
            )
            future.add_done_callback(partial(_let_go_of, kept))
            return future

        return start

    def _let_go(self, key: int, resident: _Resident, last: list[Future[Any]]) -> None:
        """Gives a unit's compressed pictures back once its last decode calls, which hold what they need, are done."""
        tracks = {camera: replace(track, data=b"") for camera, track in resident.unit.tracks.items()}
        resident.unit = replace(resident.unit, tracks=tracks)
        left = len(last)
        lock = threading.Lock()

        def done(_: Future[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            self._credits.release(key)

        for future in last:
            future.add_done_callback(done)
        if not last:
            self._credits.release(key)

    def _start(self, frames: FrameStore, resident: _Resident, camera: str, wanted: NDArray[np.int64], slots: NDArray[np.int32]) -> _Run:
        run = _Run(Future(), slots)

        def moved(fresh: NDArray[np.int32]) -> None:
            run.slots = fresh

        unit = resident.unit
        run.future = self._backend.submit(
            frames, unit.tracks[camera], unit.episode, wanted, self._forms[camera], self._shapes[camera], slots, moved
        )
        return run

    # --- assembler ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[PlannedStep, Sample]]:
        return self._in_time() if self._direct is None else self._as_decoded(self._direct)

    def _as_decoded(self, direct: DirectBatches) -> Iterator[tuple[PlannedStep, Sample]]:
        """Batches whose pictures are decoded to their places: nothing is asked for beyond what the feeder starts."""
        drained = self._work.drained_after()
        for step in self._work.steps:
            units = self._units_of(step)
            decoded = direct.take(step, lambda future, key, step=step: self._wait(future, key, step.step))
            yield step, self._assembled(step, units, self._picture_of({}), decoded)
            self._forget(drained.get(step.step, ()))

    def _units_of(self, step: PlannedStep) -> dict[int, UnitData]:
        keys = dict.fromkeys(step.key.tolist())
        with self._changed:
            found = {key: self._residents.get(key) for key in keys}
        return {
            key: (resident if isinstance(resident, _Resident) else self._resident(key, step.step)).unit for key, resident in found.items()
        }

    def _in_time(self) -> Iterator[tuple[PlannedStep, Sample]]:
        """Batches gathered from slots, whose on-demand pictures are asked for some batches ahead."""
        asked: deque[_Asked] = deque()
        planned = iter(self._work.steps)
        exhausted = False
        drained = self._work.drained_after()
        while True:
            while not exhausted and len(asked) < self._budgets.ahead:
                following = next(planned, None)
                if following is None:
                    exhausted = True
                elif not asked or self._may_ask(following):
                    asked.append(self._ask(following))
                else:
                    # Do not wait for a later batch while an earlier one may be ready.
                    planned = _chain(following, planned)
                    break
            if not asked:
                return
            head = asked.popleft()
            yield head.step, self._gather(head)
            self._release(head, drained.get(head.step.step, ()))

    def _may_ask(self, step: PlannedStep) -> bool:
        """Whether a later batch can be asked for without waiting, and without meeting damage before its turn."""
        with self._changed:
            if not all(isinstance(self._residents.get(key), _Resident) for key in set(step.key.tolist())):
                return False
        return self._demand is None or self._demand.free >= len(step) * self._per_sample

    def _resident(self, key: int, step: int) -> _Resident:
        with self._changed:
            found = self._residents.get(key)
        if isinstance(found, _Resident):
            return found
        with self._counters.timed("reelray_arrival_wait_seconds"):
            return self._awaited(key, step)

    def _awaited(self, key: int, step: int) -> _Resident:
        deadline = time.monotonic() + self._budgets.stall_s
        with self._changed:
            while key not in self._residents:
                if self._feeder_error is not None:
                    raise self._feeder_error
                if self._closed:
                    raise StreamClosedError("the stream was closed")
                if self._ledger.paused:
                    deadline = time.monotonic() + self._budgets.stall_s
                if not self._changed.wait(min(0.5, max(0.0, deadline - time.monotonic()))) and time.monotonic() >= deadline:
                    raise self._stalled(step, f"unit {key} (episode {int(self._work.list.episode[key])}) has not arrived")
            found = self._residents[key]
        if isinstance(found, ReelrayError):
            raise UnitFailure(key, step, found)
        return found

    def _ask(self, step: PlannedStep) -> _Asked:
        """Starts whatever a batch needs that is not under way yet."""
        asked = _Asked(step)
        for key in np.unique(step.key).tolist():
            resident = self._resident(key, step.step)
            if resident.once:
                continue
            anchors = np.unique(step.frame[step.key == key])
            own: list[_Run] = []
            for camera, track in resident.unit.tracks.items():
                frames = np.unique(self._spec.picture_frames(camera, anchors, resident.unit.episode_length))
                for wanted in groups(track, frames - track.first):
                    assert self._demand is not None  # made for on-demand units
                    run = self._start(self._demand, resident, camera, wanted, self._demand.reserve(len(wanted), self._budgets.stall_s))
                    own.append(run)
                    for place, picture in enumerate(wanted.tolist()):
                        asked.demand[key, camera, picture + track.first] = (run, place)
            asked.runs += own
            if int(self._work.last_step[key]) <= step.step:
                # Its bytes make room for the next unit, which this very batch may need.
                self._let_go(key, resident, [run.future for run in own])
        return asked

    def _gather(self, asked: _Asked) -> Sample:
        step = asked.step
        units: dict[int, UnitData] = {}
        slots: dict[tuple[int, str, int], tuple[FrameStore, int]] = {}
        for key in dict.fromkeys(step.key.tolist()):
            resident = self._resident(key, step.step)
            units[key] = resident.unit
            anchors = np.unique(step.frame[step.key == key])
            for camera in self._spec.cameras:
                for frame in np.unique(self._spec.picture_frames(camera, anchors, resident.unit.episode_length)).tolist():
                    if resident.once:
                        local = frame - resident.unit.tracks[camera].first
                        self._wait(resident.runs[camera][resident.run_of[camera][local]].future, key, step.step)
                        assert self._whole is not None  # made for once units
                        slots[key, camera, frame] = (self._whole, resident.slot(camera, frame))
                    else:
                        run, place = asked.demand[key, camera, frame]
                        self._wait(run.future, key, step.step)
                        assert self._demand is not None  # made for on-demand units
                        slots[key, camera, frame] = (self._demand, int(run.slots[place]))
        return self._assembled(step, units, self._picture_of(slots), None)

    def _assembled(
        self, step: PlannedStep, units: Mapping[int, UnitData], picture_of: PictureOf, decoded: Mapping[str, NDArray[Any]] | None
    ) -> Sample:
        with self._counters.timed("reelray_assemble_seconds"):
            planned = PlannedSamples(step.key, step.frame, step.is_pad, self._seed, step.epoch)
            batch = self._assembler.batch(planned, units, picture_of, decoded)
        self._counters.add("reelray_camera_frames_delivered", len(step) * self._per_sample)
        return batch

    def _picture_of(self, slots: Mapping[tuple[int, str, int], tuple[FrameStore, int]]) -> Any:
        dtypes = {camera: form.writer().dtype for camera, form in self._forms.items()}

        def picture(key: int, camera: str, frame: int) -> NDArray[Any]:
            store, slot = slots[key, camera, frame]
            return store.view(slot, self._shapes[camera], dtypes[camera])

        return picture

    def _wait(self, future: Future[Any], key: int, step: int) -> None:
        try:
            if future.done():
                future.result()
                return
            with self._counters.timed("reelray_decode_wait_seconds"):
                future.result(self._budgets.stall_s)
        except FutureTimeout:
            raise self._stalled(step, f"a decode call of episode {int(self._work.list.episode[key])} has not answered") from None
        except ReelrayError as error:
            # What kills decoders is not tried in smaller parts.
            whole = bool(self._once[key]) and not isinstance(error, PoisonedWorkError)
            raise UnitFailure(key, step, error, whole=whole) from error

    def _stalled(self, step: int, what: str) -> IngestStalledError:
        states = "; ".join(self._backend.states())
        return IngestStalledError(
            f"no batch for {self._budgets.stall_s:.0f} s at step {step} of epoch {self._work.epoch}: {what}; "
            f"{len(self._residents)} of {len(self._work.list)} units resident, {self._ledger.under_way} on their way, "
            f"{self._backend.load().calls} decode calls, "
            f"{self._ledger.held_bytes} of {self._ledger.limit_bytes} compressed bytes held; {states}"
        )

    def _release(self, asked: _Asked, drained: tuple[int, ...]) -> None:
        for run in asked.runs:
            assert self._demand is not None  # made for on-demand units
            self._demand.release(run.slots)
        self._forget(drained)

    def _forget(self, drained: tuple[int, ...]) -> None:
        """Lets go of units that are not needed any more, and of the slots that they have."""
        with self._changed:
            gone = [self._residents.pop(key, None) for key in drained]
        for resident in gone:
            if isinstance(resident, _Resident):
                for run in (run for camera_runs in resident.runs.values() for run in camera_runs):
                    assert self._whole is not None  # made for once units
                    with contextlib.suppress(ReelrayError):
                        run.future.result(self._budgets.stall_s)
                    self._whole.release(run.slots)

    def give_up(self) -> None:
        """Wakes whoever waits for a unit or for room, with `StreamClosedError`, and waits for nobody. May be called from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._credits.close()
        if self.stores.batches is not None:
            self.stores.batches.open.wake()

    def close(self) -> None:
        """Stops the feeder. The slots are closed by their owner, before this where the feeder may wait for them."""
        self.give_up()
        self._thread.join(timeout=30)
        if self._direct is not None:
            self._direct.close()
        closing = getattr(self._units, "close", None)
        if closing is not None and not self._thread.is_alive():
            closing()


def _let_go_of(kept: dict[int, Block], _: Future[Any]) -> None:
    """Keeps blocks alive until their decode call has ended, and not as long as somebody keeps the call."""
    kept.clear()


def _chain(first: PlannedStep, rest: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
    yield first
    yield from rest
