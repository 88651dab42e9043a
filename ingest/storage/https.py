"""A dataset below a plain web address."""

from __future__ import annotations

import builtins
import contextlib
import re
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO
from urllib.parse import quote, unquote, urljoin, urlsplit

from ingest.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from ingest.storage.base import ByteRange, ObjectIdentity
from ingest.storage.bodies import check_whole
from ingest.storage.executor import fetch_ranges
from ingest.storage.host_heads import forget, learn
from ingest.storage.http import Reply, ask
from ingest.storage.http_objects import HttpObjects
from ingest.storage.known import Known, KnownObjects, clean_tag
from ingest.storage.locations import Location
from ingest.storage.paths import check_relative
from ingest.storage.reader import open_ranges
from ingest.storage.retry import RetryableError, RetryPolicy

_LINK = re.compile(r"""href\s*=\s*["']([^"'<>]+)["']""", re.IGNORECASE)
_HEADS_AT_ONCE = 8
_FEW = 4
"""Paths that are asked for anew whatever the host knows: so few requests do not grow with a dataset."""

_MAX_LISTED = 200_000
_MAX_DEPTH = 16
_MAX_NUMBERED = 100_000
_SURPRISING = 20
"""Numbered files after which a name that no dataset has is asked for."""


class HttpStore:
    """Reads with exact range requests; sends no credential.

    Listings come from the server's directory pages where it has them. A server without them is asked for LeRobot's numbered parquet
    files (``chunk-000/file-000.parquet`` and so on), one name after the other until one is missing.
    """

    def __init__(self, location: Location, *, policy: RetryPolicy | None = None, known: KnownObjects | None = None) -> None:
        """
        Args:
            location: of kind ``http``.
            policy: retries.
            known: versions seen before, by the store that this one continues.
        """
        self._location = location
        self._policy = policy or RetryPolicy()
        self._known = known or KnownObjects()
        self._objects = HttpObjects(
            home=self._address,
            where=lambda path: f"{location.url}/{path}",
            headers=dict,
            tag=_tag,
            known=self._known,
            policy=self._policy,
            hint=lambda _: "check the address; reelray sends no credential to plain web servers",
            redirects=False,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self._location, self._policy, self._known))

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._location.url

    def _address(self, path: str) -> str:
        return f"{self._location.url}/{quote(check_relative(path))}"

    def identity(self, path: str) -> ObjectIdentity:
        self._learn([path])
        return self._described(path)

    def identities(self, paths: Sequence[str]) -> builtins.list[ObjectIdentity]:
        """One identity per path, in the order asked, over several connections; those of many paths are asked for once on a host.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        if len(paths) > _FEW:
            self._learn(paths)
        else:
            self._heads([path for path in paths if self._known.get(check_relative(path)).tag is None])
        return [self._described(path) for path in paths]

    def _learn(self, paths: Sequence[str]) -> None:
        with self._noticing():
            learn(self._known, self.url, [check_relative(path) for path in paths], self._heads)

    def _described(self, path: str) -> ObjectIdentity:
        known = self._known.get(path)
        if known.tag is None:
            # Nothing tells two versions apart, so nothing derived from this one may be trusted at the next opening.
            return ObjectIdentity(path, known.size, uuid.uuid4().hex, stable=False)
        return ObjectIdentity(path, known.size, known.tag)

    def _heads(self, paths: Sequence[str]) -> builtins.list[Known]:
        with ThreadPoolExecutor(_HEADS_AT_ONCE, thread_name_prefix="reelray-head") as threads:
            return builtins.list(threads.map(self._objects.head, paths))

    @contextlib.contextmanager
    def _noticing(self) -> Generator[None]:
        try:
            yield
        except ObjectChangedError:
            forget(self._known, self.url)
            raise

    def size(self, path: str) -> int:
        check_relative(path)
        size = self._known.get(path).size
        if size is None:
            size = self.identity(path).size
        if size is None:
            raise StorageError(f"{self.url}/{path}: the server states no size, so its end cannot be found")
        return size

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        check_relative(path)
        with self._noticing():
            return fetch_ranges(ranges, lambda start, stop: self._objects.read(path, start, stop))

    def read_all(self, path: str) -> bytes:
        size = self._known.get(check_relative(path)).size
        if size is None:
            with self._noticing():
                return self._objects.read(path)
        check_whole(size, f"{self.url}/{path}")
        return self.read_ranges(path, [(0, size)])[0]

    def open(self, path: str) -> BinaryIO:
        return open_ranges(self, path)

    def list(self, prefix: str = "") -> builtins.list[ObjectIdentity]:
        if prefix:
            check_relative(prefix.rstrip("/"))
        top = prefix.rstrip("/")
        names = self._listed(top)
        if names is None:
            names = builtins.list(self._numbered(top))
        return self.identities(sorted(names))

    def _listed(self, top: str) -> builtins.list[str] | None:
        """Every file below ``top`` by the server's directory pages, or None where it has none."""
        base = f"{self._location.url}/"
        pending = [f"{base}{quote(top)}/" if top else base]
        found: builtins.list[str] = []
        seen = set(pending)
        while pending:
            page = pending.pop()
            reply = ask("GET", page, {}, self._policy, limit=64 * 1024 * 1024, check=_check_page)
            if reply.status != 200 or "html" not in reply.headers.get("content-type", ""):
                return None
            for link in _links(page, reply.body.decode("utf-8", "replace")):
                if link in seen or not link.startswith(page):
                    continue
                seen.add(link)
                if link.count("/") - base.count("/") > _MAX_DEPTH:
                    raise StorageError(f"{page}: directory pages nest deeper than {_MAX_DEPTH} levels; give the folder of a dataset")
                if link.endswith("/"):
                    pending.append(link)
                else:
                    found.append(check_relative(unquote(link[len(base) :])))
                if len(seen) > _MAX_LISTED:
                    raise StorageError(f"{page}: more than {_MAX_LISTED} names in the directory pages; give a smaller root")
        return found

    def _numbered(self, top: str) -> Iterator[str]:
        """LeRobot's numbered parquet files below ``top``, as far as they exist without a gap."""
        stem = f"{top}/" if top else ""
        count = 0
        for chunk in range(_MAX_NUMBERED):
            for number in range(_MAX_NUMBERED):
                path = f"{stem}chunk-{chunk:03d}/file-{number:03d}.parquet"
                try:
                    self._objects.head(path)
                except ObjectNotFoundError:
                    if number == 0:
                        return
                    break
                count += 1
                if count > _MAX_NUMBERED or (count == _SURPRISING and self._answers_anything(stem)):
                    raise StorageError(f"{self.url}/{top}: the server has a file of every name, so what there is cannot be found out")
                yield path

    def _answers_anything(self, stem: str) -> bool:
        try:
            self._objects.head(f"{stem}no-such-chunk/no-such-file.parquet")
        except ObjectNotFoundError:
            return False
        return True


def _check_page(reply: Reply) -> None:
    text = reply.body.lower()
    if b"<html" in text and b"</html>" not in text:
        # A page cut by a proxy with an honest length would silently hide files.
        raise RetryableError("the directory page ends before its end")


def _links(page: str, text: str) -> list[str]:
    links: list[str] = []
    for match in _LINK.finditer(text):
        raw = match[1]
        # What is no address cannot be a file of the folder.
        with contextlib.suppress(ValueError):
            parts = urlsplit(raw)
            if not parts.query and not parts.fragment:
                links.append(urljoin(page, raw))
    return links


def _tag(headers: Mapping[str, str]) -> str | None:
    return clean_tag(headers.get("etag")) or headers.get("last-modified")


def _rebuild(location: Location, policy: RetryPolicy, known: KnownObjects) -> HttpStore:
    return HttpStore(location, policy=policy, known=known)
