"""The few calls of the Hub's HTTP interface that streaming needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote, urljoin, urlsplit

from ingest import settings
from ingest.errors import ObjectNotFoundError, StorageError
from ingest.storage.hosts import check_redirect
from ingest.storage.http import Reply, ask, origin
from ingest.storage.locations import is_commit
from ingest.storage.retry import RetryableError, RetryPolicy
from ingest.storage.secrets import redact

CODEBASE_TAG = "v3.0"
"""Tag that LeRobot puts on the commit of a dataset in this format; read when no revision is given."""

_NEXT_LINK = re.compile(r'<([^>]+)>\s*;[^,]*\brel="?next"?')
_MAX_PAGES = 10_000


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One file of a listing.

    Attributes:
        path: from the repository's or bucket's root.
        size: bytes of the content, not of its pointer.
        content: Xet hash of the content, or None.
    """

    path: str
    size: int
    content: str | None


def auth_headers() -> dict[str, str]:
    """Authorization for the Hub's own origin, read from the environment or login file at this very moment."""
    token = settings.hub_token()
    return {"authorization": f"Bearer {token}"} if token else {}


def refuse_offline(what: str) -> None:
    """Raises when the Hub may not be asked.

    Raises:
        StorageError: ``HF_HUB_OFFLINE`` is set.
    """
    if settings.hub_offline():
        raise StorageError(
            f"{what} is not in the local caches and HF_HUB_OFFLINE forbids asking the Hub: unset it, or fill the cache first"
        )


def refusal_hint(kind: str, repo_id: str) -> Callable[[int], str]:
    """What a person can do about a refusal, by status. ``kind`` is ``datasets`` or ``buckets``."""

    def hint(status: int) -> str:
        page = f"{settings.hub_endpoint()}/{kind}/{repo_id}"
        if status == 401:
            return f"set HF_TOKEN or run 'hf auth login' with an account that may read {page} (a private and a missing one look the same)"
        if status == 403:
            return f"the present token may not do this: ask for access at {page}, or use a token with the right permission"
        if status in {404, 410}:
            return f"check the name and revision at {page}; a private one also needs HF_TOKEN or 'hf auth login'"
        return ""

    return hint


def dataset_address(repo_id: str, commit: str, path: str) -> str:
    """Home address of a dataset's file at a commit."""
    return f"{settings.hub_endpoint()}/datasets/{repo_id}/resolve/{quote(commit, safe='')}/{quote(path)}"


def bucket_address(repo_id: str, path: str) -> str:
    """Home address of a bucket's file."""
    return f"{settings.hub_endpoint()}/buckets/{repo_id}/resolve/{quote(path, safe='')}"


def resolve_commit(repo_id: str, revision: str | None, policy: RetryPolicy) -> tuple[str, str]:
    """The commit that a revision points at now.

    Args:
        repo_id: ``OWNER/NAME``.
        revision: branch, tag or commit; None for LeRobot's version tag, or ``main`` where there is none.
        policy: retries.

    Returns:
        The revision's name and its commit of 40 hex digits.

    Raises:
        ObjectNotFoundError, AccessDeniedError: no such dataset or revision, or no access.
        StorageError: anything else that kept the Hub from answering.
    """
    if revision is None:
        try:
            return resolve_commit(repo_id, CODEBASE_TAG, policy)
        except ObjectNotFoundError:
            return resolve_commit(repo_id, "main", policy)
    if is_commit(revision):
        return revision, revision
    what = f"hf://datasets/{repo_id}@{revision}"
    refuse_offline(what)
    reply = _get(f"{settings.hub_endpoint()}/api/datasets/{repo_id}/revision/{quote(revision, safe='')}", policy)
    if reply.status != 200:
        raise reply.refusal(what, refusal_hint("datasets", repo_id)(reply.status))
    sha = _mapping(json.loads(reply.body), what).get("sha")
    if not isinstance(sha, str) or not is_commit(sha):
        raise StorageError(f"{what}: the Hub answered no commit of 40 hex digits, found {sha!r}")
    return revision, sha


def dataset_tree(repo_id: str, commit: str, folder: str, *, recursive: bool, policy: RetryPolicy) -> list[TreeEntry]:
    """Files below ``folder`` of a dataset at a commit; empty when there is no such folder."""
    what = f"hf://datasets/{repo_id}@{commit}/{folder}".rstrip("/")
    url = f"{settings.hub_endpoint()}/api/datasets/{repo_id}/tree/{commit}" + (f"/{quote(folder)}" if folder else "")
    return _tree(f"{url}?recursive={str(recursive).lower()}&expand=false", what, refusal_hint("datasets", repo_id), policy)


