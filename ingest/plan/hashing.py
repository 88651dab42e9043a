"""Keyed hashes and permutations as functions of an index, vectorised over NumPy arrays.

Nothing here keeps state: the value at an index depends on the key and the index alone, which is what lets an
order be entered anywhere. All arithmetic is modulo 2**64 on uint64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLY_1
    value = (value ^ (value >> np.uint64(27))) * _MULTIPLY_2
    return value ^ (value >> np.uint64(31))


def hash_key(*parts: ArrayLike) -> NDArray[np.uint64]:
    """A 64-bit hash of the parts, in order; integer arrays broadcast against each other, uint64[N] (N >= 1)."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = np.atleast_1d(np.asarray(part)).astype(np.uint64)
        state = _mix((state ^ word) + _STEP)
    return state


def permute(index: NDArray[np.int64], size: NDArray[np.int64], key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Image of ``index`` under the permutation of ``range(size)`` that ``key`` names, element by element.

    Rounds of odd multiplication, addition and a folding shift are bijections of the smallest power of two that
    holds ``size``; values outside ``range(size)`` are sent through again until they fall inside (cycle walking),
    which takes less than two passes on average.

    Args:
        index: int64[N], ``0 <= index < size``.
        size: int64[N], at least 1.
        key: uint64[N].

    Returns:
        int64[N], again in ``range(size)``.
    """
    bits = np.maximum(np.frexp((size - 1).astype(np.float64))[1], 1).astype(np.uint64)
    mask = (_ONE << bits) - _ONE
    shift = (bits + _ONE) >> _ONE
    second = _mix(key + _STEP)
    third = _mix(second + _STEP)
    factors = (key | _ONE, second | _ONE, third | _ONE)
    addends = (key >> np.uint64(32), second >> np.uint64(32), third >> np.uint64(32))
    value = index.astype(np.uint64)
    limit = size.astype(np.uint64)
    todo = np.arange(len(value))
    while len(todo):
        part, part_mask, part_shift = value[todo], mask[todo], shift[todo]
        for factor, addend in zip(factors, addends, strict=True):
            part = (part * factor[todo] + addend[todo]) & part_mask
            part ^= part >> part_shift
        value[todo] = part
        todo = todo[part >= limit[todo]]
    return value.astype(np.int64)


def shuffled_rows(rows: NDArray[np.int64], width: int, key: int) -> NDArray[np.int64]:
    """One uniform permutation of ``range(width)`` for each row number, int64[len(rows), width]."""
    words = hash_key(key, np.repeat(rows, width), np.tile(np.arange(width), len(rows)))
    return np.argsort(words.reshape(len(rows), width), axis=1, kind="stable").astype(np.int64, copy=False)
