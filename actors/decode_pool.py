"""Decode actors: compressed pictures in; pictures written into the caller's frame slots, or sent back as an object."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from numpy.typing import DTypeLike, NDArray
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
        slab: where to write; None has the pictures sent back with the answer.
        slots: int32[N], one slot per picture; empty where there is no slab.
    """

    dataset: str
    episode: int
    track: Track
    wanted: NDArray[np.int64]
    form: PictureForm
    shape: tuple[int, int, int]
    slab: SlabHandle | None
    slots: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeAnswer:
    """What a call did.

    Attributes:
        counts: totals to add, by counter name.
        pictures: [N, *shape], of a call without a slab. What Ray hands over is its own memory, which cannot be written to.
    """

    counts: dict[str, float] = field(default_factory=dict)
    pictures: NDArray[np.generic] | None = None


class Decoder:
    """Decodes for the ranks of one node; the class behind `DecodeActor`."""

    def __init__(self) -> None:
        self._slabs = AttachedSlabs()
        self._scratch = np.empty(0, np.uint8)

    def ping(self) -> str:
        """Answers once the actor is up; the version that it runs."""
        return __version__

    def decode(self, request: DecodeRequest) -> DecodeAnswer:
        """Decodes one run.

        Raises:
            DamagedDataError: a picture cannot be decoded; dataset, episode, camera, file and picture are named.
            StreamClosedError: the caller's slots are gone.
        """
        dtype = request.form.writer().dtype
        if request.slab is None:
            pictures = self._taken((len(request.wanted), *request.shape), dtype)
            return DecodeAnswer(_decode(request, list(pictures)), pictures)
        slab = request.slab
        return DecodeAnswer(_decode(request, [self._slabs.view(slab, int(slot), request.shape, dtype) for slot in request.slots]))

    def _taken(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Memory for one answer. Ray has copied it before the next call begins, so its warm pages serve all calls."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes > len(self._scratch):
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(shape)

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
        assert request.slab is not None  # without one, ranks ask the decoder themselves
        try:
            answer: DecodeAnswer = ray.get(self._decoder.decode.remote(replace(request, slab=None, slots=request.slots[:0])))
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        assert answer.pictures is not None  # there was no slab to write to
        for slot, picture in zip(request.slots, answer.pictures, strict=True):
            self._slabs.view(request.slab, int(slot), request.shape, picture.dtype)[...] = picture
        return DecodeAnswer(answer.counts)


def _decode(request: DecodeRequest, out: list[NDArray[np.generic]]) -> dict[str, float]:
    start = time.process_time()
    try:
        decoded = decode_run(request.track, request.wanted, request.form, out)
    except DamagedDataError as error:
        raise located(error, request.dataset, request.episode, request.track) from error
    cpu = time.process_time() - start
    return {"reelray_pictures_decoded": decoded, "reelray_decode_cpu_seconds": cpu}


DecodeActor = ray.remote(num_cpus=1)(Decoder)
"""`Decoder` as an actor; made by `actors.manager`, restarted by Ray, never re-running a call by itself."""

DecodeElsewhereActor = ray.remote(num_cpus=0)(DecoderElsewhere)
"""`DecoderElsewhere` as an actor, likewise."""
