"""What a sidecar says about its source, when two such descriptions agree, and where files are kept."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from ingest.errors import SidecarError, UnsafeInputError
from ingest.storage.base import ObjectIdentity, Store
from ingest.storage.paths import check_relative

SCHEMA_VERSION = 3
PUBLISHED_FOLDER = "meta/mp4-sidecars"
PUBLISHED_BRANCH = "lerobot-sidecars"
_PINNED = re.compile(r"hf://datasets/(?:[^/@]+/)?[^/@]+@(?P<commit>[0-9a-f]{40})(?:/.*)?")


@runtime_checkable
class BulkIdentities(Protocol):
    """A store that can describe many objects at once, cheaper than one by one."""

    def identities(self, paths: Sequence[str]) -> list[ObjectIdentity]:
        """One identity per path, in the order asked.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...


@dataclass(frozen=True, slots=True)
class SidecarSpec:
    """Source of a sidecar: which dataset, and which version of each video file.

    Attributes:
        repo_id: dataset name.
        revision: branch, tag, commit or codebase version.
        data_root: location of the payload, as given.
        sizes: bytes by path; None where the root itself pins the content.
        fingerprints: by path; empty where the root itself pins the content.
        stable: False when the source offers no identity, so that every open builds anew.
    """

    repo_id: str
    revision: str
    data_root: str
    sizes: Mapping[str, int | None]
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str])
    stable: bool = True

    @property
    def paths(self) -> list[str]:
        """Paths of the source files, sorted."""
        return sorted(self.sizes)

    @property
    def pinned_commit(self) -> str | None:
        """The commit when the root is a Hub dataset pinned to one."""
        return pinned_commit(self.data_root)

    def digest(self) -> str:
        """First 16 hex digits that tell caches of different sources apart."""
        identity: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "repo_id": self.repo_id,
            "revision": self.revision,
            "data_root": self.data_root,
        }
        if self.fingerprints and self.stable:
            identity["source_fingerprints"] = dict(self.fingerprints)
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def file_name(self) -> str:
        """Name of the sidecar file, in the cache and where it is published."""
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.revision).strip("-")[:32] or "revision"
        return f"mp4-v{SCHEMA_VERSION}-{slug}-{self.digest()}.npz"

    def cache_path(self, cache_home: Path) -> Path:
        """Where the sidecar of this source is cached below LeRobot's cache folder."""
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "--", self.repo_id).strip("-") or "dataset"
        return cache_home / "streaming-sidecars" / slug / self.file_name()

    def published(self) -> SidecarSpec:
        """The description under which the sidecar is published: a pinned root is named by its commit, never by an alias."""
        commit = self.pinned_commit
        return replace(self, revision=commit) if commit else self


def pinned_commit(data_root: str) -> str | None:
    """The commit of a Hub dataset root that names one, else None."""
    match = _PINNED.fullmatch(data_root)
    return match["commit"] if match else None


def describe_source(store: Store, paths: Sequence[str], *, repo_id: str, revision: str, data_root: str | None = None) -> SidecarSpec:
    """Describes the present state of the video files below a store.

    Args:
        store: rooted at the dataset's payload.
        paths: every video file of the dataset.
        repo_id: dataset name.
        revision: branch, tag, commit or codebase version.
        data_root: as the user gave it; the store's own location by default.

    Raises:
        ObjectNotFoundError: a video file is missing.
    """
    wanted = sorted(set(paths))
    found = store.identities(wanted) if isinstance(store, BulkIdentities) else [store.identity(path) for path in wanted]
    stable = all(identity.stable for identity in found)
    fingerprints = {identity.path: identity.fingerprint for identity in found if identity.fingerprint is not None}
    if not stable or (fingerprints and len(fingerprints) < len(found)):
        stable = False
        fingerprints = {identity.path: identity.fingerprint or uuid.uuid4().hex for identity in found}
        # One value that never repeats is enough to make any kept index differ.
        fingerprints[wanted[0]] = uuid.uuid4().hex
    return SidecarSpec(repo_id, revision, data_root or store.url, {i.path: i.size for i in found}, fingerprints, stable)


