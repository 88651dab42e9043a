"""A durable copy behind any fsspec URL: list, upload, download, never delete."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from ingest.errors import LocationError, ObjectNotFoundError, SettingsError, StorageError
from ingest.prefeature.durable import FileDigest, write_atomic
from ingest.storage import aws
from ingest.storage.paths import check_relative

SCHEMES = ("file", "memory", "s3")
PART_BYTES = 32 << 20
"""Bytes of one part of a multipart upload and of one download piece."""


def _file_system(scheme: str) -> Any:
    make = cast("Callable[..., Any]", fsspec.filesystem)  # pyright: ignore[reportUnknownMemberType]
    if scheme == "file":
        return make("file", auto_mkdir=True, use_listings_cache=False)
    if scheme == "memory":
        return make("memory")
    try:
        from obstore.fsspec import FsspecStore
    except ImportError as error:
        raise SettingsError("s3:// needs the extra: pip install 'reelray[s3]'") from error
    # hidden from the type checker, whose view of the constructor's overloads depends on the protocol literal
    opener = cast("Callable[..., Any]", FsspecStore)
    place = aws.endpoint()
    config: dict[str, str] = {**(aws.shared_credentials() or {}), **{k: v for k, v in (("endpoint", place), ("region", aws.region())) if v}}
    options = {"allow_http": True} if place is not None and place.startswith("http://") else {}
    return opener("s3", config=config, client_options=options, skip_instance_cache=True)


def _ignore(piece: bytes) -> None:
    del piece


class Remote:
    """Objects below one prefix.

    Args:
        url: ``s3://bucket/prefix``, ``file:///folder/prefix`` or ``memory://name/prefix``, at least two parts deep.
        fs: a file system to use instead of opening one. S3 settings come from the environment and the AWS files.

    Raises:
        LocationError: another scheme, a chained URL, or a prefix so short that it could hold other things.
        SettingsError: the file system's package is not installed.
    """

    def __init__(self, url: str, fs: Any = None) -> None:
        scheme, separator, rest = url.partition("://")
        parts = [part for part in rest.split("/") if part]
        if not separator or scheme not in SCHEMES or "::" in url:
            raise LocationError(f"remote {url!r}: expected one of {', '.join(name + '://' for name in SCHEMES)} and no '::' chain")
        if len(parts) < 2 or ".." in parts:
            raise LocationError(f"remote {url!r}: give a bucket and a prefix of its own for this dataset, never a bucket's root")
        self._given = url
        self.url = f"{scheme}://{'/' if scheme == 'file' else ''}{'/'.join(parts)}"
        self._prefix = ("/" if scheme in ("file", "memory") else "") + "/".join(parts)
        self._fs = fs if fs is not None else _file_system(scheme)

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        """Another process opens the URL with its own settings: no key of this one travels."""
        return Remote, (self._given,)

    def _at(self, path: str) -> str:
        return f"{self._prefix}/{check_relative(path)}"

    def _fail(self, path: str, error: Exception) -> StorageError:
        kind = ObjectNotFoundError if isinstance(error, FileNotFoundError) else StorageError
        return kind(f"{self.url}/{path}: {error}")

    def list(self) -> dict[str, int]:
        """Size of every object by relative path.

        Raises:
            StorageError: the listing failed.
        """
        try:
            self._fs.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = self._fs.find(self._prefix, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._fail("", error) from error
        cut = len(self._prefix.strip("/")) + 1
        return {name.lstrip("/")[cut:]: int(info["size"]) for name, info in found.items()}

    def read(self, path: str) -> bytes:
        """A whole small object.

        Raises:
            ObjectNotFoundError: it does not exist.
            StorageError: it cannot be read.
        """
        try:
            return bytes(self._fs.cat_file(self._at(path)))
        except Exception as error:
            raise self._fail(path, error) from error

    def upload(self, source: Path, path: str) -> FileDigest:
        """Copies a file to the remote and returns the digest of what was sent.

        Raises:
            StorageError: reading or sending failed.
        """
        digest, size = hashlib.sha256(), 0
        try:
            with open(source, "rb") as handle, self._fs.open(self._at(path), "wb", block_size=PART_BYTES) as out:
                while piece := handle.read(PART_BYTES):
                    digest.update(piece)
                    size += len(piece)
                    out.write(piece)
        except Exception as error:
            raise self._fail(path, error) from error
        return FileDigest(size, digest.hexdigest())

    def write(self, path: str, data: bytes) -> None:
        """Stores a small object."""
        try:
            self._fs.pipe_file(self._at(path), data)
        except Exception as error:
            raise self._fail(path, error) from error

    def _read_into(self, path: str, sink: Callable[[bytes], object]) -> FileDigest:
        digest, size = hashlib.sha256(), 0
        try:
            with self._fs.open(self._at(path), "rb", cache_type="none") as handle:
                while piece := handle.read(PART_BYTES):
                    digest.update(piece)
                    size += len(piece)
                    sink(piece)
        except StorageError:
            raise
        except Exception as error:
            raise self._fail(path, error) from error
        return FileDigest(size, digest.hexdigest())

    def digest(self, path: str) -> FileDigest:
        """Size and hash of an object, by reading it back: checksums in object metadata do not survive every mount."""
        return self._read_into(path, _ignore)

    def size(self, path: str) -> int:
        """Size of one object as the remote reports it.

        Raises:
            ObjectNotFoundError: it does not exist.
        """
        try:
            self._fs.invalidate_cache()
            return int(self._fs.info(self._at(path))["size"])
        except Exception as error:
            raise self._fail(path, error) from error

    def download(self, path: str, target: Path, expected: FileDigest) -> None:
        """Fetches an object; the target appears only once size and hash are right.

        Raises:
            StorageError: fetching failed, or the bytes are not the expected ones.
        """

        def fill(handle: BinaryIO) -> None:
            found = self._read_into(path, handle.write)
            if found != expected:
                raise StorageError(f"{self.url}/{path}: got {found}, the inventory says {expected}; sync the remote again from a good copy")

        write_atomic(target, fill)
