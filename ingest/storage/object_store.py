"""A dataset in S3, Google Cloud Storage or Azure, read through obstore (the extra ``reelray[s3]``)."""

from __future__ import annotations

import builtins
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, BinaryIO, TypeVar

import obstore
import obstore.store
from obstore import exceptions

from ingest import settings
from ingest.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from ingest.storage import aws
from ingest.storage.base import ByteRange, ObjectIdentity
from ingest.storage.bodies import check_whole, refuse_placeholder
from ingest.storage.executor import fetch_ranges
from ingest.storage.failures import log_failure
from ingest.storage.host_heads import forget, learn
from ingest.storage.known import Known, KnownObjects, clean_tag
from ingest.storage.locations import Location
from ingest.storage.paths import check_relative, common_folder
from ingest.storage.reader import open_ranges
from ingest.storage.retry import RETRYABLE_STATUS, RetryableError, RetryPolicy
from ingest.storage.secrets import redact
from ingest.storage.traffic import count_request

T = TypeVar("T")

_api: Any = obstore
# The overloads tell the clouds apart by types that exist only for type checkers.
_from_url: Callable[..., Any] = obstore.store.from_url

_FEW = 4
_STATUS = re.compile(r"status(?: code)?:? (\d{3})")
_PASSING = ("error sending request", "error decoding response body", "timed out", "timeout", "connection", "end of file")


