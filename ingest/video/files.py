"""Writing files so that a reader sees the old one or the new one, and saying plainly why that failed."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from ingest.errors import AccessDeniedError, LockTimeoutError, ReelrayError, SidecarError, StorageError

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REPORTED = _DENIED | _FULL | {errno.ENOTDIR}


def is_reported(error: OSError) -> bool:
    """Whether an error is one of the disk or its permissions, which rebuilding cannot cure."""
    return error.errno in _REPORTED or isinstance(error, AccessDeniedError)


def storage_failure(error: OSError, what: str, path: Path) -> OSError:
    """The error for a failed read or write, with what to do about it; errors of ours are returned as they are."""
    if isinstance(error, ReelrayError):
        return error
    reason = error.strerror or str(error)
    advice = "check permissions and free space in HF_LEROBOT_HOME" if error.errno in _REPORTED else "see the reason given"
    kind = AccessDeniedError if error.errno in _DENIED else StorageError
    failure = kind(f"{what} {path}: {reason}; {advice}")
    failure.errno = error.errno
    return failure


@contextmanager
def replacing(path: Path, what: str) -> Generator[BinaryIO]:
    """Opens a temporary file beside ``path`` and installs it on success.

    The temporary file is removed on any outcome; data and directory are synced, so that after a crash the old file or the
    new one is there, whole.

    Args:
        path: file to create or replace.
        what: names the file in messages, for example "cannot write the MP4 sidecar".

    Raises:
        AccessDeniedError: no permission, or a read-only file system.
        StorageError: no space, or anything else that kept it from being written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise storage_failure(error, what, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(folder: Path) -> None:
    """Makes a rename in ``folder`` outlast a crash; file systems without it say so and are left alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, but no device or pipe, which might never answer or never end.

    Raises:
        SidecarError: it is something else than a file.
        OSError: it cannot be opened.
    """
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise SidecarError(f"{path} is no regular file: remove what is there")
    return stream


def parts_folder(path: Path) -> Path:
    """Where a build of ``path`` that several processes share keeps what is done, so that it goes on after a kill."""
    return path.with_name(f".{path.name}.parts")


def remove_leftovers(path: Path) -> int:
    """Removes temporary files that killed writers of ``path`` left; the caller holds its lock.

    Returns:
        how many there were.
    """
    found = list(path.parent.glob(f".{path.name}.*.tmp{path.suffix}"))
    for leftover in found:
        leftover.unlink(missing_ok=True)
    return len(found)


@contextmanager
def locked(path: Path, timeout_s: float, what: str) -> Generator[None]:
    """Holds the lock of ``path``, a file of the same name with ``.lock`` behind it.

    Args:
        path: what the lock protects.
        timeout_s: longest wait.
        what: names it in messages.

    Raises:
        LockTimeoutError: another process held it all the time; names the lock.
        StorageError: the lock file cannot be created.
    """
    name = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(name, timeout=timeout_s)
        lock.acquire()
    except Timeout as error:
        raise LockTimeoutError(
            f"Timed out waiting {timeout_s:g} s for {what} lock {name}: another process may still be at work; check for one before "
            "removing the lock, or raise the time-out"
        ) from error
    except OSError as error:
        raise storage_failure(error, f"cannot lock {what}", name) from error
    try:
        yield
    finally:
        lock.release()
