"""Makes the example's dataset: a moving disc, annotated with the quadrant it is in.

The recorded state says how far the disc is from the centre but not on which side; the annotation says the side. A policy
that acts from state and text therefore has to read the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.language.episode import EpisodeLanguage, read_language
from ingest.language.importing import Span, rows_from_spans, state_row
from ingest.language.write import write_annotations
from ingest.lerobot.make import MakeOptions, make_dataset
from ingest.lerobot.rows import read_rows
from ingest.lerobot.source import Source, open_source
from ingest.storage.local import LocalStore

TASK = "follow the disc"


def quadrant_spans(action: NDArray[np.float32]) -> list[Span]:
    """Runs of frames in which the disc stays in one quadrant, with the quadrant's name.

    Args:
        action: [N, 4]; the first two columns are the disc's x and y in −1..1.
    """
    names = [f"keep {'down' if y > 0 else 'up'} {'right' if x > 0 else 'left'}" for x, y in action[:, :2]]
    starts = [frame for frame in range(len(names)) if frame == 0 or names[frame] != names[frame - 1]]
    return [Span(start, stop, names[start]) for start, stop in zip(starts, [*starts[1:], len(names)], strict=True)]


def annotate(source: Source, language: EpisodeLanguage) -> list[Any]:
    """Rows of one episode: quadrants as subtasks, a memory of how many have passed, one remark that gets an answer."""
    action = np.asarray(read_rows(source, language.episode, ["action"]).numbers["action"])
    spans = quadrant_spans(action)
    rows: list[Any] = rows_from_spans(spans, language.timestamps)
    for number, span in enumerate(spans):
        rows.append(state_row(f"{number} quadrants passed", float(language.timestamps[span.start]), style="memory"))
    remark = len(language) // 2
    call = {"type": "function", "function": {"name": "say", "arguments": {"text": "I am looking at it."}}}
    rows.append({"role": "user", "content": "do not lose it", "style": "interjection", "frame": remark})
    rows.append({"role": "assistant", "content": None, "style": None, "tool_calls": [call], "frame": remark})
    return rows


def make_annotated(folder: Path, *, episodes: int = 8, frames: int = 90) -> Source:
    """Writes the dataset and its annotations, and opens it."""
    made = make_dataset(folder, MakeOptions(episodes=episodes, frames=str(frames), cameras=1, size=(64, 96), gop=10, tasks=(TASK,)))
    bare = open_source(LocalStore.at(made.root))
    write_annotations(made.root, {language.episode: annotate(bare, language) for language in read_language(bare)})
    return open_source(LocalStore.at(made.root))