def bucket_tree(repo_id: str, prefix: str, *, policy: RetryPolicy) -> list[TreeEntry]:
    """Files of a bucket below the folder ``prefix``, recursively; empty when there is none."""
    what = f"hf://buckets/{repo_id}/{prefix}".rstrip("/")
    url = f"{settings.hub_endpoint()}/api/buckets/{repo_id}/tree" + (f"/{quote(prefix, safe='')}" if prefix else "")
    entries = _tree(f"{url}?recursive=true", what, refusal_hint("buckets", repo_id), policy)
    # The Hub matches the prefix as text: meta also finds metadata/.
    return [entry for entry in entries if not prefix or entry.path == prefix or entry.path.startswith(f"{prefix}/")]


def _tree(url: str, what: str, hint: Callable[[int], str], policy: RetryPolicy) -> list[TreeEntry]:
    refuse_offline(f"the listing of {what}")
    found: list[TreeEntry] = []
    seen: set[str] = set()
    while url not in seen:
        if len(seen) == _MAX_PAGES:
            raise StorageError(f"listing {what}: more than {_MAX_PAGES} pages")
        seen.add(url)
        reply = _get(url, policy)
        if reply.status == 404 and reply.headers.get("x-error-code", "EntryNotFound") == "EntryNotFound":
            return found
        if reply.status != 200:
            raise reply.refusal(f"listing {what}", hint(reply.status))
        items = json.loads(reply.body)
        if not isinstance(items, list):
            raise StorageError(f"listing {what}: the Hub answered {type(items).__name__}, expected a list")
        found.extend(entry for item in cast("list[object]", items) if (entry := _entry(item, what)) is not None)
        link = _NEXT_LINK.search(reply.headers.get("link", ""))
        if link is None:
            return found
        url = _next_page(url, link[1], what)
    raise StorageError(f"listing {what}: page {len(seen)} leads back to an earlier one")


def _next_page(url: str, link: str, what: str) -> str:
    # A mirror may name the original Hub in its links; the next page is asked of the endpoint in use, which holds the credential.
    home = settings.hub_endpoint()
    try:
        target = urljoin(url, link)
        if origin(target) == origin(home):
            return target
        parts = urlsplit(target)
        if parts.scheme not in {"http", "https"}:
            raise ValueError(f"scheme {parts.scheme!r}")
    except ValueError as error:
        raise StorageError(f"listing {what}: the next page is at {redact(link[:200])!r}, which is no address ({error})") from None
    return home + parts.path + (f"?{parts.query}" if parts.query else "")


def _entry(item: object, what: str) -> TreeEntry | None:
    fields = _mapping(item, what)
    if fields.get("type") != "file":
        return None
    pointer = fields.get("lfs")
    size = cast("Mapping[str, object]", pointer).get("size", fields.get("size")) if isinstance(pointer, dict) else fields.get("size")
    path = fields.get("path")
    if not isinstance(path, str) or not isinstance(size, int) or size < 0:
        raise StorageError(f"listing {what}: an entry has no usable path and size, found {path!r} and {size!r}")
    content = fields.get("xetHash")
    return TreeEntry(path, size, content if isinstance(content, str) and content else None)


def _get(url: str, policy: RetryPolicy, hops: int = 5) -> Reply:
    # A renamed repository redirects within the Hub; the credential goes to the Hub's origin only.
    headers = auth_headers() if origin(url) == origin(settings.hub_endpoint()) else {}
    reply = ask("GET", url, headers, policy, check=_check_json)
    if hops and reply.status in {301, 302, 307, 308}:
        return _get(check_redirect(url, reply.headers.get("location", "")), policy, hops - 1)
    return reply


def _check_json(reply: Reply) -> None:
    try:
        json.loads(reply.body)
    except ValueError:
        # A body cut by a proxy with an honest length looks like this, and passes; a wrong endpoint does not.
        raise RetryableError("the Hub's answer is not JSON; is HF_ENDPOINT right?", final=StorageError) from None
    except RecursionError:
        raise StorageError(
            f"{redact(reply.url)}: the Hub's answer nests deeper than any of its answers do; is HF_ENDPOINT right?"
        ) from None


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise StorageError(f"{what}: the Hub answered {type(value).__name__}, expected an object")
    return cast("Mapping[str, object]", value)
