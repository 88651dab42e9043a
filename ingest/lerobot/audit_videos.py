"""Every video file against the rows that map to it: presence, picture counts, times, sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import ObjectNotFoundError, PictureCountError, ReelrayError
from ingest.lerobot.findings import Finding, Findings, Severity
from ingest.lerobot.source import Source
from ingest.lerobot.videomap import CameraMap
from ingest.video.index import VideoIndex
from ingest.video.tables import SampleTable

_FPS_TOLERANCE = 0.005
_LISTED = 5
_FOURCC = {
    "avc1": "h264",
    "avc3": "h264",
    "hvc1": "hevc",
    "hev1": "hevc",
    "av01": "av1",
    "mp4v": "mpeg4",
    "vp09": "vp9",
    "vp08": "vp8",
}
_SAME_CODEC = {"h265": "hevc", "libx264": "h264", "libx265": "hevc", "libsvtav1": "av1", "avc": "h264", "mp4v": "mpeg4"}


@dataclass(slots=True)
class VideoAudit:
    """The state of a walk over all video files.

    Attributes:
        source: the dataset.
        index: gives sample tables.
        findings: where faults go.
        tolerance_s: most that a picture's time may differ from its row's.
        time_severity: severity of a deviation above it.
        files, pictures: walked so far.
    """

    source: Source
    index: VideoIndex
    findings: Findings
    tolerance_s: float
    time_severity: Severity
    files: int = 0
    pictures: int = 0

    def run(self) -> Iterator[str]:
        """Walks all files, yielding each path before it is read."""
        for camera in self.source.maps.values():
            missing: list[int] = []
            for number, path in enumerate(camera.paths):
                yield path
                try:
                    table = self.index.table(path)
                except ObjectNotFoundError:
                    missing.append(number)
                except ReelrayError as error:
                    self._unreadable(camera, number, error)
                else:
                    self.files += 1
                    self.pictures += len(table.presented)
                    self._file(camera, number, table)
            self._missing(camera, missing)

    def _episodes(self, camera: CameraMap, file: int) -> NDArray[np.int64]:
        return self.source.episodes.episode_index[camera.rows_of(file)]

    def _missing(self, camera: CameraMap, missing: list[int]) -> None:
        for number in missing[:_LISTED]:
            path, episodes = camera.paths[number], self._episodes(camera, number)
            total = f" ({len(missing)} of {len(camera.paths)} files of this camera are missing)" if len(missing) > 1 else ""
            self.findings.add(
                Finding(
                    code="video_missing",
                    severity="error",
                    message=(
                        f"{path} is missing: {camera.camera} of {len(episodes)} episodes, from {int(episodes[0])} on, "
                        f"should be there{total}"
                    ),
                    file=path,
                    episode=int(episodes[0]),
                    column=camera.camera,
                    found="no file",
                    expected=path,
                )
            )

    def _unreadable(self, camera: CameraMap, file: int, error: ReelrayError) -> None:
        path, episodes = camera.paths[file], self._episodes(camera, file)
        self.findings.add(
            Finding(
                code="video_unreadable",
                severity="error",
                message=f"{error} (holds {camera.camera} of {len(episodes)} episodes from {int(episodes[0])} on)",
                file=path,
                episode=int(episodes[0]),
                column=camera.camera,
            )
        )

    def _file(self, camera: CameraMap, file: int, table: SampleTable) -> None:
        path, expected = camera.paths[file], int(camera.pictures[file])
        try:
            self.source.check_pictures(path, camera.camera, len(table.presented))
        except PictureCountError as error:
            for episode in error.episodes or (None,):
                self.findings.add(
                    Finding(
                        code="picture_count",
                        severity="error",
                        message=str(error).removeprefix(f"{self.source.store.url}: "),
                        file=path,
                        episode=episode,
                        column=camera.camera,
                        found=f"{len(table.presented)} pictures",
                        expected=f"{expected} pictures",
                    )
                )
                if len(table.presented) > expected:
                    break
        else:
            self._times(camera, file, table)
        self._shape(camera, path, table)

    def _times(self, camera: CameraMap, file: int, table: SampleTable) -> None:
        """Picture times against ``from_timestamp + frame / fps``, and the file's rate against the dataset's."""
        path, info = camera.paths[file], self.source.info
        seconds = picture_times(table)
        drift = find_drift(self.source, camera, file, table, self.tolerance_s)
        if drift is not None:
            self.findings.add(
                Finding(
                    code="time_drift",
                    severity=self.time_severity,
                    message=drift.message,
                    file=path,
                    episode=drift.worst_episode,
                    column=f"videos/{camera.camera}/from_timestamp",
                    found=drift.found,
                    expected=drift.expected,
                )
            )
        self._spans(camera, file)
        steps = np.diff(seconds)
        step_s = float(np.median(steps)) if steps.size else 0.0
        if step_s > 0 and abs(1 / step_s - info.fps) > _FPS_TOLERANCE * info.fps:
            self.findings.add(
                Finding(
                    code="fps_mismatch",
                    severity="warning",
                    message=f"{path}: its pictures come at {1 / step_s:.4g} fps, but meta/info.json says fps {info.fps:g}",
                    file=path,
                    column="fps",
                    found=f"{info.fps:g}",
                    expected=f"{1 / step_s:.4g}",
                )
            )

    def _spans(self, camera: CameraMap, file: int) -> None:
        """``to_timestamp − from_timestamp`` against the length; nothing is read by it, but other readers are."""
        info, episodes, rows = self.source.info, self.source.episodes, camera.rows_of(file)
        spans = episodes.cameras[camera.camera]
        found = spans.to_timestamp[rows] - spans.from_timestamp[rows]
        expected = episodes.length[rows] / info.fps
        off = np.flatnonzero(np.abs(found - expected) > max(self.tolerance_s, 0.5 / info.fps))
        if off.size:
            first, meta = rows[off[0]], episodes.meta_paths[int(episodes.meta_file[rows[off[0]]])]
            self.findings.add(
                Finding(
                    code="span_length",
                    severity="warning",
                    message=(
                        f"{meta}: {len(off)} episodes of {camera.paths[file]}, first episode {int(episodes.episode_index[first])}: "
                        f"videos/{camera.camera}/to_timestamp − from_timestamp is {found[off[0]]:.6g} s, expected {expected[off[0]]:.6g} s "
                        "(length / fps)"
                    ),
                    file=meta,
                    episode=int(episodes.episode_index[first]),
                    column=f"videos/{camera.camera}/to_timestamp",
                    found=f"{found[off[0]]:.6g}",
                    expected=f"{expected[off[0]]:.6g}",
                )
            )

    def _shape(self, camera: CameraMap, path: str, table: SampleTable) -> None:
        feature = self.source.info.features[camera.camera]
        height, width, _channels = feature.picture_shape
        if (table.height, table.width) != (height, width):
            self.findings.add(
                Finding(
                    code="picture_size",
                    severity="error",
                    message=f"{path} holds {table.width}x{table.height} pictures, but {camera.camera} is declared as {width}x{height}",
                    file=path,
                    column=camera.camera,
                    found=f"{table.width}x{table.height}",
                    expected=f"{width}x{height}",
                )
            )
        declared: Any = feature.details.get("video.codec")
        actual = _FOURCC.get(table.codec, table.codec)
        if isinstance(declared, str) and _SAME_CODEC.get(declared, declared) != actual:
            self.findings.add(
                Finding(
                    code="codec_mismatch",
                    severity="info",
                    message=f"{path} is encoded as {actual}, but meta/info.json says {declared}; the file is what counts",
                    file=path,
                    column=camera.camera,
                    found=declared,
                    expected=actual,
                )
            )


def picture_times(table: SampleTable) -> NDArray[np.float64]:
    """float64[P] seconds at which the file shows its pictures, after edit lists."""
    return np.asarray(table.sample_pts, dtype=np.float64)[np.asarray(table.presented, dtype=np.int64)]


@dataclass(frozen=True, slots=True)
class Drift:
    """Pictures of one file whose times are not where their rows say.

    Attributes:
        path: the file.
        episodes: int64[D], episodes with such pictures, by position in the file.
        worst_episode: the one with the largest deviation.
        found: its time in seconds, as text.
        expected: the time of its row in seconds, as text.
        message: a whole sentence about all of them.
    """

    path: str
    episodes: NDArray[np.int64]
    worst_episode: int
    found: str
    expected: str
    message: str


def find_drift(source: Source, camera: CameraMap, file: int, table: SampleTable, tolerance_s: float) -> Drift | None:
    """Compares picture times with ``from_timestamp + frame / fps``.

    Args:
        source: the dataset.
        camera: the camera's map.
        file: number in ``camera.paths``; the file holds as many pictures as rows map to it.
        table: of the file.
        tolerance_s: most that a time may deviate, included.

    Returns:
        What deviates, or None.
    """
    path, fps, episodes = camera.paths[file], source.info.fps, source.episodes
    seconds = picture_times(table)
    rows = camera.rows_of(file)
    lengths = episodes.length[rows]
    owner = np.repeat(episodes.episode_index[rows], lengths)
    starts = np.repeat(episodes.cameras[camera.camera].from_timestamp[rows], lengths)
    frames = np.arange(len(starts)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    wanted = starts + frames / fps
    deviation = np.abs(seconds - wanted)
    over = np.flatnonzero(~(deviation <= tolerance_s + 1e-9))
    if not over.size:
        return None
    worst = int(np.argmax(deviation))
    late = owner[over]
    named = late[np.sort(np.unique(late, return_index=True)[1])]
    message = (
        f"{path}: {camera.camera}: {len(over)} of {len(seconds)} picture times differ from "
        f"from_timestamp + frame_index / fps by more than {tolerance_s:g} s, from episode {int(named[0])} on; "
        f"most at episode {int(owner[worst])}, frame {int(frames[worst])}: "
        f"{seconds[worst]:.6g} s, expected {wanted[worst]:.6g} s ({deviation[worst]:.4g} s, "
        f"{deviation[worst] * fps:.2f} frames). Pictures belong to rows by position, so reading is exact"
    )
    return Drift(path, named, int(owner[worst]), f"{seconds[worst]:.6g}", f"{wanted[worst]:.6g}", message)
