"""Exact reads of objects by URL: one redirect resolution per object, signed addresses refreshed once, changes noticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from ingest.errors import ObjectChangedError, ShortReadError, StorageError
from ingest.storage.failures import log_failure
from ingest.storage.hosts import check_redirect
from ingest.storage.http import Reply, exchange, origin, read_range_once, retry_status
from ingest.storage.known import Known, KnownObjects, clean_tag
from ingest.storage.retry import RetryableError, RetryPolicy

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
_MAX_HOPS = 6


class HttpObjects:
    """Reads objects whose home address a function gives.

    Args:
        home: home address of a path.
        where: name of a path in messages.
        headers: headers for one home-origin request, credentials included; asked for at each request and never kept.
        tag: identity of the object's content in a home reply's headers, or None.
        known: versions seen so far.
        policy: retries.
        hint: what a person can do about a refusal with this status.
        redirects: whether the home is known to redirect. Then the first read of an object resolves it while the others wait, so that it is
            resolved once; otherwise all go ahead, and a redirect is learnt on the way.
    """

    def __init__(
        self,
        *,
        home: Callable[[str], str],
        where: Callable[[str], str],
        headers: Callable[[], Mapping[str, str]],
        tag: Callable[[Mapping[str, str]], str | None],
        known: KnownObjects,
        policy: RetryPolicy,
        hint: Callable[[int], str],
        redirects: bool,
    ) -> None:
        self._home, self._where, self._headers, self._tag = home, where, headers, tag
        self._known, self._policy, self._hint, self._redirects = known, policy, hint, redirects
        self._addresses: dict[str, str] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Exactly bytes ``[start, stop)`` of ``path``, or the whole object when ``stop`` is None.

        Raises:
            AccessDeniedError, ObjectNotFoundError, ObjectChangedError, ShortReadError, TransientStorageError, StorageError: what happened,
                where, and what to do.
        """
        refreshed = False

        def once(attempt: int) -> bytes:
            nonlocal refreshed
            try:
                reply, total, address = self._try(path, start, stop, refresh=False)
                if reply.status in _EXPIRED and origin(address) != origin(self._home(path)) and not refreshed:
                    # A signed address was refused: it may have expired. Asking the home address again is done once per read.
                    refreshed = True
                    log_failure("GET", address, attempt=attempt, error="signed address refused", status=reply.status)
                    self._forget(path, address)
                    reply, total, address = self._try(path, start, stop, refresh=True)
                return self._judge(path, start, stop, reply, total)
            except RetryableError as fault:
                log_failure(
                    "GET", self._home(path), attempt=attempt, error=fault.reason, byte_range=None if stop is None else (start, stop)
                )
                raise

        return self._policy.call(self._where(path), once)

    def head(self, path: str) -> Known:
        """Size and tag of ``path`` from its headers alone; falls back to a one-byte read where HEAD is not allowed."""

        def once(attempt: int) -> Known:
            url = self._home(path)
            try:
                for _ in range(_MAX_HOPS):
                    reply = exchange("HEAD", url, self._headers_for(path, url), timeout_s=self._policy.timeout_s)
                    retry_status(reply)
                    if reply.status not in _REDIRECTS:
                        break
                    url = check_redirect(url, reply.headers.get("location", ""))
                else:
                    raise StorageError(f"{self._where(path)}: more than {_MAX_HOPS} redirects")
            except RetryableError as fault:
                log_failure("HEAD", url, attempt=attempt, error=fault.reason)
                raise
            if reply.status in {405, 501}:
                return Known()
            if not 200 <= reply.status < 300:
                raise reply.refusal(self._where(path), self._hint(reply.status))
            length = reply.headers.get("content-length", "")
            return Known(int(length) if length.isascii() and length.isdigit() else None, self._tag(reply.headers))

        found = self._known.see(path, self._policy.call(self._where(path), once), self._where(path))
        if found.size is None:
            self.read(path, 0, 1)
            found = self._known.get(path)
        return found

    def _headers_for(self, path: str, url: str) -> Mapping[str, str]:
        # The credential belongs to the home origin; no other host ever sees it.
        return self._headers() if origin(url) == origin(self._home(path)) else {}

    def _forget(self, path: str, address: str) -> None:
        with self._guard:
            if self._addresses.get(path) == address:
                del self._addresses[path]

    def _try(self, path: str, start: int, stop: int | None, *, refresh: bool) -> tuple[Reply, int | None, str]:
        address = self._addresses.get(path)
        if address is None and not self._redirects and not refresh:
            address = self._home(path)
        if address is None:
            with self._guard:
                lock = self._locks.setdefault(path, threading.Lock())
            with lock:
                address = self._addresses.get(path)
                if address is None:
                    url = self._home(path)
                    if refresh:
                        url += ("&" if "?" in url else "?") + f"_refresh={time.time_ns()}"
                    found, total, address = self._follow(path, url, start, stop, until_away=True)
                    self._remember(path, address)
                    if found is not None:
                        return found, total, address
        found, total, final = self._follow(path, address, start, stop, until_away=False)
        if final != address:
            self._remember(path, final)
        assert found is not None  # only a walk that stops at the border returns without a reply
        return found, total, final

    def _remember(self, path: str, address: str) -> None:
        with self._guard:
            self._addresses[path] = address if origin(address) != origin(self._home(path)) else self._home(path)

    def _follow(self, path: str, url: str, start: int, stop: int | None, *, until_away: bool) -> tuple[Reply | None, int | None, str]:
        for _ in range(_MAX_HOPS):
            reply, total = read_range_once(
                url, self._headers_for(path, url), start, stop, self._where(path), timeout_s=self._policy.timeout_s
            )
            self._note(path, url, reply, total)
            if reply.status not in _REDIRECTS:
                return reply, total, url
            url = check_redirect(url, reply.headers.get("location", ""))
            if until_away and origin(url) != origin(self._home(path)):
                return None, None, url
        raise StorageError(f"{self._where(path)}: more than {_MAX_HOPS} redirects")

    def _note(self, path: str, url: str, reply: Reply, total: int | None) -> None:
        if reply.status not in _REDIRECTS and reply.status != 206:
            return
        where = self._where(path)
        if origin(url) == origin(self._home(path)):
            linked = reply.headers.get("x-linked-size", "")
            size = int(linked) if linked.isascii() and linked.isdigit() else (total if reply.status == 206 else None)
            # A redirect's own ETag is that of the redirect; what it says about the object is in its x-headers.
            about = {name: value for name, value in reply.headers.items() if reply.status == 206 or name.startswith("x-")}
            self._known.see(path, Known(size, self._tag(about)), where)
        else:
            self._known.see(path, Known(total), where)
        if reply.status == 206:
            # Tags of a host are compared with that host's own only: a storage host need not spell them like the home does.
            self._known.see(f"{path}\0{urlsplit(url).netloc}", Known(total, clean_tag(reply.headers.get("etag"))), where)

    def _judge(self, path: str, start: int, stop: int | None, reply: Reply, total: int | None) -> bytes:
        where = self._where(path)
        if reply.status == 206:
            return reply.body
        if reply.status == 416:
            known = self._known.get(path)
            if known.size is not None and total is not None and known.size != total:
                raise ObjectChangedError(f"{where}: changed while it was in use: it had {known.size} bytes, now it has {total}")
            size = "an unknown number of" if total is None else str(total)
            raise ShortReadError(f"{where}: bytes {start}..{stop} asked for, the object has {size} bytes")
        raise reply.refusal(where, self._hint(reply.status))
