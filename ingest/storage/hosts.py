"""Which hosts a request may go to: data servers, never machines' own credential services."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urljoin, urlsplit

from ingest.errors import StorageError
from ingest.storage.secrets import redact

_METADATA_SERVICES = frozenset({"metadata.google.internal", "metadata", "instance-data"})
_METADATA_ADDRESSES = frozenset({ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")})


_EMBEDDED = tuple(ipaddress.ip_network(network) for network in ("::ffff:0:0/96", "64:ff9b::/96", "::/96"))
"""Where an IPv4 address stands in the last four bytes of an IPv6 address that leads to it."""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a system makes of a host when it is one, in whatever spelling; None for a name."""
    host = host.rstrip(".").partition("%")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        try:
            # Resolvers also take 2852039166, 0xa9fea9fe, 169.254.43518 and octal parts.
            return ipaddress.IPv4Address(socket.inet_aton(host)) if host.isascii() and " " not in host else None
        except OSError:
            return None
    if isinstance(found, ipaddress.IPv6Address) and int(found) > 1 and any(found in network for network in _EMBEDDED):
        return ipaddress.IPv4Address(found.packed[-4:])
    return found


def is_metadata_service(host: str) -> bool:
    """Whether ``host`` is a link-local, multicast or unspecified address, or a known one of a machine's credential service."""
    address = _address(host)
    if address is None:
        return host.lower().rstrip(".") in _METADATA_SERVICES
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in _METADATA_ADDRESSES


def _is_private(host: str) -> bool:
    address = _address(host)
    if address is None:
        return host.lower().rstrip(".") == "localhost" or host.lower().rstrip(".").endswith(".localhost")
    return address.is_private or address.is_loopback


def check_redirect(source: str, location: str) -> str:
    """The address that a reply from ``source`` sends a client to, when it may.

    Args:
        source: address that was asked.
        location: ``Location`` header of the reply; may be relative.

    Raises:
        StorageError: no address, another scheme, a downgrade to plain HTTP, a metadata service, or a private address named by a public
            host.
    """
    try:
        target = urljoin(source, location)
        from_parts, to_parts = urlsplit(source), urlsplit(target)
        host, _ = to_parts.hostname or "", to_parts.port
    except ValueError as error:
        raise StorageError(f"{redact(source)} redirects to {redact(location[:200])!r}, which is no address ({error})") from None
    if to_parts.scheme not in {"http", "https"} or not host:
        raise StorageError(f"{redact(source)} redirects to {redact(target)!r}, which is no web address")
    if is_metadata_service(host):
        raise StorageError(f"{redact(source)} redirects to {host!r}, a metadata service and not a data server")
    public = not _is_private(from_parts.hostname or "")
    if public and (_is_private(host) or (from_parts.scheme == "https" and to_parts.scheme == "http")):
        raise StorageError(f"{redact(source)} redirects to {redact(target)!r}: a private address or plain HTTP, which is not allowed")
    return target
