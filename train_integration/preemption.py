"""Stopping a training run on request, at the same step on every rank, with nothing lost.

A cluster that wants its machines back sends SIGTERM to the driver. The driver notes it on a `StopBoard`; every rank asks
the board once per step and learns, without waiting, after which step to stop. A machine that is about to be reclaimed
is announced by Ray Train itself; then the ranks save and go on, because Ray starts the group again elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from types import FrameType
from typing import Any

import ray
import ray.train

from actors.resources import beside_caller

_LOG = logging.getLogger("reelray.preemption")

EXIT_STOPPED = 143
"""Exit status of a run that was asked to stop by SIGTERM and has saved: 128 + 15, as shells report that signal."""


class Demand(Enum):
    """What a rank has to do after a step."""

    GO_ON = "go_on"
    SAVE = "save"
    """A machine of the run is about to be taken: save, then go on."""
    STOP = "stop"
    """The run was asked to stop: save, then leave the loop."""


class StopBoard:
    """Agrees on the last step of all ranks. Used as an actor, see `start_stop_board`; tests use it as it is.

    Ranks report a step before they take it and read the answer before they take the next one. The last step is one
    after the furthest reported when the stop is asked for: a rank that has read its answer already takes at most that
    one, so no rank can have passed it, and every rank reads of it in time.
    """

    def __init__(self) -> None:
        self._furthest = 0
        self._asked = False
        self._last: int | None = None
        self._group = ""

    def ask(self) -> None:
        """Asks the run to stop. May be called again."""
        self._asked = True
        if self._group:
            self._decide()

    def asked(self) -> bool:
        """Whether the run was asked to stop."""
        return self._asked

    def about_to_take(self, group: str, step: int) -> int | None:
        """Notes that a rank takes a step now.

        Args:
            group: name of the worker group, equal on all its ranks; another name means that the group has begun again.
            step: number of the step.

        Returns:
            The last step to take, or None while nobody has asked to stop.
        """
        if group != self._group:
            self._group, self._furthest, self._last = group, step, None
        self._furthest = max(self._furthest, step)
        if self._asked:
            self._decide()
        return self._last

    def _decide(self) -> None:
        if self._last is None:
            self._last = self._furthest + 1


def start_stop_board() -> Any:
    """A board actor that ends with the calling process and reserves no CPU. Call it in the driver."""
    return ray.remote(StopBoard).options(**beside_caller("stop")).remote()


class StopRequest:
    """One rank's side, polled by the training loop::

        stop = StopRequest(board, shard.attempt)
        for batch in stream:
            stop.begin(step + 1)
            ...  # take the step
            step += 1
            demand = stop.after(step)
            if demand is not Demand.GO_ON:
                save(...)
            if demand is Demand.STOP:
                break

    The answer to `begin` arrives while the step is taken, so asking costs the step nothing.

    Args:
        board: from `start_stop_board`; None polls for announced losses of machines only.
        group: name of the worker group.
        preemption: tells of an announced loss, or None; by default Ray Train's own, which is a barrier of all ranks.
        preemption_every: steps between two looks at ``preemption``; it must be equal on all ranks. 0 never looks.
        wait: turns what ``about_to_take`` returned into its value; `ray.get` by default.
    """

    def __init__(
        self,
        board: Any,
        group: str,
        *,
        preemption: Callable[[], Any] | None = None,
        preemption_every: int = 50,
        wait: Callable[[Any], int | None] = ray.get,
    ) -> None:
        self._ask: Any = (
            None if board is None else (board.about_to_take.remote if hasattr(board.about_to_take, "remote") else board.about_to_take)
        )
        self._group = group
        self._preemption = ray.train.get_preemption_info if preemption is None else preemption
        self._every = preemption_every
        self._wait = wait
        self._pending: Any = None
        self._last: int | None = None
        self._announced: Any = None

    def begin(self, step: int) -> None:
        """Says that a step is taken now.

        Args:
            step: its number, counted from 1 over the whole run, equal on all ranks.
        """
        if self._ask is None:
            return
        self._pending = self._ask(self._group, step)

    def after(self, step: int) -> Demand:
        """What to do after a step. Every rank must call it after every step.

        Args:
            step: number of the step that was taken.
        """
        if self._pending is not None:
            self._last = self._wait(self._pending)
            self._pending = None
        if self._last is not None and step >= self._last:
            return Demand.STOP
        return Demand.SAVE if self._newly_announced(step) else Demand.GO_ON

    def _newly_announced(self, step: int) -> bool:
        if not self._every or step % self._every:
            return False
        found = self._preemption()
        if found is None:
            self._announced = None
            return False
        which = getattr(found, "preempted_node_to_ranks", found)
        known, self._announced = self._announced, which
        return which != known


@contextlib.contextmanager
def stop_on_sigterm(ask: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """Turns the first SIGTERM into a request to stop; a second one ends the process as it would have without this.

    Use it in the driver, after Ray has been initialised (Ray sets a handler of its own) and around the run. Outside the
    main thread, where Python forbids handlers, nothing is changed.

    Args:
        ask: called once, in a thread of its own, since a signal may come in the middle of any call to Ray; for example
            ``lambda: board.ask.remote()``.

    Yields:
        A function that says whether SIGTERM has come.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(_number: int, _frame: FrameType | None) -> None:
        came.set()
        signal.signal(signal.SIGTERM, before)
        _LOG.warning("SIGTERM: the run finishes its step, saves and stops; a second SIGTERM ends it at once")
        threading.Thread(target=ask, name="reelray-stop", daemon=True).start()

    signal.signal(signal.SIGTERM, handle)
    try:
        yield came.is_set
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)
