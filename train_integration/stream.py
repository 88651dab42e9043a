"""The stream that a training loop iterates over: batches in plan order, prefetched, resumable, equal in every topology."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from time import monotonic, perf_counter
from typing import Any, Literal

import numpy as np

from actors.stream_metrics import StreamReading
from ingest.engine.assemble import Sample
from ingest.engine.counters import Counters
from ingest.engine.damage import DamageReport
from ingest.errors import CursorError, DamagedDataError
from ingest.language.stage import stage_differences, stage_of
from ingest.plan import Cursor, EpochPlan, RankPlan, plan_epoch
from train_integration.collate import to_torch
from train_integration.decoding import DecodeBackend
from train_integration.feed import Feed
from train_integration.options import StreamDescription
from train_integration.poolstate import dump_pool_state, load_pool_state
from train_integration.producer import Delivery, Producer, Production
from train_integration.state import STATE_VERSION
from train_integration.stretches import FIRST_STRETCH_SAMPLES, Stretch
from train_integration.transforms import TorchTransform, transform_batch

_LOG = logging.getLogger("reelray.stream")


class SampleStream:
    """Batches of one rank.

    ``for batch in stream`` delivers one epoch (the rest of one after a resume) and ends; iterating again delivers the
    next. ``state_dict()``, taken after a training step, counts the batches handed out so far: a stream that loads it
    goes on with the next one. Prefetched batches never count.

    Args:
        description: what to deliver.
        rank: data-parallel rank.
        world_size: data-parallel size.
        feed: where units come from.
        backend: who decodes; closed with the stream.
        decoded_bytes: bytes of decoded pictures that this rank may hold.
        counters: receives totals.
        cursor: where to start; None for the start of epoch 0.
        max_steps: end each epoch after that many batches.
        output: ``torch`` tensors or ``numpy`` arrays.
        stretch_samples: samples planned at a time, to begin with.
        worker: deliver only the batches of one consumer of the rank; None delivers all, in turns.
    """

    def __init__(
        self,
        description: StreamDescription,
        rank: int,
        world_size: int,
        feed: Feed,
        backend: Callable[[Counters], DecodeBackend],
        *,
        decoded_bytes: int,
        cursor: Cursor | None = None,
        max_steps: int | None = None,
        output: Literal["torch", "numpy"] = "torch",
        stretch_samples: int = FIRST_STRETCH_SAMPLES,
        worker: int | None = None,
    ) -> None:
        self.description = description
        self.rank = rank
        self.world_size = world_size
        self.counters = Counters()
        self.damage = DamageReport(list(description.damage.records))
        self.delivery: Delivery | None = None
        transform = description.config.image_transforms
        self.loop_transform = transform if isinstance(transform, TorchTransform) else None
        self._feed = feed
        self._make_backend = backend
        self._decoded_bytes = decoded_bytes
        self._max_steps = max_steps
        self._output = output
        self._stretch_samples = stretch_samples
        self._worker = worker
        self._settings = description.with_topology(world_size=world_size)
        # Without a cursor the plan waits: a state that is loaded next may be legal where a start would not be.
        self._made: EpochPlan | None = None if cursor is None else self._make_plan(cursor)
        self._ranked: RankPlan | None = None
        self._pool_state: bytes | None = None
        self._batches = 0 if self._made is None else self._made.cursor.batches
        self._skips: list[tuple[int, int, int]] = []
        self._producer: Producer | None = None
        self._first_batch_s: float | None = None
        self._waiting_since: float | None = None
        self._epochs_done = 0

    @property
    def _plan(self) -> EpochPlan:
        if self._made is None:
            self._made = self._make_plan(None)
        return self._made

    # --- state ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch that is being delivered, or that comes next."""
        return self._plan.epoch

    @property
    def steps(self) -> int:
        """Batches of this rank in the present segment, those before the cursor included."""
        return self._plan.rank(self.rank).steps

    @property
    def step(self) -> int:
        """Batches of the present segment that were handed out."""
        return self._batches

    @property
    def segment(self) -> int:
        """Number of the present topology segment inside the epoch."""
        return len(self._plan.cursor.segments) - 1

    @property
    def first_batch_s(self) -> float | None:
        """Seconds from the first ``iter()`` to the first batch, once it has come."""
        return self._first_batch_s

    def cursor(self) -> Cursor:
        """The resumable position after the batches handed out so far."""
        cursor = self._plan.cursor
        for dataset, episode, step in self._skips:
            cursor = cursor.skip(dataset, episode, step)
        if self._batches >= self._plan.steps and self._plan.settings.tail != "loop":
            return cursor.next_epoch()
        return cursor.advance(self._batches - self._plan.cursor.batches)

    def state_dict(self) -> dict[str, Any]:
        """Small JSON-ready state: the cursor, and the recipe where there is one. Call it after a training step."""
        state: dict[str, Any] = {"version": STATE_VERSION, "cursor": json.loads(self.cursor().to_json())}
        recipe = self._recipe()
        return state if recipe is None else state | {"recipe": recipe}

    def pool_state(self) -> bytes | None:
        """State of the rank's coverage pools after the batches handed out so far, or None where nothing needs it.

        A few kilobytes per worker. A stream of the same rank and topology that gets it with `load_state_dict` need not
        replay the draws before its position; without it the position alone is enough.
        """
        ranked = self._ranked
        if ranked is None or self._skips or self._batches >= ranked.steps:
            return None
        return dump_pool_state(ranked, self._batches)

    def _recipe(self) -> dict[str, Any] | None:
        stage = stage_of(self.description.config.recipe)
        return None if stage is None else json.loads(json.dumps(stage.describe()))

    def load_state_dict(self, state: Mapping[str, Any], *, other_recipe: bool = False, pool_state: bytes | None = None) -> None:
        """Goes on after the batches that the state counts. World size, workers and batch size may differ.

        Args:
            state: from ``state_dict``.
            other_recipe: whether the recipe may differ from the state's; other frames may then be in the selection, so the
                state's epoch begins again.
            pool_state: from `pool_state` of the same rank, saved with the state; one that does not fit is left aside.

        Raises:
            CursorError: the state is malformed, or belongs to another plan or recipe; the field that differs is named.
        """
        if state.get("version") != STATE_VERSION or "cursor" not in state:
            raise CursorError(f"stream state: expected version {STATE_VERSION} with a cursor, found {sorted(state)}")
        differences = stage_differences(state.get("recipe"), self._recipe())
        if differences and not other_recipe:
            raise CursorError(f"the state belongs to another recipe ({'; '.join(differences)}); restore it, or ask for other_recipe")
        if differences:
            epoch = Cursor.from_json(json.dumps(state["cursor"])).epoch
            _LOG.warning("the recipe differs (%s): epoch %d begins again", "; ".join(differences), epoch)
            self.set_epoch(epoch)
            return
        self.close()
        self._made = self._make_plan(Cursor.from_json(json.dumps(state["cursor"])))
        self._ranked, self._pool_state = None, pool_state
        self._batches = self._plan.cursor.batches
        self._skips = []
        self._epochs_done = 0

    def set_epoch(self, epoch: int) -> None:
        """Starts at the beginning of an epoch. Whatever was prefetched is dropped."""
        self.close()
        self._made = plan_epoch(self.description.units, self._settings, epoch=epoch)
        self._ranked = self._pool_state = None
        self._batches = 0
        self._skips = []
        self._epochs_done = 0

    def _make_plan(self, cursor: Cursor | None) -> EpochPlan:
        return plan_epoch(self.description.units, self._settings, cursor)

    # --- iteration ------------------------------------------------------------------------------

    def prepare(self, timeout_s: float = 0.0) -> bool:
        """Starts processes and memory for the batches from the present position on, and reads nothing yet.

        Call it when the state is loaded and before the model is: processes take seconds to start, and need not be
        waited for when the first batch is. A stream that is not prepared does the same when it is iterated.

        Args:
            timeout_s: wait that long for memory, and as long for the readers.

        Returns:
            Whether both are ready.
        """
        if self._producer is None:
            self._producer = Producer(self._production(), self._stretch_now(), self._epochs_done, paused=True)
        return self._producer.await_start(timeout_s) and self._feed.await_readers(timeout_s)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        limit = self.description.config.epochs
        if limit is not None and self._epochs_done >= limit:
            return
        start = perf_counter()
        if self._producer is not None and self._producer.failed:
            # Nothing comes from it any more: another one begins behind the last batch, and may meet the same error.
            self.close()
        if self._producer is None:
            self._producer = Producer(self._production(), self._stretch_now(), self._epochs_done)
        producer = self._producer
        producer.resume()
        while True:
            waited = self._waiting_since = monotonic()
            ready = producer.take(f"step {self._batches} of epoch {self.epoch}, segment {self.segment}")
            self._waiting_since = None
            self.counters.add("reelray_wait_seconds", monotonic() - waited)
            self._ranked = ready.stretch.ranked
            if ready.batch is None or ready.delivery is None:
                self._made, self._batches = ready.stretch.plan, ready.stretch.start
                self._skips = []
                self._epochs_done += 1
                if limit is not None and self._epochs_done >= limit:
                    self.close()
                return
            if self._first_batch_s is None:
                self._first_batch_s = perf_counter() - start
            self._batches = ready.delivery.step + 1
            self.delivery = ready.delivery
            real = int(np.count_nonzero(~ready.delivery.is_pad))
            self.counters.add("reelray_samples_delivered", real)
            self.counters.add("reelray_samples_padded", len(ready.delivery.is_pad) - real)
            batch = self._transformed(ready.batch, ready.delivery)
            yield to_torch(batch) if self._output == "torch" else batch

    def _production(self) -> Production:
        return Production(
            self.description,
            self._feed,
            self._make_backend,
            self.counters,
            self._decoded_bytes,
            self.rank,
            self._worker,
            loop_transforms=self.loop_transform is not None,
            skipped=self.record_skip,
            reading=self.reading,
        )

    def reading(self) -> StreamReading:
        """A look at what the stream holds and waits for, for metrics. May be called from any thread."""
        plan, producer = self._made, self._producer
        return StreamReading(
            totals=self.counters.totals(),
            epoch=0 if plan is None else plan.epoch,
            step=self._batches,
            steps=0 if plan is None else plan.steps,
            waiting_since=self._waiting_since,
            **({} if producer is None else producer.held()),
        )

    def _transformed(self, batch: Sample, delivery: Delivery) -> Sample:
        if self.loop_transform is None:
            return batch
        spec, config = self.description.job.spec, self.description.config
        return transform_batch(
            batch,
            self.loop_transform,
            (*spec.cameras, *spec.images),
            self.description.global_index(delivery.dataset, delivery.episode, delivery.frame),
            seed=config.plan.seed,
            epoch=delivery.epoch,
            as_uint8=config.return_uint8,
        )

    def _stretch_now(self) -> Stretch:
        """Where production starts: the present position; with the plan at hand when nothing was handed out yet."""
        plan = self._plan
        if self._batches != plan.cursor.batches or self._skips:
            plan = self._made = self._make_plan(self.cursor())
            self._batches, self._skips = plan.cursor.batches, []
        stretch = Stretch.begin(plan, self.rank, self._max_steps, self._stretch_samples)
        state, self._pool_state = self._pool_state, None
        if state is not None and not load_pool_state(stretch.ranked, state):
            _LOG.info("the stored pool state does not belong to this position: the draws before it are replayed")
        return stretch

    def record_skip(self, dataset: int, episode: int, step: int, frames: int, error: DamagedDataError) -> None:
        """Notes an episode that is left out from a step on; part of the state from now on."""
        self._skips.append((dataset, episode, step))
        self.damage.add(error, dataset=dataset, episode=episode, step=step, frames=frames)
        self.counters.add("reelray_episodes_skipped")
        _LOG.warning("episode %d is dropped from step %d on: %s", episode, step, error)

    def close(self) -> None:
        """Stops everything that runs for the stream. It may be iterated again, from where it stands."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
