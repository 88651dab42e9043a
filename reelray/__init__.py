"""Streams LeRobotDataset v3 video into Ray Train: every frame exactly once, in a deterministic order.

Public names are loaded when first used, so that ``import reelray`` needs neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ingest import __version__

if TYPE_CHECKING:
    from ingest.datasource import EpisodeDatasource, read_episodes
    from ingest.engine import Dataset, ReadOptions, iter_samples, open_dataset
    from ingest.language import (
        MessageTurn,
        RenderStage,
        RenderTrainingMessagesStep,
        TrainingRecipe,
        column_for_style,
        load_recipe,
        render_sample,
        validate_camera_field,
    )
    from ingest.plan import PlanSettings, plan_epoch
    from train_integration.config import EpisodeDataConfig, get_sample_stream
    from train_integration.iterable import EpisodeIterableDataset
    from train_integration.lerobot_dataset import StreamingLeRobotDataset
    from train_integration.mixtures import Member, open_mixture
    from train_integration.options import StreamConfig, open_stream
    from train_integration.stream import SampleStream
    from train_integration.transforms import SeededTransform, TorchTransform

_HOME = {
    "Dataset": "ingest.engine",
    "ReadOptions": "ingest.engine",
    "open_dataset": "ingest.engine",
    "iter_samples": "ingest.engine",
    "MessageTurn": "ingest.language",
    "RenderStage": "ingest.language",
    "RenderTrainingMessagesStep": "ingest.language",
    "column_for_style": "ingest.language",
    "validate_camera_field": "ingest.language",
    "TrainingRecipe": "ingest.language",
    "load_recipe": "ingest.language",
    "render_sample": "ingest.language",
    "PlanSettings": "ingest.plan",
    "plan_epoch": "ingest.plan",
    "EpisodeDatasource": "ingest.datasource",
    "read_episodes": "ingest.datasource",
    "EpisodeDataConfig": "train_integration.config",
    "EpisodeIterableDataset": "train_integration.iterable",
    "StreamingLeRobotDataset": "train_integration.lerobot_dataset",
    "Member": "train_integration.mixtures",
    "open_mixture": "train_integration.mixtures",
    "StreamConfig": "train_integration.options",
    "open_stream": "train_integration.options",
    "SeededTransform": "train_integration.transforms",
    "TorchTransform": "train_integration.transforms",
    "SampleStream": "train_integration.stream",
    "get_sample_stream": "train_integration.config",
}

__all__ = [
    "Dataset",
    "EpisodeDataConfig",
    "EpisodeDatasource",
    "EpisodeIterableDataset",
    "Member",
    "MessageTurn",
    "PlanSettings",
    "ReadOptions",
    "RenderStage",
    "RenderTrainingMessagesStep",
    "SampleStream",
    "SeededTransform",
    "StreamConfig",
    "StreamingLeRobotDataset",
    "TorchTransform",
    "TrainingRecipe",
    "__version__",
    "column_for_style",
    "get_sample_stream",
    "iter_samples",
    "load_recipe",
    "open_dataset",
    "open_mixture",
    "open_stream",
    "plan_epoch",
    "read_episodes",
    "render_sample",
    "validate_camera_field",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'reelray' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
