"""Options of the training command: LeRobot's names, defaults and checks, and the same ones out of a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tyro

from ingest.errors import SettingsError
from reelray.cli import _normalise, main
from reelray.commands.train import Train
from reelray.commands.train_options import DatasetArguments, LoaderArguments, explain
from reelray.config_file import with_config_file

DEFAULTS: dict[str, Any] = {
    "dataset.repo_type": "dataset",
    "dataset.root": None,
    "dataset.revision": None,
    "dataset.episodes": None,
    "dataset.exclude_episodes": None,
    "dataset.streaming": True,
    "dataset.streaming_episode_pool_size": None,
    "dataset.streaming_sampling_strategy": "remaining",
    "dataset.streaming_prefetch_episodes": 8,
    "dataset.streaming_byte_budget_gb": 8,
    "dataset.streaming_decode_threads": 2,
    "dataset.streaming_decoded_queue_size": 8,
    "dataset.video_decoder_cache_size": None,
    "dataset.streaming_native_http_connections": None,
    "dataset.streaming_native_http_subranges": 1,
    "dataset.streaming_sidecar_lock_timeout_s": 1800,
    "dataset.return_uint8": True,
    "dataset.depth_output_unit": "mm",
    "dataset.video_backend": "pyav",
    "dataset.max_num_shards": None,
    "dataset.eval_split": 0.0,
    "dataset.streaming_encoding": False,
    "loader.num_workers": 4,
    "loader.prefetch_factor": 4,
    "loader.persistent_workers": True,
    "loader.dataloader_multiprocessing_context": "spawn",
    "seed": 1000,
    "tolerance_s": 1e-4,
}
"""Options of the streaming specification and what they are when nobody says anything."""


def parsed(*arguments: object) -> Train:
    given = [str(argument) for argument in arguments]
    return tyro.cli(Train, args=_normalise(with_config_file(Train, given)))


def value(options: Any, name: str) -> Any:
    for part in name.split("."):
        options = getattr(options, part)
    return options


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    assert value(Train(), name) == DEFAULTS[name]


def test_lerobots_spelling() -> None:
    options = parsed(
        "--dataset.repo_id=owner/name",
        "--dataset.streaming=true",
        "--dataset.streaming_episode_pool_size=16",
        "--dataset.streaming_sampling_strategy=round_robin",
        "--dataset.streaming_prefetch_episodes",
        4,
        "--dataset.streaming_byte_budget_gb=4",
        "--dataset.episodes=[1,3]",
        "--dataset.return_uint8=false",
        "--num_workers=2",
        "--prefetch_factor=2",
        "--persistent_workers=false",
        "--seed=null",
        "--policy.type=bc",
    )
    config = options.stream_config(options.seed, options.dataset.streaming_sampling_strategy)
    plan = config.plan
    assert (plan.strategy, plan.pool_size, plan.byte_budget, plan.workers, plan.seed) == ("round_robin", 16, 4 << 30, 2, 42)
    assert (config.byte_budget_gb, config.prefetch_batches, config.prefetch_units, config.fetch_threads) == (4, 2, 2 * (16 + 4), 2)
    assert (config.episodes, config.return_uint8, config.decode, options.loader.persistent_workers) == ((1, 3), False, "auto", False)
    assert parsed("--dataset.streaming=false").stream_config(1, "lanes").decode == "inline"
    nothing_ahead = parsed("--num_workers", 0, "--dataset.streaming_prefetch_episodes", 0)
    assert nothing_ahead.stream_config(1, "lanes").prefetch_units == 1
    assert nothing_ahead.stream_config(1, "remaining").prefetch_units == 32
    assert parsed().stream_config(1, "remaining").prefetch_units == 4 * (8 + 8)
    assert parsed().stream_config(1, "lanes").prefetch_units == 8 * 8
    assert parsed("--dataset.max_num_shards", 7).stream_config(1, "lanes").fetch_threads == 7


@pytest.mark.parametrize(
    "name",
    [
        "dataset.streaming_episode_pool_size",
        "dataset.streaming_byte_budget_gb",
        "dataset.streaming_decode_threads",
        "dataset.streaming_decoded_queue_size",
        "dataset.video_decoder_cache_size",
        "dataset.streaming_native_http_connections",
        "dataset.streaming_native_http_subranges",
        "dataset.streaming_sidecar_lock_timeout_s",
        "dataset.max_num_shards",
        "prefetch_factor",
        "batch_size",
        "steps",
        "save_freq",
        "log_freq",
        "world_size",
        "lanes",
        "decode_actors",
        "decoded_budget_gb",
        "policy.chunk",
    ],
)
def test_values_that_must_be_positive(name: str) -> None:
    for wrong in (0, -1):
        with pytest.raises(SettingsError, match=f"^{name} must be positive, found {wrong}") as caught:
            parsed("--dataset.repo_id", "x", f"--{name}", wrong).check()
        assert isinstance(caught.value, ValueError)


def test_values_that_must_not_be_negative() -> None:
    for name in (
        "dataset.streaming_prefetch_episodes",
        "num_workers",
        "tolerance_s",
        "decode_cpus",
        "step_s",
        "max_failures",
        "node_wait_s",
    ):
        with pytest.raises(SettingsError, match=f"{name} must be non-negative, found -1"):
            parsed("--dataset.repo_id", "x", f"--{name}", -1).check()
    with pytest.raises(SettingsError, match=r"eval_split is 0\.1"):
        parsed("--dataset.repo_id", "x", "--dataset.eval_split", 0.1).check()
    with pytest.raises(SettingsError, match="less than world_size"):
        parsed("--dataset.repo_id", "x", "--world_size", 3, "--max_world_size", 2).check()
    with pytest.raises(SettingsError, match="is not a local directory"):
        parsed("--dataset.repo_id", "owner/name", "--dataset.streaming=false").check()
    parsed("--dataset.repo_id", "owner/name", "--dataset.root", "here", "--dataset.streaming=false").check()


def test_options_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reelray.train")
    explain(DatasetArguments(), LoaderArguments())
    assert not caplog.records
    explain(
        DatasetArguments(streaming_encoding=True, streaming_decoded_queue_size=3, video_decoder_cache_size=9),
        LoaderArguments(persistent_workers=False, dataloader_multiprocessing_context="fork"),
    )
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 5
    for name in ("streaming_encoding", "decoded_queue_size", "decoder_cache_size", "persistent_workers", "context"):
        assert sum(name in line for line in told) == 1


def test_a_file_holds_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "dataset:\n  repo_id: owner/name\n  episodes: [0, 2]\n  streaming: false\n  streaming_byte_budget_gb: 2.5\n"
        "policy.chunk: 3\npolicy: {type: bc}\nimage_size: [48, 64]\nseed: null\nnum_workers: 1\nresume: false\nuse_gpu: true\n"
        'delta_timestamps: {action: [0.0, 0.1]}\noutput_dir: "runs/one"\n'
    )
    options = parsed("--config", file)
    assert (options.dataset.repo_id, options.dataset.episodes, options.dataset.streaming) == ("owner/name", "[0, 2]", False)
    assert (options.dataset.streaming_byte_budget_gb, options.policy.chunk, options.image_size) == (2.5, 3, (48, 64))
    assert (options.seed, options.loader.num_workers, options.use_gpu, options.output_dir) == (None, 1, True, Path("runs/one"))
    assert options.stream_config(1, "lanes").read.delta_timestamps == {"action": [0.0, 0.1]}
    options = parsed(f"--config={file}", "--dataset.streaming", "--policy.chunk", 5, "--use_gpu=false", "--dataset.episodes", "[7]")
    assert (options.dataset.streaming, options.policy.chunk, options.use_gpu, options.dataset.episodes) == (True, 5, False, "[7]")
    assert parsed("--steps", 3).config is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datset: {repo_id: a}", r"datset\.repo_id is no option; did you mean dataset\.repo_id\?"),
        ("dataset: {repo: a}", r"dataset\.repo is no option"),
        ("config: other.yaml", "config is no option"),
        ("stepps: 4", r"stepps is no option; did you mean steps\?"),
        ("- steps", "must hold a mapping"),
        ("delta_timestamps: {action: [2020-01-01]}", "has no form on the command line"),
    ],
)
def test_files_with_what_is_no_option(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        with_config_file(Train, ["--config", str(file)])
    assert main(["train", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_values_of_the_wrong_kind_are_wrong_usage(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("steps: many")
    with pytest.raises(SystemExit) as ended:
        parsed("--config", file)
    assert ended.value.code == 2
