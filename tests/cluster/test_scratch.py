"""Temporary folders end with their process, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from train_integration.scratch import scratch_folder

HOLD = """
import signal, sys, time
# A suite that runs in the background has it ignored, and its children too.
signal.signal(signal.SIGINT, signal.default_int_handler)
from train_integration.scratch import scratch_folder
with scratch_folder("test") as folder:
    (folder / "inside").mkdir()
    (folder / "inside" / "file").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_folder_ends_with_its_block() -> None:
    with scratch_folder("test") as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_a_folder_ends_with_a_block_that_fails() -> None:
    seen: list[Path] = []

    def fail() -> None:
        with scratch_folder("test") as folder:
            seen.append(folder)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not seen[0].exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_folder_ends_with_its_process(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "inside" / "file").exists()
        # As Ray does with workers, and a terminal or a supervisor with drivers: children first, then the whole process group.
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        os.killpg(process.pid, number)
        process.wait(timeout=20)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
