"""Pictures decoded straight to their places in the batches of a work list, where each is used by one sample as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.engine.blocks import Block, BlockStore, OpenBatches
from ingest.engine.pictures import runs
from ingest.engine.unit import Track
from ingest.errors import StreamClosedError
from train_integration.worklist import PlannedStep, WorkList

Start = Callable[[BlockStore, str, Track, NDArray[np.int64], NDArray[np.int32], dict[int, Block]], Future[Any]]
"""Starts a decode call: store, camera, track, wanted pictures, their slots, and the blocks of the slots, to be let go of at its end."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchMemory:
    """Memory of open batches of a rank, kept from one work list to the next.

    Attributes:
        stores: blocks by camera.
        open: how many batches may have blocks.
        batch_size: samples of a batch.
        batch_bytes: bytes of one batch, all cameras.
        batches: batches that have memory at a time, about: those that are open, queued, in hand and with the loop.
    """

    stores: Mapping[str, BlockStore]
    open: OpenBatches
    batch_size: int
    batch_bytes: int
    batches: int

    @property
    def slots(self) -> int:
        """Pictures that open batches may hold."""
        return self.open.limit * self.batch_size * len(self.stores)

    @property
    def free(self) -> int:
        """Pictures of the batches that may still be opened."""
        return max(0, self.open.limit - self.open.count) * self.batch_size * len(self.stores)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of batches that were open at a time."""
        return self.open.peak * self.batch_bytes

    def warm(self) -> None:
        """Touches the memory of all batches that have memory at a time, so that no decoder meets fresh pages."""
        taken = [store.take() for store in self.stores.values() for _ in range(self.batches)]
        for block in taken:
            block.memory.fill(0)

    def close(self) -> None:
        """Frees what is not handed out."""
        self.open.close()
        for store in self.stores.values():
            store.close()


def batches_at_once(work: WorkList) -> int:
    """Most batches that must be open at a time for every unit to be decoded when its first picture is due."""
    if not len(work.list):
        return 0
    first, last = work.first_step, np.maximum.accumulate(work.last_step)
    order = np.unique(np.concatenate([first, last, work.step_numbers]))
    return int((np.searchsorted(order, last) - np.searchsorted(order, first)).max()) + 1


@dataclass(slots=True, eq=False)
class _Due:
    """A decode call that fills places of several batches; ``key`` is its unit, ``done`` whether it is known to have succeeded."""

    key: int
    future: Future[Any]
    done: bool = False


class DirectBatches:
    """The batches of one work list while their pictures arrive.

    One thread opens units in the order of the list, another takes batches in the order of their steps. A batch is taken
    when all its units are open, so whatever fills it is known by then.

    Args:
        memory: where batches live.
        work: what to deliver.
        shapes: (height, width, channels) of a picture, by camera.
        dtypes: element type, by camera.
        given_up: whether nobody wants the batches any more.
    """

    def __init__(
        self,
        memory: BatchMemory,
        work: WorkList,
        shapes: Mapping[str, tuple[int, int, int]],
        dtypes: Mapping[str, np.dtype[Any]],
        given_up: Callable[[], bool],
    ) -> None:
        self._memory = memory
        self._shapes = shapes
        self._dtypes = dtypes
        self._given_up = given_up
        self._steps = work.step_numbers
        self._rows = work.rows()
        self._lock = threading.Lock()
        self._following = 0
        self._blocks: dict[int, dict[str, Block]] = {}
        self._due: dict[int, list[_Due]] = {}
        self._repeats: dict[int, list[tuple[int, int, int]]] = {}

    def decode(self, key: int, tracks: Mapping[str, Track], start: Start) -> Iterator[Future[Any]]:
        """Starts decoding what a unit contributes, as soon as the batches that it fills may be open.

        Raises:
            StreamClosedError: the stream was closed meanwhile.
        """
        frames, steps, places = self._rows.of(key)
        self._open_until(int(steps[-1]))
        unique, chosen = np.unique(frames, return_index=True)
        if len(unique) < len(frames):
            self._note_repeats(frames, steps, places, unique, chosen)
        steps, places = steps[chosen], places[chosen]
        for camera, track in tracks.items():
            wanted = unique - track.first
            stop = 0
            for run in runs(track, wanted):
                here = slice(stop, stop := stop + len(run))
                filled: list[int] = np.unique(steps[here]).tolist()
                involved = self._involved(camera, filled)
                firsts = np.array([involved[step].first for step in steps[here].tolist()], np.int64)
                slots = (firsts + places[here]).astype(np.int32)
                # The call keeps the blocks: whatever becomes of the stream, their memory is not used again before it has ended.
                future = start(self._memory.stores[camera], camera, track, run, slots, involved)
                call = _Due(key, future)
                with self._lock:
                    for step in filled:
                        self._due.setdefault(step, []).append(call)
                yield future

    def _involved(self, camera: str, steps: list[int]) -> dict[int, Block]:
        with self._lock:
            if self._given_up():
                raise StreamClosedError("the stream was closed while its pictures were being decoded")
            return {step: self._blocks[step][camera] for step in steps}

    def _note_repeats(self, frames: Any, steps: Any, places: Any, unique: Any, chosen: Any) -> None:
        origin = chosen[np.searchsorted(unique, frames)]
        with self._lock:
            for row in np.flatnonzero(origin != np.arange(len(frames))).tolist():
                source = int(origin[row])
                entry = (int(places[source]), int(steps[row]), int(places[row]))
                self._repeats.setdefault(int(steps[source]), []).append(entry)

    def _open_until(self, last: int) -> None:
        while self._following <= last:
            self._memory.open.open(self._given_up)
            blocks = {camera: store.take() for camera, store in self._memory.stores.items()}
            with self._lock:
                if self._given_up():
                    self._memory.open.shut()
                    raise StreamClosedError("the stream was closed while its batches were opened")
                self._blocks[self._following] = blocks
                self._following += 1

    def take(self, step: PlannedStep, wait: Callable[[Future[Any], int], None]) -> dict[str, NDArray[Any]]:
        """Pictures (B, H, W, C) of a batch whose units are all open, by camera.

        Args:
            step: the batch.
            wait: waits for a decode call of a unit and raises its error.
        """
        number = int(np.searchsorted(self._steps, step.step))
        with self._lock:
            due = self._due.get(number, [])
        for call in due:
            # Every call fills many batches, and asking a future takes a lock.
            if not call.done:
                wait(call.future, call.key)
                call.done = True
        with self._lock:
            self._due.pop(number, None)
            repeats = self._repeats.pop(number, [])
            arrays = {camera: self._array(block, camera) for camera, block in self._blocks[number].items()}
            for place, other, to in repeats:
                for camera, block in self._blocks[other].items():
                    self._array(block, camera)[to] = arrays[camera][place]
            del self._blocks[number]
        self._memory.open.shut()
        return {camera: array[: len(step)] for camera, array in arrays.items()}

    def _array(self, block: Block, camera: str) -> NDArray[Any]:
        shape = self._shapes[camera]
        return block.memory.view(self._dtypes[camera]).reshape((-1, *shape))

    def close(self) -> None:
        """Lets go of every batch. Whoever waits for room is woken."""
        with self._lock:
            left = len(self._blocks)
            self._blocks = {}
            self._due = {}
        self._memory.open.shut(left)
