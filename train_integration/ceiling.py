"""The ceiling of decoding: every selected picture once, in file order, into one warm array, and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
from av.packet import Packet
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from ingest.engine.dataset import Dataset
from ingest.errors import BenchmarkError, SettingsError
from ingest.storage.base import Store
from ingest.video.decode import open_decoder
from ingest.video.entries import parse_sample_entries
from ingest.video.spans import PictureSpan, picture_span
from ingest.video.tables import SampleTable


@dataclass(frozen=True, slots=True)
class CeilingFigures:
    """What sequential decode reached.

    Attributes:
        camera_frames: pictures decoded and converted to ``rgb24``.
        wall_s: from the common start to the end of the last process.
        cpu_s: CPU seconds of all processes in that time.
        processes: how many ran at once.
    """

    camera_frames: int
    wall_s: float
    cpu_s: float
    processes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Consecutive pictures of one file."""

    path: str
    first: int
    count: int


def measure_ceiling(dataset: Dataset, processes: int) -> CeilingFigures:
    """Decodes the selection's cameras sequentially, one process per core, balanced by pictures.

    Args:
        dataset: the opened dataset.
        processes: decoding processes.

    Raises:
        SettingsError: the dataset delivers no camera.
        BenchmarkError: a decoding process failed.
    """
    shares = _shares(dataset, processes)
    if not shares:
        raise SettingsError("the ceiling is that of decoding, and no camera is delivered")
    command = [sys.executable, "-m", "train_integration.ceiling"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) for _ in shares]  # noqa: S603
    try:
        for worker, share in zip(workers, shares, strict=True):
            pickle.dump((dataset.source.store, share), _pipe(worker.stdin))
            _pipe(worker.stdin).flush()
        for worker in workers:
            _answer(worker)
        for worker in workers:
            _pipe(worker.stdin).write(b"go\n")
            _pipe(worker.stdin).flush()
        answers = [_answer(worker) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    starts, stops, cpu, pictures = zip(*answers, strict=True)
    return CeilingFigures(int(sum(pictures)), max(stops) - min(starts), sum(cpu), len(shares))


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # every worker is started with pipes
    return pipe


def _answer(worker: subprocess.Popen[bytes]) -> list[float]:
    line = _pipe(worker.stdout).readline()
    if not line:
        raise BenchmarkError(f"a decoding process of the ceiling ended with status {worker.wait()}; its message is above")
    answer: list[float] = json.loads(line)
    return answer


def _shares(dataset: Dataset, processes: int) -> list[list[tuple[SampleTable, PictureSpan]]]:
    pieces = [
        _Piece(*dataset.source.pictures(int(episode), camera)) for camera in dataset.spec.cameras for episode in dataset.selection.tolist()
    ]
    if not pieces:
        return []
    counts = np.array([piece.count for piece in pieces], np.int64)
    owner = np.minimum((np.cumsum(counts) - counts // 2) * processes // int(counts.sum()), processes - 1)
    shares: list[list[tuple[SampleTable, PictureSpan]]] = []
    for number in range(processes):
        mine = [pieces[place] for place in np.flatnonzero(owner == number).tolist()]
        joined: list[_Piece] = []
        for piece in mine:
            last = joined[-1] if joined else None
            if last is not None and last.path == piece.path and last.first + last.count == piece.first:
                joined[-1] = _Piece(last.path, last.first, last.count + piece.count)
            else:
                joined.append(piece)
        spans: list[tuple[SampleTable, PictureSpan]] = []
        for piece in joined:
            table = dataset.index.table(piece.path)
            spans.append((table, picture_span(table, range(piece.first, piece.first + piece.count))))
        if spans:
            shares.append(spans)
    return shares


def _decode(share: list[tuple[SampleTable, PictureSpan]], store: Store) -> list[float]:
    """Decodes a share; returns the moments of start and end, CPU seconds, and pictures."""
    out: NDArray[np.uint8] = np.zeros(0, np.uint8)
    start, cpu, pictures = time.time(), time.process_time(), 0
    for table, span in share:
        done, out = _decode_span(store, table, span, out)
        pictures += done
    return [start, time.time(), time.process_time() - cpu, pictures]


def _decode_span(store: Store, table: SampleTable, span: PictureSpan, out: NDArray[np.uint8]) -> tuple[int, NDArray[np.uint8]]:
    """Feeds a span to one decoder; returns how many pictures it showed, and the array they were written to."""
    entries = parse_sample_entries(table.stsd, table.path)
    # A decoder that expects pictures out of order holds back that many, which costs cache; only streams that need it pay.
    reordered = bool(np.any(table.composition[span.first : span.stop] != table.composition[span.first]))
    decoder: Any = open_decoder(entries[int(table.descriptions[span.first])], table.path, 16 if reordered else 0)
    reformatter = VideoReformatter()
    wanted = set(table.presented[span.wanted].tolist())
    shown = 0

    def show(frames: list[Any]) -> None:
        nonlocal shown, out
        for frame in frames:
            if frame.pts not in wanted:
                continue
            plane = reformatter.reformat(frame, format="rgb24", threads=1).planes[0]
            pixels: NDArray[np.uint8] = np.frombuffer(memoryview(cast("bytes", plane)), np.uint8)
            if len(out) != len(pixels):
                out = np.zeros(len(pixels), np.uint8)
            out[:] = pixels
            shown += 1

    buffers = [memoryview(part) for part in store.read_ranges(table.path, span.ranges)]
    chunk, offset = span.chunks_of(table)
    for place, (number, at, size) in enumerate(
        zip(chunk.tolist(), offset.tolist(), table.sizes[span.first : span.stop].tolist(), strict=True)
    ):
        packet = Packet(size)
        packet.update(cast("bytes", buffers[number][at : at + size]))
        packet.pts = packet.dts = span.first + place
        show(decoder.decode(packet))
    show(decoder.decode(None))
    return shown, out


def _main() -> None:
    """A decoding process: its share comes on standard input, readiness and result go to standard output."""
    store, share = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    sys.stdout.write("[]\n")
    sys.stdout.flush()
    sys.stdin.buffer.readline()
    sys.stdout.write(json.dumps(_decode(share, store)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
