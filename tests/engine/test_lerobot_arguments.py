"""The arguments of the class with LeRobot's: their defaults, what is refused, and what becomes of them."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from ingest.errors import SettingsError
from ingest.settings import hub_token, use_hub_token

pytest.importorskip("torch")

from train_integration.lerobot_dataset import StreamingLeRobotDataset

DEFAULTS: dict[str, Any] = {
    "root": None,
    "episodes": None,
    "exclude_episodes": None,
    "image_transforms": None,
    "delta_timestamps": None,
    "tolerance_s": 1e-4,
    "revision": None,
    "repo_type": "dataset",
    "episode_pool_size": None,
    "sampling_strategy": "remaining",
    "prefetch_episodes": 8,
    "byte_budget_gb": 8.0,
    "decode_threads": 2,
    "decoded_queue_size": 8,
    "video_decoder_cache_size": None,
    "native_http_connections": None,
    "native_http_subranges": 1,
    "sidecar_lock_timeout_s": 1800.0,
    "max_num_shards": 16,
    "seed": 42,
    "return_uint8": False,
    "video_backend": None,
    "depth_output_unit": "mm",
    "shuffle": True,
    "repeat": False,
    "buffer_size": 1000,
    "streaming": None,
    "rng": None,
    "token": None,
    "data_root": None,
    "eval_split": 0.0,
}


@pytest.fixture
def kept_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the variables back that a token sets."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    assert inspect.signature(StreamingLeRobotDataset).parameters[name].default == DEFAULTS[name]


@pytest.mark.parametrize(
    "name",
    [
        "episode_pool_size",
        "buffer_size",
        "byte_budget_gb",
        "decode_threads",
        "decoded_queue_size",
        "video_decoder_cache_size",
        "native_http_connections",
        "native_http_subranges",
        "sidecar_lock_timeout_s",
        "max_num_shards",
        "batch_size",
    ],
)
@pytest.mark.parametrize("wrong", [0, -1])
def test_values_that_must_be_positive(small: Path, name: str, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be positive.*found {wrong}") as caught:
        StreamingLeRobotDataset(str(small), **{name: wrong})
    assert isinstance(caught.value, SettingsError)


def test_other_values_that_are_refused(small: Path) -> None:
    for options, message in (
        ({"prefetch_episodes": -1}, "prefetch_episodes must be non-negative, found -1"),
        ({"tolerance_s": -1.0}, "tolerance_s must be non-negative, found -1"),
        ({"eval_split": 0.1}, r"eval_split is 0\.1, which streaming does not offer"),
        ({"sampling_strategy": "uniform"}, "strategy must be one of"),
        ({"video_backend": "video_reader"}, "video_backend is 'video_reader'"),
        ({"depth_output_unit": "cm"}, "depth_output_unit is 'cm'"),
        ({"repo_type": "model"}, "repo_type is 'model'"),
        ({"rank": 1}, "rank and world_size together"),
        ({"seed": -1}, "seed must be non-negative"),
        ({"token": " "}, "token is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            StreamingLeRobotDataset(str(small), **options)


def test_threads_queues_and_windows_of_a_worker(small: Path) -> None:
    """What a worker of some gets of the rank's limits."""
    for options, workers, threads, ahead, batches in (
        ({}, 0, 16, 40, 8),
        ({}, 4, 16, 16, 8),
        ({"max_num_shards": 3}, 1, 3, 40, 8),
        ({"episode_pool_size": 2, "prefetch_episodes": 1}, 2, 3, 3, 8),
        ({"buffer_size": 2, "prefetch_episodes": 0}, 2, 1, 1, 8),
        ({"decoded_queue_size": 20, "batch_size": 8}, 1, 16, 40, 3),
        ({"sampling_strategy": "lanes"}, 0, 16, 64, 8),
    ):
        local = StreamingLeRobotDataset(str(small), byte_budget_gb=6, **options)._local(workers)
        found = (local.job.threads, local.config.prefetch_units, local.config.prefetch_batches)
        assert found == (threads, ahead, batches), options
        assert local.config.byte_budget_gb == 6 / max(1, workers)
        assert local.config.plan.byte_budget == 6 << 30


@pytest.mark.usefixtures("kept_environment")
def test_a_token_is_for_this_process_and_its_workers_and_in_no_pickle(small: Path) -> None:
    dataset = StreamingLeRobotDataset(str(small), token="hf_PLANTEDSECRET")
    assert hub_token() == os.environ["HF_TOKEN"] == "hf_PLANTEDSECRET"
    assert b"PLANTEDSECRET" not in pickle.dumps(dataset)
    assert "PLANTEDSECRET" not in json.dumps(dataset.state_dict())
    use_hub_token(True)
    assert hub_token() == "hf_PLANTEDSECRET"
    StreamingLeRobotDataset(str(small), token=False)
    assert hub_token() is None
    with pytest.raises(SettingsError, match="there is none"):
        StreamingLeRobotDataset(str(small), token=True)
