"""The decode pool's client, over actors that answer when a test says so."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

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


@dataclass(eq=False)
class Actor:
    """Holds calls until they are answered."""

    calls: list[tuple[Any, Future[Any]]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)

    @property
    def decode(self) -> Actor:
        return self

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
