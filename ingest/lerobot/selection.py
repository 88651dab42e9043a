"""Which episodes are read."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from ingest.errors import SelectionError
from ingest.lerobot.source import Source

_log = logging.getLogger(__name__)


def parse_episodes(text: str) -> list[int]:
    """Episode numbers from ``1,3`` or ``[1, 3]``.

    Raises:
        SelectionError: anything else.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    parts = [part.strip() for part in inner.split(",") if part.strip()]
    if not parts or not all(part.removeprefix("-").isascii() and part.removeprefix("-").isdigit() for part in parts):
        raise SelectionError(f"episodes {text!r} is not a list of episode numbers; write for example 1,3")
    return [int(part) for part in parts]


def select_episodes(source: Source, episodes: Sequence[int] | None = None, exclude: Sequence[int] | None = None) -> NDArray[np.int64]:
    """The selected episodes, in the order given (or ascending), each once.

    Args:
        source: the dataset.
        episodes: episode numbers; repeats keep their first place. None selects every episode.
        exclude: episode numbers to leave out; numbers that do not exist are dropped with a log line.

    Returns:
        int64[S] episode numbers.

    Raises:
        SelectionError: a negative or unknown episode, or nothing left.
    """
    known = source.episodes.episode_index
    where = source.store.url
    if episodes is None:
        chosen = known
    else:
        numbers = [_number(value, where) for value in episodes]
        negative = [number for number in numbers if number < 0]
        if negative:
            raise SelectionError(f"{where}: episodes {negative} are negative; episodes are numbered from 0 and do not count from the end")
        chosen = np.array(list(dict.fromkeys(numbers)), dtype=np.int64)
        missing = chosen[~np.isin(chosen, known)]
        if missing.size:
            raise SelectionError(f"{where}: episodes {missing.tolist()} do not exist; the dataset has {source.episodes.describe()}")
    if exclude is not None:
        out = np.array([_number(value, where) for value in exclude], dtype=np.int64)
        unknown = out[~np.isin(out, known)]
        if unknown.size:
            _log.warning("%s: exclude_episodes names %s, which do not exist; they are ignored", where, unknown.tolist())
        chosen = chosen[~np.isin(chosen, out)]
    if not len(chosen):
        raise SelectionError(f"{where}: the selection holds no episode; the dataset has {source.episodes.describe()}")
    return chosen.astype(np.int64)


def _number(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or abs(operator.index(value)) >= 2**62:
        raise SelectionError(f"{where}: {value!r} is not an episode number")
    return operator.index(value)
