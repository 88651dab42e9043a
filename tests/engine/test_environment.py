"""Variables that are set for a library, and only as long as it runs."""

from __future__ import annotations

import os

import pytest

from ingest.settings import defaults_of_environment


def test_defaults_yield_to_what_is_set_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELRAY_TEST_SET", "mine")
    monkeypatch.delenv("REELRAY_TEST_FREE", raising=False)
    with defaults_of_environment({"REELRAY_TEST_SET": "theirs", "REELRAY_TEST_FREE": "theirs"}):
        assert (os.environ["REELRAY_TEST_SET"], os.environ["REELRAY_TEST_FREE"]) == ("mine", "theirs")
    assert os.environ["REELRAY_TEST_SET"] == "mine"
    assert "REELRAY_TEST_FREE" not in os.environ
