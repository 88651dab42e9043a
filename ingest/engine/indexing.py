"""Which index a dataset's videos are read by, and under which names it is kept: the one place that decides both."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingest.errors import DamagedDataError, LocationError, ObjectNotFoundError, SettingsError, StorageError
from ingest.lerobot.source import Source
from ingest.storage.base import Store
from ingest.storage.locations import Location, parse_location
from ingest.video.files import is_reported
from ingest.video.index import ProbingIndex, VideoIndex
from ingest.video.sidecar.build import DEFAULT_LOCK_TIMEOUT_S, DEFAULT_WORKERS, BuildProgress, Progress
from ingest.video.sidecar.lookup import IndexRequest

_LOG = logging.getLogger("reelray.engine")
_LOGGED_SHARE = 0.05
_LOGGED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSource:
    """A dataset whose videos are indexed.

    Attributes:
        source: its metadata.
        store: where the videos are read from.
        paths: every video file, sorted, each once.
        repo_id: recorded name.
        revision: recorded revision.
        data_root: recorded location of the videos.
    """

    source: Source
    store: Store
    paths: tuple[str, ...]
    repo_id: str
    revision: str
    data_root: str

    @classmethod
    def of(
        cls,
        source: Source,
        location: Location | None = None,
        *,
        store: Store | None = None,
        repo_id: str | None = None,
        revision: str | None = None,
        data_root: str | None = None,
    ) -> IndexedSource:
        """Describes an opened dataset as every sidecar of it does, so that each way of asking finds the same file.

        Args:
            source: the opened dataset.
            location: it was opened from; None takes what the store says.
            store: where the videos are, if not beside the metadata.
            repo_id: name to record; by default OWNER/NAME, or the folder's name.
            revision: to record; by default the location's, or the codebase version.
            data_root: location of the videos to record; by default the store's own.
        """
        store = store or source.store
        if location is None:
            try:
                location = parse_location(source.store.url)
            except LocationError:
                location = Location("local", source.store.url)
        name = Path(location.url).expanduser().resolve().name if location.is_local else location.url
        return cls(
            source=source,
            store=store,
            paths=tuple(sorted({path for camera in source.maps.values() for path in camera.paths})),
            repo_id=repo_id or location.repo_id or name,
            revision=revision or location.revision or source.info.version,
            data_root=data_root or store.url,
        )

    def identity(self) -> dict[str, Any]:
        """What a sidecar records about its source."""
        return {"repo_id": self.repo_id, "revision": self.revision, "data_root": self.data_root}

    def first_episodes(self, count: int) -> list[str]:
        """Video files of the first ``count`` episodes."""
        episodes = self.source.episodes.episode_index[:count].tolist()
        found = {self.source.pictures(int(episode), camera)[0] for episode in episodes for camera in self.source.cameras}
        return sorted(found)

    def request(self, **settings: Any) -> IndexRequest:
        """How the index is found or built; ``settings`` are further fields of `IndexRequest`."""
        return IndexRequest(store=self.store, paths=self.paths, **self.identity(), **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """How an opened dataset gets the index of its videos.

    Attributes:
        use_sidecar: find or build the MP4 sidecar; off reads the heads of files as they are needed.
        lock_timeout_s: longest wait for another process that builds the same sidecar.
        workers: files indexed at once.
        progress: called after every file of a build; None logs every twentieth of it, once a second at most.
    """

    use_sidecar: bool = True
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    workers: int = DEFAULT_WORKERS
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SettingsError(f"sidecar_workers must be positive, found {self.workers}")
        if not 0 <= self.lock_timeout_s < math.inf:
            raise SettingsError(f"sidecar_lock_timeout_s must be non-negative, found {self.lock_timeout_s:g}")


def open_index(videos: IndexedSource, options: IndexOptions) -> VideoIndex:
    """The index of a dataset's videos: its sidecar, or the files themselves where none can be kept.

    Raises:
        LockTimeoutError: another process held the lock for too long.
        StorageError: the source cannot be read.
    """
    probing = ProbingIndex(videos.store)
    if not videos.paths or not options.use_sidecar:
        return probing
    request = videos.request(lock_timeout_s=options.lock_timeout_s, workers=options.workers)
    try:
        return request.open(options.progress or log_progress(videos.store.url))
    except (DamagedDataError, ObjectNotFoundError) as error:
        # One file that cannot be indexed must not hide the others: the check of the selection names what it touches.
        reason = error
    except StorageError as error:
        if not is_reported(error):
            raise
        reason = error
    _LOG.warning("%s: no MP4 sidecar, file heads are read as they are needed: %s", videos.store.url, reason)
    return probing


def log_progress(where: str) -> Callable[[BuildProgress], None]:
    """Logs a build: every twentieth of it, once a second at most, with its rate and the time left."""
    share = seconds = 0.0

    def log(progress: BuildProgress) -> None:
        nonlocal share, seconds
        reached = progress.done / progress.total
        if reached - share < _LOGGED_SHARE or progress.elapsed_s - seconds < _LOGGED_S:
            return
        share, seconds = reached, progress.elapsed_s
        left = "" if progress.eta_s is None else f", {progress.eta_s:.0f} s left"
        _LOG.info("%s: indexed %d of %d video files (%.1f/s%s)", where, progress.done, progress.total, progress.rate, left)

    return log
