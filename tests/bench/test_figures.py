"""Tables of the documents are those of the results, and every result has one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.figures import RESULTS, ROOT, TABLES, documents, number, rendered, table


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == rendered(text), "the results have changed: python -m benchmarks --render"


def test_every_table_stands_in_a_document_and_every_result_in_a_table() -> None:
    shown = {name for path in documents() for name in re.findall(r"<!-- figures: ([\w-]+) -->", path.read_text(encoding="utf-8"))}
    assert shown == set(TABLES)
    assert {results for results, _ in TABLES.values()} == set(NAMES) | {"soak"}
    for name in NAMES:
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()
        assert json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["machine"], "says what it was measured on"


def test_rendering() -> None:
    assert table("what|a|b", [("x", 1, "2")]) == "| what | a | b |\n|---|---:|---:|\n| x | 1 | 2 |\n"
    assert [number(value) for value in (None, 0, 0.01234, 0.5, 12.34, 12345.6)] == ["–", "0", "0.012", "0.50", "12.3", "12,346"]
