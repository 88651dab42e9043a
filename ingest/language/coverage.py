"""What a recipe makes of every frame of a dataset, before anything is trained.

Planning needs it, because frames without any supervision leave the selection first and batches stay full; people need
it, because a recipe that silently falls back to the task on a third of all frames looks fine from outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.errors import LanguageError
from ingest.language.episode import EpisodeLanguage
from ingest.language.render import Rendered
from ingest.language.stage import Outcome, RenderStage

MAX_FAULTS = 200
"""How many ambiguous frames are described one by one; all are counted."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One frame whose annotations a resolver cannot decide on."""

    episode: int
    frame: int
    style: str | None
    message: str


@dataclass(frozen=True, slots=True)
class EpisodeCoverage:
    """Outcomes of one episode of F frames.

    Attributes:
        episode: episode index.
        outcome: uint8[F], values of ``Outcome``.
        branch: int16[F], position in ``LanguagePlan.branches`` of the chosen component, −1 for none.
        kept: bool[F], frames that stay in the selection.
    """

    episode: int
    outcome: NDArray[np.uint8]
    branch: NDArray[np.int16]
    kept: NDArray[np.bool_]

    def kept_runs(self) -> list[tuple[int, int]]:
        """Half-open frame ranges that stay, in order; planning units are cut along them."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.kept, [False]]).astype(np.int8)))
        return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


@dataclass(frozen=True, slots=True)
class LanguagePlan:
    """What a recipe does to a selection.

    Attributes:
        recipe: fingerprint of the recipe.
        stage: the stage that was judged.
        branches: component names in declaration order; one empty name for a message recipe.
        episodes: outcomes by episode, in the order read.
        faults: the first ambiguous frames.
        empty_targets: rendered frames with a supervised message without text and without tool calls.
    """

    recipe: str
    stage: RenderStage
    branches: tuple[str, ...]
    episodes: tuple[EpisodeCoverage, ...]
    faults: tuple[Fault, ...]
    empty_targets: int

    @property
    def frames(self) -> int:
        """Frames looked at."""
        return sum(len(part.outcome) for part in self.episodes)

    def leaving(self) -> dict[int, NDArray[np.int64]]:
        """Frames that leave the selection, by episode; episodes that lose none are left out."""
        lost = {part.episode: np.flatnonzero(~part.kept).astype(np.int64) for part in self.episodes}
        return {episode: frames for episode, frames in lost.items() if len(frames)}

    def frames_of(self, branch: str) -> dict[int, NDArray[np.int64]]:
        """Frames that a branch renders, by episode: what a sampler needs to show a rare branch, such as VQA, more often.

        Raises:
            LanguageError: the recipe has no such branch.
        """
        if branch not in self.branches:
            raise LanguageError(f"the recipe has no branch {branch!r}: it has {', '.join(self.branches) or 'one'}", kind="unknown_branch")
        wanted = self.branches.index(branch)
        found = {part.episode: np.flatnonzero((part.branch == wanted) & (part.outcome == Outcome.RENDERED)) for part in self.episodes}
        return {episode: frames.astype(np.int64) for episode, frames in found.items() if len(frames)}

    def fingerprint(self) -> str:
        """32 hexadecimal digits over recipe, policy and the frames that leave; part of the plan's fingerprint."""
        digest = blake2b(digest_size=16)
        digest.update(f"{self.recipe}:{self.stage.policy}:{self.stage.on_ambiguous}:{self.stage.rephrasings_win}".encode())
        if self.stage.lerobot_batches:
            digest.update(b":lerobot_batches")
        for episode, frames in sorted(self.leaving().items()):
            digest.update(f";{episode}:".encode())
            digest.update(frames.astype("<i8").tobytes())
        return digest.hexdigest()

    def count(self, outcome: Outcome) -> int:
        """Frames with an outcome."""
        return sum(int(np.count_nonzero(part.outcome == outcome)) for part in self.episodes)

    def branch_counts(self) -> dict[str, tuple[int, int]]:
        """``(chosen, rendered)`` frames by branch."""
        counts: dict[str, tuple[int, int]] = {}
        for position, name in enumerate(self.branches):
            chosen = rendered = 0
            for part in self.episodes:
                mine = part.branch == position
                chosen += int(np.count_nonzero(mine))
                rendered += int(np.count_nonzero(mine & (part.outcome == Outcome.RENDERED)))
            counts[name] = (chosen, rendered)
        return counts


