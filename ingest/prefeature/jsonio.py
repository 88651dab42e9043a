"""JSON as this dataset writes and reads it: canonical text, bounded files, typed errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ingest.errors import MetadataError

MAX_JSON_BYTES = 256 << 20


def canonical_json(value: Any, *, indent: int | None = None) -> str:
    """JSON with sorted keys and text as is, the same for equal values."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, sort_keys=True, ensure_ascii=False, indent=indent, separators=separators, allow_nan=False)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One canonical JSON object a line."""
    return "".join(canonical_json(row) + "\n" for row in rows).encode()


def as_object(value: object, where: str) -> dict[str, Any]:
    """``value`` as a JSON object.

    Raises:
        MetadataError: it is something else.
    """
    if not isinstance(value, dict):
        raise MetadataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise MetadataError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MetadataError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise MetadataError(f"{path.name}: not UTF-8 ({error})") from error


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Parses one JSON object.

    Raises:
        MetadataError: not JSON, or not an object.
    """
    try:
        return as_object(json.loads(text), where)
    except (ValueError, RecursionError) as error:
        if isinstance(error, MetadataError):
            raise
        raise MetadataError(f"{where}: not valid JSON ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        MetadataError: missing, too large, or not a JSON object.
    """
    return parse_object(_read_text(path), path.name)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one a line.

    Raises:
        MetadataError: the file is missing or a line is not a JSON object; the message gives the line number.
    """
    # split on newlines only: captions may hold other separators that str.splitlines would cut at
    lines = _read_text(path).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [parse_object(line, f"{path.name} line {number}") for number, line in enumerate(lines, 1)]
