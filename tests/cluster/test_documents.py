"""Documents name tests, errors, options and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ingest.errors

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("cluster.md", "security.md", "troubleshooting.md", "monitoring.md", "reliability.md")


def _text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_threat_has_a_test_that_exists() -> None:
    rows = [line for line in _text("security.md").splitlines() if line.startswith("| ") and "threat" not in line]
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tests_that_are_named_exist(name: str) -> None:
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", _text(name)):
        assert re.search(rf"def {test}\(", (ROOT / file).read_text(encoding="utf-8")), f"{file}::{test}"


def test_every_way_to_fail_has_a_test() -> None:
    table = _text("reliability.md").partition("## What happens when")[2].partition("\n\nNothing")[0]
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
    for page, anchor in re.findall(r"\]\(([\w/.-]+\.md)(?:#([\w-]+))?\)", text):
        assert (ROOT / "docs" / page).exists(), page
        if anchor:
            headings = re.findall(r"^#+ (.*)$", _text(page), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs
    for path in re.findall(r"`(cluster/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_options_that_are_named_exist(name: str) -> None:
    from dataclasses import fields, is_dataclass

    from actors.build_sidecars import BuildSidecars
    from reelray.commands.common import PlaceArguments, ReadArguments
    from reelray.commands.doctor import Doctor
    from reelray.commands.sidecar import SidecarBuild
    from reelray.commands.stream import Stream
    from reelray.commands.train import DatasetArguments, Train
    from train_integration.jobs import Jobs

    known = {"dataset." + field.name for field in fields(DatasetArguments)}
    for command in (Train, Doctor, Stream, SidecarBuild, BuildSidecars, PlaceArguments, ReadArguments, Jobs):
        assert is_dataclass(command)
        known |= {field.name for field in fields(command)}
    known |= {"recipe", "strict_time"}
    rays = {"object_store_memory", "shm_size", "dashboard_agent_listen_port", "build_arg"}
    for option in re.findall(r"`--([a-z][\w.-]*)", _text(name)):
        assert option.replace("-", "_") in known | rays, option
