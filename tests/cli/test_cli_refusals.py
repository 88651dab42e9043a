"""What cannot be done is refused before anything is done: one typed line, a status, and no file that is half written."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest
import ray
from calls import Answer, Run, failure

from ingest.lerobot.make import MakeOptions, make_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("refused") / "ds"
    make_dataset(target, MakeOptions(episodes=4, frames="3:6", cameras=1, size=(32, 64), fps=10, gop=3, seed=4))
    return target


def refused(result: Answer, match: str) -> None:
    line = failure(result)
    assert re.search(match, line), line


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("command", [("plan",), ("stream", "--engine", "local")])
@pytest.mark.parametrize("option", ["--order", "--cursor-out"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    run: Run, root: Path, tmp_path: Path, command: tuple[str, ...], option: str
) -> None:
    other = tmp_path / "other"
    rest = ["--cursor-out" if option == "--order" else "--order", other]
    name, *words = command
    (tmp_path / "file").write_text("mine")
    name_of = option.strip("-").replace("-", "_")
    for path, match in (
        (tmp_path, rf"SettingsError: {name_of}: \S+ is a directory; name a file in it"),
        (tmp_path / "file" / "below", rf"SettingsError: {name_of}: \S+ cannot be written, because \S+ is a file"),
        (other, r"SettingsError: order and cursor_out are the same file"),
    ):
        refused(run(name, root, *words, option, path, *rest), match)
    assert files(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_device_or_pipe_is_never_replaced_by_a_file(run: Run, root: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (
        ("plan", root, "--order"),
        ("plan", root, "--html"),
        ("stream", root, "--engine", "local", "--cursor-out"),
        ("sidecar", "build", root, "--output"),
        ("recipe", "check", "subtask", "--html"),
        ("episode", "export", root, "0"),
    ):
        refused(run(*words, pipe), r"SettingsError: \w+: \S+ is a device or pipe; name a file")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    refused(run("plan", root, "--order", "/"), "SettingsError: order: / is a directory")
    twice = ["--order", tmp_path / "o", "--cursor-out", tmp_path / "below" / ".." / "o"]
    refused(run("plan", root, *twice), "SettingsError: order and cursor_out are the same file")


def test_pages_that_cannot_be_written_are_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    for words in (("recipe", "coverage", tmp_path, "--recipe", "subtask"), ("prefeature", "validate", tmp_path)):
        refused(run(*words, "--html", tmp_path), "SettingsError: html: .* is a directory")


def test_a_dataset_that_cannot_be_made_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    for options, match in (
        (["--codec", "foo"], "SettingsError: codec 'foo' is unknown"),
        (["--codec", "vp9", "--bframes", "2"], "SettingsError: bframes is 2, but vp9 has no B-frames"),
        (["--fps", "0.0001"], "SettingsError: fps is 0.0001"),
        (["--episodes", 10**15], "MemoryError: "),
    ):
        refused(run("make-dataset", tmp_path / "ds", *options), match)
        assert not (tmp_path / "ds").exists()


def test_a_folder_is_no_sidecar(run: Run, root: Path) -> None:
    refused(run("sidecar", "verify", root), "ObjectNotFoundError: .* is not a file: give the sidecar")


def test_numbers_that_mean_nothing_are_refused(run: Run, root: Path) -> None:
    refused(run("inspect", root, "--files", "-1"), "SettingsError: files must be non-negative, found -1")
    refused(run("doctor", root, "--limit", "-1"), "SettingsError: limit must be non-negative, found -1")
    refused(run("doctor", root, "--tolerance-s", "nan"), "SettingsError: tolerance_s must be non-negative, found nan")


def test_a_cursor_says_that_it_stands_in_another_epoch(run: Run, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cursor = tmp_path / "c"
    assert run("plan", root, "--epoch", "2", "--max-steps", "1", "--cursor-out", cursor)[0] == 0
    assert run("plan", root, "--epoch", "2", "--cursor-in", cursor)[0] == 0
    assert not caplog.records
    assert run("stream", root, "--engine", "local", "--epoch", "5", "--cursor-in", cursor)[0] == 0
    assert "epoch 5 has no effect: the cursor stands in epoch 2" in caplog.text


def test_a_plan_that_fails_writes_nothing(run: Run, root: Path, tmp_path: Path) -> None:
    outputs = ["--order", tmp_path / "o", "--cursor-out", tmp_path / "c", "--html", tmp_path / "h"]
    refused(run("plan", root, "--bandwidth-mbps", "0", *outputs), "SettingsError: bandwidth_mbps must be positive")
    refused(run("plan", root, "--byte-budget-gb", "1e300", *outputs), "SettingsError: byte_budget_gb must be positive")
    refused(run("plan", root, "--byte-budget-gb", "1e-7", *outputs), r"BudgetError: Episode \d+ .* requires \d+ bytes")
    refused(run("plan", root, "--html", tmp_path), "SettingsError: html: .* is a directory")
    assert files(tmp_path) == []


@pytest.mark.parametrize("offset", [1e300, -1e13])
def test_windows_beyond_any_episode_are_refused(run: Run, root: Path, offset: float) -> None:
    windows = json.dumps({"action": [offset]})
    refused(
        run("plan", root, "--delta-timestamps", windows), r"SettingsError: delta_timestamps\['action'\] asks for .* no episode is that long"
    )
    assert run("plan", root, "--delta-timestamps", json.dumps({"action": [1e9, -1e9]}))[0] == 0


def test_training_that_cannot_start_leaves_no_trace(run: Run, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "run"
    train = ["train", "--dataset.repo_id", root, "--output_dir", target, "--steps", "2"]
    refused(run(*train, "--dataset.streaming_byte_budget_gb", "1e-7"), r"BudgetError: Episode \d+ .*streaming_byte_budget_gb")
    refused(run(*train, "--world_size", "9"), "PlanError: rank 4 owns no streaming episodes")
    refused(run(*train, "--dataset.episodes", "[2, 0, 2]"), "SettingsError: dataset.episodes names 2 more than once")
    assert not target.exists()
    (tmp_path / "file").write_text("")
    refused(run(*train[:3], "--output_dir", tmp_path / "file", "--steps", "2"), "SettingsError: output_dir: .* is a file")


def test_a_run_keeps_its_settings_when_another_is_started_in_its_folder(run: Run, root: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "train_config.json").write_text("those of the first run")
    refused(run("train", "--dataset.repo_id", root, "--output_dir", tmp_path, "--seed", "7"), "SettingsError: .* holds an earlier run")
    assert (tmp_path / "train_config.json").read_text() == "those of the first run"


@pytest.mark.parametrize(
    ("address", "match"), [([], "a local Ray cluster cannot be started"), (["--address", "a:1"], "the Ray cluster at a:1")]
)
def test_a_cluster_that_does_not_come_up_is_a_typed_error(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, address: list[str], match: str
) -> None:
    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    refused(run("stream", root, *address), f"ResourceUnavailableError: {match}.*timed out during startup")
