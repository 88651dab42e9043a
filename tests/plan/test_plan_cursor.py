from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_ledger import planned, trial_units

from ingest.errors import CursorError
from ingest.plan import Cursor, PlanSettings, Segment, SkippedRange, Topology, Units, plan_epoch, plan_fingerprint
from ingest.plan.cursor import EVERY_EPOCH

FINGERPRINT = plan_fingerprint(trial_units(), PlanSettings(byte_budget=8 << 30))

numbers = st.integers(0, 4000)
cursors = st.builds(
    lambda epoch, segments, skipped: Cursor(
        FINGERPRINT,
        epoch,
        tuple(
            Segment(topology=Topology(world_size=world + 1, workers=workers + 1, batch_size=batch + 1), batches=batches)
            for world, workers, batch, batches in segments
        ),
        tuple(SkippedRange(dataset, first, first + more, EVERY_EPOCH, 0) for dataset, first, more in skipped),
    ),
    numbers,
    st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(0, 0)), max_size=1),
)


@given(cursors)
def test_json_round_trip(cursor: Cursor) -> None:
    assert Cursor.from_json(cursor.to_json()) == cursor
    assert Cursor.from_json(cursor.to_json().encode()) == cursor
    assert pickle.loads(pickle.dumps(cursor)) == cursor


def test_sizes_stay_small() -> None:
    cursor = Cursor(FINGERPRINT, epoch=1000)
    sizes = []
    for number in range(12):
        cursor = cursor.resume(world_size=1024 - number, workers=16, batch_size=1024).advance(10_000_000)
        sizes.append(len(cursor.to_json()))
    assert sizes[7] <= 1024
    assert max(after - before for before, after in itertools.pairwise(sizes)) <= 80
    assert len(cursor.next_epoch().to_json()) < 512
    assert not any(word in cursor.to_json() for word in ("/", "token", "host"))


def test_segments_extend_open_and_vanish() -> None:
    cursor = Cursor(FINGERPRINT).resume(world_size=2, workers=1, batch_size=4).advance(3)
    assert cursor.resume(world_size=2, workers=1, batch_size=4) is cursor
    wider = cursor.resume(world_size=3, workers=1, batch_size=4)
    assert [one.batches for one in wider.segments] == [3, 0]
    assert wider.batches == 0
    back = wider.resume(world_size=2, workers=1, batch_size=4)
    assert back.segments == cursor.segments
    other = wider.resume(world_size=5, workers=0, batch_size=1)
    assert [one.topology.world_size for one in other.segments] == [2, 5]
    assert other.advance(2).next_epoch().segments == ()
    assert other.advance(2).next_epoch().epoch == 1
    assert cursor.resume(world_size=2, workers=0, batch_size=4) is cursor
    unnamed = json.loads(cursor.to_json())
    unnamed["segments"][0]["workers"] = 0
    assert Cursor.from_json(json.dumps(unnamed)) == cursor


def test_without_a_segment_nothing_can_be_counted() -> None:
    with pytest.raises(CursorError, match="call resume with a topology before advance"):
        Cursor(FINGERPRINT).advance(1)
    with pytest.raises(CursorError, match="call resume with a topology before skip"):
        Cursor(FINGERPRINT).skip(0, 1, 2)
    cursor = Cursor(FINGERPRINT).resume(world_size=1)
    with pytest.raises(CursorError, match=r"batches must be non-negative .* found -1"):
        cursor.advance(-1)
    with pytest.raises(CursorError, match=r"episode must be non-negative .* found -3"):
        cursor.skip(0, -3, 0)


def test_skipped_episodes_are_kept_as_ranges() -> None:
    cursor = Cursor(FINGERPRINT).resume(world_size=1).advance(2)
    for episode in (4, 6, 5, 9, 5):
        cursor = cursor.skip(0, episode, 2)
    cursor = cursor.skip(1, 5, 2)
    assert [(one.dataset, one.first, one.last, one.step) for one in cursor.skipped] == [(0, 4, 6, 2), (0, 9, 9, 2), (1, 5, 5, 2)]
    assert cursor.skip(0, 5, 7) == cursor
    assert Cursor.from_json(cursor.to_json()) == cursor
    following = cursor.next_epoch()
    assert {one.segment for one in following.skipped} == {EVERY_EPOCH}
    assert Cursor.from_json(following.to_json()) == following


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, r"seed: cursor has 1, plan has 2"),
        ({"strategy": "round_robin"}, r"strategy: cursor has 'remaining', plan has 'round_robin'"),
        ({"pool_size": 3}, r"pool_size: cursor has None, plan has 3"),
        ({"byte_budget": 100}, r"byte_budget: cursor has None, plan has 100"),
        ({"tail": "pad"}, r"tail: cursor has 'exact', plan has 'pad'"),
        ({"share": "frame_exact"}, r"share: cursor has 'episodes'"),
        ({"dataset": "other"}, r"dataset: cursor has '[0-9a-f]{16}', plan has '[0-9a-f]{16}'"),
        ({"shuffle": False}, r"shuffle: cursor has True, plan has False"),
    ],
)
def test_a_mismatch_names_the_field(change: dict[str, object], named: str) -> None:
    units = trial_units()
    cursor = planned(units, "remaining", (2, 0, 4), seed=1).cursor_at(2)
    options: dict[str, object] = {"strategy": "remaining", "seed": 1, "clamp_workers": True, **change}
    with pytest.raises(CursorError, match=named):
        plan_epoch(units, PlanSettings(world_size=2, batch_size=4, **options), cursor)  # pyright: ignore[reportArgumentType]


