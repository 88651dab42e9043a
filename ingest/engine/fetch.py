"""Reads a unit: its rows, and exactly the video bytes that its pictures need."""

# pyarrow has no stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np
import pyarrow as pa

from ingest.engine.counters import Counters
from ingest.engine.episodes import EpisodeReader
from ingest.engine.spec import SampleSpec
from ingest.engine.unit import Track, UnitData, UnitRows, localise
from ingest.errors import ChecksumError, DamagedDataError, PictureCountError, ReservationError, TransientStorageError
from ingest.lerobot.rows import EpisodeRows
from ingest.lerobot.source import Source
from ingest.storage.local import LocalStore
from ingest.video.fetch import SpanFetcher
from ingest.video.index import VideoIndex, WatchingIndex

_LOG = logging.getLogger("reelray.fetch")
_OUTAGE_PAUSE_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnitRequest:
    """Which unit to read.

    Attributes:
        dataset: number of the dataset in a mixture, 0 otherwise.
        episode: episode index.
        lo: first anchor frame.
        hi: one past the last anchor frame.
        limit_bytes: most bytes of compressed pictures that reading it may hold; None sets no limit.
    """

    dataset: int
    episode: int
    lo: int
    hi: int
    limit_bytes: int | None = None


class UnitReader:
    """Reads units of one dataset. Thread-safe.

    Args:
        source: the dataset.
        index: sample tables of its video files.
        spec: what samples consist of.
        counters: receives bytes and seconds.
        outage_s: seconds for which a unit is asked for again when the store does not answer, beyond the store's own retries.
    """

    def __init__(self, source: Source, index: VideoIndex, spec: SampleSpec, counters: Counters, *, outage_s: float = 0.0) -> None:
        self._source = source
        self._index = index
        self._spec = spec
        self._counters = counters
        self._outage_s = outage_s
        self._rows = EpisodeReader(source, spec.stored_keys)
        self._spans = SpanFetcher(source.store)
        # Only local files can be compared at every read: elsewhere an identity costs a request, and commits do not change.
        self._watched = index if isinstance(index, WatchingIndex) and isinstance(source.store, LocalStore) else None

    def read(self, request: UnitRequest) -> UnitData:
        """Fetches one unit.

        Raises:
            DamagedDataError: rows or bytes that should be there are missing or wrong; the episode is named.
            ReservationError: it needs more bytes than it may hold; its ``leads`` name the cameras.
            StorageError: the store failed.
        """
        return ride_out(lambda: self._read(request), self._outage_s, self._again)

    def _again(self, error: TransientStorageError) -> None:
        self._counters.add("reelray_retries")
        _LOG.warning("%s does not answer; what is wanted of it is asked for again: %s", self._source.store.url, error)

    def _read(self, request: UnitRequest) -> UnitData:
        start = perf_counter()
        try:
            length = int(self._source.episodes.length[self._source.episodes.row(request.episode)])
            rows = self._read_rows(request, length)
            tracks = self._read_tracks(request, length)
        except DamagedDataError as error:
            raise self._with_episode(error, request.episode) from error
        finally:
            self._counters.add("reelray_fetch_seconds", perf_counter() - start)
        self._counters.add("reelray_row_bytes_read", rows.nbytes)
        return UnitData(request.dataset, request.episode, request.lo, request.hi, length, rows, tracks)

    def _read_rows(self, request: UnitRequest, length: int) -> UnitRows:
        spec = self._spec
        held = self._rows.read(request.episode, keep=request.hi - request.lo < length)
        found = held.rows
        first, stop = spec.reach((*spec.columns, *spec.images), request.lo, request.hi, found.length)
        numbers = {key: values[first:stop] for key, values in found.numbers.items()}
        columns = {key: column.slice(first, stop - first) for key, column in found.others.items()}
        # Each frame carries all state rows of its episode, so any cut has them.
        language = None if held.language is None else held.language.part(first, stop)
        return UnitRows(first, stop - first, numbers, pa.table(columns), self._tasks(found, first, stop), language)

    def _tasks(self, rows: EpisodeRows, first: int, stop: int) -> dict[int, str]:
        if "task_index" not in rows.numbers:
            return {}
        wanted = np.unique(rows.numbers["task_index"][first:stop]).tolist()
        return {int(number): self._source.tasks.text(int(number)) for number in wanted}

    def _read_tracks(self, request: UnitRequest, length: int) -> dict[str, Track]:
        tracks: dict[str, Track] = {}
        leads: list[tuple[str, int]] = []
        left = request.limit_bytes
        for camera in self._spec.cameras:
            try:
                tracks[camera], lead = self._read_track(request, camera, length, left)
            except ReservationError as error:
                error.leads = (*leads, *((camera, lead) for _, lead in error.leads))
                error.args = (f"{self._source.store.url}: episode {request.episode}: {camera}: {error}",)
                raise
            leads.append((camera, lead))
            left = None if left is None else left - len(tracks[camera].data)
        return tracks

    def _read_track(self, request: UnitRequest, camera: str, length: int, limit_bytes: int | None) -> tuple[Track, int]:
        """A camera's pictures, and how many random-access points further back they begin than the index says."""
        path, file_first, _ = self._source.pictures(request.episode, camera)
        first, stop = self._spec.reach((camera,), request.lo, request.hi, length)
        table = self._index.table(path)
        try:
            self._source.check_pictures(path, camera, table.pictures)
        except PictureCountError as error:
            # The other episodes of a file that is too short are whole.
            if request.episode in error.episodes:
                raise
        if self._watched is not None:
            self._watched.check_unchanged(self._source.store, path)
        try:
            fetched = self._spans.fetch(table, range(file_first + first, file_first + stop), limit_bytes=limit_bytes)
        except ChecksumError as error:
            error.camera = camera
            error.args = (f"{camera}: {error}", *error.args[1:])
            raise
        self._counters.add("reelray_payload_bytes_read", fetched.nbytes)
        self._counters.add("reelray_payload_bytes_needed", fetched.span.sample_bytes)
        return localise(fetched.table, fetched.span, b"".join(fetched.parts), camera=camera, first=first), fetched.lead

    def _with_episode(self, error: DamagedDataError, episode: int) -> DamagedDataError:
        error.dataset = error.dataset or self._source.store.url
        if error.episode is None:
            error.episode = episode
        if f"episode {episode}" not in str(error) and not error.episodes:
            error.args = (f"{error.dataset}: episode {episode}: {error}", *error.args[1:])
        return error


def ride_out(
    action: Callable[[], T],
    outage_s: float,
    again: Callable[[TransientStorageError], object],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Runs an action again while the store behind it does not answer.

    Opening a dataset gives up after the store's own retries, since its address may be wrong. Once it is open, a network
    that is away for a minute is worth waiting for: what depends on it would have to start again otherwise.

    Args:
        action: what to run.
        outage_s: seconds from the first failure after which nothing is tried again; 0 tries once.
        again: told each failure that is followed by another try.
        clock: monotonic seconds.
        sleep: waits.

    Raises:
        TransientStorageError: the store did not answer in time.
    """
    failed_at: float | None = None
    while True:
        try:
            return action()
        except TransientStorageError as error:
            now = clock()
            failed_at = now if failed_at is None else failed_at
            if now - failed_at + _OUTAGE_PAUSE_S > outage_s:
                raise
            again(error)
            sleep(_OUTAGE_PAUSE_S)
