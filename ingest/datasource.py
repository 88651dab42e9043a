"""Ray Data reads episodes: one row per unit, in admission order, fetched ahead by threads inside one generator.

A read task costs tens of milliseconds and order between tasks survives only at the price of their running ahead, so a
task is a long generator and the parallelism is inside it. Bytes fetched but not yet handed on are limited by credits
that are granted in plan order.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import gc
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray.data import DataContext, Datasource, ReadTask
from ray.data.block import BlockAccessor, BlockMetadata
from ray.exceptions import RayError

from ingest.engine.assemble import BatchAssembler, PlannedSamples
from ingest.engine.counters import Counters
from ingest.engine.dataset import Dataset, open_dataset
from ingest.engine.decoded import DecodedUnits
from ingest.engine.fetch import UnitReader, UnitRequest
from ingest.engine.spec import ReadOptions, SampleSpec
from ingest.engine.unit import UnitData, pack_unit, unpack_unit
from ingest.engine.units import decoding_saved
from ingest.errors import DamagedDataError, ReelrayError, ReservationError, SelectionError, SettingsError, StorageError, StreamClosedError
from ingest.language.styles import LANGUAGE_COLUMNS
from ingest.lerobot.source import Source
from ingest.storage.base import Store
from ingest.storage.processes import keep_freed_memory
from ingest.video.index import VideoIndex

LANGUAGE_KEY = "language"
"""Column of `read_episodes` that holds an episode's annotations, packed (see `AnnotationRows`)."""

UNITS_PER_TASK = 256
"""Units that one read task yields: a task that is lost is run again from its first unit."""

T = TypeVar("T")

_FETCH_THREADS = 4
_AHEAD_PER_THREAD = 4
"""Units under way or waiting for each fetching thread."""

_PREFETCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Everything a read task needs, shipped once as an object reference.

    Attributes:
        source: metadata of the dataset.
        index: sample tables of its video files; pickles without what it has cached.
        spec: what samples consist of.
        threads: units fetched at once by one task.
        prefetch_bytes: bytes that one task may have fetched or under way, beyond the unit that is due.
        outage_s: seconds for which a unit is asked for again when its store does not answer, beyond the store's own retries.
        key: names the job, so that a worker process keeps what it has opened from task to task.
    """

    source: Source
    index: VideoIndex
    spec: SampleSpec
    threads: int = _FETCH_THREADS
    prefetch_bytes: int = _PREFETCH_BYTES
    outage_s: float = 240.0
    key: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def of(cls, dataset: Dataset, **settings: Any) -> ReadJob:
        """A job that reads like an opened dataset."""
        return cls(dataset.source, dataset.index, dataset.spec, **settings)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The datasets that units come from, by dataset number."""
        return tuple(job.source for job in self.jobs)

    @property
    def jobs(self) -> tuple[ReadJob, ...]:
        """How each dataset is read, by dataset number."""
        return (self,)

    @property
    def location(self) -> str:
        """Where the data are, for messages."""
        return self.source.store.url

    def reader(self, counters: Counters) -> UnitReader:
        """A reader of the job's units."""
        return UnitReader(self.source, self.index, self.spec, counters, outage_s=self.outage_s)

    def indexed(self, change: Callable[[VideoIndex], VideoIndex]) -> ReadJob:
        """The same job with its index changed, for example for use on other nodes."""
        return replace(self, index=change(self.index))

    def decoding_saved(self, units: UnitList) -> NDArray[np.float64]:
        """Pixels that need not be decoded when each of some units is decoded whole instead of sample by sample, float64[N]."""
        saved = np.zeros(len(units), dtype=np.float64)
        for number in np.unique(units.dataset).tolist():
            rows = np.flatnonzero(units.dataset == number)
            job = self.jobs[number]
            saved[rows] = decoding_saved(units.take(rows), job.source, job.index, job.spec)
        return saved

    def stored(self, change: Callable[[Store], Store]) -> ReadJob:
        """The same job with its store changed."""
        return replace(self, source=replace(self.source, store=change(self.source.store)))


