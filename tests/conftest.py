"""Fixtures that every area of the suite shares."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

import pytest
from calls import Answer, Run


def _shared_root() -> Path | None:
    value = os.environ.get("REELRAY_SHARED")
    return Path(value) if value and (Path(value) / "data").is_dir() else None


_ended: list[int] = []
"""Status of the session, once it has one."""


@atexit.register
def _leave() -> None:
    """Ends the process before the interpreter and its libraries are taken down; Ray's own workers leave in the same way.

    Threads of Ray's library may outlive the clusters that were started and ended in this process, and have been seen to crash it then,
    after the last test had passed. Whatever else is to be done at the end was registered later, and is done by now.
    """
    if _ended and "ray" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ended[-1])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keeps the status for `_leave`."""
    _ended.append(int(session.exitstatus))


def pytest_report_header() -> str:
    root = _shared_root()
    return "conformance data: " + ("from REELRAY_SHARED" if root else "REELRAY_SHARED is not set, its suites are skipped")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow and soak tests to runs whose ``-m`` expression names them; skips conformance suites aloud without their data."""
    chosen = config.getoption("-m") or ""
    left = [item for item in items if any(item.get_closest_marker(marker) and marker not in chosen for marker in ("slow", "soak"))]
    config.hook.pytest_deselected(items=left)
    # A skipped test is one that this machine cannot run; these are run by another command.
    items[:] = [item for item in items if item not in set(left)]
    for item in items:
        if item.get_closest_marker("shared") and _shared_root() is None:
            item.add_marker(pytest.mark.skip(reason="needs the conformance data: set REELRAY_SHARED"))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The conformance data's parent folder; tests that use it carry the ``shared`` marker."""
    root = _shared_root()
    if root is None:
        pytest.skip("needs the conformance data: set REELRAY_SHARED")
    return root


@pytest.fixture(autouse=True)
def _isolated_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps every test away from the user's Hugging Face caches and tokens."""
    home = tmp_path_factory.mktemp("hf-home", numbered=True)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_LEROBOT_HOME", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: (status, output, errors)."""
    from reelray.cli import main

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
