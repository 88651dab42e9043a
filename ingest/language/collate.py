"""Batches of samples that carry language: messages stay Python lists, everything else is stacked as usual."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ingest.errors import LanguageError
from ingest.language.step import MESSAGES_KEY, READ_MESSAGES_KEYS, STREAMS_KEY, TARGETS_KEY
from ingest.language.styles import LANGUAGE_COLUMNS

LIST_KEYS = (*READ_MESSAGES_KEYS, STREAMS_KEY, TARGETS_KEY, *LANGUAGE_COLUMNS)
"""Keys that a batch holds as one Python list with an entry per sample."""

Stack = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
"""Stacks the remaining keys of samples that all have the same ones."""


def stack_arrays(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The default stack: arrays and numbers become arrays with a leading batch dimension, other values lists."""
    batch: dict[str, Any] = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        numeric = all(isinstance(value, np.ndarray | np.generic | int | float | bool) for value in values)
        batch[key] = np.stack([np.asarray(value) for value in values]) if numeric else values
    return batch


def collate_language(
    samples: Sequence[Mapping[str, Any] | None], stack: Stack = stack_arrays, *, list_keys: Sequence[str] = LIST_KEYS
) -> dict[str, Any] | None:
    """One batch from samples of which some may be None.

    Args:
        samples: rendered or raw samples; None entries have no supervision and are left out.
        stack: for the keys outside ``list_keys``, for example torch's default collate function.
        list_keys: keys that stay lists; add a configured messages key here.

    Returns:
        The batch, or None when nothing is left.

    Raises:
        LanguageError: a key is in some samples of the batch and not in others.
    """
    present = [sample for sample in samples if sample is not None]
    if not present:
        return None
    keys = {key: sum(key in sample for sample in present) for sample in present for key in sample}
    partial = {key: count for key, count in keys.items() if count != len(present)}
    if partial:
        key, count = next(iter(partial.items()))
        raise LanguageError(
            f"{key!r} is in {count} of {len(present)} samples of the batch: render all of them with one recipe, or none",
            kind="partial_batch_key",
        )
    lists = {key: [sample[key] for sample in present] for key in present[0] if key in list_keys}
    rest = [{key: value for key, value in sample.items() if key not in list_keys} for sample in present]
    return {**stack(rest), **lists} if rest[0] else lists


def add_batch_dimension(
    data: Mapping[str, Any], messages_key: str = MESSAGES_KEY, streams_key: str = STREAMS_KEY, targets_key: str = TARGETS_KEY
) -> dict[str, Any]:
    """A copy in which the rendered fields of one sample are wrapped as a batch of one; a batch stays as it is."""
    wrapped = dict(data)
    messages = data.get(messages_key)
    if isinstance(messages, list) and not (messages and isinstance(cast("list[Any]", messages)[0], list)):
        for key in (messages_key, streams_key, targets_key):
            if key in wrapped:
                wrapped[key] = [wrapped[key]]
    return wrapped