class ObjectStore:
    """Exact ranges of objects, each request bound to the ETag first seen, so that a replaced object is refused by the server itself."""

    def __init__(self, location: Location, *, policy: RetryPolicy | None = None, known: KnownObjects | None = None) -> None:
        """
        Args:
            location: of kind ``object``.
            policy: retries.
            known: versions seen before, by the store that this one continues.
        """
        self._location = location
        self._policy = policy or RetryPolicy()
        self._known = known or KnownObjects()
        self._opened: tuple[int, Any] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self._location, self._policy, self._known))

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._location.url

    def identity(self, path: str) -> ObjectIdentity:
        known = self._entry(path)
        return ObjectIdentity(path, known.size, known.tag, stable=known.tag is not None)

    def identities(self, paths: Sequence[str]) -> builtins.list[ObjectIdentity]:
        """One identity per path, in the order asked; many paths cost one listing instead of a request each.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        if len(paths) > _FEW:
            self.list(common_folder(paths))
        for path in paths:
            if self._known.get(check_relative(path)).size is None:
                self._head(path)
        return [self.identity(path) for path in paths]

    def size(self, path: str) -> int:
        size = self._entry(path).size
        assert size is not None  # object stores always state sizes
        return size

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        known = self._entry(path)
        for start, stop in ranges:
            if known.size is not None and stop > known.size:
                raise ShortReadError(f"{self.url}/{path}: bytes {start}..{stop} asked for, the object has {known.size} bytes")
        return fetch_ranges(ranges, lambda start, stop: self._read(path, known, start, stop))

    def read_all(self, path: str) -> bytes:
        known = self._entry(path)
        assert known.size is not None  # object stores always state sizes
        check_whole(known.size, f"{self.url}/{path}")
        return self._read(path, known, 0, known.size) if known.size else b""

    def open(self, path: str) -> BinaryIO:
        return open_ranges(self, check_relative(path))

    def list(self, prefix: str = "") -> builtins.list[ObjectIdentity]:
        folder = check_relative(prefix.rstrip("/")) if prefix.strip("/") else ""

        def listing(store: Any) -> builtins.list[tuple[str, Known]]:
            found: builtins.list[tuple[str, Known]] = []
            for page in _api.list(store, folder or None, chunk_size=1000):
                found.extend((str(meta["path"]), Known(int(meta["size"]), clean_tag(meta["e_tag"]))) for meta in page)
            return found

        found = self._call(folder or ".", "list", listing)
        self._known.see_all(found, self.url)
        return [self.identity(path) for path, _ in sorted(found)]

    def _entry(self, path: str) -> Known:
        known = self._known.get(check_relative(path))
        if known.size is None:
            learn(self._known, self.url, [path], lambda paths: [self._head(one) for one in paths])
        return self._known.get(path)

    def _head(self, path: str) -> Known:
        meta = self._call(path, "head", lambda store: _api.head(store, path))
        return self._known.see(path, Known(int(meta["size"]), clean_tag(meta["e_tag"])), f"{self.url}/{path}")

    def _read(self, path: str, known: Known, start: int, stop: int) -> bytes:
        where = f"{self.url}/{path}"

        def get(store: Any) -> bytes:
            result = _api.get(store, path, options={"range": (start, stop), "if_match": None if known.tag is None else f'"{known.tag}"'})
            self._known.see(path, Known(int(result.meta["size"]), clean_tag(result.meta["e_tag"])), where)
            data = bytes(result.bytes())
            if len(data) != stop - start:
                raise RetryableError(f"bytes {start}..{stop} asked for, {len(data)} bytes arrived", final=ShortReadError)
            return data

        try:
            data = self._call(path, "get", get)
        except exceptions.PreconditionError:
            forget(self._known, self.url)
            found = self._call(path, "head", lambda store: _api.head(store, path))
            now = Known(int(found["size"]), clean_tag(found["e_tag"]))
            raise ObjectChangedError(f"{where}: changed while it was in use: it was {known}, now it is {now}; start again") from None
        if start == 0:
            refuse_placeholder(data[:256], where, whole=stop == known.size)
        return data

    def _store(self) -> Any:
        with self._lock:
            # The client's threads and sockets must not cross a fork.
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), _open(self._location))
            return self._opened[1]

    def _call(self, path: str, verb: str, action: Callable[[Any], T]) -> T:
        where = f"{self.url}/{path}"

        def once(attempt: int) -> T:
            started = time.monotonic()
            received = 0
            try:
                result = action(self._store())
                received = len(result) if isinstance(result, bytes) else 0
                return result
            except RetryableError as error:
                log_failure(verb, where, attempt=attempt, error=error.reason)
                raise
            except exceptions.PreconditionError:
                raise
            except (exceptions.BaseError, OSError) as error:
                if isinstance(error, StorageError):
                    raise
                raised = _translate(error, where)
                if isinstance(raised, RetryableError):
                    log_failure(verb, where, attempt=attempt, error=raised.reason)
                raise raised from None
            finally:
                count_request(received, time.monotonic() - started)

        return self._policy.call(where, once)


def _open(location: Location) -> Any:
    scheme, _, rest = location.url.partition("://")
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=15),
            "read_timeout": timedelta(seconds=60),
            "timeout": timedelta(seconds=600),
        },
        # Retries are this package's own: with one deadline, jitter and a log.
        "retry_config": {"max_retries": 0},
    }
    if scheme in {"s3", "s3a"}:
        config: dict[str, Any] = {}
        address, region, keys = aws.endpoint(), aws.region(), aws.shared_credentials()
        if address is not None:
            config["endpoint"] = address
            options["client_options"]["allow_http"] = address.startswith("http://")
        if region is not None:
            config["region"] = region
        if keys is not None:
            options["credential_provider"] = lambda: {**keys, "expires_at": None}
        return _from_url(f"s3://{rest}", config=config, **options)
    if scheme in {"gs", "gcs"}:
        emulator = settings.google_emulator()
        if emulator is None:
            return _from_url(f"gs://{rest}", **options)
        options["client_options"]["allow_http"] = True
        return _from_url(f"gs://{rest}", config={"base_url": emulator, "skip_signature": True}, **options)
    return _from_url(location.url, **options)


def _translate(error: Exception, where: str) -> StorageError | RetryableError:
    # The library's text goes on with a dump of its internals; the first paragraph says what happened.
    text = redact(str(error).partition("\n")[0])
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{where}: there is no such object")
    status = _STATUS.search(str(error))
    code = int(status[1]) if status else None
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or code in {401, 403}:
        return AccessDeniedError(f"{where}: {text}; {_advice(where)}")
    if "must be specified" in text:
        return AccessDeniedError(f"{where}: {text}; {_advice(where)}")
    if code in RETRYABLE_STATUS or (code is None and any(word in str(error).lower() for word in _PASSING)):
        return RetryableError(text)
    return StorageError(f"{where}: {text}")


def _advice(where: str) -> str:
    """Where the credentials of a cloud are looked for."""
    scheme = where.partition("://")[0]
    if scheme in {"s3", "s3a"}:
        names, public = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL", "AWS_SKIP_SIGNATURE"
    elif scheme in {"gs", "gcs"}:
        names, public = "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE"
    else:
        names, public = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_SKIP_SIGNATURE"
    return f"check in this process' environment: {names}; {public}=true reads what is public without any"


def _rebuild(location: Location, policy: RetryPolicy, known: KnownObjects) -> ObjectStore:
    return ObjectStore(location, policy=policy, known=known)
