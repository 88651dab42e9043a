"""The state of streams as data: what one rank saves, and one state out of those of all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ingest.errors import CursorError
from ingest.plan import Cursor

STATE_VERSION = 1
"""Version of the dictionaries that streams save."""


def merged_state(states: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One state out of those of all ranks: the same position, and every rank's skipped episodes.

    Raises:
        CursorError: the ranks do not stand at the same batch.
    """
    cursors = [Cursor.from_json(json.dumps(state["cursor"])) for state in states]
    first = cursors[0]
    if any((one.epoch, one.segments) != (first.epoch, first.segments) for one in cursors):
        places = sorted({f"epoch {one.epoch} batch {one.batches}" for one in cursors})
        raise CursorError(f"the ranks' states stand at different places: {', '.join(places)}; save them at the same step")
    skipped = tuple(dict.fromkeys(one for cursor in cursors for one in cursor.skipped))
    merged = replace(first, skipped=skipped)
    return {**states[0], "version": STATE_VERSION, "cursor": json.loads(merged.to_json())}
