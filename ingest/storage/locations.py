"""Where a dataset lives, parsed from what people write. No network and no credentials are involved.

Accepted spellings: a local directory, ``OWNER/NAME`` (a dataset on the Hub), ``hf://datasets/OWNER/NAME[@REVISION][/PATH]``,
``hf://buckets/OWNER/BUCKET[/PATH]``, ``s3://``, ``gs://``, ``az://``, ``https://``, ``memory://`` and a few more fsspec schemes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, quote, unquote, urlsplit

from ingest.errors import LocationError, UnsafeInputError
from ingest.storage.hosts import is_metadata_service
from ingest.storage.paths import check_relative
from ingest.storage.secrets import redact

Kind = Literal["local", "hub", "bucket", "http", "object", "memory", "fsspec"]

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl"})
"""Object stores: read through obstore where it is installed, else through their fsspec implementation."""

FSSPEC_SCHEMES = frozenset({"sftp", "ssh", "ftp", "hdfs", "webhdfs", "oss", "oci", "lakefs"})
"""Further fsspec schemes that are read as they are; their packages are the user's to install."""

_HTTP_SCHEMES = frozenset({"http", "https"})
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_PAIR = re.compile(rf"{_PART}/{_PART}")
_SINGLE = re.compile(_PART)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SLASHED_REVISION = re.compile(r"refs/(?:convert|pr)/[^/]+")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]*")


@dataclass(frozen=True, slots=True)
class Location:
    """One dataset root.

    Attributes:
        kind: which store reads it.
        url: the canonical spelling: no trailing slash, no credential, the revision included.
        repo_id: ``OWNER/NAME`` of a Hub dataset or bucket; what the caller named a local root; else None.
        revision: branch, tag or commit as asked for; None where nothing was asked or nothing can be.
        path: prefix inside the repository, bucket, host or container; empty at its root.
        bare: whether a Hub dataset was spelled as OWNER/NAME alone, as a relative path might be.
    """

    kind: Kind
    url: str
    repo_id: str | None = None
    revision: str | None = None
    path: str = ""
    bare: bool = field(default=False, compare=False)

    @property
    def is_local(self) -> bool:
        """Whether the files are in a local directory."""
        return self.kind == "local"

    @property
    def pinned(self) -> bool:
        """Whether the location itself fixes the content: a Hub dataset at a full commit."""
        return self.kind == "hub" and self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def scheme(self) -> str:
        """URL scheme; ``file`` for a local directory."""
        return "file" if self.kind == "local" else self.url.partition("://")[0]

    def at(self, commit: str) -> Location:
        """The same Hub dataset at ``commit`` (40 hex digits).

        Raises:
            LocationError: this is no Hub dataset, or ``commit`` is not a full commit.
        """
        if self.kind != "hub" or self.repo_id is None or _COMMIT.fullmatch(commit) is None:
            raise LocationError(f"{self.url} cannot be pinned to {commit!r}: only Hub datasets have commits of 40 hex digits")
        return replace(self, revision=commit, url=_hub_url(self.repo_id, commit, self.path))


