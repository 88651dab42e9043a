"""Mixture files: the datasets of a mixture, their weights and how their features get common names, as YAML.

weights: explicit            # or: frames; without it all frames are one selection
block: 64
datasets:
  - source: data/pick        # a location; a relative folder is looked for beside the file
    weight: 1
  - source: owner/name
    weight: 3
    revision: main
    episodes: [0, 1, 2]
    rename: {observation.images.top: observation.images.cam0}
    drop: [observation.images.wrist]
    pad: {action: 14}
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ingest.errors import SettingsError
from train_integration.mixture_features import Member
from train_integration.yaml_file import load_yaml

_SUFFIXES = (".yaml", ".yml")
_TOP = ("weights", "block", "datasets")
_OPTIONS = ("revision", "repo_type", "root", "allow_unknown_version")
_MEMBER = ("source", "weight", "episodes", "exclude_episodes", "rename", "drop", "pad", *_OPTIONS)
_TYPES = {"revision": str, "repo_type": str, "root": str, "allow_unknown_version": bool}
_MAX_DATASETS = 4096


@dataclass(frozen=True, slots=True)
class MixtureFile:
    """What a mixture file says.

    Attributes:
        members: the datasets.
        weights: shares of the datasets, ``frames``, or None where all their frames are one selection.
        block: samples of a mixture block; None for the default.
    """

    members: tuple[Member, ...]
    weights: tuple[float, ...] | Literal["frames"] | None
    block: int | None


def is_mixture_file(source: str | Path) -> bool:
    """Whether a location is spelt as a mixture file."""
    return "://" not in str(source) and str(source).endswith(_SUFFIXES)


def read_mixture(path: Path) -> MixtureFile:
    """Reads a mixture file.

    Raises:
        SettingsError: it cannot be read, or an entry is unknown, missing or of the wrong kind; the entry is named.
    """
    found = load_yaml(path)
    _refuse_unknown(path, "a mixture", found, _TOP)
    entries = found.get("datasets")
    if not isinstance(entries, list) or not entries or len(entries) > _MAX_DATASETS:
        raise SettingsError(f"{path}: datasets must be a list of 1..{_MAX_DATASETS} entries, found {_shown(entries)}")
    members: list[Member] = []
    weights: list[float | None] = []
    for number, entry in enumerate(cast("list[Any]", entries)):
        where = f"datasets[{number}]"
        if not isinstance(entry, dict):
            raise SettingsError(f"{path}: {where} must be a mapping with a source, found {_shown(entry)}")
        _refuse_unknown(path, where, cast("dict[Any, Any]", entry), _MEMBER)
        members.append(_member(path, where, cast("dict[str, Any]", entry)))
        weights.append(_weight(path, where, cast("dict[str, Any]", entry).get("weight")))
    block = found.get("block")
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise SettingsError(f"{path}: block must be a positive whole number, found {_shown(block)}")
    return MixtureFile(tuple(members), _weights(path, found.get("weights"), weights), block)


def _weights(path: Path, kind: Any, given: list[float | None]) -> tuple[float, ...] | Literal["frames"] | None:
    if kind not in (None, "frames", "explicit"):
        raise SettingsError(f"{path}: weights must be frames or explicit, found {_shown(kind)}; numbers go to each dataset as its weight")
    explicit = [weight for weight in given if weight is not None]
    if kind == "frames" and explicit:
        raise SettingsError(f"{path}: weights are by frames, so no dataset can have a weight of its own")
    if kind == "frames":
        return "frames"
    if not explicit and kind is None:
        return None
    if len(explicit) < len(given):
        raise SettingsError(f"{path}: datasets[{given.index(None)}] has no weight: give every dataset one, or none and weights: frames")
    return tuple(explicit)


def _weight(path: Path, where: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise SettingsError(f"{path}: {where}.weight must be a number of 0 or more, found {_shown(value)}")
    return float(value)


def _member(path: Path, where: str, entry: Mapping[str, Any]) -> Member:
    source = entry.get("source")
    if not isinstance(source, str) or not source:
        raise SettingsError(f"{path}: {where} needs a source, the location of a dataset; found {_shown(source)}")
    beside = path.parent / source
    if "://" not in source and not Path(source).expanduser().is_absolute() and beside.is_dir():
        source = str(beside)
    for name in _OPTIONS:
        value = entry.get(name)
        if value is not None and not isinstance(value, _TYPES[name]):
            raise SettingsError(f"{path}: {where}.{name} must be a {_TYPES[name].__name__}, found {_shown(value)}")
    return Member(
        source=source,
        rename=_mapping(path, f"{where}.rename", entry.get("rename"), str),
        drop=tuple(_list(path, f"{where}.drop", entry.get("drop"), str) or ()),
        pad=_mapping(path, f"{where}.pad", entry.get("pad"), int),
        episodes=_list(path, f"{where}.episodes", entry.get("episodes"), int),
        exclude_episodes=_list(path, f"{where}.exclude_episodes", entry.get("exclude_episodes"), int),
        options={name: entry[name] for name in _OPTIONS if entry.get(name) is not None},
    )


def _list(path: Path, where: str, value: Any, kind: type) -> tuple[Any, ...] | None:
    if value is None:
        return None
    items = cast("list[Any]", value) if isinstance(value, list) else None
    if items is None or not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise SettingsError(f"{path}: {where} must be a list of {kind.__name__}, found {_shown(value)}")
    return tuple(items)


def _mapping(path: Path, where: str, value: Any, kind: type) -> dict[str, Any]:
    if value is None:
        return {}
    items = cast("dict[Any, Any]", value) if isinstance(value, dict) else None
    right = items is not None and all(
        isinstance(key, str) and isinstance(item, kind) and not isinstance(item, bool) for key, item in items.items()
    )
    if items is None or not right:
        raise SettingsError(f"{path}: {where} must be a mapping of str to {kind.__name__}, found {_shown(value)}")
    if kind is int and any(item < 1 for item in items.values()):
        raise SettingsError(f"{path}: {where} must hold positive widths, found {_shown(value)}")
    return items


def _refuse_unknown(path: Path, where: str, found: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    unknown = [str(name) for name in found if name not in known]
    if unknown:
        raise SettingsError(f"{path}: {where} has unknown entries {', '.join(unknown)}; it may have {', '.join(known)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
