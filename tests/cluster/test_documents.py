"""Documents name tests, errors, options and files that exist."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

import ingest.errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
DOCUMENTS = [name for name in PAGES if name != "docs/reference.md"]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_threat_has_a_test_that_exists() -> None:
    rows = [line for line in _text("docs/security.md").splitlines() if line.startswith("| ") and "threat" not in line]
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tests_that_are_named_exist(name: str) -> None:
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", _text(name)):
        assert re.search(rf"def {test}\(", (ROOT / file).read_text(encoding="utf-8")), f"{file}::{test}"


def test_every_way_to_fail_has_a_test() -> None:
    table = _text("docs/reliability.md").partition("## What happens when")[2].partition("\n\nNothing")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "what fails" not in line]
    assert len(rows) >= 10
    assert all("`tests/" in row for row in rows)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_errors_that_are_named_exist(name: str) -> None:
    for error in re.findall(r"\b([A-Z]\w+Error)\b", _text(name)):
        assert hasattr(ingest.errors, error), error


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text = _text(name)
    for page, anchor in re.findall(r"\]\(([\w/.-]+\.(?:md|png))(?:#([\w-]+))?\)", text):
        target = ((ROOT / name).parent / page).resolve()
        assert target.exists(), page
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page}#{anchor}"
    for path in re.findall(r"`(cluster/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option that documents may name, with ``_``."""
    from actors.build_sidecars import BuildSidecars
    from train_integration.jobs import Jobs

    # The reference is generated, and tested to be current.
    known = set(re.findall(r"`--([\w.-]+)`", _text("docs/reference.md").replace("-", "_").replace("`__", "`--")))
    known |= {field.name for command in (BuildSidecars, Jobs) for field in fields(command)}
    for program in [*(ROOT / "benchmarks").glob("*.py"), ROOT / "train_integration" / "demo_prefeature.py"]:
        known |= {name.replace("-", "_") for name in re.findall(r'add_argument\("--([\w-]+)"', program.read_text(encoding="utf-8"))}
    return known | {"help", "object_store_memory", "shm_size", "dashboard_agent_listen_port", "build_arg"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_options_that_are_named_exist(name: str, options: set[str]) -> None:
    for option in re.findall(r"`--([a-z](?:[\w.-]*\w)?)(?![\w.])", _text(name)):
        assert option.replace("-", "_") in options, option


@pytest.mark.parametrize("name", PAGES)
def test_commands_that_are_named_exist(name: str, options: set[str]) -> None:
    from reelray.cli import COMMANDS, _split

    text = re.sub(r"^```.*?^```", "", _text(name), flags=re.MULTILINE | re.DOTALL)
    for program, rest in re.findall(r"`(reelray|python -m) ([a-z][^`\n]*)`", text):
        words = rest.replace("\\|", "|").replace("|", " ").split()
        if program == "reelray":
            assert _split(words)[0] is not None or (words[1:] == ["…"] and any(name.startswith(words[0]) for name in COMMANDS)), rest
        else:
            assert importlib.util.find_spec(words[0]) is not None, rest
        for word in words:
            if word.startswith("--") and word != "--":
                assert word[2:].partition("=")[0].replace("-", "_") in options, rest
