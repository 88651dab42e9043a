"""A store that is away for a while is waited for, within limits."""

from __future__ import annotations

import pytest
from servers.clock import FakeTime

from ingest.engine.fetch import ride_out
from ingest.errors import AccessDeniedError, TransientStorageError


class Away:
    """Answers again at a certain time; every try takes some seconds."""

    def __init__(self, time: FakeTime, until: float) -> None:
        self.time, self.until, self.tries = time, until, 0

    def __call__(self) -> str:
        self.tries += 1
        if self.time.now < self.until:
            self.time.now += 20
            raise TransientStorageError(f"refused at {self.time.now:.0f} s")
        return "here"


def test_an_outage_is_ridden_out() -> None:
    time = FakeTime()
    away, told = Away(time, 60), []
    assert ride_out(away, 240, told.append, clock=lambda: time.now, sleep=time.sleep) == "here"
    assert (away.tries, len(told)) == (4, 3)


def test_it_ends_with_the_last_error() -> None:
    time = FakeTime()
    away = Away(time, 1e9)
    with pytest.raises(TransientStorageError, match=r"refused at 2\d\d s"):
        ride_out(away, 240, lambda _: None, clock=lambda: time.now, sleep=time.sleep)
    # The last try may begin just before the limit.
    assert time.now <= 20 + 240 + 21


def test_nothing_else_is_tried_again() -> None:
    tries: list[int] = []

    def denied() -> None:
        tries.append(1)
        raise AccessDeniedError("no")

    with pytest.raises(AccessDeniedError):
        ride_out(denied, 240, lambda _: None)
    time = FakeTime()
    away = Away(time, 60)
    with pytest.raises(TransientStorageError):
        ride_out(away, 0, lambda _: None, clock=lambda: time.now, sleep=time.sleep)
    assert (len(tries), away.tries) == (1, 1)