def is_commit(revision: str | None) -> bool:
    """Whether ``revision`` is a full commit hash rather than a name that may move."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def parse_location(
    text: str | os.PathLike[str],
    *,
    repo_type: str | None = None,
    root: str | os.PathLike[str] | None = None,
    revision: str | None = None,
) -> Location:
    """Parses a dataset location.

    Args:
        text: a spelling from the module's list, or the dataset's name when ``root`` says where its files are.
        repo_type: ``dataset`` or ``bucket``; None takes it from the spelling.
        root: a local directory that holds the dataset, or ``hf://buckets/OWNER/BUCKET`` naming the same bucket as ``text``.
        revision: branch, tag or commit of a Hub dataset.

    Raises:
        LocationError: the text is no location, contradicts the other arguments, or carries a credential.
    """
    if repo_type not in {None, "dataset", "bucket"}:
        raise LocationError(f"repo_type is {repo_type!r}, expected 'dataset' or 'bucket'")
    spelled = _clean(text)
    wanted = _clean_revision(revision)
    if root is not None and str(root):
        return _with_root(spelled, _clean(root), repo_type, wanted)
    location = _parse(spelled, repo_type, from_path=isinstance(text, os.PathLike))
    if repo_type == "bucket" and location.kind != "bucket":
        raise LocationError(f"repo_type is 'bucket', but {location.url} is not a bucket: write OWNER/BUCKET or hf://buckets/OWNER/BUCKET")
    if repo_type == "dataset" and location.kind == "bucket":
        raise LocationError(f"repo_type is 'dataset', but {location.url} is a bucket: use repo_type 'bucket'")
    return _with_revision(location, wanted)


def _clean(text: str | os.PathLike[str]) -> str:
    spelled = os.fspath(text)
    if "://" in spelled:
        spelled = spelled.strip()
    if not spelled.strip():
        raise LocationError("the location is empty: give a directory, OWNER/NAME or a URL")
    if any(ord(character) < 32 or ord(character) == 127 for character in spelled):
        raise LocationError(f"location {redact(spelled)!r} holds a control character")
    if any(0xD800 <= ord(character) < 0xE000 for character in spelled):
        # How Python spells the bytes of a path that are no UTF-8; sidecars, cursors and reports could not name it.
        raise LocationError(f"location {redact(spelled)!r} is no UTF-8: give the directory another name")
    if "::" in spelled:
        raise LocationError(f"location {redact(spelled)!r} chains file systems with '::', which is not allowed: give the data's own URL")
    return spelled


def _clean_revision(revision: str | None) -> str | None:
    if revision is None or not revision.strip():
        return None
    name = revision.strip()
    if _REVISION.fullmatch(name) is None or ".." in name or name.endswith("/"):
        raise LocationError(f"revision {redact(name)!r} is not the name of a branch or tag, nor a commit")
    return name


def _with_root(spelled: str, root: str, repo_type: str | None, revision: str | None) -> Location:
    if "://" not in root or root.startswith("file://"):
        if repo_type == "bucket" or spelled.startswith("hf://buckets/"):
            raise LocationError(
                f"root {root!r} is a local directory, but the dataset is a bucket: leave root out or use repo_type 'dataset'"
            )
        local = _parse(root, None, from_path=True)
        name = spelled.removeprefix("hf://datasets/").partition("@")[0]
        return replace(local, repo_id=name if _PAIR.fullmatch(name) else None, revision=revision)
    if not root.startswith("hf://buckets/"):
        raise LocationError(
            f"root {redact(root)!r} is neither a local directory nor hf://buckets/OWNER/BUCKET: give its URL as the dataset"
        )
    if repo_type == "dataset":
        raise LocationError(f"root {root!r} is a bucket, but repo_type is 'dataset'")
    bucket = _parse(root, "bucket", from_path=False)
    if bucket.path:
        raise LocationError(f"root {root!r} names a folder inside the bucket: give hf://buckets/{bucket.repo_id} alone")
    named = _parse(spelled, "bucket", from_path=False)
    if named.kind != "bucket" or named.repo_id != bucket.repo_id or named.path:
        raise LocationError(f"root {root!r} and dataset {redact(spelled)!r} name different buckets: they must be equal")
    return _with_revision(bucket, revision)


def _with_revision(location: Location, revision: str | None) -> Location:
    if revision is None:
        return location
    if location.kind == "local":
        return replace(location, revision=revision)
    if location.kind == "bucket":
        raise LocationError(f"{location.url} is a bucket: buckets have no revisions, so revision {revision!r} has no meaning")
    if location.kind != "hub" or location.repo_id is None:
        raise LocationError(f"{location.url} has no revisions, so revision {revision!r} has no meaning; only Hub datasets do")
    if location.revision is not None and location.revision != revision:
        raise LocationError(f"{location.url} names revision {location.revision!r}, but revision is {revision!r}: give one of them")
    return replace(location, revision=revision, url=_hub_url(location.repo_id, revision, location.path))


def _parse(spelled: str, repo_type: str | None, *, from_path: bool) -> Location:
    if "://" not in spelled:
        return _parse_bare(spelled, repo_type, from_path=from_path)
    scheme, _, rest = spelled.partition("://")
    scheme = scheme.lower()
    if scheme == "hf":
        return _parse_hub(spelled, rest)
    if scheme == "file":
        return _parse_file(spelled, rest)
    if scheme == "memory":
        return Location("memory", f"memory://{_path(spelled, rest)}", path=_path(spelled, rest))
    if scheme in _HTTP_SCHEMES:
        return _parse_http(spelled, scheme)
    if scheme in OBJECT_SCHEMES or scheme in FSSPEC_SCHEMES:
        return _parse_container(spelled, scheme)
    allowed = sorted({"hf", "file", "memory"} | _HTTP_SCHEMES | OBJECT_SCHEMES | FSSPEC_SCHEMES)
    raise LocationError(f"location {redact(spelled)!r}: scheme {scheme!r} is not one of {allowed}")


def _parse_bare(spelled: str, repo_type: str | None, *, from_path: bool) -> Location:
    looks_like_id = _PAIR.fullmatch(spelled) is not None
    if repo_type == "bucket" and not from_path:
        if not looks_like_id:
            raise LocationError(f"{spelled!r} is not a bucket: write OWNER/BUCKET or hf://buckets/OWNER/BUCKET")
        return _bucket(spelled, "")
    # A directory that is there wins over a dataset of the same spelling: the user sees the directory.
    if looks_like_id and not from_path and not Path(spelled).is_dir():
        return Location("hub", _hub_url(spelled, None, ""), repo_id=spelled, bare=True)
    # A single slash is the root directory; otherwise trailing slashes mean nothing.
    return Location("local", spelled.rstrip("/") or "/")


def _parse_file(spelled: str, rest: str) -> Location:
    host, slash, path = rest.partition("/")
    if host not in {"", "localhost"} or not slash:
        raise LocationError(f"location {redact(spelled)!r}: expected file:///absolute/path")
    return Location("local", "/" + unquote(path).rstrip("/"))


def _parse_hub(spelled: str, rest: str) -> Location:
    group, _, tail = rest.partition("/")
    if group == "buckets":
        parts = tail.rstrip("/").split("/", 2)
        if len(parts) < 2 or _PAIR.fullmatch("/".join(parts[:2])) is None:
            raise LocationError(f"location {redact(spelled)!r}: expected hf://buckets/OWNER/BUCKET[/PATH]")
        return _bucket("/".join(parts[:2]), _path(spelled, parts[2]) if len(parts) == 3 else "")
    if group == "datasets":
        return _parse_hub_dataset(spelled, tail.rstrip("/"))
    hint = "a model repository" if group not in {"spaces", "models", "kernels"} else f"one of the Hub's {group}"
    raise LocationError(
        f"location {redact(spelled)!r} is {hint}, not a dataset: write hf://datasets/OWNER/NAME or hf://buckets/OWNER/BUCKET"
    )


def _parse_hub_dataset(spelled: str, tail: str) -> Location:
    head, at, after = tail.partition("@")
    revision: str | None = None
    if at:
        slashed = _SLASHED_REVISION.match(after)
        name, _, path = (slashed[0], "", after[slashed.end() :].lstrip("/")) if slashed else after.partition("/")
        revision = _clean_revision(unquote(name))
        if revision is None:
            raise LocationError(f"location {redact(spelled)!r}: '@' is not followed by a revision")
        repo_id = head
    else:
        parts = head.split("/", 2)
        repo_id, path = "/".join(parts[:2]), parts[2] if len(parts) == 3 else ""
    if _PAIR.fullmatch(repo_id) is None and (_SINGLE.fullmatch(repo_id) is None or path):
        raise LocationError(f"location {redact(spelled)!r}: expected hf://datasets/OWNER/NAME[@REVISION][/PATH]")
    prefix = _path(spelled, path) if path else ""
    return Location("hub", _hub_url(repo_id, revision, prefix), repo_id=repo_id, revision=revision, path=prefix)


def _parse_http(spelled: str, scheme: str) -> Location:
    parts = _split(spelled)
    if parts.query or parts.fragment:
        raise LocationError(
            f"location {redact(spelled)!r} has a query or fragment: a root is a plain prefix, and signed queries are credentials "
            "that would be written into plans and logs"
        )
    host = (parts.hostname or "").rstrip(".").lower()
    if is_metadata_service(host):
        raise LocationError(f"location {redact(spelled)!r} points at a link-local metadata service, which is not allowed")
    path = _path(spelled, unquote(parts.path))
    authority = parts.netloc.lower()
    return Location("http", f"{scheme}://{authority}" + (f"/{quote(path)}" if path else ""), path=path)


def _parse_container(spelled: str, scheme: str) -> Location:
    if "?" in spelled or "#" in spelled:
        raise LocationError(f"location {redact(spelled)!r}: '?' and '#' are not allowed in a root, options come from the environment")
    parts = _split(spelled, container_user=scheme in {"abfs", "abfss"})
    path = _path(spelled, parts.path)
    kind: Kind = "object" if scheme in OBJECT_SCHEMES else "fsspec"
    return Location(kind, f"{scheme}://{parts.netloc}" + (f"/{path}" if path else ""), path=path)


def _split(spelled: str, *, container_user: bool = False) -> SplitResult:
    try:
        parts = urlsplit(spelled)
        _ = parts.port
    except ValueError as error:
        raise LocationError(f"location {redact(spelled)!r} is not a URL: {redact(str(error))}") from None
    if not parts.hostname:
        raise LocationError(f"location {redact(spelled)!r} names no host or bucket")
    if "@" in parts.netloc and not (container_user and ":" not in parts.netloc.partition("@")[0]):
        raise LocationError(
            f"location {redact(spelled)!r} carries a user name or password: credentials come from the environment or the login file, "
            "never from the location"
        )
    return parts


def _path(spelled: str, path: str) -> str:
    trimmed = path.strip("/")
    if not trimmed:
        return ""
    try:
        return check_relative(trimmed)
    except UnsafeInputError as error:
        raise LocationError(f"location {redact(spelled)!r}: {error}") from None


def _bucket(repo_id: str, path: str) -> Location:
    return Location("bucket", f"hf://buckets/{repo_id}" + (f"/{path}" if path else ""), repo_id=repo_id, path=path)


def _hub_url(repo_id: str, revision: str | None, path: str) -> str:
    name = "" if revision is None else "@" + (revision if _SLASHED_REVISION.fullmatch(revision) else quote(revision, safe=""))
    return f"hf://datasets/{repo_id}{name}" + (f"/{path}" if path else "")
