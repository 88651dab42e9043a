"""Units from Ray Data, in the order in which a rank needs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import ray
from ray.data import DataContext, ExecutionResources

from actors.gate import start_gate
from ingest.datasource import EpisodeDatasource, ReadJob, UnitList, in_order, unpack_row
from ingest.engine.counters import Counters
from ingest.engine.unit import UnitData
from ingest.errors import DamagedDataError, ReelrayError, StorageError, StreamClosedError
from train_integration.credits import UnitCredits

_READ_TASKS = 2
"""Read tasks of a rank that run at once: the next one is ready when one ends; parallel fetches are inside a task."""

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


@dataclass(frozen=True, slots=True)
class RayFeed:
    """Reads with Ray Data tasks that reserve no CPU, so that trainers and decoders may hold all of them.

    Attributes:
        job: reference to what read tasks need; owned by the driver, so it outlives Train workers.
        object_store_bytes: most object store memory that this rank's reading may take.
        gate: where read tasks wait for byte credits; ends with the process that made this object.
    """

    job: ray.ObjectRef[ReadJob]
    object_store_bytes: int
    gate: Any = field(default_factory=start_gate)

    def units(self, wanted: UnitList, counters: Counters, credits: UnitCredits) -> Iterator[Arrival]:
        if not len(wanted):
            return
        gate, key = self.gate, uuid4().hex
        credits.listen(lambda granted: gate.grant.remote(key, granted))
        context = DataContext.get_current().copy()
        # One row per block and blocks in plan order: the row is the unit of everything that follows.
        context.target_max_block_size = 1
        context.execution_options.preserve_order = True
        context.execution_options.resource_limits = ExecutionResources.for_limits(object_store_memory=self.object_store_bytes)
        context.enable_progress_bars = False
        with DataContext.current(context):
            datasource = EpisodeDatasource(self.job, wanted, gate=gate, gate_key=key)
            tasks = len(datasource.get_read_tasks(1))
            dataset = ray.data.read_datasource(datasource, num_cpus=0, override_num_blocks=tasks, concurrency=_READ_TASKS)
        iterator: Any = dataset.iterator()
        batches = iterator.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
        for table in batches:
            for row in range(table.num_rows):
                ordinal, unit, counts = unpack_row(table, row)
                counters.merge(counts)
                yield ordinal, unit


def warm_readers() -> list[ray.ObjectRef[None]]:
    """Starts the processes of a rank's read tasks and their imports, about a second of CPU each, before the first batch is asked for."""
    task: Any = ray.remote(_be_there).options(num_cpus=0, max_retries=0)
    return [task.remote() for _ in range(_READ_TASKS)]


def _be_there() -> None:
    """Arriving here has imported what read tasks import; staying a moment gives each task a process of its own."""
    time.sleep(1.0)


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
            except (DamagedDataError, StorageError) as error:
                return error

        for number, unit in enumerate(in_order(read, wanted.nbytes, self.job.threads, self.job.prefetch_bytes)):
            yield int(wanted.ordinal[number]), unit