def mismatch(expected: SidecarSpec, candidate: SidecarSpec) -> str | None:
    """Why ``candidate`` does not describe the source that is expected, or None when it does."""
    for name in ("repo_id", "data_root"):
        if getattr(expected, name) != getattr(candidate, name):
            return f"{name} is {getattr(candidate, name)!r}, expected {getattr(expected, name)!r}"
    if expected.revision != candidate.revision and expected.pinned_commit is None:
        return f"revision is {candidate.revision!r}, expected {expected.revision!r}"
    if expected.sizes.keys() != candidate.sizes.keys():
        extra, missing = sorted(candidate.sizes.keys() - expected.sizes.keys()), sorted(expected.sizes.keys() - candidate.sizes.keys())
        return f"{len(missing)} source files are not indexed ({missing[:2]}), {len(extra)} indexed ones are not in the source ({extra[:2]})"
    for path, size in expected.sizes.items():
        if size is not None and size != candidate.sizes[path]:
            return f"{path} had {candidate.sizes[path]} bytes, it has {size} now"
    if dict(expected.fingerprints) != dict(candidate.fingerprints):
        changed = [p for p in expected.sizes if expected.fingerprints.get(p) != candidate.fingerprints.get(p)]
        return f"{changed[0]} has another fingerprint than when it was indexed ({len(changed)} files differ)"
    return None


def spec_to_json(spec: SidecarSpec) -> dict[str, Any]:
    """The ``sidecar`` object of the manifest; sizes must be known."""
    return {
        "schema_version": SCHEMA_VERSION,
        "repo_id": spec.repo_id,
        "revision": spec.revision,
        "data_root": spec.data_root,
        "source_files": [{"path": path, "size": spec.sizes[path]} for path in spec.paths],
        "source_fingerprints": {path: spec.fingerprints[path] for path in sorted(spec.fingerprints)},
    }


def spec_from_json(value: object, where: str) -> SidecarSpec:
    """Reads and checks the ``sidecar`` object of a manifest.

    Raises:
        SidecarError: another schema, a missing field, or one of the wrong kind.
    """
    fields = as_object(value, f"{where}: sidecar")
    version = fields.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SidecarError(f"{where}: schema {version!r}, expected {SCHEMA_VERSION}; older sidecars are ignored and rebuilt")
    texts = [as_text(fields.get(name), f"{where}: {name}") for name in ("repo_id", "revision", "data_root")]
    sizes: dict[str, int | None] = {}
    for row in as_list(fields.get("source_files"), f"{where}: source_files"):
        entry = as_object(row, f"{where}: source_files")
        path = checked_path(entry.get("path"), where)
        if path in sizes:
            raise SidecarError(f"{where}: {path} is listed twice")
        sizes[path] = None if entry.get("size") is None else as_count(entry.get("size"), f"{where}: size of {path}")
    fingerprints = {
        path: as_text(text, f"{where}: fingerprint of {path}")
        for path, text in as_object(fields.get("source_fingerprints", {}), f"{where}: source_fingerprints").items()
    }
    if fingerprints and (fingerprints.keys() != sizes.keys() or not all(fingerprints.values())):
        raise SidecarError(f"{where}: source_fingerprints cover {len(fingerprints)} of {len(sizes)} files, or one is empty")
    return SidecarSpec(texts[0], texts[1], texts[2], sizes, fingerprints)


def checked_path(value: object, where: str) -> str:
    """A source path from a manifest.

    Raises:
        SidecarError: it is no plain path below the dataset.
    """
    path = as_text(value, f"{where}: path")
    try:
        return check_relative(path)
    except UnsafeInputError as error:
        raise SidecarError(f"{where}: {error}") from error


def as_object(value: object, what: str) -> dict[str, Any]:
    """``value`` as a JSON object, or SidecarError."""
    if not isinstance(value, dict):
        raise SidecarError(f"{what} is {type(value).__name__}, expected an object")
    return cast("dict[str, Any]", value)


def as_list(value: object, what: str) -> list[Any]:
    """``value`` as a JSON array, or SidecarError."""
    if not isinstance(value, list):
        raise SidecarError(f"{what} is {type(value).__name__}, expected a list")
    return cast("list[Any]", value)


def as_text(value: object, what: str) -> str:
    """``value`` as text, or SidecarError."""
    if not isinstance(value, str):
        raise SidecarError(f"{what} is {type(value).__name__}, expected text")
    return value


def as_count(value: object, what: str, *, signed: bool = False) -> int:
    """``value`` as a whole number that fits 63 bits, or SidecarError."""
    if not isinstance(value, int) or isinstance(value, bool) or not (-(1 << 62) if signed else 0) <= value < 1 << 62:
        raise SidecarError(f"{what} is {value!r}, expected a whole number")
    return value
