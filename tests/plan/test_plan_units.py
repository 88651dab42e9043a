from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_ledger import every_frame

from ingest.errors import PlanError
from ingest.plan import Units, cut_units


def test_columns_are_checked_copied_and_read_only() -> None:
    lengths = np.array([3, 4])
    units = Units.from_lengths(lengths)
    lengths[0] = 99
    assert units.frames.tolist() == [3, 4]
    with pytest.raises(ValueError, match="read-only"):
        units.hi[0] = 5
    with pytest.raises(PlanError, match=r"units\.cost must have shape \(2,\)"):
        Units.from_lengths([3, 4], cost=[1.0])
    with pytest.raises(PlanError, match=r"units\.bytes\[1\] \(episode 1\) must be a number >= 0, found -5"):
        Units.from_lengths([3, 4], nbytes=[1, -5])
    with pytest.raises(PlanError, match=r"units\.cost\[0\].*found inf"):
        Units.from_lengths([3], cost=[np.inf])
    with pytest.raises(PlanError, match=r"units\.hi\[0\] \(episode 0\) must be a frame number not below lo, found -1"):
        Units.from_lengths([-1])


def test_frames_must_not_be_selected_twice() -> None:
    with pytest.raises(PlanError, match=r"units 0 and 2 share frames of episode 7 of dataset 0"):
        Units.from_lengths([3, 4, 5], episodes=[7, 2, 7])
    two = [Units.from_lengths([3], dataset=number) for number in (0, 1)]
    assert len(Units.concatenate(two)) == 2
    with pytest.raises(PlanError, match="no unit table"):
        Units.concatenate([])


def test_take_renumbers() -> None:
    units = Units.from_lengths([3, 4, 5]).take(np.array([2, 0]))
    assert units.episode.tolist() == [2, 0]
    assert units.frames.tolist() == [5, 3]


def test_runs_end_at_boundaries_and_keep_frames_bytes_and_cost() -> None:
    units = Units.from_lengths([25, 7], nbytes=[1001, 50])
    cut = cut_units(units, {0: [0, 10, 12, 20]}, max_frames=12)
    assert list(zip(cut.episode.tolist(), cut.lo.tolist(), cut.hi.tolist(), strict=True)) == [
        (0, 0, 12),
        (0, 12, 20),
        (0, 20, 25),
        (1, 0, 7),
    ]
    assert every_frame(cut) == every_frame(units)
    assert cut.bytes[:3].sum() == 1001
    assert cut.bytes[3] == 50
    assert cut.cost.tolist() == pytest.approx([12, 8, 5, 7])


def test_a_gop_above_the_limit_stays_whole_and_ends_at_its_boundary() -> None:
    cut = cut_units(Units.from_lengths([40]), {0: [0, 15, 18, 38]}, max_frames=4)
    assert cut.lo.tolist() == [0, 15, 18, 38]
    by_bytes = cut_units(Units.from_lengths([40], nbytes=[4000]), {0: range(0, 40, 5)}, max_bytes=1000)
    assert by_bytes.lo.tolist() == [0, 10, 20, 30]
    assert by_bytes.bytes.tolist() == [1000] * 4
    with pytest.raises(PlanError, match="max_frames must be positive, found 0"):
        cut_units(Units.from_lengths([4]), {}, max_frames=0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 15), st.integers(0, 10**15))
def test_cutting_keeps_every_frame_and_every_byte(lengths: list[int], limit: int, gop: int, nbytes: int) -> None:
    units = Units.from_lengths(lengths, nbytes=[nbytes + row for row in range(len(lengths))])
    cut = cut_units(units, {row: np.arange(0, count, gop) for row, count in enumerate(lengths)}, max_frames=limit)
    assert every_frame(cut) == every_frame(units)
    assert np.bincount(cut.episode, cut.frames, minlength=len(lengths)).tolist() == lengths
    assert [int(cut.bytes[cut.episode == row].sum()) for row in range(len(lengths))] == units.bytes.tolist()
    assert (cut.lo % gop == 0).all()
    assert (cut.frames <= max(limit, gop)).all()
