"""What a training checkpoint holds: weights once, and the stream's position of every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray.train
import torch

from ingest.errors import CursorError
from train_integration.stream import SampleStream, merged_state

_WEIGHTS = "training.pt"


def save_checkpoint(metrics: Mapping[str, Any], stream: SampleStream, training: Mapping[str, Any] | None) -> None:
    """Reports metrics and a checkpoint through Ray Train. Every rank must call it at the same step.

    Args:
        metrics: as for `ray.train.report`.
        stream: the rank's stream; its position after the step just taken is saved.
        training: tensors and plain values to save; only rank 0 gives them.
    """
    with TemporaryDirectory(prefix="reelray-checkpoint-") as folder:
        path = Path(folder)
        (path / f"stream-{stream.rank:05d}.json").write_text(json.dumps(stream.state_dict()), encoding="utf-8")
        if training is not None:
            torch.save(dict(training), path / _WEIGHTS)
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder))


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
