"""Recipes from YAML text, files and names: bounded, without code, and with the line of every fault."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from ingest.errors import ObjectNotFoundError, RecipeError
from ingest.language.recipe import TrainingRecipe
from ingest.language.recipe_checks import Rules

MAX_BYTES = 256 * 1024
MAX_NODES = 10_000
MAX_DEPTH = 32

RECIPE_FOLDER = Path(__file__).resolve().parents[2] / "recipes"
"""The shipped recipes; the folder sits beside the packages, in a checkout as in an installed wheel."""

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class RecipeText:
    """A recipe together with where its parts stand in the text.

    Attributes:
        recipe: the checked recipe.
        source: file name or another label for messages.
        lines: 1-based line of every key and list entry, by path from the top.
        repeated: ``(path, line)`` of keys given twice in one mapping; YAML keeps the last.
    """

    recipe: TrainingRecipe
    source: str
    lines: Mapping[Path_, int]
    repeated: tuple[tuple[Path_, int], ...] = ()

    def line_of(self, path: Path_) -> int | None:
        """Line of the deepest part of ``path`` that stands in the text."""
        return _line_of(self.lines, path)


def parse_recipe(text: str | bytes, *, source: str = "recipe", rules: Rules = "reelray") -> RecipeText:
    """Reads a recipe from YAML text.

    Plain YAML with anchors and merge keys is read; tags, repeated expansion and oversized documents are refused.

    Args:
        text: at most 256 KiB, UTF-8.
        source: label for messages.
        rules: ``lerobot`` accepts exactly what LeRobot accepts (see ``TrainingRecipe``).

    Raises:
        RecipeError: not YAML, too large, or an invalid recipe; names line and place.
    """
    lines: dict[Path_, int] = {}
    repeated: list[tuple[Path_, int]] = []
    try:
        data = _load_yaml(text, lines, repeated)
        recipe = TrainingRecipe.from_dict(data, rules=rules)
    except RecipeError as error:
        error.source = source
        if error.line is None:
            error.line = _line_of(lines, error.path)
        raise
    return RecipeText(recipe, source, lines, tuple(repeated))


def read_recipe(location: str | os.PathLike[str], *, rules: Rules = "reelray") -> RecipeText:
    """Reads a recipe file, or one of the shipped recipes by name (``subtask``, ``subtask_mem`` …).

    Raises:
        ObjectNotFoundError: neither a file nor a shipped recipe.
        RecipeError: see ``parse_recipe``.
    """
    path = Path(location).expanduser()
    if not path.is_file():
        shipped = RECIPE_FOLDER / f"{path.name.removesuffix('.yaml')}.yaml"
        if str(path.parent) not in (".", "recipes") or not shipped.is_file():
            names = ", ".join(shipped_recipes())
            raise ObjectNotFoundError(f"{location}: no such recipe file, and the shipped recipes are {names}")
        path = shipped
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    return parse_recipe(text, source=str(location), rules=rules)


def load_recipe(
    source: str | os.PathLike[str] | Mapping[str, Any] | TrainingRecipe,
    *,
    inline: Mapping[str, Any] | None = None,
    rules: Rules = "reelray",
) -> TrainingRecipe:
    """A checked recipe from whatever holds one.

    Args:
        source: a file, the name of a shipped recipe, YAML text (recognised by a line break), nested mappings, or a recipe.
        inline: the recipe that travelled in a checkpoint; used when ``source`` names a file that is not on this machine.
        rules: see ``parse_recipe``.

    Raises:
        ObjectNotFoundError: no such file or name, and no ``inline``.
        RecipeError: the recipe is invalid; names line and place.
    """
    if isinstance(source, TrainingRecipe):
        return source
    if isinstance(source, Mapping):
        return TrainingRecipe.from_dict(source, rules=rules)
    if isinstance(source, str) and "\n" in source:
        return parse_recipe(source, rules=rules).recipe
    try:
        return read_recipe(source, rules=rules).recipe
    except ObjectNotFoundError:
        if inline is None:
            raise
        return TrainingRecipe.from_dict(inline, rules=rules)


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with reelray."""
    return sorted(path.stem for path in RECIPE_FOLDER.glob("*.yaml") if _is_recipe(path))


def _is_recipe(path: Path) -> bool:
    # Job configurations share the folder; a recipe starts with one of the two words.
    with path.open(encoding="utf-8") as file:
        return any(line.startswith(("messages:", "blend:")) for line in file)


def _load_yaml(text: str | bytes, lines: dict[Path_, int], repeated: list[tuple[Path_, int]]) -> Any:
    size = len(text) if isinstance(text, bytes) else len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise RecipeError(f"a recipe may have {MAX_BYTES} bytes, found {size} or more", kind="too_large")
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        _check_shape(decoded)
        loader = yaml.SafeLoader(decoded)
        node = loader.get_single_node()
        if node is None:
            return None
        for path, line, again in _walk(node, ()):
            if again:
                repeated.append((path, line))
            lines[path] = line
        return cast("Any", loader.construct_document(node))  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError(f"not readable as plain YAML: {problem}", kind="bad_yaml", line=None if mark is None else mark.line + 1) from None
    except (ValueError, OverflowError) as error:
        # A scalar that looks like a date or number but is none, or bytes that are not UTF-8.
        raise error if isinstance(error, RecipeError) else RecipeError(f"not readable as plain YAML: {error}", kind="bad_yaml") from None


def _check_shape(text: str) -> None:
    """Refuses documents that are too deep or too large once their aliases are expanded, before any node is built."""
    anchors: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in cast("Iterator[yaml.Event]", yaml.parse(text, Loader=yaml.SafeLoader)):  # pyright: ignore[reportUnknownMemberType]
        line = event.start_mark.line + 1
        grown = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, grown = open_nodes.pop()
            if anchor is not None:
                anchors[anchor] = grown
        elif isinstance(event, yaml.ScalarEvent):
            grown = 1
            if event.anchor is not None:
                anchors[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise RecipeError(f"alias *{event.anchor} has no finished anchor before it", kind="bad_yaml", line=line)
            grown = anchors[event.anchor]
        anchor, count = open_nodes[-1]
        open_nodes[-1] = (anchor, count + grown)
        if len(open_nodes) > MAX_DEPTH:
            raise RecipeError(f"nested deeper than {MAX_DEPTH} levels", kind="too_deep", line=line)
        if count + grown > MAX_NODES:
            raise RecipeError(f"more than {MAX_NODES} values once aliases are expanded", kind="too_large", line=line)


def _walk(node: yaml.Node, path: Path_) -> Iterator[tuple[Path_, int, bool]]:
    """``(path, line, seen before)`` of every key and list entry below a node."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            yield (*path, name), key.start_mark.line + 1, name in seen
            seen.add(name)
            yield from _walk(value, (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(cast("list[yaml.Node]", node.value)):
            yield (*path, position), value.start_mark.line + 1, False
            yield from _walk(value, (*path, position))


def _line_of(lines: Mapping[Path_, int], path: Path_) -> int | None:
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None
