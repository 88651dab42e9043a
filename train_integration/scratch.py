"""Temporary folders that do not outlive their process, however it ends."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

_REMOVE = 'cat > /dev/null; rm -rf -- "$0"'


@contextlib.contextmanager
def scratch_folder(role: str) -> Iterator[Path]:
    """A temporary folder that is removed when the block ends, or when the process does: SIGKILL leaves nothing either.

    A small shell waits for the end of a pipe that only this process holds, and removes the folder then. It belongs to a
    session of its own, so that a signal to the process group does not end it first.

    Args:
        role: what the folder is for, in one word; part of its name.
    """
    folder = mkdtemp(prefix=f"reelray-{role}-")
    command = ["/bin/sh", "-c", _REMOVE, folder]
    # Its end closes the pipe and waits until the folder is gone.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # noqa: S603 - the folder is an argument, never code
        yield Path(folder)
