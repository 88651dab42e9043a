"""Recipes as values: what a training sample is made of, checked when it is made.

A recipe is either a list of chat turns (``messages``) or a weighted choice among such recipes (``blend``). It holds no
code and no path, serialises to nested dicts (``to_dict``), and therefore travels inside a checkpoint.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, cast

from ingest.errors import RecipeError, RecipeTypeError
from ingest.language.recipe_checks import Rules, at, check_bindings, check_content, check_dropout, check_weight, one_of, typed

ROLES = ("user", "assistant", "system", "tool")
STREAMS = ("high_level", "low_level")
ROUTES = ("vqa",)

DEFAULT_BINDINGS: Mapping[str, str] = {
    "subtask": "active_at(t, style=subtask)",
    "memory": "active_at(t, style=memory)",
    "plan": "active_at(t, style=plan)",
    "speech": "emitted_at(t, role=assistant, tool_name=say)",
    "interjection": "emitted_at(t, style=interjection)",
    "vqa": "emitted_at(t, style=vqa, role=assistant)",
    "vqa_query": "emitted_at(t, style=vqa, role=user)",
}
"""Names that every recipe may use without declaring them; declaring one replaces it."""

TASK = "task"
"""The binding that is always there: the task text of the sample."""

PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

EXTENSION_FIELDS = ("requires", "select_from_applicable", "dropout")
"""Fields that LeRobot's main branch rejects; a recipe that uses one is not portable."""

