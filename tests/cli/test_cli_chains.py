"""Random chains of commands that hand a cursor file on, from outside: every frame once per epoch, whatever changes."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from calls import Run

from ingest.lerobot.make import MakeOptions, make_dataset
from reelray.cli import main

STRATEGIES = ("lanes", "remaining", "round_robin", "sequential", "episode_sequential", "reservoir")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("chains") / "ds"
    make_dataset(target, MakeOptions(episodes=7, frames="1:19", cameras=1, size=(32, 64), fps=10, gop=4, bframes=1, video_files=2, seed=8))
    return target


class Chain:
    """Commands over one dataset with the settings that must not change, and what they wrote."""

    def __init__(self, root: Path, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cursor, self.order = folder / "cursor.json", folder / "order.parquet"
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        self.kept: list[object] = [root, "--strategy", strategy, "--seed", seed, "--lane-frames", self.draw.choice([1, 4, 64])]
        self.kept += ["--tail", self.draw.choice(["exact", "pad"]), "--share", self.draw.choice(["episodes", "frame_exact", "cost"])]

    def hop(self, steps: int | None) -> tuple[int, list[int]]:
        """Runs one command; returns the epoch and the global indices that it delivered."""
        command = self.draw.choice([["plan"], ["stream", "--engine", "local"]])
        begun = self.cursor.exists()
        topology = ["--world-size", self.draw.randint(1, 6 if begun else 2), "--workers", self.draw.randint(0, 3)]
        arguments = [*command, *self.kept, *topology, "--batch-size", self.draw.randint(1, 5), "--order", self.order]
        arguments += ["--cursor-out", self.cursor] + (["--cursor-in", self.cursor] if begun else [])
        arguments += [] if steps is None else ["--max-steps", steps]
        assert main([str(argument) for argument in arguments]) == 0
        rows = pq.read_table(self.order).to_pydict()
        epochs = set(rows["epoch"])
        assert len(epochs) <= 1
        return max(epochs, default=-1), [index for index, pad in zip(rows["index"], rows["is_pad"], strict=True) if not pad]

    def state(self) -> dict[str, Any]:
        return json.loads(self.cursor.read_text())


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(9, 40))])
def test_random_chains_deliver_every_frame_once_in_two_epochs(root: Path, tmp_path: Path, seed: int) -> None:
    chain = Chain(root, tmp_path, seed)
    seen: dict[int, list[int]] = {0: [], 1: []}
    while not chain.cursor.exists() or chain.state()["epoch"] < 2:
        epoch, indices = chain.hop(chain.draw.choice([0, 1, 1, 2, 4, None if chain.draw.random() < 0.2 else 3]))
        if indices:
            seen[epoch] += indices
    frames = len(seen[0])
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(frames))
    assert chain.state()["segments"] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cursor_files_stay_small_however_often_the_topology_changes(root: Path, tmp_path: Path, strategy: str) -> None:
    chain = Chain(root, tmp_path, 0)
    cursor, sizes = chain.cursor, []
    for number in range(12):
        topology = ["--world-size", 1 + number % 3, "--workers", 1 + number % 2, "--batch-size", 2, "--share", "cost", "--max-steps", 1]
        given = ["--cursor-in", cursor] if number else []
        arguments = ["plan", root, "--strategy", strategy, "--tail", "pad", "--seed", 2**62, *topology, *given, "--cursor-out", cursor]
        assert main([str(argument) for argument in arguments]) == 0
        assert len(chain.state()["segments"]) == number + 1
        sizes.append(cursor.stat().st_size)
    assert max(sizes[:8]) <= 1024
    assert all(after - before <= 80 for before, after in pairwise(sizes))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300"])
@pytest.mark.parametrize("option", ["--byte-budget-gb", "--decoded-budget-gb"])
def test_budgets_that_are_none(root: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    assert main(["stream", str(root), "--engine", "local", option, value]) == 1
    assert f"{option[2:].replace('-', '_')} must be positive, found {float(value)}" in capsys.readouterr().err


@pytest.mark.parametrize("epoch", ["-1", "99999999999999999999"])
def test_epochs_that_are_none(root: Path, capsys: pytest.CaptureFixture[str], epoch: str) -> None:
    for command in (["plan"], ["stream", "--engine", "local"]):
        assert main([*command, str(root), "--epoch", epoch]) == 1
        assert "SettingsError: epoch must be" in capsys.readouterr().err


def test_an_order_without_end_goes_on_pass_by_pass(run: Run, root: Path, tmp_path: Path) -> None:
    arguments = [root, "--strategy", "lanes", "--tail", "loop", "--dp-size", "3", "--batch-size", "5"]
    steps: list[list[int]] = []
    given: list[str | Path] = []
    for number in range(3):
        files = {name: tmp_path / f"{name}-{number}" for name in ("planned", "delivered", "after", "reached")}
        assert run("plan", *arguments, *given, "--order", files["planned"], "--cursor-out", files["after"])[0] == 0
        outputs = ["--order", files["delivered"], "--cursor-out", files["reached"]]
        assert run("stream", *arguments, *given, "--engine", "local", "--no-digests", *outputs)[0] == 0
        planned, delivered = (pq.read_table(files[name]) for name in ("planned", "delivered"))
        assert delivered.select(planned.column_names).equals(planned)
        assert files["after"].read_text() == files["reached"].read_text()
        steps.append(sorted(set(planned["step"].to_pylist())))
        given = ["--cursor-in", files["after"]]
    assert [step for one in steps for step in one] == list(range(3 * len(steps[0])))
