"""Files that are either whole or absent, however a process ends."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes ``data`` beside ``path`` and renames it into place; a reader sees the old content or all of the new.

    Args:
        path: its folder is made when missing; a link in its place is replaced, never followed.
        data: whole content.
        durable: also flush to the device before the rename, for what cannot be made again.

    Raises:
        OSError: no space, no permission, or a folder that cannot be made; names the file, and nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.tmp")
    try:
        # Not mkstemp, whose files nobody but their owner may read: the umask decides, as for any file.
        with open(temporary, "xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            # What a full disk says of a write does not name the file.
            error.filename = os.fspath(path)
        raise
