"""The decode pool's client, over actors that answer when a test says so."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError

from actors.decode_pool import DecodeAnswer
from actors.pool_client import DecodePoolClient
from ingest.engine.counters import Counters
from ingest.errors import StreamClosedError


class Ref:
    """Stands for an object reference."""

    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def future(self) -> Future[Any]:
        return self._answer


class Answering:
    """Answers every ping at once."""

    def remote(self) -> Ref:
        answer: Future[Any] = Future()
        answer.set_result("up")
        return Ref(answer)


@dataclass(eq=False)
class Actor:
    """Holds calls until they are answered."""

    calls: list[tuple[Any, Future[Any]]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)

    @property
    def decode(self) -> Actor:
        return self

    @property
    def ping(self) -> Answering:
        return Answering()

    def remote(self, request: Any) -> Ref:
        answer: Future[Any] = Future()
        self.calls.append((request, answer))
        return Ref(answer)


@dataclass
class Request:
    """Compares like a request would: arrays of different lengths refuse to be compared."""

    wanted: np.ndarray[Any, Any]


def client_of(actor: Actor) -> DecodePoolClient:
    handle: Any = actor
    return DecodePoolClient([handle], Counters())


def submitted(client: DecodePoolClient, actor: Actor, sizes: list[int]) -> list[Future[Any]]:
    futures = [client.submit(Request(np.arange(size)), cost=1.0, describe="", on_lost=lambda lost: lost) for size in sizes]
    deadline = time.monotonic() + 10
    while len(actor.calls) < min(2, len(sizes)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return futures


def test_answers_may_come_in_any_order() -> None:
    actor = Actor()
    client = client_of(actor)
    first, second = submitted(client, actor, [24, 4])
    actor.calls[1][1].set_result(DecodeAnswer({"reelray_pictures_decoded": 4}))
    assert second.result(10).counts == {"reelray_pictures_decoded": 4}
    assert not first.done()
    actor.calls[0][1].set_result(DecodeAnswer({"reelray_pictures_decoded": 24}))
    assert first.result(10).counts == {"reelray_pictures_decoded": 24}
    client.close()


def test_closing_fails_what_is_open_and_what_comes_later() -> None:
    actor = Actor()
    client = client_of(actor)
    futures = submitted(client, actor, [3, 3, 3])
    client.close()
    futures.append(client.submit(Request(np.arange(3)), cost=1.0, describe="", on_lost=lambda lost: lost))
    for future in futures:
        with pytest.raises(StreamClosedError):
            future.result(10)


def test_a_client_that_breaks_leaves_nobody_waiting() -> None:
    actor = Actor()
    client = client_of(actor)
    futures = submitted(client, actor, [3, 3, 3])
    actor.calls[0][1].set_result("no answer that a decode actor gives")
    for future in futures:
        with pytest.raises(AttributeError):
            future.result(10)
    with pytest.raises(AttributeError):
        client.submit(Request(np.arange(3)), cost=1.0, describe="", on_lost=lambda lost: lost).result(10)
    client.close()


@pytest.mark.parametrize(
    "lost",
    [ActorDiedError(), ObjectLostError("00", None, ""), OutOfMemoryError("evicted"), NodeDiedError("gone"), WorkerCrashedError()],
    ids=lambda lost: type(lost).__name__,
)
@pytest.mark.parametrize("passed_on", [False, True], ids=["own", "of the actor elsewhere"])
def test_a_call_whose_answer_is_lost_in_any_way_is_sent_again(lost: RayError, passed_on: bool) -> None:
    actor = Actor()
    client = client_of(actor)
    (future,) = submitted(client, actor, [3])
    actor.calls[0][1].set_exception(RayTaskError("decode", "", lost) if passed_on else lost)
    deadline = time.monotonic() + 10
    while len(actor.calls) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    actor.calls[1][1].set_result(DecodeAnswer({"reelray_pictures_decoded": 3}))
    assert future.result(10).counts == {"reelray_pictures_decoded": 3}
    client.close()


def test_a_closed_client_keeps_nothing_of_its_calls() -> None:
    actor = Actor()
    client = client_of(actor)
    requests = [Request(np.arange(3)) for _ in range(4)]
    kept: list[weakref.ref[Any]] = [weakref.ref(request) for request in requests]
    gc.disable()
    try:
        for request in requests:
            # As in the stream, what sends a call again refers to the client.
            client.submit(request, cost=1.0, describe="", on_lost=lambda lost, client=client: lost)
        del request, requests
        while len(actor.calls) < 2:
            time.sleep(0.001)
        client.close()
        pictures = np.zeros(3)
        kept.append(weakref.ref(pictures))
        actor.calls.pop()[1].set_result(DecodeAnswer(pictures=pictures))
        del pictures
        actor.calls.clear()
        assert [one() for one in kept] == [None] * 5
    finally:
        gc.enable()
