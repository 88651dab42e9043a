"""One HTTP client per process, and the exact range read that every HTTP-backed store uses."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from ingest.errors import AccessDeniedError, ObjectNotFoundError, ShortReadError, StorageError
from ingest.storage.bodies import WHOLE_LIMIT, refuse_placeholder
from ingest.storage.failures import log_failure
from ingest.storage.retry import RETRYABLE_STATUS, RetryableError, RetryPolicy, retry_after_s
from ingest.storage.secrets import quiet_http_logs, redact
from ingest.storage.traffic import count_request

MAX_CONNECTIONS = 64
"""Open connections of one process; more showed no gain against the Hub and slow each other down."""

_CONNECT_S = 15.0
_SLOWEST_BYTES_PER_S = 16384
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")
_JSON_LIMIT = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, its body read.

    Attributes:
        status: HTTP status.
        headers: by lower-case name.
        body: as received, after content decoding; empty for redirects and refusals.
        url: what was asked, with its query; never put into messages as it is.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str = field(repr=False)

    def refusal(self, what: str, hint: str = "") -> StorageError:
        """The typed error of a reply that is neither a success nor worth a retry."""
        detail = redact(self.headers.get("x-error-message", "") or _snippet(self))
        text = f"{what}: the server answered {self.status}" + (f" ({detail})" if detail else "")
        if self.status in {401, 403}:
            return AccessDeniedError(f"{text}; {hint or 'check the credentials of this process'}")
        if self.status in {404, 410}:
            return ObjectNotFoundError(f"{text}; {hint or 'there is no such object'}")
        return StorageError(f"{text}{'; ' + hint if hint else ''}")


def _snippet(reply: Reply) -> str:
    if "html" in reply.headers.get("content-type", ""):
        return ""
    return reply.body[:200].decode("utf-8", "replace").strip().replace("\n", " ")


_lock = threading.Lock()
_client: httpx.Client | None = None
_client_pid = 0


def _shared_client() -> httpx.Client:
    global _client, _client_pid
    # A forked child must not share its parent's sockets, so the client belongs to one process id.
    with _lock:
        if _client is None or _client_pid != os.getpid():
            quiet_http_logs()
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS, keepalive_expiry=30.0)
            _client = httpx.Client(limits=limits, follow_redirects=False, headers={"user-agent": "reelray"})
            _client_pid = os.getpid()
        return _client


def close_connections() -> None:
    """Closes this process' idle and open connections; the next request opens new ones."""
    global _client
    with _lock:
        client, _client = (_client if _client_pid == os.getpid() else None), None
    if client is not None:
        client.close()


def exchange(method: str, url: str, headers: Mapping[str, str], *, timeout_s: float, limit: int = _JSON_LIMIT, raw: bool = False) -> Reply:
    """One attempt, no redirect followed.

    Args:
        method: HTTP method.
        url: absolute.
        headers: credentials included; they are not kept.
        timeout_s: longest silence; the whole transfer may take as long again as its bytes need at 16 KiB/s.
        limit: longest body in bytes that is read; one more byte ends the transfer.
        raw: leave the body's content encoding alone.

    Raises:
        RetryableError: the connection failed, timed out or broke, or the body is shorter than announced.
        StorageError: the URL cannot be asked at all, or the body is longer than ``limit``.
    """
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
    started = time.monotonic()
    length = 0
    try:
        with _shared_client().stream(method, url, headers={"accept-encoding": "identity", **headers}, timeout=timeout) as response:
            found = {name.lower(): value for name, value in response.headers.items()}
            parts: list[bytes] = []
            if method != "HEAD" and not 300 <= response.status_code < 400:
                for part in response.iter_raw() if raw else response.iter_bytes():
                    length += len(part)
                    if time.monotonic() - started > timeout_s + length / _SLOWEST_BYTES_PER_S:
                        raise RetryableError(f"the transfer crawls: {length} bytes in {time.monotonic() - started:.0f} s")
                    if length > limit:
                        raise StorageError(
                            f"{redact(url)}: the reply (status {response.status_code}) is longer than the {limit} bytes that may come; "
                            "a server that ignores ranges cannot be streamed from"
                        )
                    parts.append(part)
            return Reply(response.status_code, found, b"".join(parts), url)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects, UnicodeError) as error:
        raise StorageError(f"{redact(url)}: {redact(str(error))}") from None
    except (httpx.TransportError, httpx.DecodingError, httpx.StreamError) as error:
        unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        raise RetryableError(f"{type(error).__name__}: {redact(str(error))}".rstrip(": "), unreachable=unreachable) from None
    finally:
        count_request(length, time.monotonic() - started)


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what decides whether a credential may be sent."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def retry_status(reply: Reply) -> None:
    """Raises ``RetryableError`` for a status that may pass."""
    if reply.status in RETRYABLE_STATUS:
        raise RetryableError(f"the server answered {reply.status}", retry_after_s=retry_after_s(reply.headers))


def ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    policy: RetryPolicy,
    *,
    limit: int = _JSON_LIMIT,
    check: Callable[[Reply], None] | None = None,
) -> Reply:
    """``exchange`` with retries: returns the first reply whose status is final, whatever it is.

    Args:
        method: HTTP method.
        url: absolute.
        headers: credentials included; they are not kept.
        policy: retries.
        limit: longest body in bytes.
        check: raises ``RetryableError`` for a reply with status 200 that is not usable.
    """

    def once(attempt: int) -> Reply:
        try:
            reply = exchange(method, url, headers, limit=limit, timeout_s=policy.timeout_s)
            retry_status(reply)
            if check is not None and reply.status == 200:
                check(reply)
        except RetryableError as fault:
            log_failure(method, url, attempt=attempt, error=fault.reason)
            raise
        return reply

    return policy.call(f"{method} {redact(url)}", once)


def read_range_once(
    url: str, headers: Mapping[str, str], start: int, stop: int | None, where: str, *, timeout_s: float
) -> tuple[Reply, int | None]:
    """One attempt at bytes ``[start, stop)``, with every check that needs no knowledge of the object.

    Args:
        url: absolute.
        headers: credentials included; they are not kept.
        start: first byte; 0 when ``stop`` is None.
        stop: end of the range, or None for the whole object.
        where: names the object in errors.
        timeout_s: as in ``exchange``.

    Returns:
        The reply and the object's total size in bytes as the reply states it, or None. Status 206: the body is exactly the range asked for,
        also where the server answered 200 with exactly these bytes. Status 416: the object ends before ``stop``. Any other status is the
        caller's to judge.

    Raises:
        RetryableError: a fault that may pass: transport, status, short body, wrong ``Content-Range``.
        StorageError: the server does not do ranges, or sends something other than the file.
    """
    wanted = None if stop is None else stop - start
    asked = {} if stop is None else {"range": f"bytes={start}-{stop - 1}"}
    limit = WHOLE_LIMIT if wanted is None else max(wanted, 65536)
    reply = exchange("GET", url, {**headers, **asked}, timeout_s=timeout_s, limit=limit, raw=True)
    retry_status(reply)
    if reply.status not in {200, 206, 416}:
        return reply, None
    content_type = reply.headers.get("content-type", "")
    if reply.status != 416 and reply.headers.get("content-encoding", "identity").lower() not in {"", "identity"}:
        raise StorageError(
            f"{where}: the server compresses its replies ({reply.headers['content-encoding']}), so bytes cannot be addressed"
        )
    if reply.status == 200:
        total = len(reply.body)
        refuse_placeholder(reply.body[:256], where, content_type=content_type, whole=total <= 256)
        if wanted is not None and (start != 0 or total != wanted):
            raise StorageError(
                f"{where}: the server answered a request for bytes {start}..{stop} with 200 and another body: it ignores ranges"
            )
        return Reply(206, reply.headers, reply.body, reply.url), total
    match = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", "").strip())
    total = int(match[3]) if match and match[3] != "*" else None
    if reply.status == 416 or (stop is not None and total is not None and total < stop):
        return Reply(416, reply.headers, b"", reply.url), total
    if stop is None or match is None or match[1] is None or (int(match[1]), int(match[2])) != (start, stop - 1):
        found = reply.headers.get("content-range", "")
        raise RetryableError(f"bytes {start}..{stop} asked for, Content-Range is {found!r}", final=ShortReadError)
    if len(reply.body) != wanted:
        raise RetryableError(f"bytes {start}..{stop} asked for, {len(reply.body)} of {wanted} bytes arrived", final=ShortReadError)
    if start == 0:
        refuse_placeholder(reply.body[:256], where, content_type=content_type, whole=total == wanted)
    return reply, total
