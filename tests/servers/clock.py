"""Time for tests: a clock that moves only when somebody sleeps on it."""

from __future__ import annotations

from random import Random

from ingest.storage.retry import RetryPolicy


def no_sleep(seconds: float) -> None:
    """Returns at once."""
    assert seconds >= 0


class FakeTime:
    """A clock in seconds and the waits that moved it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def policy(self, **fields: float) -> RetryPolicy:
        return RetryPolicy(clock=lambda: self.now, sleep=self.sleep, random=Random(3), **fields)  # type: ignore[arg-type]
