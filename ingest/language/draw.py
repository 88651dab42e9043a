"""Deterministic choice: a sample's draws depend on its global index and on nothing else.

Python's ``hash`` differs between processes and random generators carry state; a keyed digest does neither, so every
worker, every epoch and every resumed run picks the same branch for the same frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


def draw_integer(text: str) -> int:
    """The draw for a text: an integer in ``[0, 2**64)``, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def unit_draw(index: int, prefix: str = "") -> float:
    """The draw of a sample as a double in ``[0, 1]``.

    Args:
        index: global frame index of the dataset; may be negative.
        prefix: names the purpose, so that different choices about one sample are independent.
    """
    return draw_integer(f"{prefix}{index}") / 2**64


def weighted_choice(candidates: Sequence[tuple[T, float]], draw: float) -> T | None:
    """Walks the cumulative weights in the order given and takes the first interval that holds the draw.

    Args:
        candidates: ``(choice, weight)`` pairs; their order is part of the result.
        draw: a number in ``[0, 1]``.

    Returns:
        The choice; None when there is no candidate or the weights sum to nothing. What rounding leaves over at the
        end belongs to the last candidate.
    """
    total = 0.0
    for _, weight in candidates:
        total += weight
    if not candidates or total <= 0:
        return None
    target = draw * total
    reached = 0.0
    for choice, weight in candidates:
        reached += weight
        if target < reached:
            return choice
    return candidates[-1][0]
