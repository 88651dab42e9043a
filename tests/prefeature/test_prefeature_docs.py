"""The documentation's claims that can be checked: every report has an answer, and every named test and command exists."""

from __future__ import annotations

import re
from pathlib import Path

from ingest.prefeature.describe import schema_table
from ingest.prefeature.sizes import Sizes
from reelray.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "prefeature.md").read_text(encoding="utf-8")
REPORTS = 57


def numbers(cell: str) -> list[int]:
    """Report numbers of a row: ``6, 7`` or ``29–33``."""
    found: list[int] = []
    for part in cell.split(","):
        first, _, last = part.strip().partition("–")
        found += range(int(first), int(last or first) + 1)
    return found


def test_every_report_is_answered_once() -> None:
    rows = re.findall(r"^\| ([0-9][0-9, –]*) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
    assert [number for cell, _, _ in rows for number in numbers(cell)] == list(range(1, REPORTS + 1))


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "prefeature").glob("test_*.py"))
    assert len(named) > 40
    assert not {name for name in named if f"def {name}(" not in written}


def test_the_table_of_files_is_that_of_the_schema() -> None:
    assert schema_table(Sizes()) in PAGE


def test_every_named_command_exists() -> None:
    named = set(re.findall(r"`reelray (prefeature [\w-]+)", PAGE))
    assert named == {name for name in COMMANDS if name.startswith("prefeature ")}


def test_the_licence_is_stated_where_people_look() -> None:
    for text in (PAGE, (ROOT / "README.md").read_text(encoding="utf-8")):
        flat = " ".join(text.replace("*", "").split())
        for words in ("No Tencent code", "untested on the real model", "South Korea", "derivatives"):
            assert words in flat, words
