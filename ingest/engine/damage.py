"""What happens when data turn out to be damaged, and the record of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from ingest.errors import DatasetError

DamagePolicy = Literal["error", "skip_episode"]
"""``error`` stops with the typed error; ``skip_episode`` drops whole episodes and records each of them."""


@dataclass(frozen=True, slots=True)
class DamageRecord:
    """One episode that was dropped.

    Attributes:
        dataset: number of the dataset in a mixture, 0 otherwise.
        episode: episode index.
        step: commit step (batches committed by each rank) from which the episode's samples are missing; 0 = all of it.
        frames: selected frames that are not delivered because of it.
        kind: class name of the error that was found.
        message: its text.
    """

    dataset: int
    episode: int
    step: int
    frames: int
    kind: str
    message: str


@dataclass(slots=True)
class DamageReport:
    """Every dropped episode, in the order found."""

    records: list[DamageRecord] = field(default_factory=list[DamageRecord])

    def add(self, error: DatasetError, *, dataset: int, episode: int, step: int, frames: int) -> DamageRecord:
        """Records that ``episode`` is dropped because of ``error``."""
        record = DamageRecord(dataset, episode, step, frames, type(error).__name__, str(error))
        self.records.append(record)
        return record

    @property
    def episodes(self) -> Sequence[int]:
        """Episode indices dropped, in the order found."""
        return [record.episode for record in self.records]

    def to_json(self) -> list[dict[str, object]]:
        """One plain dictionary per record."""
        return [asdict(record) for record in self.records]
