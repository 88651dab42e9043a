"""Small YAML files from people: plain mappings, read safely and within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml

from ingest.errors import SettingsError

MAX_BYTES = 1 << 20
"""Largest file that is read."""

MAX_DEPTH = 16
"""Deepest nesting that is read."""


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds one mapping.

    Raises:
        SettingsError: it cannot be read, is larger or deeper than allowed, has aliases or a key twice, or is no mapping.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise SettingsError(f"{path} has more than {MAX_BYTES} bytes")
    try:
        text = data.decode()
        _check_shape(path, text)
        node = yaml.SafeLoader(text).get_single_node()
        _refuse_repeated(path, node)
        found: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not plain YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise error if isinstance(error, SettingsError) else SettingsError(f"{path} is not plain YAML: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{path} must hold a mapping at the top level, found {type(found).__name__}")
    return cast("dict[str, Any]", found)


def _check_shape(path: Path, text: str) -> None:
    """Refuses aliases, which can stand for more than memory holds, and deep nesting, before any node is built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(f"{path}, line {event.start_mark.line + 1}: aliases are not read; write the value again")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SettingsError(f"{path}, line {event.start_mark.line + 1}: nested deeper than {MAX_DEPTH} levels")


def _refuse_repeated(path: Path, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise SettingsError(f"{path}, line {key.start_mark.line + 1}: {key.value} is there twice")
                seen.add(key.value)
            _refuse_repeated(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated(path, value)
