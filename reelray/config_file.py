"""Options out of a YAML file: the same names as on the command line, which wins where both say something."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from ingest.errors import SettingsError

_OPTION = "--config"


def with_config_file(command: type, arguments: Sequence[str]) -> list[str]:
    """Arguments with those of the file that ``--config`` names put before them.

    Args:
        command: dataclass of the command's options.
        arguments: as given.

    Raises:
        SettingsError: the file cannot be read, or an entry is no option of the command.
    """
    given = list(arguments)
    if not any(item.name == "config" for item in fields(command)):
        return given
    files = [following for option, following in pairwise(given) if option == _OPTION]
    files += [option.removeprefix(f"{_OPTION}=") for option in given if option.startswith(f"{_OPTION}=")]
    if not files:
        return given
    from train_integration.yaml_file import load_yaml

    path, known = Path(files[-1]), dict(_options(command))
    found: list[str] = []
    for name, value in _flat(load_yaml(path), known):
        if name not in known or name == "config":
            near = get_close_matches(name, known, n=1)
            raise SettingsError(f"{path}: {name} is no option{f'; did you mean {near[0]}?' if near else ''}")
        found += _arguments(path, name, value, known[name])
    return [*found, *given]


def _options(command: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Name and type of every option, as written on the command line without its dashes."""
    hints = get_type_hints(command, include_extras=True)
    for item in fields(command):
        hint = hints[item.name]
        inner = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        if is_dataclass(inner) and isinstance(inner, type):
            yield from _options(inner, prefix if inner is not hint else f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, inner


def _flat(found: Mapping[Any, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in known:
            yield from _flat(cast("dict[Any, Any]", value), known, f"{name}.")
        else:
            yield name, value


def _arguments(path: Path, name: str, value: Any, kind: Any) -> list[str]:
    if isinstance(value, bool):
        head, _, last = name.rpartition(".")
        head = f"--{head}." if head else "--"
        return [f"{head}{last}" if value else f"{head}no-{last}"]
    if isinstance(value, list) and any(get_origin(one) is tuple for one in (kind, *get_args(kind))):
        return [f"--{name}", *map(str, cast("list[Any]", value))]
    if isinstance(value, list | dict):
        try:
            return [f"--{name}", json.dumps(value)]
        except TypeError:
            raise SettingsError(f"{path}: {name} holds {value!r}, which has no form on the command line") from None
    return [f"--{name}", str(value)]
