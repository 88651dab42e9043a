"""The list of checkpoints survives whatever ends its writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train_integration.snapshots import SnapshotKeeper, mend_snapshot


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path


def written(run: Path, content: str) -> Path:
    (run / "checkpoint_manager_snapshot.json").write_text(content)
    return run / "checkpoint_manager_snapshot.json"


@pytest.mark.parametrize("cut_off", ["", '{"checkpoints": [1, 2', "null"])
def test_a_list_that_was_cut_off_is_the_one_before(run: Path, cut_off: str) -> None:
    keeper = SnapshotKeeper(run)
    for checkpoints in ([1], [1, 2]):
        found = written(run, json.dumps({"checkpoints": checkpoints}))
        keeper.after_report(None, [], object())
    written(run, cut_off)
    # A list that cannot be read is never kept.
    keeper.after_report(None, [], object())
    mend_snapshot(run)
    assert json.loads(found.read_text()) == {"checkpoints": [1, 2]}


def test_a_whole_list_stays(run: Path) -> None:
    keeper = SnapshotKeeper(run)
    written(run, '{"checkpoints": [1]}')
    keeper.after_report(None, [], object())
    found = written(run, '{"checkpoints": [1, 2]}')
    keeper.after_report(None, [], None)
    mend_snapshot(run)
    assert json.loads(found.read_text()) == {"checkpoints": [1, 2]}


def test_the_first_list_of_all_may_be_lost(run: Path) -> None:
    mend_snapshot(run / "nothing here")
    found = written(run, '{"che')
    mend_snapshot(run)
    assert not found.exists()


def test_a_copy_that_cannot_be_written_ends_nothing(run: Path) -> None:
    keeper = SnapshotKeeper(run / "gone")
    keeper.after_report(None, [], object())
