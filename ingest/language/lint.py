"""Finds recipes that load and still do not train what their author means."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ingest.language.expressions import Expression, parse_expression
from ingest.language.pages import page, table
from ingest.language.recipe import DEFAULT_BINDINGS, TASK, MessageTurn, TrainingRecipe
from ingest.language.recipe_file import RecipeText
from ingest.language.styles import STATE_COLUMN, STYLES

Path_ = tuple[str | int, ...]

_LOOKALIKE = re.compile(r"\$\{\s*\w+\s*\}|\$[A-Za-z_]\w*|(?<![${])\{[A-Za-z_]\w*\}")


@dataclass(frozen=True, slots=True)
class RecipeFinding:
    """One finding.

    Attributes:
        code: short name of the rule.
        severity: ``warning`` for what is likely a mistake, ``info`` for what is worth knowing.
        message: what is odd and what to do.
        path: where in the recipe.
        line: 1-based line in the file, or None.
    """

    code: str
    severity: Literal["warning", "info"]
    message: str
    path: Path_ = ()
    line: int | None = None

    @property
    def where(self) -> str:
        """The path as text, such as ``blend.chat.messages[1]``."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path).lstrip(".")


@dataclass(frozen=True, slots=True)
class RecipeReport:
    """What was found in one recipe.

    Attributes:
        source: file name or another label.
        fingerprint: of the recipe.
        components: ``(name, weight, route, turns)`` in declaration order.
        references: names of the bindings used.
        findings: in the order of the recipe.
    """

    source: str
    fingerprint: str
    components: tuple[tuple[str, float | None, str | None, int], ...]
    references: tuple[str, ...]
    findings: tuple[RecipeFinding, ...]

    @property
    def warnings(self) -> tuple[RecipeFinding, ...]:
        """Findings that are likely mistakes."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "source": self.source,
            "fingerprint": self.fingerprint,
            "components": [
                {"name": name, "weight": weight, "route": route, "turns": turns} for name, weight, route, turns in self.components
            ],
            "references": list(self.references),
            "findings": [
                {"code": item.code, "severity": item.severity, "message": item.message, "where": item.where, "line": item.line}
                for item in self.findings
            ],
        }

    def to_text(self) -> str:
        """The report for a terminal."""
        lines = [f"{self.source}: valid recipe, {len(self.components)} component(s), fingerprint {self.fingerprint}"]
        for name, weight, route, turns in self.components:
            share = "" if weight is None else f", weight {weight:g}"
            lines.append(f"  {name or 'messages'}: {turns} turn(s){share}" + (f", route {route}" if route else ""))
        for item in self.findings:
            place = f"line {item.line}, " if item.line is not None else ""
            lines.append(f"  {item.severity} [{item.code}] {place}{item.where}: {item.message}")
        if not self.findings:
            lines.append("  nothing to complain about")
        return "\n".join(lines)

    def to_html(self) -> str:
        """The report as a page of its own."""
        components = [
            [name or "messages", "" if weight is None else f"{weight:g}", route or "", turns]
            for name, weight, route, turns in self.components
        ]
        findings = [[item.severity, item.code, "" if item.line is None else item.line, item.where, item.message] for item in self.findings]
        body = table(["component", "weight", "route", "turns"], components) + table(
            ["severity", "rule", "line", "where", "message"], findings
        )
        return page(f"Recipe {self.source}", body)


def check_recipe(text: RecipeText, cameras: Collection[str] | None = None) -> RecipeReport:
    """Lints a recipe that has loaded.

    Args:
        text: from ``parse_recipe`` or ``read_recipe``.
        cameras: the dataset's camera keys; None leaves cameras unchecked.
    """
    recipe = text.recipe
    found = [
        *_whole(recipe),
        *(RecipeFinding("repeated_key", "warning", "given twice here; YAML keeps the last", path) for path, _ in text.repeated),
    ]
    for name, component in recipe.components.items():
        prefix: Path_ = ("blend", name) if recipe.blend is not None else ()
        found += [replace(item, path=(*prefix, *item.path)) for item in _component(component, cameras)]
    placed = [replace(item, line=text.line_of(item.path)) for item in found]
    return RecipeReport(
        text.source,
        recipe.fingerprint(),
        tuple((name, part.weight, part.route, len(part.messages or ())) for name, part in recipe.components.items()),
        tuple(recipe.references()),
        tuple(sorted(placed, key=lambda item: item.line or 0)),
    )


def _whole(recipe: TrainingRecipe) -> Iterator[RecipeFinding]:
    if recipe.blend is None:
        for name in ("weight", "route"):
            if getattr(recipe, name) is not None:
                yield RecipeFinding("meaningless_field", "warning", "has no meaning outside a blend", (name,))
    else:
        if recipe.bindings:
            yield RecipeFinding(
                "ignored_bindings", "warning", "components do not inherit the bindings of a blend: move them", ("bindings",)
            )
        if all(part.route for part in recipe.blend.values()):
            yield RecipeFinding("only_routed", "warning", "every component is routed: frames without a match render nothing", ("blend",))
    extensions = [name for name in ("select_from_applicable",) if getattr(recipe, name)]
    extensions += ["requires" for part in recipe.components.values() if part.requires]
    extensions += ["dropout" for part in recipe.components.values() for turn in part.messages or () if turn.dropout]
    extensions += ["seconds_ago" for part in recipe.components.values() for _, text in part.needed if parse_expression(text).seconds_ago]
    if extensions:
        yield RecipeFinding(
            "not_portable", "info", f"LeRobot rejects {', '.join(dict.fromkeys(extensions))}; the recipe works with reelray only"
        )


def _component(recipe: TrainingRecipe, cameras: Collection[str] | None) -> Iterator[RecipeFinding]:
    turns = tuple(recipe.messages or ())
    bindings = {name: parse_expression(text) for name, text in recipe.needed}
    for name in recipe.bindings or ():
        path: Path_ = ("bindings", name)
        if name not in recipe.references():
            yield RecipeFinding(
                "unused_binding", "warning", "no turn uses it, yet it is resolved on every frame and may be ambiguous", path
            )
    for name, expression in bindings.items():
        yield from (
            replace(item, path=("bindings", name) if name in (recipe.bindings or ()) else ())
            for item in _binding(name, expression, cameras)
        )
    for position, turn in enumerate(turns):
        for item in _turn(turn, cameras):
            yield replace(item, path=("messages", position, *item.path))
    users = {
        turn.content: position
        for position, turn in enumerate(turns)
        if turn.role == "user" and isinstance(turn.content, str) and turn.content
    }
    for position, turn in enumerate(turns):
        if turn.target and isinstance(turn.content, str) and users.get(turn.content, position) < position:
            yield RecipeFinding(
                "target_copies_user",
                "warning",
                f"the target repeats the user text of turn {users[turn.content]}: nothing is learnt",
                ("messages", position),
            )
    supervising = [turn for turn in turns if turn.target or turn.stream == "low_level"]
    impossible = {name for name, expression in bindings.items() if _impossible(expression, cameras)}
    if supervising and all(turn.if_present in impossible for turn in supervising):
        yield RecipeFinding("never_renders", "warning", "every supervising turn waits for a binding that no row can match")
    if recipe.route and any(turn.if_present is None for turn in supervising):
        yield RecipeFinding(
            "route_catches_all", "warning", "a supervising turn has no if_present, so this route takes every frame", ("route",)
        )


def _turn(turn: MessageTurn, cameras: Collection[str] | None) -> Iterator[RecipeFinding]:
    needed = {name for name in turn.placeholders() if name != TASK} | ({turn.tool_calls_from} if turn.tool_calls_from else set[str]())
    if turn.target and needed and turn.if_present is None:
        names = ", ".join(sorted(needed))
        yield RecipeFinding("unguarded_target", "warning", f"without {names} the target is empty text: add if_present")
    if turn.target and turn.role != "assistant":
        yield RecipeFinding("target_role", "info", f"supervises a {turn.role} turn", ("target",))
    texts = [("content", turn.content)] if isinstance(turn.content, str) else []
    blocks = turn.content if isinstance(turn.content, list) else []
    texts += [(str(key), value) for block in blocks for key, value in block.items() if isinstance(value, str)]
    for _, text in texts:
        literal = [match for match in _LOOKALIKE.findall(text) if match[2:-1] not in turn.placeholders()]
        if literal:
            yield RecipeFinding(
                "literal_placeholder", "warning", f"{literal[0]} stays as it is; placeholders are written ${{name}}", ("content",)
            )
    for position, block in enumerate(blocks):
        feature = block.get("feature")
        if (
            block.get("type") == "image"
            and cameras is not None
            and isinstance(feature, str)
            and "$" not in feature
            and feature not in cameras
        ):
            yield RecipeFinding(
                "unknown_camera",
                "warning",
                f"the dataset has no {feature}; it has {', '.join(sorted(cameras))}",
                ("content", position, "feature"),
            )


def _binding(name: str, expression: Expression, cameras: Collection[str] | None) -> Iterator[RecipeFinding]:
    reason = _impossible(expression, cameras)
    if reason:
        yield RecipeFinding("impossible_binding", "warning", f"{name}: {expression} matches no row: {reason}")
    style = STYLES.find(expression.style)
    if expression.function == "emitted_at" and style is not None and style.column == STATE_COLUMN:
        yield RecipeFinding(
            "emitted_state",
            "warning",
            f"{name}: emitted_at sees a {style.name} row only within 0.1 s of its start, a few frames: use active_at",
        )
    if expression.function == "emitted_at" and style is not None and style.view_dependent and expression.camera is None:
        kind = "default " if DEFAULT_BINDINGS.get(name) is not None else ""
        yield RecipeFinding("no_camera", "info", f"{name}: the {kind}binding is ambiguous on frames that two cameras annotate: add camera=")


def _impossible(expression: Expression, cameras: Collection[str] | None) -> str | None:
    """Why no valid row can match, or None."""
    style = STYLES.find(expression.style)
    if expression.camera is not None and style is not None and not style.view_dependent:
        return f"{style.name} rows have no camera"
    if expression.camera is not None and cameras is not None and expression.camera not in cameras:
        return f"the dataset has no camera {expression.camera}"
    return None
