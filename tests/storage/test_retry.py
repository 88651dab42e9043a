from __future__ import annotations

from datetime import UTC, datetime
from random import Random

import pytest
from servers.clock import FakeTime

from ingest.errors import ObjectNotFoundError, ShortReadError, TransientStorageError
from ingest.storage.retry import RetryableError, RetryPolicy, retry_after_s

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"retry-after": "Mon, 30 Nov 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Mon, 30 Nov 2026 11:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "9" * 30}, 10.0**6),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"retry-after": "3", "ratelimit": '"api";r=0;t=55'}, 3.0),
        ({"ratelimit": '"api";r=0'}, None),
    ],
)
def test_what_a_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, now=NOW) == seconds


def _failing(times: int, fault: Exception) -> object:
    calls = [0]

    def action(attempt: int) -> int:
        calls[0] += 1
        assert attempt == calls[0]
        if attempt <= times:
            raise fault
        return attempt

    return action


def test_waits_grow_are_jittered_and_bounded() -> None:
    time = FakeTime()
    assert time.policy(attempts=12, deadline_s=1000.0).call("x", _failing(11, RetryableError("no"))) == 12  # type: ignore[arg-type]
    bounds = [0.5, 1, 2, 4, 8, 8, 8, 8, 8, 8, 8]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(time.waits, bounds, strict=True))
    other = FakeTime()
    RetryPolicy(clock=lambda: other.now, sleep=other.sleep, random=Random(9)).call("x", _failing(3, RetryableError("no")))  # type: ignore[arg-type]
    assert other.waits != time.waits[:3]


def test_the_last_fault_decides_the_error() -> None:
    with pytest.raises(ShortReadError, match=r"GET x: half a body after 8 tries"):
        FakeTime().policy().call("GET x", _failing(100, RetryableError("half a body", final=ShortReadError)))  # type: ignore[arg-type]
    with pytest.raises(TransientStorageError):
        FakeTime().policy().call("x", _failing(100, RetryableError("no")))  # type: ignore[arg-type]


def test_other_errors_are_not_retried() -> None:
    time = FakeTime()
    with pytest.raises(ObjectNotFoundError):
        time.policy().call("x", _failing(1, ObjectNotFoundError("gone")))  # type: ignore[arg-type]
    assert time.waits == []


def test_refusals_that_say_when_to_come_back_are_waited_out_longer_than_faults() -> None:
    time = FakeTime()
    assert time.policy().call("x", _failing(40, RetryableError("429", retry_after_s=5.0))) == 41  # type: ignore[arg-type]
    assert sum(time.waits) >= 200
    with pytest.raises(TransientStorageError, match="tries"):
        FakeTime().policy().call("x", _failing(1000, RetryableError("429", retry_after_s=0.0)))  # type: ignore[arg-type]
    with pytest.raises(TransientStorageError, match="asked to wait 300 s, after 3 tries"):
        FakeTime().policy().call("x", _failing(1000, RetryableError("429", retry_after_s=300.0)))  # type: ignore[arg-type]
