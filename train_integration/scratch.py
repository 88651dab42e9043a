"""Temporary folders that do not outlive their process, however it ends."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from uuid import uuid4

_KEEPER = 'exec 3<&0; { cat <&3; rm -rf -- "$0"; } &'


@contextlib.contextmanager
def scratch_folder(role: str) -> Iterator[Path]:
    """A temporary folder that is removed when the block ends, or when the process does: SIGKILL leaves nothing either.

    A small shell waits for the end of a pipe that only this process holds, and removes the folder then. It is neither a
    child nor of the process's group, since whoever kills a process, like Ray a worker, may kill its children first.

    Args:
        role: what the folder is for, in one word; part of its name.
    """
    folder = Path(gettempdir()) / f"reelray-{role}-{uuid4().hex[:12]}"
    command = ["/bin/sh", "-c", _KEEPER, str(folder)]
    # The shell that is started here ends at once; the one that waits is left to the system.
    keeper = subprocess.Popen(  # noqa: S603 - the folder is an argument, never code
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    with keeper:
        keeper.wait()
        # Made only now that somebody is there to remove it, whenever this process is killed.
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
