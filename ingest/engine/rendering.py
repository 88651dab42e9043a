"""Sample stages: what is done to a finished sample before it is delivered, one sample at a time also inside batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ingest.engine.assemble import Sample
from ingest.errors import LanguageError
from ingest.language.collate import collate_language

_ABSENT = object()


class RenderStage(Protocol):
    """An injected stage that turns a sample into another one, for example a language recipe's messages."""

    def __call__(self, sample: Sample, /) -> Sample | None:
        """Returns the sample to deliver; must be a pure function of the sample.

        None says that the sample has no supervision. Such frames leave the selection before planning (see
        ``open_dataset(recipe=...)``), so inside a stream None is an error.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stages:
    """Several stages, one after another.

    Attributes:
        stages: in the order in which they are applied.
    """

    stages: tuple[RenderStage, ...]

    def __call__(self, sample: Sample, /) -> Sample | None:
        """The sample after all stages, or None as soon as one gives None."""
        found: Sample | None = sample
        for stage in self.stages:
            if found is None:
                return None
            found = stage(found)
        return found


def chain(*stages: RenderStage | None) -> RenderStage | None:
    """The stages that are not None, as one; None where there is none."""
    present = tuple(stage for stage in stages if stage is not None)
    return None if not present else present[0] if len(present) == 1 else Stages(present)


def render_one(render: RenderStage, sample: Sample) -> Sample:
    """Applies a stage to one sample.

    Raises:
        LanguageError: the stage gives None for a sample that was planned.
    """
    found = render(sample)
    if found is None:
        place = ", ".join(f"{key} {int(sample[key])}" for key in ("episode_index", "frame_index", "index") if key in sample)
        raise LanguageError(
            f"a planned sample ({place or 'of unknown place'}) has no supervision and would leave a hole in its batch: open the "
            "dataset with recipe=..., so that such frames leave the selection before planning",
            kind="unplanned_drop",
        )
    return found


def render_batch(render: RenderStage, batch: Sample) -> Sample:
    """Applies a stage to each sample of a batch.

    What the stage leaves alone is not copied. New and changed values become one array with a leading batch axis where they
    are numbers, and one list per key otherwise: messages and language rows are always lists.

    Raises:
        LanguageError: the stage gives None for a sample, or a key to only some samples of the batch.
    """
    size = len(batch["is_pad"])
    samples = [{key: value[place] for key, value in batch.items()} for place in range(size)]
    rendered = [render_one(render, sample) for sample in samples]
    same = {key for key in batch if all(one.get(key, _ABSENT) is sample[key] for one, sample in zip(rendered, samples, strict=True))}
    fresh = collate_language([{key: value for key, value in one.items() if key not in same} for one in rendered]) or {}
    return {key: batch[key] for key in batch if key in same} | fresh
