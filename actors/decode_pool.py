"""Decode actors: compressed pictures in, pictures written into the caller's frame slots, only counts sent back."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayTaskError

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
        dtype = request.form.writer().dtype
        return _decode(request, [self._slabs.view(request.slab, int(slot), request.shape, dtype) for slot in request.slots])

    def decode_here(self, request: DecodeRequest) -> tuple[NDArray[np.generic], DecodeAnswer]:
        """Decodes one run for another node; its slots are not looked at.

        Returns:
            The pictures, [N, *shape], and the answer.

        Raises:
            DamagedDataError: as `decode`.
        """
        pictures = np.empty((len(request.wanted), *request.shape), request.form.writer().dtype)
        return pictures, _decode(request, list(pictures))

    def warm(self, slab: SlabHandle) -> None:
        """Maps a stream's memory before its first call."""
        with contextlib.suppress(StreamClosedError):
            self._slabs.warm(slab)

    def forget(self, token: bytes) -> None:
        """Unmaps the slots of a stream that has ended."""
        self._slabs.drop(token)


class DecoderElsewhere(Decoder):
    """Stands on the node of the ranks for a decoder on another one: compressed pictures go there, and what comes back goes into the slots.

    Args:
        decoder: handle of a `DecodeActor`; a call that is lost with it fails with Ray's own error, as one lost with this actor does.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self._decoder = decoder

    def ping(self) -> str:
        """Answers once the other actor is up; the version that it runs."""
        return ray.get(self._decoder.ping.remote())

    def decode(self, request: DecodeRequest) -> DecodeAnswer:
        """Has one run decoded, and copies it into its slots.

        Raises:
            DamagedDataError: as `Decoder.decode`.
            StreamClosedError: the caller's slots are gone.
        """
        try:
            pictures, answer = ray.get(self._decoder.decode_here.remote(replace(request, slots=request.slots[:0])))
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        for slot, picture in zip(request.slots, pictures, strict=True):
            self._slabs.view(request.slab, int(slot), request.shape, picture.dtype)[...] = picture
        return answer


def _decode(request: DecodeRequest, out: list[NDArray[np.generic]]) -> DecodeAnswer:
    start = time.process_time()
    try:
        decoded = decode_run(request.track, request.wanted, request.form, out)
    except DamagedDataError as error:
        raise located(error, request.dataset, request.episode, request.track) from error
    cpu = time.process_time() - start
    return DecodeAnswer({"reelray_pictures_decoded": decoded, "reelray_decode_cpu_seconds": cpu})


DecodeActor = ray.remote(num_cpus=1)(Decoder)
"""`Decoder` as an actor; made by `actors.manager`, restarted by Ray, never re-running a call by itself."""

DecodeElsewhereActor = ray.remote(num_cpus=0)(DecoderElsewhere)
"""`DecoderElsewhere` as an actor, likewise."""