def test_other_units_are_another_plan() -> None:
    cursor = planned(trial_units(), "lanes", (2, 0, 4)).cursor_at(2)
    for other in (Units.from_lengths([11, 7, 1, 23, 2, 9, 16, 5]), trial_units().take(range(7))):  # pyright: ignore[reportArgumentType]
        with pytest.raises(CursorError, match="another plan \\(units: cursor has"):
            planned(other, "lanes", (2, 0, 4), cursor)
    # Bytes decide an order only where a budget does.
    heavier = Units.from_lengths([11, 7, 1, 23, 2, 9, 16, 4], nbytes=range(8))
    planned(heavier, "lanes", (2, 0, 4), cursor)
    budget = planned(heavier, "remaining", (2, 0, 4), byte_budget=20).cursor_at(2)
    with pytest.raises(CursorError, match="bytes: cursor has"):
        planned(trial_units(), "remaining", (2, 0, 4), budget, byte_budget=20)


GOOD = json.loads(Cursor(FINGERPRINT).resume(world_size=2).advance(3).skip(0, 1, 2).to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, found 2"),
        ({"version": True}, "version must be 1, found True"),
        ({"epoch": -1}, "epoch must be non-negative"),
        ({"epoch": "1"}, "epoch must be non-negative .* found '1'"),
        ({"epoch": 1 << 70}, "at most"),
        ({"segments": [{}] * 1001}, "at most 1000 segments, found 1001"),
        ({"segments": [{"world_size": 1 << 40, "workers": 0, "batch_size": 1, "batches": 1}]}, "world_size must be at most"),
        ({"fingerprint": []}, "fingerprint must be an object"),
        ({"fingerprint": {"seed": [1]}}, "fingerprint must be an object of plain values"),
        ({"segments": {}}, "segments must be a list, found dict"),
        ({"segments": [3]}, r"segments\[0\] must be a JSON object, found int"),
        ({"segments": [{"world_size": 1}]}, r"segments\[0\]: missing \['batch_size', 'batches', 'workers'\]"),
        ({"segments": [{"world_size": 0, "workers": 0, "batch_size": 1, "batches": 1}]}, r"segments\[0\]: world_size must be positive"),
        ({"segments": [{"world_size": 1, "workers": 0, "batch_size": 1, "batches": 0.5}]}, r"segments\[0\]\.batches"),
        ({"skipped": [[0, 1, 2]]}, "must hold"),
        ({"skipped": [[0, 5, 4, 0, 0]]}, "first <= last"),
        ({"skipped": [[0, 1, 1, 1, 0]]}, "segment < 1"),
        ({"skipped": [[0, 1, 1, -2, 0]]}, "skipped segment must be non-negative"),
        ({"skipped": [[0, "a", 1, 0, 0]]}, "skipped first must be"),
        ({"more": 1}, r"unknown \['more'\]"),
    ],
)
def test_strict_reading(change: dict[str, object], message: str) -> None:
    with pytest.raises(CursorError, match=message):
        Cursor.from_json(json.dumps({**GOOD, **change}))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"version":1}', "9" * 5000, "[" * 100_000, " " * (1 << 21)])
def test_text_that_is_no_cursor(text: str) -> None:
    with pytest.raises(CursorError):
        Cursor.from_json(text)


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_noise_is_refused(text: str | bytes) -> None:
    with pytest.raises(CursorError):
        Cursor.from_json(text)


@pytest.mark.parametrize("strategy", ["lanes", "remaining"])
@pytest.mark.parametrize("tail", ["exact", "pad", "drop_tail"])
def test_a_position_that_no_run_reaches_is_refused(strategy: str, tail: str) -> None:
    units = Units.from_lengths([9, 20, 14])
    plan = plan_epoch(units, PlanSettings(strategy=strategy, world_size=2, batch_size=4, tail=tail))  # type: ignore[arg-type]
    last = plan.segment.common_steps if tail != "drop_tail" else 6
    at_the_end = plan.cursor.advance(last)
    assert plan_epoch(units, plan.settings, at_the_end).rank(0).start_step == last
    for settings in (plan.settings, replace(plan.settings, world_size=3)):
        with pytest.raises(CursorError, match=rf"counts {last + 1} batches in segment 0 of epoch 0, whose ranks have \d+ at most"):
            plan_epoch(units, settings, at_the_end.advance(1))
    with pytest.raises(CursorError, match="it is damaged, or of another dataset"):
        plan_epoch(units, plan.settings, plan.cursor.advance(10**6))
