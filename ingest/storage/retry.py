"""When to try a request again, how long to wait before, and when to give up."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import TypeVar

import tenacity

from ingest.errors import StorageError, TransientStorageError

T = TypeVar("T")

RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that say 'not now' rather than 'no'."""

_ASKED_SHARE = 8
_RATE_LIMIT_RESET = re.compile(r"(?:^|;)\s*t=(\d+)")


class RetryableError(Exception):
    """One attempt failed in a way that may pass.

    Attributes:
        reason: what happened, without a credential.
        retry_after_s: seconds that the server asked to wait, or None.
        final: class of the error once retries are used up.
        unreachable: whether no connection could be made at all.
    """

    def __init__(
        self,
        reason: str,
        *,
        retry_after_s: float | None = None,
        final: type[StorageError] = TransientStorageError,
        unreachable: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.final = final
        self.unreachable = unreachable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Jittered exponential waits below a total deadline.

    Attributes:
        attempts: tries in all, the first included; refusals that say when to come back count an eighth, as waiting them out is working.
        deadline_s: seconds from the first try after which no further try starts.
        first_wait_s: upper bound of the first wait; it doubles from try to try.
        longest_wait_s: upper bound of every wait that the server did not ask for.
        unreachable_attempts: tries in all where no connection can be made; None makes no difference.
        timeout_s: silence after which one try is given up: to connect, between bytes, and beyond what its bytes need at a crawl.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.
        random: source of the jitter; None makes a fresh one per call, so that ranks do not return in step.
    """

    attempts: int = 8
    deadline_s: float = 900.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 8.0
    unreachable_attempts: int | None = None
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Random | None = None

    def call(self, what: str, action: Callable[[int], T]) -> T:
        """Runs ``action(attempt)``, attempt counted from 1, until it returns or retrying is over.

        Args:
            what: names the request in the error, without a credential.
            action: raises ``RetryableError`` for a fault that may pass; any other exception ends the call at once.

        Raises:
            StorageError: of the last fault's class, once attempts or deadline are used up.
        """
        started = self.clock()
        random = self.random or Random()

        def wait(state: tenacity.RetryCallState) -> float:
            fault = _fault(state)
            bound = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(state.attempt_number - 1, 30))
            if fault.retry_after_s is not None:
                # Jitter on top, never below: the server said when it has room again.
                return fault.retry_after_s + random.uniform(0.0, min(bound, 1.0))
            return random.uniform(bound / 2, bound)

        spent = 0

        def stop(state: tenacity.RetryCallState) -> bool:
            nonlocal spent
            fault = _fault(state)
            if fault.unreachable and self.unreachable_attempts is not None and state.attempt_number >= self.unreachable_attempts:
                return True
            spent += 1 if fault.retry_after_s is not None else _ASKED_SHARE
            return spent >= self.attempts * _ASKED_SHARE or self.clock() - started + state.upcoming_sleep > self.deadline_s

        retrying = tenacity.Retrying(retry=tenacity.retry_if_exception_type(RetryableError), wait=wait, stop=stop, sleep=self.sleep)
        attempt = 0

        def once() -> T:
            nonlocal attempt
            attempt += 1
            return action(attempt)

        try:
            return retrying(once)
        except tenacity.RetryError as error:
            fault = _fault_of(error.last_attempt)
            asked = "" if fault.retry_after_s is None else f", which asked to wait {fault.retry_after_s:.0f} s,"
            raise fault.final(
                f"{what}: {fault.reason}{asked} after {attempt} tries in {self.clock() - started:.1f} s "
                f"(limits: {self.attempts} tries, {self.deadline_s:.0f} s)"
            ) from None


def _fault(state: tenacity.RetryCallState) -> RetryableError:
    assert state.outcome is not None  # waits and stops are asked for only after a failed attempt
    return _fault_of(state.outcome)


def _fault_of(outcome: tenacity.Future) -> RetryableError:
    fault = outcome.exception()
    assert isinstance(fault, RetryableError)
    return fault


def retry_after_s(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Seconds to wait that a reply asks for: ``Retry-After`` as seconds or a date, else the ``t=`` of ``RateLimit``."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(min(int(value[:9]), 10**6))
    if value:
        try:
            when = parsedate_to_datetime(value)
        except (ValueError, TypeError):
            when = None
        if when is not None:
            when = when if when.tzinfo else when.replace(tzinfo=UTC)
            return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())
    reset = _RATE_LIMIT_RESET.search(headers.get("ratelimit", ""))
    return float(reset[1][:6]) if reset else None
