"""The code in the documents works: what can run here runs, the rest is parsed, and its options, modules and files exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ingest.lerobot.make import MakeOptions, make_dataset

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
PLACEHOLDERS = {"SRC", "FILE", "DIR", "COMMAND", "NAME"}


def blocks(language: str) -> list[Any]:
    """Fenced blocks of a language, by document and number."""
    found: list[Any] = []
    for document in DOCUMENTS:
        texts = re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        found += [pytest.param(text, id=f"{document.name}-{number}") for number, text in enumerate(texts)]
    return found


# --- Python -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"))
def test_python_parses_and_its_imports_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two datasets, ``a`` and ``b``, in the current directory."""
    for number, name in enumerate("ab"):
        make_dataset(tmp_path / name, MakeOptions(episodes=4, frames="100:110", cameras=1, size=(32, 64), gop=5, seed=number))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def annotations(folder: Path) -> dict[str, Any]:
    return {"folder": folder / "a", "episode": 0, "timestamps": [frame / 30 for frame in range(100)]}


def rendered(folder: Path) -> dict[str, Any]:
    (recipe,) = [block.values[0] for block in blocks("yaml") if "target: true" in block.values[0]][:1]
    (folder / "own.yaml").write_text(recipe, encoding="utf-8")
    (first,) = [block.values[0] for block in blocks("python") if "write_annotations" in block.values[0]]
    exec(compile(first, "language.md", "exec"), annotations(folder))
    return {"source": folder / "a"}


def loaded(folder: Path) -> dict[str, Any]:
    from torch.utils.data import DataLoader

    import reelray

    (folder / "a").rename(folder / "path")
    (folder / "path" / "to").mkdir(parents=True)
    make_dataset(folder / "path" / "to" / "dataset", MakeOptions(episodes=4, frames="8:10", cameras=1, size=(32, 64), gop=5))
    return {"reelray": reelray, "DataLoader": DataLoader, "plan": reelray.PlanSettings(workers=4, batch_size=4), "used": 2}


def rename_camera(root: Path, old: str, new: str) -> None:
    (root / "videos" / old).rename(root / "videos" / new)
    for path in (root / "meta").rglob("*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    for path in (root / "meta" / "episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([name.replace(old, new) for name in table.column_names]), path)


def mixed(folder: Path) -> dict[str, Any]:
    rename_camera(folder / "b", "observation.images.cam0", "observation.images.top")
    from ingest.plan import PlanSettings
    from train_integration.mixtures import Member, open_mixture
    from train_integration.options import StreamConfig

    return {"open_mixture": open_mixture, "Member": Member, "StreamConfig": StreamConfig, "PlanSettings": PlanSettings}


RUNNABLE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "write_annotations(folder": annotations,
    'recipe="subtask_mem"': rendered,
    "EpisodeIterableDataset(description)": loaded,
    "open_mixture(\n": mixed,
}
"""What a block contains, and what the text around it has set up before."""


@pytest.mark.parametrize("known", sorted(RUNNABLE))
def test_python_runs(known: str, folder: Path) -> None:
    found = [block.values[0] for block in blocks("python") if known in block.values[0]]
    assert found, f"no document has a block with {known!r} any more"
    for block in found:
        # The made datasets have four joints.
        exec(compile(block.replace('"action": 14', '"action": 4'), "document", "exec"), RUNNABLE[known](folder))


# --- shell ------------------------------------------------------------------------------------------


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def parse(words: list[str]) -> None:
    """Gives a command line of reelray to its own parser."""
    import tyro

    from reelray.cli import COMMANDS, _normalise, _split
    from train_integration.jobs import ENTRY_POINTS, Jobs

    words = words[: words.index(">")] if ">" in words else words
    if words[:2] == ["python", "-m"] and words[2] == "train_integration.jobs":
        own, _, rest = " ".join(words[3:]).partition(" -- ")
        jobs = tyro.cli(Jobs, args=own.split())
        parse([*ENTRY_POINTS[jobs.name], *rest.split()])
        return
    modules = {"train_integration.train": "train", "actors.build_sidecars": None, "reelray.cli": None}
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, words[2]
        if words[2].startswith("benchmarks."):
            source = (ROOT / f"{words[2].replace('.', '/')}.py").read_text(encoding="utf-8")
            assert {word for word in words[3:] if word.startswith("--")} <= set(re.findall(r'add_argument\("(--[\w-]+)"', source)), words
        if words[2] not in modules:
            return
        words = [*([modules[words[2]]] if modules[words[2]] else []), *words[3:]]
        if words and words[0] not in {name.split()[0] for name in COMMANDS}:
            return
    else:
        words = words[1:]
    name, rest = _split(words)
    assert name is not None, words
    command = COMMANDS[name]
    options: Any = getattr(importlib.import_module(f"reelray.commands.{command.module}"), command.name)
    with contextlib.suppress(TypeError):
        tyro.cli(options, args=_normalise(rest))


@pytest.mark.parametrize("block", blocks("bash"))
def test_shell_commands_are_right(block: str) -> None:
    for words in commands(block):
        if "--" in words and words[:3] == ["ray", "job", "submit"]:
            words = words[words.index("--") + 1 :]
        if words[0] == "reelray" or words[:2] == ["python", "-m"]:
            parse(words)
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), words
        for word in words:
            if word.startswith(("cluster/", "docs/", "examples/", "benchmarks/")) and "=" not in word:
                assert (ROOT / word).exists(), word


def test_the_reference_is_current() -> None:
    from reelray.reference import reference

    stored = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert stored == reference(), "options have changed: python -m reelray.reference > docs/reference.md"
