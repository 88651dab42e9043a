"""Commands run in this process, and what they answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Answer = tuple[int, str, str]
"""Status, output, errors."""

Run = Callable[..., Answer]
"""The fixture ``run``."""


def loaded(result: Answer) -> Any:
    """The JSON of a command that worked."""
    status, out, err = result
    assert status == 0, err
    return json.loads(out)


def failure(result: Answer) -> str:
    """The one line of a failed command."""
    status, _, err = result
    assert status == 1
    lines = [line for line in err.splitlines() if line.startswith("reelray ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]
