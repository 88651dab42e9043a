"""The caller's side of the decode pool: balanced, bounded, and in charge of every retry.

Actors are restarted by Ray but never re-run a call (`max_task_retries=0`): a call that kills its actor would otherwise
kill it for ever. Here a call that was lost with its actor is sent again, alone on an actor that has answered a ping, and
is quarantined when it keeps killing whoever runs it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from actors.stream_metrics import PoolLoad
from ingest.engine.counters import Counters
from ingest.errors import PoisonedWorkError, ResourceUnavailableError, StreamClosedError

_LOST = (RayActorError, ObjectLostError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
"""What Ray raises for a call whose actor, or whose answer, is gone: the node died, or Ray ended the actor to save memory."""

_QUEUED_PER_ACTOR = 2
"""Calls on their way to one actor: one that runs and one that waits, so that it never idles between two."""


@dataclass(slots=True, eq=False)
class _Call:
    request: Any
    cost: float
    describe: str
    future: Future[Any]
    on_lost: Callable[[Any], Any]
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Member:
    handle: ActorHandle
    running: list[_Call] = field(default_factory=list)
    alone: bool = False
    down: bool = False
    failures: int = 0
    answered_at: float = field(default_factory=time.monotonic)

    @property
    def load(self) -> float:
        return sum(call.cost for call in self.running)


class DecodePoolClient:
    """Sends decode calls of one rank to the actors of its node.

    Args:
        actors: handles of live `actors.decode_pool.DecodeActor`.
        counters: receives retries, quarantines and the actors' own counts.
        max_attempts: how often a call may be lost with its actor before it is quarantined.
        give_up_s: seconds without any answering actor after which waiting calls fail.
    """

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        counters: Counters,
        *,
        max_attempts: int = 3,
        give_up_s: float = 120.0,
    ) -> None:
        if not actors:
            raise ResourceUnavailableError("the decode pool has no actors on this node")
        self._members = [_Member(actor) for actor in actors]
        self._counters = counters
        self._max_attempts = max_attempts
        self._give_up_s = give_up_s
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[_Call] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._closed = False
        self._open: set[Future[Any]] = set()
        self._ended: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="reelray-pool-client", daemon=True)
        self._thread.start()

    def submit(self, request: Any, *, cost: float, describe: str, on_lost: Callable[[Any], Any]) -> Future[Any]:
        """Queues one call. Calls start in the order they are submitted.

        Args:
            request: argument of `DecodeActor.decode`.
            cost: relative work, used to balance the actors.
            describe: what the call is for, in error messages ("episode 3, camera …").
            on_lost: makes the request to send after one was lost with its actor (with other frame slots), or raises
                `StreamClosedError` where nobody wants the answer any more.

        Returns:
            A future of the actor's answer. It fails with the actor's own typed error, with `PoisonedWorkError`
            when the call keeps killing actors, or with `ResourceUnavailableError` when no actor answers any more.
        """
        future: Future[Any] = Future()
        call = _Call(request, cost, describe, future, on_lost)
        self._open.add(future)
        # Not the call: a future that refers to itself would keep its answer's pictures until the garbage collector comes.
        future.add_done_callback(self._open.discard)
        self._events.put(lambda: self._enqueue(call))
        if self._ended is not None:
            self._fail(future, self._ended)
        return future

    def states(self) -> list[str]:
        """One line per actor, for stall reports."""
        now = time.monotonic()
        return [
            f"actor {member.handle._actor_id.hex()[:8]}: {'down' if member.down else 'up'}, "  # pyright: ignore[reportPrivateUsage]
            f"{len(member.running)} calls, last answer {now - member.answered_at:.0f} s ago"
            for member in self._members
        ]

    def load(self) -> PoolLoad:
        """What the pool is doing for this rank, for metrics."""
        running = sum(len(member.running) for member in self._members)
        return PoolLoad(len(self._members), sum(member.down for member in self._members), running + len(self._waiting))

    def close(self) -> None:
        """Fails what is still waiting and stops. Idempotent."""
        if not self._closed:
            self._closed = True
            self._events.put(lambda: None)
            self._thread.join(timeout=10)

    # Everything below runs on the one client thread, so it needs no lock.

    def _serve(self) -> None:
        try:
            self._handle_events()
            self._ended = StreamClosedError("the stream was closed while pictures were being decoded")
        except Exception as unexpected:
            # Nobody else would answer these calls, and whoever waits for them would wait for ever.
            self._ended = unexpected
        for future in list(self._open):
            self._fail(future, self._ended)
        self._forget()

    def _forget(self) -> None:
        """Lets go of every call: calls refer to who made them, so they would keep their pictures until the garbage collector comes."""
        self._waiting.clear()
        self._timers.clear()
        for member in self._members:
            member.running.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.get_nowait()

    @staticmethod
    def _fail(future: Future[Any], error: Exception) -> None:
        # Submitting and ending may meet here.
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)

    def _handle_events(self) -> None:
        while not self._closed:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            try:
                self._events.get(timeout=timeout)()
            except queue.Empty:
                now = time.monotonic()
                due = [action for at, action in self._timers if at <= now]
                self._timers = [(at, action) for at, action in self._timers if at > now]
                for action in due:
                    action()
            self._dispatch()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + delay_s, action))
        self._timers.sort(key=lambda timer: timer[0])

    def _enqueue(self, call: _Call) -> None:
        self._waiting.append(call)

    def _dispatch(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            room = [
                member
                for member in self._members
                if not member.down and not member.alone and len(member.running) < (1 if call.attempts else _QUEUED_PER_ACTOR)
            ]
            if not room:
                self._check_stall()
                return
            self._waiting.popleft()
            member = min(room, key=lambda candidate: (candidate.load, len(candidate.running)))
            member.running.append(call)
            member.alone = call.attempts > 0
            self._watch(member.handle.decode.remote(call.request), lambda answer, m=member, c=call: self._finished(m, c, answer))

    def _watch(self, ref: ray.ObjectRef[Any], then: Callable[[Future[Any]], None]) -> None:
        def come(answer: Future[Any]) -> None:
            if self._ended is None:
                self._events.put(lambda: then(answer))

        ref.future().add_done_callback(come)

    def _finished(self, member: _Member, call: _Call, answer: Future[Any]) -> None:
        member.running.remove(call)
        member.alone = False
        error = answer.exception()
        cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
        if isinstance(cause, _LOST):  # the actor, or the one on another node that it stands for
            self._lost(member, call)
            return
        member.answered_at = time.monotonic()
        if cause is None:
            member.failures = 0
            done = answer.result()
            self._counters.merge(done.counts)
            call.future.set_result(done)
        else:
            call.future.set_exception(cause)

    def _lost(self, member: _Member, call: _Call) -> None:
        if not member.down:
            member.down = True
            member.failures += 1
            self._ping_later(member)
        call.attempts += 1
        if call.attempts >= self._max_attempts:
            self._counters.add("reelray_quarantined")
            call.future.set_exception(
                PoisonedWorkError(
                    f"{call.describe}: decoding it killed {call.attempts} decode actors in a row, so it is quarantined; "
                    "check the file with `reelray doctor`, or drop the episode with --damage skip_episode"
                )
            )
            return
        self._counters.add("reelray_retries")
        try:
            call.request = call.on_lost(call.request)
        except StreamClosedError as closed:
            call.future.set_exception(closed)
            return
        self._waiting.appendleft(call)

    def _ping_later(self, member: _Member) -> None:
        delay_s = min(0.2 * 2 ** (member.failures - 1), 5.0)
        self._later(delay_s, lambda: self._watch(member.handle.ping.remote(), lambda answer: self._pinged(member, answer)))

    def _pinged(self, member: _Member, answer: Future[Any]) -> None:
        if answer.exception() is None:
            member.down = False
            member.answered_at = time.monotonic()
        else:
            member.failures += 1
            self._ping_later(member)

    def _check_stall(self) -> None:
        silent_s = time.monotonic() - max(member.answered_at for member in self._members)
        if all(member.down for member in self._members) and silent_s > self._give_up_s:
            error = ResourceUnavailableError(f"no decode actor has answered for {silent_s:.0f} s: {'; '.join(self.states())}")
            while self._waiting:
                self._waiting.popleft().future.set_exception(error)
