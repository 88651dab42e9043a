"""What a training checkpoint holds: weights once, every rank's stream position and pool state, and the language recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import torch
import yaml

from ingest.errors import CursorError, StorageError
from train_integration.poolstate import MAX_FILE_BYTES
from train_integration.scratch import scratch_folder
from train_integration.state import merged_state
from train_integration.stream import SampleStream

_WEIGHTS = "training.pt"
RECIPE_FILE = "recipe.yaml"
"""The language recipe of the run, for people and for `load_recipe`; what a resume compares is in the streams' states."""


def save_checkpoint(metrics: Mapping[str, Any], stream: SampleStream, training: Mapping[str, Any] | None) -> None:
    """Reports metrics and a checkpoint through Ray Train. Every rank must call it at the same step.

    Args:
        metrics: as for `ray.train.report`.
        stream: the rank's stream; its position after the step just taken is saved.
        training: tensors and plain values to save; only rank 0 gives them.
    """
    with scratch_folder("checkpoint") as path:
        state = stream.state_dict()
        (path / f"stream-{stream.rank:05d}.json").write_text(json.dumps(state), encoding="utf-8")
        pools = stream.pool_state()
        if pools is not None:
            (path / pool_file(stream.rank)).write_bytes(pools)
        recipe = state.get("recipe", {}).get("recipe")
        if recipe is not None and training is not None:
            (path / RECIPE_FILE).write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
        if training is not None:
            torch.save(dict(training), path / _WEIGHTS)
        try:
            ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(path))
        except OSError as error:
            raise StorageError(
                f"the checkpoint {dict(metrics)} could not be stored: {error}; make room or mend the storage, and go on with --resume"
            ) from error


def pool_file(rank: int) -> str:
    """Name of the file that spares a rank the replay of a pool order; it may be absent."""
    return f"pool_{rank}.npz"


def load_pools(checkpoint: ray.train.Checkpoint, rank: int) -> bytes | None:
    """A rank's ``pool_state``, where the checkpoint has one that is no larger than such a file can be."""
    with checkpoint.as_directory() as folder:
        path = Path(folder) / pool_file(rank)
        return path.read_bytes() if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES else None


def load_checkpoint(checkpoint: ray.train.Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stream's state, merged over the ranks that saved it, and what `save_checkpoint` was given as ``training``.

    The number of ranks that load it need not be the number that saved it.

    Raises:
        CursorError: the checkpoint holds no stream state.
    """
    with checkpoint.as_directory() as folder:
        path = Path(folder)
        files = sorted(path.glob("stream-*.json"))
        if not files:
            raise CursorError(f"{checkpoint.path}: no stream-*.json in the checkpoint; it was not saved by reelray")
        state = merged_state([json.loads(file.read_text(encoding="utf-8")) for file in files])
        weights = path / _WEIGHTS
        training: dict[str, Any] = torch.load(weights, map_location="cpu", weights_only=True) if weights.exists() else {}
    return state, training
