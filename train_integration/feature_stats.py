"""Statistics of features: as a dataset stores them, out of its rows, and of several datasets as if they were one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.engine.dataset import Dataset
from ingest.errors import DatasetError
from train_integration.mixture_features import Member

Statistics = dict[str, NDArray[np.float64]]

_NAMES = ("count", "mean", "std", "min", "max")
_ROWS_EPISODES = 64


def feature_statistics(dataset: Dataset, keys: Sequence[str]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Mean and standard deviation of vector features: from ``stats.json``, or from the first episodes' rows.

    Raises:
        DatasetError: a feature has no numbers.
    """
    found: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    missing: list[str] = []
    for key in keys:
        stored: Any = dataset.source.stats.get(key, {})
        if "mean" in stored and "std" in stored:
            found[key] = (np.asarray(stored["mean"], np.float64).reshape(-1), np.asarray(stored["std"], np.float64).reshape(-1))
        else:
            missing.append(key)
    if missing:
        values: dict[str, list[NDArray[Any]]] = {key: [] for key in missing}
        reader = dataset.row_reader()
        for episode in dataset.selection[:_ROWS_EPISODES].tolist():
            rows = reader.read(episode, missing)
            for key in missing:
                if key not in rows.numbers:
                    raise DatasetError(f"{dataset.location}: feature {key} has no numbers to train on in episode {episode}")
                values[key].append(rows.numbers[key].reshape(rows.length, -1))
        for key, parts in values.items():
            joined = np.concatenate(parts).astype(np.float64)
            found[key] = (joined.mean(0), joined.std(0))
    return found


def stored_statistics(member: Member, dataset: Dataset) -> dict[str, Statistics]:
    """What a dataset stores about its features, under the mixture's names, with vectors filled up."""
    found: dict[str, Statistics] = {}
    frames = np.array([dataset.num_frames], dtype=np.float64)
    for key, stored in dataset.source.stats.items():
        if key in member.drop or not {"mean", "std"} <= stored.keys():
            continue
        one = {name: np.asarray(stored[name], dtype=np.float64) for name in _NAMES if name in stored}
        width = member.pad.get(member.name(key))
        if width is not None:
            one = {name: values if name == "count" else padded(values, width) for name, values in one.items()}
        found[member.name(key)] = {"count": frames} | one | {"count": frames}
    for key, width in member.pad.items():
        zeros = dict.fromkeys(("mean", "std", "min", "max"), np.zeros(width))
        found.setdefault(key, {"count": frames, **zeros})
    return found


def padded(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """A vector filled up with zeros."""
    return np.pad(values.reshape(-1), (0, max(0, width - values.size)))


def merged_statistics(parts: Sequence[Mapping[str, NDArray[np.float64]]], weights: Sequence[float] | None) -> Statistics:
    """Statistics of several datasets as if they were one.

    Args:
        parts: ``count``, ``mean`` and ``std`` of each dataset, and ``min`` and ``max`` where all have them.
        weights: shares of the datasets; None counts each by its own ``count``.
    """
    counts = np.array([float(part["count"].reshape(-1)[0]) for part in parts])
    share = counts if weights is None else np.asarray(weights, dtype=np.float64)
    share = share / share.sum()
    mean = sum(weight * part["mean"] for weight, part in zip(share, parts, strict=True))
    # The variance of the whole: what each part varies by, and how far its mean lies from the common one.
    square = sum(weight * (part["std"] ** 2 + (part["mean"] - mean) ** 2) for weight, part in zip(share, parts, strict=True))
    merged = {"count": np.array([counts.sum()]), "mean": np.asarray(mean), "std": np.sqrt(square)}
    used = [part for part, weight in zip(parts, share, strict=True) if weight > 0]
    for name, smallest in (("min", np.minimum), ("max", np.maximum)):
        if all(name in part for part in used):
            merged[name] = smallest.reduce([part[name] for part in used])
    return merged