Content = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MessageTurn:
    """One chat turn.

    Attributes:
        role: ``user``, ``assistant``, ``system`` or ``tool``.
        content: text with ``${name}`` placeholders, or a list of blocks (mappings with a ``type``), or None for a turn
            that carries tool calls only.
        stream: ``high_level`` (text) or ``low_level`` (the action loss is on).
        target: whether the turn is supervised.
        if_present: binding without which the turn is left out.
        tool_calls_from: binding whose row lends its tool calls.
        dropout: share of samples, in [0, 1], that leave the turn out (extension).

    Raises:
        RecipeError: a value is outside what the field allows.
        RecipeTypeError: a value has the wrong type.
    """

    role: str
    content: Content | None = None
    stream: str | None = None
    target: bool = False
    if_present: str | None = None
    tool_calls_from: str | None = None
    dropout: float = 0.0
    rules: Rules = field(default="reelray", repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        one_of("role", self.role, ROLES, "bad_role")
        one_of("stream", self.stream, STREAMS, "bad_stream")
        if cast("object", self.target) is None:
            object.__setattr__(self, "target", False)
        if self.rules == "reelray" and not isinstance(self.target, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RecipeTypeError(f"must be true or false, found {self.target!r}", kind="bad_target", path=("target",))
        check_content(self.content, self.tool_calls_from)
        check_dropout(self.dropout)
        for name in ("if_present", "tool_calls_from"):
            if isinstance(getattr(self, name), list | dict | bool):
                raise RecipeTypeError(f"must be the name of a binding, found {getattr(self, name)!r}", kind="type_misuse", path=(name,))

    def placeholders(self) -> list[str]:
        """Every name between ``${`` and ``}`` in the content, in order, repeats included."""
        texts = [self.content] if isinstance(self.content, str) else []
        if isinstance(self.content, list):
            texts = [value for block in self.content for value in block.values() if isinstance(value, str)]
        return [name for text in texts for name in PLACEHOLDER.findall(text)]

    def references(self) -> list[tuple[str, str]]:
        """``(field, name)`` for every binding that the turn uses."""
        used = [("content", name) for name in self.placeholders()]
        if self.if_present is not None:
            used.append(("if_present", self.if_present))
        if self.tool_calls_from is not None:
            used.append(("tool_calls_from", self.tool_calls_from))
        return used


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """What becomes of one annotated frame; exactly one of ``messages`` and ``blend`` is given.

    Attributes:
        messages: the turns, in order.
        bindings: name to resolver expression; adds to and replaces the default bindings. Not inherited by blend components.
        blend: name to component, in the order that the weighted choice walks.
        weight: share of a component, > 0; weights need not sum to 1.
        route: ``vqa`` on a component that comes before the weighted choice on frames where it renders.
        requires: bindings without which a component renders nothing (extension).
        select_from_applicable: choose only among components that render (extension, on the blend).
        needed: ``(name, expression)`` of every binding that rendering resolves, worked out once. Unused defaults are
            left out, so a recipe without VQA works on frames that two cameras annotated; declared bindings are in even
            when unused, as in LeRobot.

    Raises:
        RecipeError: the recipe breaks a rule; ``path`` and ``kind`` say which and where.
        RecipeTypeError: a value has the wrong type.
    """

    messages: Sequence[MessageTurn] | None = None
    bindings: Mapping[str, str] | None = None
    blend: Mapping[str, TrainingRecipe] | None = None
    weight: float | None = None
    route: str | None = None
    requires: Sequence[str] = ()
    select_from_applicable: bool = False
    rules: Rules = field(default="reelray", repr=False, compare=False, kw_only=True)
    needed: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.blend is None):
            found = "neither" if self.messages is None else "both"
            raise RecipeError(f"give exactly one of messages and blend, found {found}", kind="messages_or_blend_missing")
        if self.route is not None:
            one_of("route", self.route, ROUTES, "bad_route")
        if not isinstance(self.select_from_applicable, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RecipeTypeError(
                f"must be true or false, found {self.select_from_applicable!r}", kind="type_misuse", path=("select_from_applicable",)
            )
        check_bindings(self.bindings, self.rules)
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(self.messages))
            self._check_messages(self.messages)
        if self.blend is not None:
            object.__setattr__(self, "blend", dict(self.blend))
            self._check_blend(self.blend)
        object.__setattr__(self, "requires", tuple(self.requires))
        declared = dict(self.bindings or {})
        used = {name: DEFAULT_BINDINGS[name] for name in self.references() if name in DEFAULT_BINDINGS}
        object.__setattr__(self, "needed", tuple({**used, **declared}.items()) if self.blend is None else ())

    def _check_messages(self, turns: Sequence[MessageTurn]) -> None:
        if self.select_from_applicable:
            raise RecipeError(
                "belongs on a blend, not on a message recipe", kind="applicable_on_messages", path=("select_from_applicable",)
            )
        known = {TASK, *DEFAULT_BINDINGS, *(self.bindings or ())}
        used = [(("messages", position, where), name) for position, turn in enumerate(turns) for where, name in turn.references()]
        for path, name in [*used, *((("requires", position), name) for position, name in enumerate(self.requires))]:
            if name not in known:
                raise RecipeError(f"unknown binding {name!r}: known are {', '.join(sorted(known))}", kind="unknown_binding", path=path)
        if not any(turn.target or turn.stream == "low_level" for turn in turns):
            raise RecipeError(
                "supervises nothing: mark a turn target: true or put one on stream: low_level", kind="no_supervision", path=("messages",)
            )

    def _check_blend(self, components: Mapping[str, TrainingRecipe]) -> None:
        if self.route is not None:
            raise RecipeError("belongs on a component, not on the blend", kind="route_on_blend", path=("route",))
        if self.requires:
            raise RecipeError("belongs on a component, not on the blend", kind="requires_on_blend", path=("requires",))
        if not components:
            raise RecipeError("needs at least one component", kind="empty_blend", path=("blend",))
        for name, component in components.items():
            with at("blend", name):
                if component.blend is not None:
                    raise RecipeError("a component must have messages; blends do not nest", kind="nested_blend", path=("blend",))
                check_weight(component.weight, self.rules)

    @property
    def components(self) -> Mapping[str, TrainingRecipe]:
        """The blend's components by name; a message recipe is its own only component, under the empty name."""
        return self.blend if self.blend is not None else {"": self}

    def references(self) -> list[str]:
        """Sorted names of every binding that turns and ``requires`` use, over all components."""
        names = {name for part in self.components.values() for turn in part.messages or () for _, name in turn.references()}
        return sorted(names.union(*(part.requires for part in self.components.values())))

    def prompt_turns(self, name: str) -> tuple[MessageTurn, ...]:
        """The turns before the first supervised assistant turn whose content uses ``${name}``.

        Raises:
            RecipeError: no component has such a turn.
        """
        for component in self.components.values():
            turns = tuple(component.messages or ())
            for position, turn in enumerate(turns):
                if turn.target and turn.role == "assistant" and name in turn.placeholders():
                    return turns[:position]
        raise RecipeError(f"no supervised assistant turn uses ${{{name}}}, so there is no prompt for it", kind="no_target_for_binding")

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists that ``from_dict`` reads back; defaults are left out, declaration order is kept."""
        data: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("rules", "needed") or value is None or (item.name in ("requires", "select_from_applicable") and not value):
                continue
            if item.name == "messages":
                data[item.name] = [_turn_dict(turn) for turn in value]
            elif item.name == "blend":
                data[item.name] = {name: component.to_dict() for name, component in value.items()}
            else:
                data[item.name] = dict(value) if item.name == "bindings" else list(value) if item.name == "requires" else value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, rules: Rules = "reelray") -> TrainingRecipe:
        """Builds and checks a recipe from nested mappings; the input is not kept.

        Raises:
            RecipeError: see the class.
        """
        if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] recipes come from files
            raise RecipeError(f"a recipe is a mapping at the top level, found {type(data).__name__}", kind="yaml_not_mapping")
        recipe = _recipe(data, rules, component=False)
        if rules == "reelray":
            try:
                recipe.fingerprint()
            except UnicodeEncodeError as error:
                # YAML and JSON can spell half of a surrogate pair, which no tokenizer and no file takes.
                raise RecipeError(f"the text {error.object[error.start : error.end]!r} is no character", kind="bad_text") from None
        return recipe

    def fingerprint(self) -> str:
        """32 hexadecimal digits that change with anything that may change a rendered sample."""
        # Order decides the weighted choice, so keys are not sorted.
        return blake2b(json.dumps(self.to_dict(), ensure_ascii=False, default=repr).encode(), digest_size=16).hexdigest()


def _recipe(data: Mapping[str, Any], rules: Rules, *, component: bool) -> TrainingRecipe:
    values = _known_fields(data, TrainingRecipe, rules)
    if values.get("messages") is not None:
        with at("messages"):
            turns = typed(values["messages"], list | tuple, "a list of turns")
            values["messages"] = [_turn(position, turn, rules) for position, turn in enumerate(turns)]
    if values.get("blend") is not None:
        if component:
            raise RecipeError("a component must have messages; blends do not nest", kind="nested_blend", path=("blend",))
        with at("blend"):
            values["blend"] = {
                name: _component(name, part, rules) for name, part in typed(values["blend"], Mapping, "a mapping of components").items()
            }
    if "requires" in values:
        with at("requires"):
            names = typed(values["requires"] if values["requires"] is not None else [], list | tuple, "a list of binding names")
            values["requires"] = [typed(name, str, "a binding name") for name in names]
    return TrainingRecipe(**values, rules=rules)


def _component(name: Any, data: Any, rules: Rules) -> TrainingRecipe:
    with at(name if isinstance(name, str | int) else str(name)):
        typed(name, str, "a name in text (quote it)")
        return _recipe(typed(data, Mapping, "a mapping with weight and messages", kind="not_a_mapping"), rules, component=True)


def _turn(position: int, data: Any, rules: Rules) -> MessageTurn:
    with at(position):
        values = _known_fields(typed(data, Mapping, "a mapping with role, content and stream", kind="not_a_mapping"), MessageTurn, rules)
        if "role" not in values:
            raise RecipeTypeError("a turn needs a role", kind="missing_required_field")
        return MessageTurn(**copy.deepcopy(values), rules=rules)


def _turn_dict(turn: MessageTurn) -> dict[str, Any]:
    values = {item.name: getattr(turn, item.name) for item in fields(turn) if item.name != "rules"}
    return {name: copy.deepcopy(value) for name, value in values.items() if value is not None and value is not False and value != 0.0}


def _known_fields(data: Mapping[Any, Any], cls: type[MessageTurn] | type[TrainingRecipe], rules: Rules) -> dict[str, Any]:
    allowed = [
        item.name
        for item in fields(cls)
        if item.name not in ("rules", "needed") and (rules == "reelray" or item.name not in EXTENSION_FIELDS)
    ]
    for key in data:
        if key not in allowed:
            raise RecipeTypeError(
                f"unknown field {key!r}: allowed are {', '.join(allowed)}",
                kind="unknown_field",
                path=(key if isinstance(key, str | int) else str(key),),
            )
    return dict(data)
