"""Bodies that are not what was asked for, though the transfer succeeded."""

from __future__ import annotations

from ingest.errors import PlaceholderError, UnsafeInputError

WHOLE_LIMIT = 1024 * 1024 * 1024
"""Longest object in bytes that is read whole; only metadata is."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_LIMIT = 1024


def refuse_placeholder(data: bytes, where: str, *, content_type: str = "", whole: bool = False) -> None:
    """Checks the first bytes of an object.

    Args:
        data: bytes from the object's start.
        where: names the object in the error.
        content_type: of the reply, where there was one.
        whole: whether ``data`` is the object's whole content.

    Raises:
        PlaceholderError: a Git LFS pointer or a web page stands where the file should be.
    """
    if data.startswith(_POINTER) and (not whole or len(data) <= _POINTER_LIMIT):
        raise PlaceholderError(
            f"{where}: is a Git LFS pointer of a few lines, not the file itself; fetch the files with 'git lfs pull', or stream the "
            "dataset from the Hub"
        )
    if content_type.partition(";")[0].strip().lower() == "text/html" and not where.lower().endswith((".html", ".htm")):
        raise PlaceholderError(
            f"{where}: the server answered with a web page instead of the file, probably a login or error page; check the address and "
            "the credentials"
        )


def check_whole(size: int, where: str) -> None:
    """Refuses to read an object whole before anything is allocated for it.

    Args:
        size: bytes, as the store states them.
        where: names the object in the error.

    Raises:
        UnsafeInputError: it is longer than any metadata.
    """
    if size > WHOLE_LIMIT:
        raise UnsafeInputError(f"{where}: {size} bytes cannot be read whole; metadata above {WHOLE_LIMIT} bytes is not read")
