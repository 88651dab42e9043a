"""The conformance files: every one agrees with its truth or is refused with a reason, within time and memory."""

from __future__ import annotations

import functools
import itertools
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
import pytest

from ingest.errors import DecodeError, ReelrayError, ShortReadError, UnsupportedTimelineError, VideoFormatError
from ingest.storage.local import LocalStore
from ingest.video.fetch import read_pictures
from ingest.video.index import ProbingIndex
from ingest.video.pixels import PictureWriter
from ingest.video.spans import gop_starts
from ingest.video.tables import SampleTable

T = TypeVar("T")

pytestmark = pytest.mark.shared

TIMELINES = {"elst_empty_only", "elst_many", "elst_rate2", "elst_rate_half", "elst_reorder", "elst_repeat"}
REFUSED = {
    "bad_boxsize_4", "bad_empty_0b", "bad_ftyp_only", "bad_garbage", "bad_junk_before_ftyp", "bad_moov_size_small", "bad_no_moov",
    "bad_trunc_moov_at_end", "bad_webm_named_mp4", "cenc_encrypted", "hm_stsz_huge_count",
}  # fmt: skip
UNREADABLE = {"bad_mdat_zeroed_tail": 29, "bad_trunc_faststart_60pct": 0, "hm_stco_beyond_eof": 0, "hm_stz2_4": 0, "hm_stz2_8": 0}


def _files(root: Path) -> list[Path]:
    return [path.with_suffix("").with_suffix("") for path in sorted((root / "data" / "mp4").glob("*.truth.json"))]


def _linear(path: Path) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                found.append(frame.to_ndarray(format="rgb24").copy())
                if len(found) == 200:
                    break
    except av.FFmpegError:
        pass
    return found


def _attempt(action: Callable[[], T], kinds: type[ReelrayError] | tuple[type[ReelrayError], ...]) -> tuple[T | None, ReelrayError | None]:
    try:
        return action(), None
    except kinds as error:
        return None, error


def _agrees(table: SampleTable, truth: dict[str, Any], stem: str) -> None:
    flags = np.isin(np.arange(table.samples), table.sync)
    timed = np.minimum(table.dts, table.dts[table.samples - table.untimed]) if table.untimed else table.dts
    rows = np.stack([table.offsets, table.sizes, timed, timed + table.composition, flags], 1).tolist()
    assert rows == [[*row[:4], row[5]] for row in truth["box"]["samples"]], stem
    if stem not in UNREADABLE:
        assert table.presented_pts.tolist() == [row[0] for row in truth["decode"]["frames"]], stem


def _decodes(store: LocalStore, table: SampleTable, expected: list[np.ndarray], stem: str) -> None:
    writer, pictures = PictureWriter(), min(table.pictures, 200)
    starts = [*(n for n in gop_starts(table).tolist() if n < pictures), pictures]
    runs = [range(a, b) for a, b in itertools.pairwise(starts)] + [range(n, min(n + 2, pictures)) for n in range(0, pictures, 17)]

    def compare(run: range) -> None:
        for picture, frame in read_pictures(store, table, run):
            if picture < len(expected):
                np.testing.assert_array_equal(writer.picture(frame), expected[picture], err_msg=f"{stem} {picture}")

    for run in runs:
        _, error = _attempt(functools.partial(compare, run), (DecodeError, ShortReadError))
        if error is not None:
            assert stem in UNREADABLE, error
            assert run.stop > UNREADABLE[stem]
            assert table.path in str(error)
            assert "picture" in str(error)


def test_every_file_agrees_or_is_refused(shared_dir: Path) -> None:
    files = _files(shared_dir)
    assert len(files) >= 100
    store = LocalStore.at(shared_dir / "data" / "mp4")
    index = ProbingIndex(store)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in files:
        truth = json.loads(path.with_name(path.name + ".truth.json").read_text())
        began = time.process_time()
        table, error = _attempt(functools.partial(index.table, path.name), VideoFormatError)
        assert (error is not None) == (path.stem in REFUSED | TIMELINES), error
        if error is not None:
            assert isinstance(error, UnsupportedTimelineError) == (path.stem in TIMELINES)
            assert path.name in str(error)
            assert "\n" not in str(error)
        if table is not None:
            _agrees(table, truth, path.stem)
            _decodes(store, table, _linear(path), path.stem)
        assert time.process_time() - began < 2.5, path.name  # the linear decode that it is compared with included
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


def test_every_trial_file_reads_episode_by_episode(shared_dir: Path) -> None:
    writer, checked = PictureWriter(), 0
    for path in sorted((shared_dir / "data" / "trials" / "09_gop_and_edit_lists").rglob("*.mp4")):
        store, expected = LocalStore.at(path.parent), _linear(path)
        table = ProbingIndex(store).table(path.name)
        assert table.pictures == len(expected) == 90
        for run in (range(24), range(24, 60), range(60, 90)):
            for picture, frame in read_pictures(store, table, run):
                np.testing.assert_array_equal(writer.picture(frame), expected[picture])
                checked += 1
    assert checked >= 270


def test_every_other_dataset_file_can_be_indexed(shared_dir: Path) -> None:
    refused: list[str] = []
    for path in sorted((shared_dir / "data").rglob("*.mp4")):
        if path.parent.name == "mp4":
            continue
        store = LocalStore.at(path.parent)
        try:
            table = ProbingIndex(store).table(path.name)
            assert not table.truncated.size
            next(iter(read_pictures(store, table, [table.pictures - 1])))
        except ReelrayError as error:
            refused.append(str(error))
    assert not refused
