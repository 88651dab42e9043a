"""Decode actors: compressed pictures in, pictures written into the caller's frame slots, only counts sent back."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import numpy as np
import ray
from numpy.typing import NDArray

from actors.slab import AttachedSlabs, SlabHandle
from ingest import __version__
from ingest.engine.pictures import PictureForm, decode_run, located
from ingest.engine.unit import Track
from ingest.errors import DamagedDataError, StreamClosedError


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRequest:
    """One run of pictures of one camera.

    Attributes:
        dataset: location of the dataset, for messages.
        episode: episode index, for messages.
        track: the compressed pictures, with its own sample table.
        wanted: int64[N], picture numbers of the track, ascending.
        form: form of the pictures.
        shape: (height, width, channels) of one picture.
        slab: where to write.
        slots: int32[N], one slot per picture.
    """

    dataset: str
    episode: int
    track: Track
    wanted: NDArray[np.int64]
    form: PictureForm
    shape: tuple[int, int, int]
    slab: SlabHandle
    slots: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeAnswer:
    """What a call did.

    Attributes:
        counts: totals to add, by counter name.
    """

    counts: dict[str, float] = field(default_factory=dict)


class Decoder:
    """Decodes for the ranks of one node; the class behind `DecodeActor`."""

    def __init__(self) -> None:
        self._slabs = AttachedSlabs()

    def ping(self) -> str:
        """Answers once the actor is up; the version that it runs."""
        return __version__

    def decode(self, request: DecodeRequest) -> DecodeAnswer:
        """Decodes one run into its slots.

        Raises:
            DamagedDataError: a picture cannot be decoded; dataset, episode, camera, file and picture are named.
            StreamClosedError: the caller's slots are gone.
        """
        start = time.process_time()
        dtype = request.form.writer().dtype
        out = [self._slabs.view(request.slab, int(slot), request.shape, dtype) for slot in request.slots]
        try:
            decoded = decode_run(request.track, request.wanted, request.form, out)
        except DamagedDataError as error:
            raise located(error, request.dataset, request.episode, request.track) from error
        cpu = time.process_time() - start
        return DecodeAnswer({"reelray_pictures_decoded": decoded, "reelray_decode_cpu_seconds": cpu})

    def warm(self, slab: SlabHandle) -> None:
        """Maps a stream's memory before its first call."""
        with contextlib.suppress(StreamClosedError):
            self._slabs.warm(slab)

    def forget(self, token: bytes) -> None:
        """Unmaps the slots of a stream that has ended."""
        self._slabs.drop(token)


DecodeActor = ray.remote(num_cpus=1)(Decoder)
"""`Decoder` as an actor; made by `actors.manager`, restarted by Ray, never re-running a call by itself."""
