"""Keeps Ray Train's list of checkpoints whole: Ray writes it anew, in place, at every checkpoint.

A driver that dies in the middle of that, or a disk that is full just then, leaves a list that cannot be read, and with it
a run that cannot be resumed although all its checkpoints are there.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ray.train import UserCallback

_LOG = logging.getLogger("reelray.train")
_LIST = "checkpoint_manager_snapshot.json"
_KEPT = "checkpoint_manager_snapshot.kept.json"


class SnapshotKeeper(UserCallback):
    """Keeps a copy of the list, as it is after every checkpoint. Runs in Ray Train's controller.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:  # noqa: ARG002 - the signature is Ray's
        if checkpoint is None:
            return
        try:
            written = (self._run / _LIST).read_bytes()
            if _is_whole(written):
                _replace(self._run / _KEPT, written)
        except OSError as error:
            _LOG.warning("the list of checkpoints was not copied, an earlier copy stays: %s", error)


def mend_snapshot(run: Path) -> None:
    """Puts the copy in the place of a list that cannot be read. Call it before a run is resumed.

    Args:
        run: folder of the run; it need not exist.
    """
    found = run / _LIST
    if not found.exists() or _is_whole(found.read_bytes()):
        return
    kept = run / _KEPT
    if kept.exists():
        _LOG.warning("%s was cut off while it was written: the run goes on from the checkpoint before", found)
        _replace(found, kept.read_bytes())
    else:
        _LOG.warning("%s was cut off while it was written for the first time: the run begins again", found)
        found.unlink()


def _is_whole(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(content)
    temporary.replace(path)
