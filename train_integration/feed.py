"""Units from Ray Data, in the order in which a rank needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any, Protocol
from uuid import uuid4

import ray
from ray.data import DataContext, ExecutionResources
from ray.exceptions import RayError

from actors.causes import raise_typed
from actors.gate import start_gate
from ingest.datasource import EpisodeDatasource, ReadJob, UnitList, in_order, unpack_row
from ingest.engine.counters import Counters
from ingest.engine.unit import UnitData
from ingest.errors import DamagedDataError, ReelrayError, ReservationError, StorageError, StreamClosedError
from train_integration.credits import UnitCredits

_READ_TASKS = 2
"""Read tasks of a rank that run at once: the next one is ready when one ends; parallel fetches are inside a task."""

_NEAR = 24
"""Units that readers are known to have before them when a grant need not be told at once; more than they fetch ahead."""

Arrival = tuple[int, UnitData | ReelrayError]
"""Ordinal of a unit, and the unit or what kept it from being read."""


class Feed(Protocol):
    """Where a rank's units come from."""

    def units(self, wanted: UnitList, counters: Counters, credits: UnitCredits) -> Iterator[Arrival]:
        """Yields the wanted units in the order asked. Closing the iterator stops everything behind it.

        Args:
            wanted: what to read; ``ordinal`` is the row.
            counters: receives bytes and seconds.
            credits: must be waited for before a unit is fetched.
        """
        ...

    def await_readers(self, timeout_s: float) -> bool:
        """Waits until whatever reads is up and waits for credits, once `units` is iterated; whether it is."""
        ...


@dataclass(frozen=True, slots=True)
class RayFeed:
    """Reads with Ray Data tasks that reserve no CPU, so that trainers and decoders may hold all of them.

    Attributes:
        job: reference to what read tasks need; owned by the driver, so it outlives Train workers.
        object_store_bytes: most object store memory that this rank's reading may take.
        gate: where read tasks wait for byte credits; ends with the process that made this object.
        ids: ids of executions in turn. Ray's dashboard and statistics keep half a megabyte for each id that they have seen, so an
            execution takes that of the one before the last, which is over by then.
        lists: numbers of the lists of units, for the gate.
    """

    job: ray.ObjectRef[ReadJob]
    object_store_bytes: int
    gate: Any = field(default_factory=start_gate)
    ids: Iterator[str] = field(default_factory=lambda: cycle((uuid4().hex[:12], uuid4().hex[:12])))
    lists: Iterator[int] = field(default_factory=count)

    def units(self, wanted: UnitList, counters: Counters, credits: UnitCredits) -> Iterator[Arrival]:
        if not len(wanted):
            return
        gate, number = self.gate, next(self.lists)
        grants = _Grants(lambda granted: gate.grant.remote(number, granted), len(wanted))
        credits.listen(grants.grown)

        def read(rest: UnitList) -> Generator[Arrival]:
            name = next(self.ids) if len(rest) == len(wanted) else uuid4().hex[:12]
            for units, counts in self._rows(rest, number, name):
                counters.merge(counts)
                grants.arrived(units[-1][0])
                yield from units

        yield from each_once(wanted, read)

    def _rows(self, wanted: UnitList, number: int, name: str) -> Iterator[tuple[list[Arrival], dict[str, float]]]:
        """One execution of Ray Data: its rows as they come."""
        context = DataContext.get_current().copy()
        # One row per block and blocks in plan order: a row is handed on as soon as it is there.
        context.target_max_block_size = 1
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = ExecutionResources.for_limits(object_store_memory=self.object_store_bytes)
        context.enable_progress_bars = False
        with DataContext.current(context):
            datasource = EpisodeDatasource(self.job, wanted, gate=self.gate, gate_list=number)
            tasks = len(datasource.get_read_tasks(1))
            dataset: Any = ray.data.read_datasource(datasource, num_cpus=0, override_num_blocks=tasks, concurrency=_READ_TASKS)
            dataset._set_uuid(name)
        # Blocks as they come: Ray's batches keep a row back until the next one is there, and that one may need the room that this
        # one takes; without prefetching they leave a thread behind for every execution.
        try:
            for bundle in dataset.iter_internal_ref_bundles():
                for block in bundle.blocks:
                    table: Any = ray.get(block.ref)
                    for row in range(table.num_rows):
                        yield unpack_row(table, row)
        except RayError as error:
            raise_typed(error)

    def await_readers(self, timeout_s: float) -> bool:
        return bool(ray.wait([self.gate.asked.remote()], timeout=timeout_s)[0])


def each_once(wanted: UnitList, read: Callable[[UnitList], Generator[Arrival]]) -> Iterator[Arrival]:
    """Every unit of a list once and in order, whatever becomes of who reads.

    When a read task is lost, Ray runs it again and leaves out as many rows as had come. Rows hold what was ready together, which is
    something else the second time: so units may come again, or not at all.

    Args:
        wanted: what to read.
        read: reads a list; called again for what is left when something is missing.

    Raises:
        StorageError: nothing of what is left came.
    """
    due = 0
    while due < len(wanted):
        before = due
        with closing(read(wanted.part(due, len(wanted)))) as arrivals:
            for ordinal, unit in arrivals:
                if due < len(wanted) and ordinal > wanted.ordinal[due]:
                    break
                if due < len(wanted) and ordinal == wanted.ordinal[due]:
                    due += 1
                    yield ordinal, unit
        if due == before:
            raise StorageError(f"unit {due} of {len(wanted)} was asked for and did not come: read tasks ended without it")


class _Grants:
    """Tells readers about grants: at once when they may be waiting, otherwise several at a time, because each one is a message.

    Args:
        tell: sends the number below which units may be fetched.
        units: units of the list.
    """

    def __init__(self, tell: Callable[[int], Any], units: int) -> None:
        self._tell = tell
        self._units = units
        self._lock = threading.Lock()
        self._granted = 0
        self._told = 0
        self._arrived = 0

    def grown(self, granted: int) -> None:
        """Notes a grant; -1 is the end."""
        with self._lock:
            if granted < 0:
                self._tell(granted)
                return
            self._granted = max(self._granted, granted)
            self._tell_if_due()

    def arrived(self, ordinal: int) -> None:
        """Notes that the units up to one have come."""
        with self._lock:
            self._arrived = max(self._arrived, ordinal + 1)
            self._tell_if_due()

    def _tell_if_due(self) -> None:
        fresh = self._granted - self._told
        if fresh and (self._told - self._arrived < _NEAR or fresh >= _NEAR or self._granted == self._units):
            self._told = self._granted
            self._tell(self._granted)


@dataclass(frozen=True, slots=True)
class LocalFeed:
    """Reads with threads of this process, for streams outside a Ray cluster.

    Attributes:
        job: what to read and how.
    """

    job: ReadJob

    def units(self, wanted: UnitList, counters: Counters, credits: UnitCredits) -> Iterator[Arrival]:
        reader = self.job.reader(counters)

        def read(number: int) -> UnitData | ReelrayError:
            credits.wait(number)
            try:
                return reader.read(wanted.request(number))
            except StreamClosedError:
                raise
            except (DamagedDataError, ReservationError, StorageError) as error:
                return error

        for number, unit in enumerate(in_order(read, wanted.nbytes, self.job.threads, self.job.prefetch_bytes)):
            yield int(wanted.ordinal[number]), unit

    def await_readers(self, timeout_s: float) -> bool:  # noqa: ARG002 - threads need no start
        return True
