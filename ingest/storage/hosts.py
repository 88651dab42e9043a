"""Which hosts a request may go to: data servers, never machines' own credential services."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from ingest.errors import StorageError
from ingest.storage.secrets import redact

_METADATA_SERVICES = frozenset({"metadata.google.internal", "metadata", "instance-data"})


def is_metadata_service(host: str) -> bool:
    """Whether ``host`` is a link-local, multicast or unspecified address, or a known name of a machine's credential service."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") in _METADATA_SERVICES
    return address.is_link_local or address.is_multicast or address.is_unspecified


def _is_private(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return address.is_private or address.is_loopback


def check_redirect(source: str, target: str) -> str:
    """Returns ``target`` when a reply from ``source`` may send a client there.

    Raises:
        StorageError: another scheme, a downgrade to plain HTTP, a metadata service, or a private address named by a public host.
    """
    from_parts, to_parts = urlsplit(source), urlsplit(target)
    host = to_parts.hostname or ""
    if to_parts.scheme not in {"http", "https"} or not host:
        raise StorageError(f"{redact(source)} redirects to {redact(target)!r}, which is no web address")
    if is_metadata_service(host):
        raise StorageError(f"{redact(source)} redirects to {host!r}, a metadata service and not a data server")
    public = not _is_private(from_parts.hostname or "")
    if public and (_is_private(host) or (from_parts.scheme == "https" and to_parts.scheme == "http")):
        raise StorageError(f"{redact(source)} redirects to {redact(target)!r}: a private address or plain HTTP, which is not allowed")
    return target
