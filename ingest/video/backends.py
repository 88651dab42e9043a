"""What decodes: one interface, so that other decoders can stand in for PyAV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.video.decode import Payload, decode_into
from ingest.video.pixels import PictureWriter
from ingest.video.spans import PictureSpan
from ingest.video.tables import SampleTable


class PictureDecoder(Protocol):
    """Decodes pictures of a span into arrays. Implementations pickle, hash, and may be used from several threads."""

    @property
    def name(self) -> str:
        """Short name, for reports."""
        ...

    @property
    def exact(self) -> bool:
        """Whether ``rgb24`` pictures equal those of a linear PyAV decode bit for bit."""
        ...

    def decode_into(
        self,
        table: SampleTable,
        span: PictureSpan,
        payload: Payload,
        wanted: NDArray[np.integer] | Sequence[int],
        writer: PictureWriter,
        out_slots: Sequence[NDArray[Any]] | NDArray[Any],
    ) -> Iterator[tuple[int, int]]:
        """See `ingest.video.decode.decode_into`: every wanted picture by number, or a typed error; never a neighbour."""
        ...


@dataclass(frozen=True, slots=True)
class PyavDecoder:
    """The default: libavcodec through PyAV, one thread, packets straight from memory."""

    name: str = "pyav"
    exact: bool = True

    def decode_into(
        self,
        table: SampleTable,
        span: PictureSpan,
        payload: Payload,
        wanted: NDArray[np.integer] | Sequence[int],
        writer: PictureWriter,
        out_slots: Sequence[NDArray[Any]] | NDArray[Any],
    ) -> Iterator[tuple[int, int]]:
        return decode_into(table, span, payload, wanted, writer, out_slots)


PYAV = PyavDecoder()
