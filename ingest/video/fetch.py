"""Pictures of one file from a store: fetch, decode, and start earlier where the file's key pictures need a lead-in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import av
import numpy as np
from numpy.typing import NDArray

from ingest.errors import LeadInError
from ingest.storage.base import Store
from ingest.video.decode import decode_pictures
from ingest.video.spans import picture_span
from ingest.video.tables import SampleTable


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
