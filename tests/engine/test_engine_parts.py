"""The engine's parts: packed units, batch memory, frame slots, the choice between two ways of decoding, counters."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich_dataset import DEPTH, PICTURE

from ingest.engine import COUNTERS, BatchAssembler, Counters, PlannedSamples, open_dataset
from ingest.engine.assemble import BufferPool
from ingest.engine.decoded import DecodedUnits
from ingest.engine.fetch import UnitRequest
from ingest.engine.modes import choose_once
from ingest.engine.unit import UnitData, excerpt, pack_unit, unpack_unit
from ingest.engine.units import decoding_saved
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.video.spans import picture_span
from ingest.video.tables import SampleTable


def batch_of(dataset: object, unit: UnitData, frames: list[int]) -> dict[str, object]:
    assembler: BatchAssembler = dataset.assembler()  # type: ignore[attr-defined]
    pictures = DecodedUnits(assembler.spec, ("here",), Counters())
    planned = PlannedSamples(np.zeros(len(frames), np.int64), np.array(frames), np.zeros(len(frames), np.bool_), 1, 0)
    return assembler.batch(planned, {0: unit}, pictures.bind({0: unit}))


def same(left: dict[str, object], right: dict[str, object]) -> None:
    assert set(left) == set(right)
    for key, value in left.items():
        if isinstance(value, np.ndarray):
            other = right[key]
            assert isinstance(other, np.ndarray)
            assert other.dtype == value.dtype
            np.testing.assert_array_equal(value, other)
        else:
            assert value == right[key]


def test_units_survive_packing(rich: Path) -> None:
    deltas = {"observation.images.cam0": [-0.2, 0.0, 0.3], "action": [0.0, 0.4], PICTURE: [-0.1, 0.0]}
    dataset = open_dataset(rich, return_uint8=True, delta_timestamps=deltas)
    reader = dataset.reader()
    for episode, length in zip(dataset.selection.tolist(), dataset.lengths.tolist(), strict=True):
        for lo, hi in {(0, length), (length // 2, length), (0, 1), (length - 1, length)}:
            unit = reader.read(UnitRequest(0, episode, lo, hi))
            header, parts = pack_unit(unit)
            again = unpack_unit(header, b"".join(parts))
            assert (again.episode, again.lo, again.hi, again.episode_length) == (episode, lo, hi, length)
            assert again.payload_bytes == unit.payload_bytes
            assert again.rows.tasks == unit.rows.tasks
            assert again.rows.others.equals(unit.rows.others)
            assert set(again.tracks) == {"observation.images.cam0", "observation.images.cam1", DEPTH}
            for camera, track in unit.tracks.items():
                other = again.tracks[camera]
                assert (other.first, other.path, bytes(other.data)) == (track.first, track.path, bytes(track.data))
                for field in fields(track.table):
                    np.testing.assert_array_equal(getattr(other.table, field.name), getattr(track.table, field.name))
            frames = list(range(lo, hi))
            same(batch_of(dataset, unit, frames), batch_of(dataset, again, frames))
    header, parts = pack_unit(unit)
    assert pack_unit(unpack_unit(header, b"".join(parts))) == (header, parts)


def test_excerpts_hold_only_what_they_need(rich: Path) -> None:
    dataset = open_dataset(rich, return_uint8=True)
    length = int(dataset.lengths.max())
    episode = int(dataset.selection[int(np.argmax(dataset.lengths))])
    unit = dataset.reader().read(UnitRequest(0, episode, 0, length))
    track = unit.tracks["observation.images.cam0"]
    part = excerpt(track, np.array([length - 1], dtype=np.int64))
    assert part.pictures == 1
    assert len(part.data) < len(track.data)
    assert part.numbers.tolist() == [int(track.numbers[length - 1])]
    assert excerpt(track, np.arange(length)).numbers.tolist() == track.numbers.tolist()


@given(st.lists(st.tuples(st.sampled_from([(2, 3), (4,), (1, 2, 2)]), st.integers(0, 3)), max_size=40), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_buffers_in_use_are_never_handed_out(steps: list[tuple[tuple[int, ...], int]], keep: int) -> None:
    pool = BufferPool(keep)
    held: list[tuple[np.ndarray, int]] = []
    for number, (shape, drop) in enumerate(steps):
        array = pool.take(shape, np.dtype(np.int64))
        assert array.shape == shape
        array[...] = number
        # What the user keeps is the array, a view of it, or a view of a view: each must protect the memory.
        kept = (array, array[:1], array.reshape(-1)[:1][:1])[number % 3]
        held.append((kept, number))
        del array, kept
        for _ in range(min(drop, len(held))):
            held.pop(0)
        for values, wanted in held:
            assert (values == wanted).all()


def test_buffers_are_used_again() -> None:
    pool = BufferPool(2)
    places = set()
    for _ in range(6):
        array = pool.take((64, 64), np.dtype(np.uint8))
        places.add(array.__array_interface__["data"][0])
        del array
    assert len(places) == 1


def test_buffers_under_torch_tensors_are_not_reused() -> None:
    torch = pytest.importorskip("torch")
    pool = BufferPool(2)
    array = pool.take((8,), np.dtype(np.int64))
    array[...] = 7
    tensor = torch.from_numpy(array)
    del array
    for _ in range(4):
        pool.take((8,), np.dtype(np.int64))[...] = 0
    assert tensor.tolist() == [7] * 8


UNITS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 9), st.integers(-3, 50)), max_size=24)


@given(UNITS, st.integers(0, 40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_units_decoded_once_fit_the_budget(units: list[tuple[int, int, int, int]], budget: int, priced: bool) -> None:
    units.sort(key=lambda unit: unit[0])
    first = np.array([unit[0] for unit in units], dtype=np.int64)
    last = first + np.array([unit[1] for unit in units], dtype=np.int64)
    pictures = np.array([unit[2] for unit in units], dtype=np.int64)
    saved = np.array([unit[3] for unit in units], dtype=np.float64) if priced else None
    once = choose_once(first, last, pictures, budget, saved)
    held = np.array([pictures[once & (first <= step) & (last >= step)].sum() for step in range(30)])
    assert (held <= budget).all()
    for unit in np.flatnonzero(~once):
        if saved is None or saved[unit] > 0:
            # What was refused does not fit beside those that were taken.
            assert held[first[unit] : last[unit] + 1].max() + pictures[unit] > budget
        else:
            assert saved[unit] <= 0
    if saved is not None:
        assert (saved[once] > 0).all()
    assert choose_once(first, last, pictures, int(pictures.sum())).all()


def test_what_saves_most_is_decoded_whole_where_not_all_fits() -> None:
    first, last, pictures = np.zeros(4, np.int64), np.full(4, 9), np.full(4, 5)
    saved = np.array([1.0, 40.0, 0.0, 20.0])
    assert choose_once(first, last, pictures, 10, saved).tolist() == [False, True, False, True]
    # As much is saved with half the memory, or in half the time: that leaves room for others.
    assert choose_once(first, last, np.array([5, 11, 5, 5]), 11, saved).tolist() == [True, False, False, True]
    assert choose_once(first, np.array([9, 9, 9, 1]), pictures, 5, saved).tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("gop", "bframes", "window"), [(1, 0, None), (4, 0, None), (12, 2, None), (6, 0, [-0.2, 0.0]), (12, 2, [-0.1, 0.1])]
)
def test_what_decoding_whole_saves_is_what_decoders_need_not_be_fed(
    tmp_path: Path, gop: int, bframes: int, window: list[float] | None
) -> None:
    place = tmp_path / "set"
    make_dataset(place, MakeOptions(episodes=3, frames="9:20", cameras=1, size=(32, 64), gop=gop, bframes=bframes, video_files=2, fps=10))
    dataset = open_dataset(place, delta_timestamps=None if window is None else {"observation.images.cam0": window})
    units = dataset.units(lane_frames=8)
    saved = decoding_saved(units, dataset.source, dataset.index, dataset.spec)
    camera = dataset.spec.cameras[0]
    for row, (episode, lo, hi) in enumerate(zip(units.episode.tolist(), units.lo.tolist(), units.hi.tolist(), strict=True)):
        path, begin, count = dataset.source.pictures(episode, camera)
        table = dataset.index.table(path)

        def fed(first: int, stop: int, table: SampleTable = table, begin: int = begin) -> int:
            span = picture_span(table, range(begin + first, begin + stop))
            return span.stop - span.first

        whole = fed(*dataset.spec.reach((camera,), lo, hi, count))
        alone = sum(fed(*dataset.spec.reach((camera,), frame, frame + 1, count)) for frame in range(lo, hi))
        # Windows are taken as if episodes had no ends.
        slack = 0 if window is None else 2 * max(gop, 2) * 2
        assert abs(saved[row] / (32 * 64) - (alone - whole)) <= slack, (episode, lo, hi)
    if gop == 1 and window is None:
        assert not saved.any()


def test_counters_know_their_names() -> None:
    counters = Counters()
    counters.merge({"reelray_retries": 2.0})
    with counters.timed("reelray_wait_seconds"):
        counters.add("reelray_retries")
    assert counters.totals()["reelray_retries"] == 3
    assert set(counters.totals()) == set(COUNTERS)
    with pytest.raises(KeyError):
        counters.add("reelray_typo")


def test_a_batch_may_mix_numbers_and_nulls(rich: Path) -> None:
    dataset = open_dataset(rich, columns=["index", "task_index", "action"], cameras=[], return_uint8=True)
    reader = dataset.reader()
    units = {number: reader.read(UnitRequest(0, number, 0, 2)) for number in (0, 1)}
    rows = units[1].rows
    numbers = {key: values for key, values in rows.numbers.items() if key != "action"}
    empty = UnitData(0, 1, 0, 2, 2, type(rows)(0, 2, numbers, pa.table({"action": pa.nulls(2)}), rows.tasks), {})
    planned = PlannedSamples(np.array([0, 1, 0]), np.array([0, 1, 1]), np.array([False, False, True]), 0, 0)
    batch = dataset.assembler().batch(planned, {0: units[0], 1: empty}, lambda *_: np.zeros(1))
    assert isinstance(batch["action"], list)
    np.testing.assert_array_equal(batch["action"][0], units[0].rows.numbers["action"][0])
    assert batch["action"][1] is None
    assert batch["is_pad"].tolist() == [False, False, True]