@dataclass(frozen=True, slots=True, eq=False)
class UnitList:
    """Units to read, in the order to deliver them.

    Attributes:
        ordinal: int64[N], number that comes back with each row.
        dataset: int32[N].
        episode: int64[N].
        lo: int64[N].
        hi: int64[N].
        nbytes: int64[N], compressed bytes, for credits and for Ray's estimates.
    """

    ordinal: NDArray[np.int64]
    dataset: NDArray[np.int32]
    episode: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ordinal)

    def part(self, start: int, stop: int) -> UnitList:
        """Some consecutive units."""
        return self.take(np.arange(start, stop))

    def take(self, rows: NDArray[np.int64]) -> UnitList:
        """Some units, as copies."""
        names = ("ordinal", "dataset", "episode", "lo", "hi", "nbytes")
        return UnitList(**{name: getattr(self, name)[rows] for name in names})

    def request(self, number: int) -> UnitRequest:
        """What to read for one unit, within the bytes that are reserved for it."""
        fields = (self.dataset, self.episode, self.lo, self.hi, self.nbytes)
        return UnitRequest(*(int(values[number]) for values in fields))


class EpisodeDatasource(Datasource):
    """Units in the order of ``units``, a few to a row: every row costs its way through Ray, so what is ready together travels together.

    Rows hold lists ``ordinal``, ``header``, ``payload`` and ``error``, and ``counts``; see `unpack_row`. A unit that
    cannot be read has an ``error``, so that the consumer's damage policy decides, and not Ray.

    Args:
        job: reference to a `ReadJob`.
        units: what to read.
        gate: actor whose ``wait(list, ordinal)`` returns, once a unit may be fetched, the number below which all may be, or -1
            when none is wanted any more; None fetches without asking.
        gate_list: number by which the gate knows the list of units.
    """

    def __init__(self, job: ray.ObjectRef[ReadJob], units: UnitList, *, gate: Any = None, gate_list: int = 0) -> None:
        super().__init__()
        self._job = job
        self._units = units
        self._gate = gate
        self._gate_list = gate_list

    def get_name(self) -> str:
        return "ReelrayEpisodes"

    def estimate_inmemory_data_size(self) -> int | None:
        return int(self._units.nbytes.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """Pure and free of I/O: Ray calls it several times for each execution.

        The number of tasks follows from the units alone, whatever ``parallelism`` asks for: tasks are there to
        bound what is run again after a loss.
        """
        return [
            self._task(self._units.part(start, min(start + UNITS_PER_TASK, len(self._units))), per_task_row_limit)
            for start in range(0, len(self._units), UNITS_PER_TASK)
        ]

    def _task(self, units: UnitList, row_limit: int | None) -> ReadTask:
        job, gate, number = self._job, self._gate, self._gate_list

        granted = 0

        def may_fetch(ordinal: int) -> bool:
            nonlocal granted
            # Without its gate a task still keeps to the bytes of its own job.
            with contextlib.suppress(RayError):
                if gate is not None and 0 <= granted <= ordinal:
                    granted = int(ray.get(gate.wait.remote(number, ordinal)))
            return granted >= 0

        def read() -> Iterator[pa.Table]:
            found = _fetched(job)
            _open_index(found, units)
            yield from _read_rows(found, units, may_fetch)

        metadata = BlockMetadata(num_rows=len(units), size_bytes=int(units.nbytes.sum()), exec_stats=None, input_files=None)
        return ReadTask(read, metadata, per_task_row_limit=row_limit)


def unpack_row(table: pa.Table, row: int) -> tuple[list[tuple[int, UnitData | ReelrayError]], dict[str, float]]:
    """A row of `EpisodeDatasource`: ordinals with the unit or the error that kept it from being read, and counts."""
    columns = [table.column(name)[row].as_py() for name in ("ordinal", "header", "payload", "error")]
    units = [
        (ordinal, load_error(error) if error is not None else unpack_unit(header, payload))
        for ordinal, header, payload, error in zip(*columns, strict=True)
    ]
    counts: dict[str, float] = json.loads(table.column("counts")[row].as_py())
    return units, counts


def dump_error(error: ReelrayError) -> str:
    """An error as JSON: its class and message, and for damage what it names."""
    fields = {
        name: value for name, value in vars(error).items() if isinstance(value, str | int | tuple | list) and not name.startswith("_")
    }
    return json.dumps({"kind": type(error).__name__, "message": str(error), "fields": fields})


def load_error(text: str) -> ReelrayError:
    """The inverse of `dump_error`."""
    import ingest.errors

    described = json.loads(text)
    kind: Any = getattr(ingest.errors, described["kind"], StorageError)
    error: ReelrayError = kind(described["message"])
    for name, value in described["fields"].items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


_jobs: OrderedDict[str, ReadJob] = OrderedDict()


def _fetched(job: ray.ObjectRef[ReadJob]) -> ReadJob:
    """A job, kept in this worker process from task to task: it holds the metadata of the whole dataset."""
    name = job.hex()
    if name not in _jobs:
        _jobs[name] = ray.get(job)
        # What was loaded until now stays: looking through it for garbage is better done before units are asked for.
        gc.collect()
        while len(_jobs) > 2:
            _jobs.popitem(last=False)
    return _jobs[name]


_readers: OrderedDict[str, tuple[UnitReader, Counters]] = OrderedDict()


def _reader(job: ReadJob) -> tuple[UnitReader, Counters]:
    """The reader of a job in this worker process, kept from task to task with the footers and tables it has read."""
    if job.key not in _readers:
        keep_freed_memory()
        counters = Counters()
        _readers[job.key] = (job.reader(counters), counters)
        while len(_readers) > 2:
            _readers.popitem(last=False)
    return _readers[job.key]


def _open_index(job: ReadJob, units: UnitList) -> None:
    """Opens the index that units are read with, before bytes may be fetched: the first of them does not wait for it then."""
    own = job.jobs[int(units.dataset[0])]
    # Whatever is wrong is told when the unit is read, as that unit's error.
    with contextlib.suppress(ReelrayError):
        for camera in own.spec.cameras:
            own.index.table(own.source.pictures(int(units.episode[0]), camera)[0])


def _read_rows(job: ReadJob, units: UnitList, may_fetch: Callable[[int], bool]) -> Iterator[pa.Table]:
    reader, counters = _reader(job)

    def read(number: int) -> tuple[bytes, list[bytes | memoryview], str | None]:
        if not may_fetch(int(units.ordinal[number])):
            return b"", [], dump_error(StreamClosedError("the stream was closed before this unit was fetched"))
        try:
            header, payload = pack_unit(reader.read(units.request(number)))
            return header, payload, None
        except (DamagedDataError, ReservationError, StorageError) as error:
            return b"", [], dump_error(error)

    counted = counters.totals()
    done = 0
    for parcel in in_parcels(read, units.nbytes, job.threads, job.prefetch_bytes):
        totals = counters.totals()
        counts = {name: value - counted[name] for name, value in totals.items() if value != counted[name]}
        counted = totals
        headers, payloads, errors = zip(*parcel, strict=True)
        yield pa.table(
            {
                "ordinal": pa.array([units.ordinal[done : done + len(parcel)].tolist()], pa.list_(pa.int64())),
                "header": _one_list([[header] for header in headers]),
                "payload": _one_list(payloads),
                "error": pa.array([errors], pa.list_(pa.string())),
                "counts": pa.array([json.dumps(counts)], pa.string()),
            }
        )
        done += len(parcel)


def _one_list(binaries: Sequence[Sequence[bytes | memoryview]]) -> pa.Array:
    """A large_list<large_binary> of one row, of binaries given in parts, each byte copied once."""
    ends = np.cumsum([0, *(sum(len(part) for part in parts) for parts in binaries)], dtype=np.int64)
    data = b"".join(part for parts in binaries for part in parts)
    values = pa.Array.from_buffers(pa.large_binary(), len(binaries), [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return pa.LargeListArray.from_arrays(pa.array([0, len(binaries)], pa.int64()), values)


def in_order(read: Callable[[int], T], nbytes: NDArray[np.int64], threads: int, budget: int) -> Iterator[T]:
    """Runs ``read(0), read(1), …`` in threads and yields the results in order; see `in_parcels`."""
    for parcel in in_parcels(read, nbytes, threads, budget):
        yield from parcel


def in_parcels(read: Callable[[int], T], nbytes: NDArray[np.int64], threads: int, budget: int) -> Iterator[list[T]]:
    """Runs ``read(0), read(1), …`` in threads and yields the results in order, those together that are ready together.

    A read starts only when the bytes of everything under way or waiting, and its own, fit the budget, or when it is
    the one that is due: credits are granted in order, so nothing that is due ever waits for something later.
    """
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="reelray-fetch") as pool:
        ahead: deque[Future[T]] = deque()
        held = due = 0

        def start_more() -> None:
            nonlocal held
            while (following := due + len(ahead)) < len(nbytes) and len(ahead) < _AHEAD_PER_THREAD * threads:
                if following > due and held + int(nbytes[following]) > budget:
                    return
                ahead.append(pool.submit(read, following))
                held += int(nbytes[following])

        try:
            while due < len(nbytes):
                start_more()
                first, parcel = due, [ahead.popleft().result()]
                while ahead and ahead[0].done():
                    parcel.append(ahead.popleft().result())
                due += len(parcel)
                # What follows is fetched while the consumer is busy with these.
                start_more()
                yield parcel
                held -= int(nbytes[first:due].sum())
        finally:
            for waiting in ahead:
                waiting.cancel()


class EpisodeTableDatasource(Datasource):
    """One row per episode with everything decoded, for plain Ray Data pipelines.

    Selecting columns is pushed down to the read: a camera that is not selected is neither fetched nor decoded.

    Args:
        dataset: the opened dataset.
        job: reference to a job that reads it.
    """

    def __init__(self, dataset: Dataset, job: ray.ObjectRef[ReadJob]) -> None:
        super().__init__()
        # Ray's mixin reads and replaces this, but leaves making it to the subclass.
        self._projection_map: dict[str, str] | None = None
        self._job = job
        self._episodes = dataset.selection
        self._lengths = dataset.lengths
        self._nbytes = _decoded_bytes(dataset)
        spec = dataset.spec
        keys = [LANGUAGE_KEY if key in LANGUAGE_COLUMNS else key for key in (*spec.cameras, *spec.images, *spec.columns)]
        pads = [f"{key}_is_pad" for key in keys if key in spec.windows]
        self._names: tuple[str, ...] = tuple(dict.fromkeys(("episode", "length", "task", *keys, *pads)))

    def get_name(self) -> str:
        return "ReelrayEpisodeTable"

    def estimate_inmemory_data_size(self) -> int | None:
        return int(self._nbytes.sum())

    def supports_projection_pushdown(self) -> bool:
        return True

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        projection = self.get_projection_map()
        columns = None if projection is None else list(projection)
        if unknown := [name for name in columns or () if name not in self._names]:
            raise SelectionError(f"{', '.join(unknown)} cannot be selected; rows of episodes have {', '.join(self._names)}")
        count = max(1, min(parallelism, len(self._episodes)))
        edges = np.linspace(0, len(self._episodes), count + 1).astype(int).tolist()
        return [self._task(start, stop, columns, per_task_row_limit) for start, stop in pairwise(edges)]

    def _task(self, start: int, stop: int, columns: Sequence[str] | None, row_limit: int | None) -> ReadTask:
        job, episodes, lengths = self._job, self._episodes[start:stop].copy(), self._lengths[start:stop].copy()

        def read() -> Iterator[Any]:
            yield from _episode_blocks(ray.get(job), episodes, lengths, columns)

        size = int(self._nbytes[start:stop].sum())
        metadata = BlockMetadata(num_rows=stop - start, size_bytes=size, exec_stats=None, input_files=None)
        return ReadTask(read, metadata, per_task_row_limit=row_limit)


def _decoded_bytes(dataset: Dataset) -> NDArray[np.int64]:
    spec = dataset.spec
    per_frame = sum(int(np.prod(spec.features[camera].picture_shape)) for camera in spec.cameras)
    per_frame += sum(4 * max(1, int(np.prod(spec.features[key].shape))) for key in spec.columns)
    return dataset.lengths * per_frame


def _episode_blocks(job: ReadJob, episodes: NDArray[np.int64], lengths: NDArray[np.int64], columns: Sequence[str] | None) -> Iterator[Any]:
    spec = job.spec
    if columns is not None:
        wanted = {*(name.removesuffix("_is_pad") for name in columns), *columns, *(LANGUAGE_COLUMNS if LANGUAGE_KEY in columns else ())}
        spec = replace(
            spec,
            cameras=tuple(key for key in spec.cameras if key in wanted),
            images=tuple(key for key in spec.images if key in wanted),
            columns=tuple(key for key in spec.columns if key in wanted),
        )
    # State rows go into the block once, packed; as columns they would be repeated on every frame.
    arrays = replace(spec, columns=tuple(key for key in spec.columns if key not in LANGUAGE_COLUMNS))
    counters = Counters()
    reader = UnitReader(job.source, job.index, spec, counters)
    assembler = BatchAssembler(arrays, (job.source.store,), as_uint8=True)
    for episode, length in zip(episodes.tolist(), lengths.tolist(), strict=True):
        unit = reader.read(UnitRequest(0, episode, 0, length))
        pictures = DecodedUnits(spec, (job.source.store.url,), counters)
        frames = np.arange(length, dtype=np.int64)
        batch = assembler.batch(
            PlannedSamples(np.zeros(length, np.int64), frames, np.zeros(length, np.bool_), 0, 0), {0: unit}, pictures.bind({0: unit})
        )
        row: dict[str, Any] = {"episode": [episode], "length": [length], "task": [batch["task"][0]]}
        if unit.rows.language is not None:
            row[LANGUAGE_KEY] = [unit.rows.language.pack()]
        for key in (*spec.cameras, *spec.images, *arrays.columns):
            for name in (key, f"{key}_is_pad") if key in spec.windows else (key,):
                value = batch[name]
                row[name] = np.ascontiguousarray(value)[None] if isinstance(value, np.ndarray) else [value]
        yield BlockAccessor.batch_to_block({key: row[key] for key in row if columns is None or key in columns})


def read_episodes(
    source: str | Path | Store,
    *,
    episodes: Sequence[int] | None = None,
    options: ReadOptions | None = None,
    concurrency: int | None = None,
    **read_options: Any,
) -> ray.data.Dataset:
    """A plain Ray Dataset with one row per episode.

    Rows hold ``episode``, ``length``, ``task`` (of the first frame), every stored feature as an array of shape
    (length, *feature shape), every camera as uint8 (length, C, H, W), and ``<key>_is_pad`` beside each window. Annotations are
    one column ``language``, packed, so that state rows are not repeated on every frame:
    ``AnnotationRows.unpack(row["language"]).raw(frame)``.
    ``Dataset.select_columns`` is pushed down: cameras that are not selected are neither fetched nor decoded.

    Args:
        source: local directory, or an opened store.
        episodes: episodes to read, in the order to list them; None reads all.
        options: how to read; or give the fields of `ReadOptions` as keywords.
        concurrency: read tasks that may run at once; None leaves it to Ray.
        **read_options: fields of `ReadOptions`.

    Raises:
        DatasetError: the dataset cannot be read as asked.
    """
    dataset = open_dataset(source, episodes=episodes, options=options, return_uint8=True, **read_options)
    if dataset.render is not None:
        raise SettingsError("read_episodes delivers episodes as stored: render samples with iter_samples or a SampleStream")
    datasource = EpisodeTableDatasource(dataset, ray.put(ReadJob.of(dataset)))
    blocks = min(len(dataset.selection), 200)
    return ray.data.read_datasource(datasource, override_num_blocks=blocks, concurrency=concurrency)