def plan_language(stage: RenderStage, episodes: Iterable[EpisodeLanguage]) -> LanguagePlan:
    """Judges every frame of a selection, from annotations alone.

    Costs one rendering per annotated frame; episodes without annotations are judged by their task alone.

    Args:
        stage: the stage that will render the stream; it must have a recipe.
        episodes: annotations of the selected episodes (``read_language``).

    Raises:
        LanguageError: a frame cannot be rendered and its policy is ``error``; names episode, frame and style.
    """
    if stage.recipe is None:
        raise LanguageError("there is nothing to plan without a recipe: raw columns pass through", kind="missing_recipe")
    branches = tuple(stage.recipe.components)
    numbers = {name: position for position, name in enumerate(branches)}
    parts: list[EpisodeCoverage] = []
    faults: list[Fault] = []
    empty_targets, annotated = 0, False
    for language in episodes:
        annotated = annotated or language.rows.annotated
        part = _blank(language)
        if language.rows.annotated or stage.lerobot_batches:
            empty_targets += _judge(stage, language, numbers, part, faults)
        parts.append(part)
    if not annotated and not any(part.kept.any() for part in parts):
        # Neither annotations nor tasks anywhere: rendering is a no-op, and nothing leaves.
        parts = [
            EpisodeCoverage(part.episode, np.full_like(part.outcome, Outcome.UNANNOTATED), part.branch, np.ones_like(part.kept))
            for part in parts
        ]
    return LanguagePlan(stage.recipe.fingerprint(), stage, branches, tuple(parts), tuple(faults), empty_targets)


def _blank(language: EpisodeLanguage) -> EpisodeCoverage:
    """The verdict on an episode without annotations: frames with a task stay, others have no supervision."""
    worded = np.asarray([bool(text) for text in language.tasks] + [False])
    kept = worded[language.task_of]
    outcome = np.where(kept, Outcome.UNANNOTATED, Outcome.DROPPED).astype(np.uint8)
    return EpisodeCoverage(language.episode, outcome, np.full(len(language), -1, np.int16), kept)


def _judge(stage: RenderStage, language: EpisodeLanguage, numbers: dict[str, int], part: EpisodeCoverage, faults: list[Fault]) -> int:
    empty_targets = 0
    for frame in range(len(language)):
        state, events = language.rows.state(frame), language.rows.frame_events(frame)
        if not state and not events and not stage.lerobot_batches:
            continue
        try:
            verdict = stage.judge(state, events, language.time(frame), int(language.index[frame]), language.task(frame))
        except LanguageError as error:
            raise _placed(error, language.episode, frame) from error
        part.outcome[frame] = verdict.outcome
        part.branch[frame] = numbers.get(verdict.branch, -1) if verdict.branch is not None else -1
        part.kept[frame] = verdict.rendered is not None
        if verdict.error is not None and len(faults) < MAX_FAULTS:
            faults.append(Fault(language.episode, frame, verdict.error.style, str(verdict.error)))
        if verdict.rendered is not None and has_empty_target(verdict.rendered):
            empty_targets += 1
    return empty_targets


def has_empty_target(rendered: Rendered) -> bool:
    """Whether a supervised message has neither text nor tool calls, which teaches a model to say nothing."""
    messages = (rendered["messages"][position] for position in rendered["target_message_indices"])
    return any(not message.get("content") and not message.get("tool_calls") for message in messages)


def _placed(error: LanguageError, episode: int, frame: int) -> LanguageError:
    return type(error)(
        f"episode {episode}, frame {frame}: {error}; repair the annotations or use policy fallback or drop",
        kind=error.kind,
        episode=episode,
        frame=frame,
        style=error.style,
    )


def coverage_summary(plan: LanguagePlan) -> dict[str, Any]:
    """The coverage of a recipe as plain values: counts and shares per branch and outcome, faults, frames that leave."""
    total = max(plan.frames, 1)
    branches = [
        {
            "branch": name or "messages",
            "chosen": chosen,
            "rendered": rendered,
            "chosen_share": chosen / total,
            "rendered_share": rendered / total,
        }
        for name, (chosen, rendered) in plan.branch_counts().items()
    ]
    outcomes = [{"outcome": kind.name.lower(), "frames": plan.count(kind), "share": plan.count(kind) / total} for kind in Outcome]
    leaving = plan.leaving()
    return {
        "recipe": plan.recipe,
        "policy": plan.stage.policy,
        "on_ambiguous": plan.stage.on_ambiguous,
        "fingerprint": plan.fingerprint(),
        "episodes": len(plan.episodes),
        "frames": plan.frames,
        "kept_frames": plan.frames - sum(len(frames) for frames in leaving.values()),
        "branches": branches,
        "outcomes": outcomes,
        "never_rendered": [entry["branch"] for entry in branches if not entry["rendered"]],
        "empty_targets": plan.empty_targets,
        "faults": [
            {"episode": fault.episode, "frame": fault.frame, "style": fault.style, "message": fault.message} for fault in plan.faults
        ],
        "leaving": {str(episode): frame_ranges(frames) for episode, frames in leaving.items()},
    }


def frame_ranges(frames: NDArray[np.int64]) -> list[list[int]]:
    """Sorted frame numbers as half-open ``[start, stop]`` ranges."""
    breaks = np.flatnonzero(np.diff(frames) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(frames, breaks) if len(run)]
