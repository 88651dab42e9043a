"""Recipes at the opening of a dataset: which columns rendering needs, and which frames have anything to supervise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ingest.engine.spec import ReadOptions, SampleSpec
from ingest.errors import DatasetError, SettingsError
from ingest.language.audit import AnnotationFinding, audit_annotations
from ingest.language.coverage import LanguagePlan, plan_language
from ingest.language.episode import EpisodeLanguage, read_language
from ingest.language.stage import RenderStage
from ingest.language.styles import LANGUAGE_COLUMNS
from ingest.lerobot.info import Info
from ingest.lerobot.source import Source

_ANCHOR = ("timestamp", "index", *LANGUAGE_COLUMNS)


@dataclass(frozen=True, slots=True, eq=False)
class FrameRuns:
    """Runs of frames that are delivered, in selection order.

    Attributes:
        row: int64[R], place of the run's episode in the selection, ascending.
        lo: int64[R], first frame.
        hi: int64[R], one past the last frame.
    """

    row: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]

    @classmethod
    def whole(cls, lengths: NDArray[np.int64]) -> FrameRuns:
        """Every frame of every episode."""
        return cls(np.arange(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64), lengths)

    @classmethod
    def kept(cls, selection: NDArray[np.int64], plan: LanguagePlan) -> FrameRuns:
        """The frames that a recipe leaves in the selection."""
        place = {episode: row for row, episode in enumerate(selection.tolist())}
        found = sorted((place[part.episode], lo, hi) for part in plan.episodes if part.episode in place for lo, hi in part.kept_runs())
        columns = np.array(found, dtype=np.int64).reshape(-1, 3)
        return cls(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())

    @property
    def frames(self) -> NDArray[np.int64]:
        """Frames of each run, int64[R]."""
        return self.hi - self.lo

    def has(self, row: int, frame: int) -> bool:
        """Whether a frame of the episode at a place of the selection is delivered."""
        first, stop = np.searchsorted(self.row, [row, row + 1])
        inside = int(np.searchsorted(self.lo[first:stop], frame, side="right")) - 1
        return inside >= 0 and frame < int(self.hi[first + inside])


def rendering_options(options: ReadOptions, info: Info) -> ReadOptions:
    """The options with the columns that rendering reads, where only some columns are asked for."""
    if options.columns is None:
        return options
    needed = [key for key in _ANCHOR if key in info.features]
    return replace(options, columns=tuple(dict.fromkeys((*options.columns, *needed))))


def check_anchor(spec: SampleSpec) -> None:
    """Refuses windows on what rendering reads of the anchor.

    Raises:
        SettingsError: names the feature.
    """
    windowed = [key for key in _ANCHOR if key in spec.windows]
    if windowed:
        raise SettingsError(f"a recipe reads {', '.join(windowed)} of the anchor frame: leave it out of delta_timestamps")


def plan_recipe(
    source: Source,
    stage: RenderStage,
    selection: NDArray[np.int64],
    damaged: Callable[[int, DatasetError], None] | None,
    found: Callable[[AnnotationFinding], None],
) -> LanguagePlan:
    """Judges every selected frame from the language columns; no picture is read.

    Args:
        source: the dataset.
        stage: the stage that will render; it has a recipe.
        selection: int64[E], episodes.
        damaged: told of episodes whose rows cannot be read, which are left out; None raises.
        found: told of everything questionable about the annotations, such as an unknown style.

    Raises:
        LanguageError: a frame cannot be rendered and its policy is ``error``; names episode, frame and style.
    """
    if not any(column in source.info.features for column in LANGUAGE_COLUMNS):
        stage = replace(stage, lerobot_batches=False)
    cameras = (*source.cameras, *source.info.images)

    def audited() -> Iterator[EpisodeLanguage]:
        for language in read_language(source, selection.tolist(), damaged=damaged):
            for finding in audit_annotations([language], cameras):
                found(finding)
            yield language

    return plan_language(stage, audited())
