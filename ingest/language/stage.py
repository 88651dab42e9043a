"""The rendering stage of the stream: one flat sample in, the sample with messages out.

The engine injects it. Frames that the stage would refuse leave the selection before planning (``language_plan``), so
batches stay full and no frame is lost or seen twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Literal, cast

from ingest.errors import LanguageError
from ingest.language.recipe import TrainingRecipe
from ingest.language.recipe_file import load_recipe
from ingest.language.render import Frame, Rendered, render_branch, task_text
from ingest.language.rows import Row, StateRows, mapping_rows, state_rows, unwrap_number, unwrap_scalar
from ingest.language.step import (
    MESSAGES_KEY,
    READ_MESSAGES_KEYS,
    STREAMS_KEY,
    TARGETS_KEY,
    is_empty,
    sample_time,
    task_only,
    without_columns,
)
from ingest.language.styles import EVENT_COLUMN, LANGUAGE_COLUMNS, STATE_COLUMN

Policy = Literal["error", "fallback", "drop"]
"""What becomes of an annotated frame that the recipe does not render.

``error``: the run stops before it starts. ``fallback``: its task alone trains the actions; without a task it leaves the
selection. ``drop``: it leaves the selection. Frames without any annotation are not concerned: their task trains the
actions, and without a task they leave.
"""

POLICIES: tuple[Policy, ...] = ("error", "fallback", "drop")


class Outcome(IntEnum):
    """What becomes of a frame."""

    RENDERED = 0
    """The recipe renders it."""
    UNANNOTATED = 1
    """It has no annotation; its task alone trains the actions."""
    FALLBACK = 2
    """It is annotated but the recipe does not apply; its task alone trains the actions."""
    DROPPED = 3
    """It has no supervision at all and leaves the selection."""
    AMBIGUOUS = 4
    """Its rows are in fault: a binding matches several, or one is malformed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One frame's outcome.

    Attributes:
        outcome: the kind.
        branch: chosen component (empty for a message recipe), None when nothing was chosen.
        rendered: the messages, or None when the frame leaves the selection.
        error: what was wrong with an ambiguous frame.
    """

    outcome: Outcome
    branch: str | None
    rendered: Rendered | None
    error: LanguageError | None = None


@dataclass(frozen=True, slots=True)
class RenderStage:
    """Renders flat samples, the way the engine hands them on.

    Attributes:
        recipe: None passes samples through, raw columns included.
        policy: for frames on which the recipe does not apply; see ``Policy``.
        on_ambiguous: for frames whose rows are in fault (a binding matches several, or one is malformed).
        messages_key: key that the messages are written under.
        streams_key: key that the stream of each message is written under.
        targets_key: key that the positions of the supervised messages are written under.
        rephrasings_win: lets ``task_aug`` rows replace the sample's task.
        lerobot_batches: renders a frame without rows, in a dataset that has language columns, by the recipe with no rows,
            as LeRobot does inside batches, instead of giving it the task fallback that it gets as a single sample.
    """

    recipe: TrainingRecipe | None
    policy: Policy = "fallback"
    on_ambiguous: Policy = "error"
    messages_key: str = MESSAGES_KEY
    rephrasings_win: bool = False
    streams_key: str = STREAMS_KEY
    targets_key: str = TARGETS_KEY
    lerobot_batches: bool = False

    def __post_init__(self) -> None:
        for name, policy in (("policy", self.policy), ("on_ambiguous", self.on_ambiguous)):
            if policy not in POLICIES:
                raise LanguageError(f"{name} must be one of {', '.join(POLICIES)}, found {policy!r}", kind="bad_policy")
        if len({*self.keys, *LANGUAGE_COLUMNS}) < 5 or not all(self.keys):
            raise LanguageError(
                f"the keys of messages, streams and targets must be three different names and no raw columns, found {', '.join(self.keys)}",
                kind="bad_keys",
            )

    @property
    def keys(self) -> tuple[str, str, str]:
        """Keys that a rendered sample has: messages, streams, targets."""
        return self.messages_key, self.streams_key, self.targets_key

    def describe(self) -> dict[str, Any]:
        """The recipe and every setting as plain values; equal descriptions render equal samples. It goes into checkpoints."""
        settings = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "recipe"}
        return {"recipe": None if self.recipe is None else self.recipe.to_dict(), **settings}

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> RenderStage:
        """The stage that ``describe`` described.

        Raises:
            LanguageError: it is no description of a stage.
            RecipeError: its recipe is invalid.
        """
        known = {item.name for item in fields(cls)}
        if "recipe" not in description or not known.issuperset(description):
            raise LanguageError(f"no description of a rendering stage: it has {', '.join(map(repr, description))}", kind="bad_description")
        recipe = description["recipe"]
        settings: dict[str, Any] = {**description, "recipe": None if recipe is None else TrainingRecipe.from_dict(recipe)}
        return cls(**settings)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        """The sample with messages and without raw columns, or None when it has no supervision.

        Args:
            sample: a LeRobot item; may hold ``language_persistent``, ``language_events``, ``timestamp``, ``index``, ``task``.

        Raises:
            LanguageError: the sample cannot be rendered and its policy is ``error``.
        """
        if self.recipe is None or any(name in sample for name in (self.messages_key, *READ_MESSAGES_KEYS)):
            return dict(sample)
        state, events, task = sample.get(STATE_COLUMN), sample.get(EVENT_COLUMN), sample.get("task")
        stored = any(name in sample for name in LANGUAGE_COLUMNS)
        if is_empty(state) and is_empty(events) and not (self.lerobot_batches and stored):
            rendered = task_only(task)
            return self._with(sample, rendered) if rendered is not None else without_columns(sample)
        t = unwrap_number(sample_time(sample), "timestamp")
        verdict = self.judge(state_rows(state), mapping_rows(events), t, int(unwrap_scalar(sample.get("index", 0), "index")), task)
        return None if verdict.rendered is None else self._with(sample, verdict.rendered)

    def judge(self, state: StateRows, events: list[Row], t: float, index: int, task: str | None) -> Verdict:
        """What becomes of one frame.

        Raises:
            LanguageError: only under the policy ``error``; the caller adds episode and frame.
        """
        if not state and not events and not self.lerobot_batches:
            rendered = task_only(task)
            return Verdict(Outcome.DROPPED if rendered is None else Outcome.UNANNOTATED, None, rendered)
        assert self.recipe is not None
        problem: LanguageError | None = None
        branch: str | None = None
        try:
            text = task_text(index, state, task, rephrasings_win=self.rephrasings_win)
            branch, rendered = render_branch(self.recipe, Frame(state, events, t, index, text))
        except LanguageError as error:
            if self.on_ambiguous == "error":
                raise
            problem, rendered = error, None
        if rendered is not None:
            return Verdict(Outcome.RENDERED, branch, rendered)
        policy = self.policy if problem is None else self.on_ambiguous
        if policy == "error":
            raise LanguageError(f"the recipe does not apply to sample {index} (branch {branch or 'messages'})", kind="not_applicable")
        rendered = task_only(task) if policy == "fallback" else None
        if problem is not None:
            return Verdict(Outcome.AMBIGUOUS, branch, rendered, problem)
        return Verdict(Outcome.DROPPED if rendered is None else Outcome.FALLBACK, branch, rendered)

    def _with(self, sample: Mapping[str, Any], rendered: Rendered) -> dict[str, Any]:
        kept = {name: value for name, value in sample.items() if name not in LANGUAGE_COLUMNS}
        kept.update(zip(self.keys, (rendered["messages"], rendered["message_streams"], rendered["target_message_indices"]), strict=True))
        return kept


RecipeLike = str | os.PathLike[str] | Mapping[str, Any] | TrainingRecipe | RenderStage
"""What names a recipe: anything that ``load_recipe`` takes, or a stage, which also carries policies and keys."""


def stage_of(recipe: RecipeLike | None) -> RenderStage | None:
    """The stage of a recipe, with the default policies where ``recipe`` is no stage itself.

    Raises:
        ObjectNotFoundError: no such file and no shipped recipe of that name.
        RecipeError: the recipe is invalid; names line and place.
    """
    return recipe if recipe is None or isinstance(recipe, RenderStage) else RenderStage(load_recipe(recipe))


def stage_differences(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, limit: int = 5) -> list[str]:
    """Where two descriptions of stages differ, for messages: ``recipe.blend.low.weight: before 0.7, now 0.5``.

    The order of a blend's components is part of it. None stands for no recipe.
    """
    one, two = ({} if side is None else dict(_leaves(side)) for side in (before, now))
    found = [
        f"{place}: before {one.get(place, 'absent')}, now {two.get(place, 'absent')}"
        for place in dict.fromkeys((*one, *two))
        if one.get(place) != two.get(place)
    ]
    return found if len(found) <= limit else [*found[:limit], f"{len(found) - limit} more"]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        entries = cast("Mapping[str, Any]", value)
        if place.endswith("blend"):
            yield f"{place} (order)", ", ".join(entries)
        for name, part in entries.items():
            yield from _leaves(part, f"{place}.{name}" if place else name)
    elif isinstance(value, list | tuple) and value:
        for number, part in enumerate(cast("Sequence[Any]", value)):
            yield from _leaves(part, f"{place}[{number}]")
    else:
        yield place, json.dumps(value, ensure_ascii=False, default=repr)
