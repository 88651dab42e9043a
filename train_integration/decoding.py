"""How a rank gets pictures decoded: by the node's pool, or by threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from time import thread_time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.decode_pool import DecodeAnswer, DecodeRequest
from actors.object_frames import ObjectFrames
from actors.pool_client import DecodePoolClient
from actors.slab import BlockSlab, FrameSlab, SlabHandle
from actors.stream_metrics import PoolLoad
from ingest.engine.blocks import BlockStore, HeapBlocks
from ingest.engine.counters import Counters
from ingest.engine.frames import FrameStore, HeapFrames
from ingest.engine.pictures import PictureForm, decode_run, located
from ingest.engine.unit import Track, excerpt
from ingest.errors import DamagedDataError

SlotsMoved = Callable[[NDArray[np.int32]], None]
"""Told the new slots when a run is decoded again elsewhere."""


class DecodeBackend(Protocol):
    """Decodes runs of pictures into frame slots."""

    def make_frames(self, slot_bytes: int, slots: int) -> FrameStore:
        """Slots that this back end can write to."""
        ...

    def make_blocks(self, slot_bytes: int, batch: int, blocks: int) -> BlockStore | None:
        """Memory of batches that this back end can write to, or None where it can only write to slots.

        Args:
            slot_bytes: bytes of one picture.
            batch: pictures of one block.
            blocks: blocks that will be in use at a time, about.
        """
        ...

    def warm(self, store: FrameStore | BlockStore) -> None:
        """Lets decoders meet memory whose pages exist before their first call."""
        ...

    def submit(
        self,
        frames: FrameStore | BlockStore,
        track: Track,
        episode: int,
        wanted: NDArray[np.int64],
        form: PictureForm,
        shape: tuple[int, int, int],
        slots: NDArray[np.int32],
        moved: SlotsMoved,
    ) -> Future[Any]:
        """Starts decoding ``wanted`` into ``slots``; calls start in the order submitted.

        The future fails with the typed error of `ingest.errors`. ``moved`` is called before it succeeds when other
        slots had to be used.
        """
        ...

    def states(self) -> Sequence[str]:
        """One line per decoder, for stall reports."""
        ...

    def load(self) -> PoolLoad:
        """What the decoders are doing, for metrics."""
        ...

    def close(self) -> None:
        """Stops; what has not started fails."""
        ...


class _ActorDecoding:
    """What decoding by actors has in common, wherever their pictures go."""

    def __init__(self, client: DecodePoolClient, dataset: str) -> None:
        self._client = client
        self._dataset = dataset

    def states(self) -> Sequence[str]:
        return self._client.states()

    def load(self) -> PoolLoad:
        return self._client.load()


class PoolDecoding(_ActorDecoding):
    """Decoding by the actors of the node, through shared frame slots.

    Args:
        client: the pool's client; closed with this object.
        dataset: location of the dataset, for messages.
        forget: called with a slab's token when the slab is closed.
        warm: called with the handle of a slab that the decoders may map ahead.
    """

    def __init__(self, client: DecodePoolClient, dataset: str, forget: Callable[[bytes], None], warm: Callable[[SlabHandle], None]) -> None:
        super().__init__(client, dataset)
        self._forget = forget
        self._warm = warm
        self._slabs: list[FrameSlab | BlockSlab] = []

    def make_frames(self, slot_bytes: int, slots: int) -> FrameSlab:
        slab = FrameSlab(slot_bytes, slots)
        self._slabs.append(slab)
        return slab

    def make_blocks(self, slot_bytes: int, batch: int, blocks: int) -> BlockSlab:
        slab = BlockSlab(slot_bytes, batch, blocks)
        self._slabs.append(slab)
        return slab

    def warm(self, store: FrameStore | BlockStore) -> None:
        assert isinstance(store, FrameSlab | BlockSlab)  # made by this object
        self._warm(store.handle)

    def submit(
        self,
        frames: FrameStore | BlockStore,
        track: Track,
        episode: int,
        wanted: NDArray[np.int64],
        form: PictureForm,
        shape: tuple[int, int, int],
        slots: NDArray[np.int32],
        moved: SlotsMoved,
    ) -> Future[Any]:
        assert isinstance(frames, FrameSlab | BlockSlab)  # made by this object
        request = _request(self._dataset, track, episode, wanted, form, shape, frames.handle, slots)

        def elsewhere(lost: DecodeRequest) -> DecodeRequest:
            fresh = frames.replace_lost(lost.slots)
            moved(fresh)
            return replace(lost, slots=fresh, slab=frames.handle)

        return _submit(self._client, request, track, wanted, elsewhere)

    def close(self) -> None:
        self._client.close()
        for slab in self._slabs:
            self._forget(slab.handle.token)
            slab.close()


class ObjectDecoding(_ActorDecoding):
    """Decoding by actors whose pictures come through Ray's object store.

    Args:
        client: the pool's client; closed with this object.
        dataset: location of the dataset, for messages.
    """

    def __init__(self, client: DecodePoolClient, dataset: str) -> None:
        super().__init__(client, dataset)
        self._stores: list[ObjectFrames] = []

    def make_frames(self, slot_bytes: int, slots: int) -> ObjectFrames:
        store = ObjectFrames(slot_bytes, slots)
        self._stores.append(store)
        return store

    def make_blocks(self, slot_bytes: int, batch: int, blocks: int) -> None:
        """None: an object is what one call decodes, and not what one batch delivers."""

    def warm(self, store: FrameStore | BlockStore) -> None:
        """Nothing to do: Ray maps the object store when a process starts."""

    def submit(
        self,
        frames: FrameStore | BlockStore,
        track: Track,
        episode: int,
        wanted: NDArray[np.int64],
        form: PictureForm,
        shape: tuple[int, int, int],
        slots: NDArray[np.int32],
        moved: SlotsMoved,  # noqa: ARG002 - a lost decoder wrote to memory of its own, so the slots can be used again
    ) -> Future[Any]:
        assert isinstance(frames, ObjectFrames)  # made by this object
        request = _request(self._dataset, track, episode, wanted, form, shape, None, slots[:0])
        landed: Future[Any] = Future()

        def land(call: Future[Any]) -> None:
            try:
                frames.land(slots, call.result().pictures)
            except Exception as error:
                landed.set_exception(error)
            else:
                landed.set_result(None)

        _submit(self._client, request, track, wanted, lambda lost: lost).add_done_callback(land)
        return landed

    def close(self) -> None:
        self._client.close()
        for store in self._stores:
            store.close()


def _request(
    dataset: str,
    track: Track,
    episode: int,
    wanted: NDArray[np.int64],
    form: PictureForm,
    shape: tuple[int, int, int],
    slab: SlabHandle | None,
    slots: NDArray[np.int32],
) -> DecodeRequest:
    numbers = np.arange(len(wanted), dtype=np.int64)
    return DecodeRequest(dataset, episode, excerpt(track, wanted), numbers, form, shape, slab, slots)


def _submit(
    client: DecodePoolClient, request: DecodeRequest, track: Track, wanted: NDArray[np.int64], on_lost: Callable[[Any], Any]
) -> Future[Any]:
    pictures = f"pictures {int(wanted[0])}..{int(wanted[-1])} of {track.path}"
    describe = f"{request.dataset}: episode {request.episode}, {track.camera}, {pictures}"
    cost = float(len(wanted)) * request.shape[0] * request.shape[1]
    return client.submit(request, cost=cost, describe=describe, on_lost=on_lost)


class InlineDecoding:
    """Decoding by threads of this process: for one rank on a small node, and outside a Ray cluster.

    Args:
        threads: decoders that run at once.
        dataset: location of the dataset, for messages.
        counters: receives pictures and CPU seconds.
    """

    def __init__(self, threads: int, dataset: str, counters: Counters) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="reelray-decode")
        # Threads start now, and not when the first pictures are due.
        together = threading.Barrier(threads)
        for _ in range(threads):
            self._pool.submit(together.wait)
        self._calls: set[Future[Any]] = set()
        self._dataset = dataset
        self._counters = counters
        self._stores: list[HeapFrames | HeapBlocks] = []

    def make_frames(self, slot_bytes: int, slots: int) -> HeapFrames:
        store = HeapFrames(slot_bytes, slots)
        self._stores.append(store)
        return store

    def make_blocks(self, slot_bytes: int, batch: int, blocks: int) -> HeapBlocks:  # noqa: ARG002 - a heap needs no estimate
        store = HeapBlocks(slot_bytes, batch)
        self._stores.append(store)
        return store

    def warm(self, store: FrameStore | BlockStore) -> None:
        """Nothing to do: threads share the pages of the rank."""

    def submit(
        self,
        frames: FrameStore | BlockStore,
        track: Track,
        episode: int,
        wanted: NDArray[np.int64],
        form: PictureForm,
        shape: tuple[int, int, int],
        slots: NDArray[np.int32],
        moved: SlotsMoved,  # noqa: ARG002 - threads of this process are never lost
    ) -> Future[Any]:
        def decode() -> DecodeAnswer:
            start = thread_time()
            dtype = form.writer().dtype
            out = [frames.view(int(slot), shape, dtype) for slot in slots]
            try:
                decoded = decode_run(track, wanted, form, out)
            except DamagedDataError as error:
                raise located(error, self._dataset, episode, track) from error
            answer = DecodeAnswer({"reelray_pictures_decoded": decoded, "reelray_decode_cpu_seconds": thread_time() - start})
            self._counters.merge(answer.counts)
            return answer

        call = self._pool.submit(decode)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def states(self) -> Sequence[str]:
        return ["inline decoding threads"]

    def load(self) -> PoolLoad:
        return PoolLoad(self._threads, 0, len(self._calls))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for store in self._stores:
            store.close()
