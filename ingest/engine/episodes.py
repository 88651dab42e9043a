"""Rows of the episodes that are read in several units, kept so that each is read about once."""

# pyarrow has no stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingest.errors import LanguageError, RowsError
from ingest.language.columns import normalise_table
from ingest.language.episode import AnnotationRows
from ingest.language.styles import LANGUAGE_COLUMNS
from ingest.lerobot.rows import EpisodeRows, RowReader
from ingest.lerobot.source import Source

HELD_BYTES = 64 << 20
"""Rows that one reader keeps, at most."""


@dataclass(frozen=True, slots=True)
class HeldEpisode:
    """The rows of a whole episode.

    Attributes:
        rows: every column but the language columns.
        language: the annotations, state rows held once; None where no language column is read.
    """

    rows: EpisodeRows
    language: AnnotationRows | None


class EpisodeReader:
    """Reads whole episodes and keeps the last ones that are asked for in parts. Thread-safe.

    Runs of frames of one episode are units of their own, and each of them needs its rows. A language column repeats the state
    rows on every frame, tens of megabytes for a long episode, so reading it for every unit costs more than decoding.

    Args:
        source: the dataset.
        columns: stored columns to read.
    """

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        self._source = source
        self._columns = columns
        self._reader = RowReader(source, normalise=normalise_table)
        self._held: OrderedDict[int, HeldEpisode] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, episode: int, *, keep: bool) -> HeldEpisode:
        """The rows of an episode.

        Args:
            episode: episode index.
            keep: whether they will be asked for again.

        Raises:
            RowsError: rows are missing, or a column cannot be read; the episode is named.
        """
        with self._lock:
            held = self._held.get(episode)
            if held is not None:
                self._held.move_to_end(episode)
                return held
        found = self._read(episode)
        if keep:
            self._keep(episode, found)
        return found

    def _read(self, episode: int) -> HeldEpisode:
        rows = self._reader.read(episode, self._columns)
        stored = {key: column for key, column in rows.others.items() if key in LANGUAGE_COLUMNS}
        if not stored:
            return HeldEpisode(rows, None)
        try:
            language = AnnotationRows.from_columns(stored, rows.length)
        except LanguageError as error:
            raise RowsError(f"episode {episode}: {error}", dataset=self._source.store.url, episode=episode) from error
        others = {key: column for key, column in rows.others.items() if key not in stored}
        return HeldEpisode(replace(rows, others=others), language)

    def _keep(self, episode: int, found: HeldEpisode) -> None:
        if found.rows.nbytes > HELD_BYTES:
            return
        with self._lock:
            if episode in self._held:
                return
            self._held[episode] = found
            self._bytes += found.rows.nbytes
            while self._bytes > HELD_BYTES:
                self._bytes -= self._held.popitem(last=False)[1].rows.nbytes
