"""Renders one frame's annotations into chat messages: a pure function of its arguments."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from ingest.language.draw import draw_integer, unit_draw, weighted_choice
from ingest.language.expressions import parse_expression
from ingest.language.recipe import PLACEHOLDER, TASK, MessageTurn, TrainingRecipe
from ingest.language.resolve import find_row
from ingest.language.rows import Row, StateRows, mapping_rows, mapping_value, state_rows, unwrap_number


class Rendered(TypedDict):
    """One rendered sample.

    Attributes:
        messages: ``{"role", "content"?, "tool_calls"?}`` each; no chat template is applied.
        message_streams: stream of each message, same length.
        target_message_indices: positions of the supervised messages.
    """

    messages: list[dict[str, Any]]
    message_streams: list[str]
    target_message_indices: list[int]


@dataclass(frozen=True, slots=True)
class Frame:
    """What rendering needs to know about one frame.

    Attributes:
        state: state rows of the episode.
        events: event rows of this frame.
        t: frame time in seconds, the float32 time widened to double.
        index: global frame index of the dataset; decides every draw.
        task: text of ``${task}``, or None.
    """

    state: StateRows
    events: Sequence[Row]
    t: float
    index: int
    task: str | None


def render_sample(
    recipe: TrainingRecipe,
    persistent: Iterable[Row | None] | None,
    events: Iterable[Row | None] | None,
    t: float,
    sample_index: int,
    *,
    task: str | None = None,
    context: Any = None,
    rephrasings_win: bool = False,
) -> Rendered | None:
    """Renders one frame by a recipe.

    Args:
        recipe: the recipe; of a blend, one component is chosen by ``sample_index``.
        persistent: state rows of the episode (pass one ``StateRows`` for all frames to index them once); None means none.
        events: event rows of this frame; None means none.
        t: frame time in seconds.
        sample_index: global frame index.
        task: the sample's task text; wins over rephrasings and context, the empty string included.
        context: mapping or object with a ``task``, asked last.
        rephrasings_win: lets ``task_aug`` rows replace ``task``.

    Returns:
        The messages, or None when the recipe does not apply to this frame.

    Raises:
        LanguageError: a binding matches several rows, or rows are malformed.
    """
    state = state_rows(persistent)
    text = task_text(sample_index, state, task, context, rephrasings_win=rephrasings_win)
    # A float32 time would narrow the row times that it is compared with.
    frame = Frame(state, mapping_rows(events), unwrap_number(t, "t"), sample_index, text)
    return render_branch(recipe, frame)[1]


def render_branch(recipe: TrainingRecipe, frame: Frame) -> tuple[str | None, Rendered | None]:
    """The chosen component's name (empty for a message recipe, None when there is none) and what it renders."""
    if recipe.blend is None:
        return "", _render_component(recipe, frame)
    if recipe.select_from_applicable:
        return _choose_rendered(_rendering(recipe.blend, frame, routed_only=False), frame.index, "applicable:")
    routed = _rendering(recipe.blend, frame, routed_only=True)
    if routed:
        return _choose_rendered(routed, frame.index, "vqa:")
    name = select_component(recipe, frame.index)
    return (None, None) if name is None else (name, _render_component(recipe.blend[name], frame))


def select_component(recipe: TrainingRecipe, sample_index: int) -> str | None:
    """The component that the ordinary weighted draw gives a sample.

    Routed components take no part. Returns None when nothing is left to draw from, and the empty name for a recipe that
    is no blend.
    """
    if recipe.blend is None:
        return ""
    candidates = [(name, float(component.weight or 0.0)) for name, component in recipe.blend.items() if component.route is None]
    return weighted_choice(candidates, unit_draw(sample_index))


def task_text(
    sample_index: int,
    persistent: Iterable[Row | None] | None,
    task: str | None = None,
    context: Any = None,
    *,
    rephrasings_win: bool = False,
) -> str | None:
    """The text of ``${task}`` for a sample.

    The sample's own task comes first, then one of the ``task_aug`` rows with role ``user``, then the context's task.
    The same index always picks the same rephrasing; timestamps of rephrasings are ignored.
    """
    if task is not None and not rephrasings_win:
        return task
    # Not ``of_style``: a rephrasing needs no timestamp.
    choices = [row for row in state_rows(persistent) if row.get("style") == "task_aug" and row.get("role") == "user"]
    if choices:
        content = choices[draw_integer(f"task_aug:{sample_index}") % len(choices)].get("content")
        if content:
            return str(content)
    if task is not None:
        return task
    return mapping_value(context, "task") if isinstance(context, Mapping) else getattr(context, "task", None)


def render_turns(turns: Sequence[MessageTurn], bindings: Mapping[str, Any], sample_index: int = 0) -> Rendered:
    """Renders turns with bindings that are already resolved: None, a row, or text."""
    rendered = Rendered(messages=[], message_streams=[], target_message_indices=[])
    for position, turn in enumerate(turns):
        if turn.dropout and draw_integer(f"message_dropout:{sample_index}:{position}") / 2**64 < turn.dropout:
            continue
        if turn.if_present is not None and bindings.get(turn.if_present) is None:
            continue
        message: dict[str, Any] = {"role": turn.role}
        if isinstance(turn.content, str):
            message["content"] = _fill(turn.content, bindings)
        elif turn.content is not None:
            message["content"] = [_fill_block(block, bindings) for block in turn.content]
        if turn.tool_calls_from is not None:
            calls = mapping_value(bindings.get(turn.tool_calls_from), "tool_calls")
            if calls:
                message["tool_calls"] = copy.deepcopy(calls)
        if turn.target:
            rendered["target_message_indices"].append(len(rendered["messages"]))
        rendered["messages"].append(message)
        rendered["message_streams"].append(cast("str", turn.stream))
    return rendered


def _render_component(recipe: TrainingRecipe, frame: Frame) -> Rendered | None:
    bindings = _bind(recipe, frame)
    if any(bindings.get(name) is None for name in recipe.requires):
        return None
    rendered = render_turns(recipe.messages or (), bindings, frame.index)
    supervised = rendered["target_message_indices"] or "low_level" in rendered["message_streams"]
    return rendered if supervised else None


def _bind(recipe: TrainingRecipe, frame: Frame) -> dict[str, Any]:
    bindings: dict[str, Any] = {TASK: frame.task}
    for name, expression in recipe.needed:
        bindings[name] = find_row(parse_expression(expression), frame.state, frame.events, frame.t)
    return bindings


def _rendering(components: Mapping[str, TrainingRecipe], frame: Frame, *, routed_only: bool) -> list[tuple[str, float, Rendered]]:
    kept: list[tuple[str, float, Rendered]] = []
    for name, component in components.items():
        if routed_only and component.route is None:
            continue
        rendered = _render_component(component, frame)
        if rendered is not None:
            kept.append((name, float(component.weight or 0.0), rendered))
    return kept


def _choose_rendered(kept: list[tuple[str, float, Rendered]], index: int, prefix: str) -> tuple[str | None, Rendered | None]:
    chosen = weighted_choice([((name, rendered), weight) for name, weight, rendered in kept], unit_draw(index, prefix))
    return (None, None) if chosen is None else chosen


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = cast("Row", value).get("content")
    return "" if value is None else str(value)


def _fill(template: str, bindings: Mapping[str, Any]) -> str:
    # One pass: text that comes from rows is never expanded again.
    return PLACEHOLDER.sub(lambda match: _text(bindings.get(match.group(1))), template)


def _fill_block(block: Mapping[str, Any], bindings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _fill(value, bindings) if isinstance(value, str) else copy.deepcopy(value) for key, value in block.items()}
