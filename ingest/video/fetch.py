"""Pictures of one file from a store: fetch from where decoding can really begin, verify, decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import av
import numpy as np
from numpy.typing import NDArray

from ingest.errors import DecodeError, LeadInError, ReservationError
from ingest.storage.base import Store
from ingest.video.checksums import verify_payload
from ingest.video.decode import decode_pictures
from ingest.video.entries import SampleEntry, parse_sample_entries
from ingest.video.keys import HEAD_BYTES, is_complete
from ingest.video.spans import PictureSpan, picture_span
from ingest.video.tables import SampleTable, read_only


@dataclass(frozen=True, slots=True)
class FetchedSpan:
    """A span and its bytes, beginning where decoding can begin.

    Attributes:
        table: of the file; inside the span, ``starts`` has only points that were found to be ones.
        span: which samples.
        parts: contents of ``span.ranges``, equal to the checksums of the index where it has them.
        nbytes: bytes read for it, those of attempts that began too late included.
        lead: random-access points further back than the index says.
    """

    table: SampleTable
    span: PictureSpan
    parts: list[bytes]
    nbytes: int
    lead: int


class SpanFetcher:
    """Fetches spans for decoding elsewhere. Thread-safe.

    A file may list key pictures that are none, or H.264 pictures that show only after a lead-in (intra refresh). Whoever
    decodes a fetched span has no more than its bytes, so the points in it are looked into here, and the doubtful ones are
    tried with a decoder.

    Args:
        store: rooted at the dataset.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._leads: dict[str, int] = {}

    def fetch(
        self, table: SampleTable, pictures: NDArray[np.integer] | Sequence[int] | range, *, limit_bytes: int | None = None
    ) -> FetchedSpan:
        """Fetches what shows some pictures.

        Args:
            table: of the file.
            pictures: picture numbers; duplicates count once.
            limit_bytes: most bytes to hold at a time; None reads whatever it takes.

        Raises:
            ChecksumError: the bytes differ from the checksums of the index.
            ReservationError: the pictures need more bytes than may be held; those are not read.
            SelectionError: a picture that the file does not present.
            StorageError: the bytes cannot be read.
        """
        # Files that need a lead-in need it everywhere: begin with what sufficed the last time.
        lead, nbytes = self._leads.get(table.path, 0), 0
        while True:
            span = picture_span(table, pictures, lead=lead)
            if limit_bytes is not None and span.nbytes > limit_bytes:
                raise ReservationError(
                    f"{table.path}: pictures {int(span.wanted[0])}..{int(span.wanted[-1])} need {span.nbytes} bytes when decoding begins "
                    f"{lead} random-access points further back, more than the {limit_bytes} bytes reserved: reserve them anew",
                    leads=((table.path, lead),),
                )
            nbytes += span.nbytes
            found = self._attempt(table, span)
            if found is not None:
                return FetchedSpan(*found, nbytes, lead)
            lead = 2 * lead + 1
            self._leads[table.path] = lead

    def _attempt(self, table: SampleTable, span: PictureSpan) -> tuple[SampleTable, PictureSpan, list[bytes]] | None:
        """A span read, or None, with nothing kept, where decoding cannot begin with it."""
        parts = self._store.read_ranges(table.path, span.ranges)
        verify_payload(table, span, parts)
        points = _Points(table, span, parts)
        return (points.proven(), span, parts) if span.first == 0 or points.complete(span.first) else None


class _Points:
    """The random-access points of one fetched span."""

    def __init__(self, table: SampleTable, span: PictureSpan, parts: Sequence[bytes]) -> None:
        self._table, self._span, self._parts = table, span, parts
        self._entries: tuple[SampleEntry, ...] = parse_sample_entries(table.stsd, table.path)
        self._chunk, self._at = span.chunks_of(table)

    def proven(self) -> SampleTable:
        """The table without the points in the span that turn out to be none."""
        starts = self._table.starts
        low, high = np.searchsorted(starts, (self._span.first + 1, self._span.stop)).tolist()
        wrong = [number for number in range(low, high) if not self.complete(int(starts[number]))]
        return replace(self._table, starts=read_only(np.delete(starts, wrong))) if wrong else self._table

    def complete(self, sample: int) -> bool:
        """Whether a decoder that begins with a sample shows its picture and all later ones."""
        table, place = self._table, sample - self._span.first
        start = int(self._at[place])
        head = self._parts[int(self._chunk[place])][start : start + min(int(table.sizes[sample]), HEAD_BYTES)]
        told = is_complete(self._entries[int(table.descriptions[sample])], head)
        return self._shows(sample) if told is None else told

    def _shows(self, sample: int) -> bool:
        """Decodes the first picture that is shown from a sample on; damage is for the decoder of the span to report."""
        table = self._table
        ticks = table.dts[table.presented].astype(np.int64) + table.composition[table.presented]
        tick = int(table.dts[sample]) + int(table.composition[sample])
        inside = (table.presented >= sample) & (table.presented < self._span.stop)
        shown = np.flatnonzero((ticks >= tick) & inside)
        if not len(shown):
            return True
        wanted = shown[:1].astype(np.int64)
        span = replace(self._span, first=sample, stop=int(table.presented[wanted[0]]) + 1, wanted=wanted)
        try:
            # The whole span is verified already.
            for _ in decode_pictures(replace(table, gop_xxh3=None), span, self._parts):
                pass
        except LeadInError:
            return False
        except DecodeError:
            return True
        return True


def read_pictures(
    store: Store, table: SampleTable, pictures: NDArray[np.integer] | Sequence[int] | range
) -> Iterator[tuple[int, av.VideoFrame]]:
    """Fetches and decodes pictures in presentation order.

    Where the last random-access point turns out to be none, or to need a lead-in (intra refresh), decoding starts further
    back, at sample 0 in the end.

    Args:
        store: rooted at the dataset.
        table: of the file.
        pictures: picture numbers; duplicates count once.

    Yields:
        (picture number, frame).

    Raises:
        DecodeError: damaged data; names the file and the picture.
        SelectionError: a picture that the file does not present.
        StorageError: the bytes cannot be read.
    """
    remaining = np.unique(np.asarray(pictures, np.int64))
    lead = 0
    while True:
        span = picture_span(table, remaining, lead=lead)
        delivered = 0
        try:
            for picture, frame in decode_pictures(table, span, store.read_ranges(table.path, span.ranges)):
                delivered += 1
                yield picture, frame
        except LeadInError:
            if span.first == 0:
                raise
            remaining = remaining[delivered:]
            lead = 2 * lead + 1
        else:
            return
