"""The coverage pools of a rank as one small file, ``pool_<rank>.npz``, beside the position that a checkpoint holds."""

from __future__ import annotations

import io
import zipfile

import numpy as np

from ingest.errors import CursorError
from ingest.plan import RankPlan

MAX_FILE_BYTES = 1 << 26
"""Largest file that is read."""


def dump_pool_state(ranked: RankPlan, step: int) -> bytes | None:
    """States of all workers' pools after ``step`` batches, at most 32 KiB each; None where there is none to keep."""
    states = {f"worker_{worker}": ranked.pool_state(worker, step) for worker in range(ranked.workers)}
    kept = {name: np.frombuffer(state, dtype=np.uint8) for name, state in states.items() if state is not None}
    if not kept:
        return None
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **kept)
    return buffer.getvalue()


def load_pool_state(ranked: RankPlan, content: bytes) -> bool:
    """Starts a rank's pools from stored states.

    A state is a short cut, never a source of truth: one that is damaged or belongs to another share, seed or epoch is
    left aside, and the position alone decides.

    Returns:
        Whether every worker with a pool found its state.
    """
    if len(content) > MAX_FILE_BYTES:
        return False
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as states:
            for worker in range(ranked.workers):
                ranked.load_pool_state(worker, np.asarray(states[f"worker_{worker}"], dtype=np.uint8).tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, CursorError):
        return False
    return True
