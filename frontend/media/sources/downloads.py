"""Download images and audio from hosts that the operator allows."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

from ....protocol.errors import ParameterError
from ...http.shown_values import echo

MAX_BYTES: Final = 1 << 25
"""Maximum bytes of a downloaded file."""

TIMEOUT_S: Final = 10.0
"""Maximum total seconds of a download, including redirects."""

MAX_REDIRECTS: Final = 3

_CHUNK_BYTES: Final = 1 << 16
_REDIRECTS: Final = (301, 302, 303, 307, 308)

_TUNNELS: Final = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "2001::/32", "2002::/16")))

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Found: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


def is_public(address: Address) -> bool:
    """Return whether an address is on the internet, and not this machine or its private network."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        # These networks map to IPv4 addresses, which may be private.
        if any(address in network for network in _TUNNELS):
            return False
    return address.is_global and not address.is_multicast


class Downloader:
    """Downloads files by HTTPS. It is thread-safe.

    Args:
        allowed_domains: The host names that URLs may have, including those of redirects.
        may_connect: Returns whether a connection to an address is allowed.
        tls: The TLS settings. By default, certificates are verified against the system's.
    """

    def __init__(
        self,
        allowed_domains: Collection[str],
        may_connect: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = frozenset(domain.lower() for domain in allowed_domains)
        self._may_connect = may_connect
        self._tls = tls or ssl.create_default_context()

    def download(self, url: str, where: str) -> bytes:
        """Return the content of the file at `url`.

        Raises:
            ParameterError: The URL is not allowed, or the file cannot be read; `where` names the field.
        """
        end = time.monotonic() + TIMEOUT_S
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._verify(url, where)
            try:
                content, location = self._request(parts, where, end)
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
                raise ParameterError(where, f"cannot be downloaded: {reason}") from None
            if content is not None:
                return content
            url = urljoin(url, location)
        raise ParameterError(where, f"redirects more than {MAX_REDIRECTS} times")

    def _verify(self, url: str, where: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            # Reading the port raises ValueError if it is not a number.
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ParameterError(where, f"is not a valid URL: {echo(url)}") from None
        if parts.scheme != "https" or not host:
            raise ParameterError(
                where, f"must be a data URL or begin with https://, got {echo(url)}"
            )
        if host not in self._allowed:
            raise ParameterError(
                where,
                f"has the host {echo(host)}, from which this server does not download "
                "(--allowed-media-domains); send a data URL",
            )
        return parts

    def _request(self, parts: SplitResult, where: str, end: float) -> tuple[bytes | None, str]:
        """Return the content (or None) and the URL of a redirect."""
        host, port = parts.hostname or "", parts.port or 443
        with self._connect(host, port, where, end) as tls_socket:
            connection = http.client.HTTPSConnection(host, port)
            connection.sock = tls_socket
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "*/*", "User-Agent": "engine"})
            response = connection.getresponse()
            if response.status in _REDIRECTS:
                return None, response.headers.get("location") or ""
            if response.status != http.client.OK:
                raise ParameterError(
                    where, f"cannot be downloaded: the host answered {response.status}"
                )
            content = bytearray()
            while chunk := response.read1(_CHUNK_BYTES):
                content += chunk
                if len(content) > MAX_BYTES:
                    raise ParameterError(where, f"has more than {MAX_BYTES} bytes")
                # Newer versions of Python close the socket after the last byte.
                if response.isclosed():
                    break
                tls_socket.settimeout(_remaining(end))
            return bytes(content), ""

    def _connect(self, host: str, port: int, where: str, end: float) -> ssl.SSLSocket:
        """Return a connection to an allowed address of the host.

        The name is resolved only once, against DNS rebinding.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, address in found:
            if not self._may_connect(ipaddress.ip_address(address[0])):
                raise ParameterError(
                    where, f"has the host {echo(host)}, whose address is not public"
                )
        plain = _connect_to_any(found, end)
        try:
            plain.settimeout(_remaining(end))
            return self._tls.wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise


def _connect_to_any(found: Sequence[_Found], end: float) -> socket.socket:
    """Return a connection to the first address that answers, of those that `getaddrinfo` found."""
    problem = OSError("the host has no address")
    for index, (family, kind, protocol, _, address) in enumerate(found):
        try:
            plain = socket.socket(family, kind, protocol)
        except OSError as error:
            problem = error
            continue
        try:
            # The remaining time is divided equally among this address and those after it.
            plain.settimeout(_remaining(end) / (len(found) - index))
            plain.connect(address)
            return plain
        except OSError as error:
            plain.close()
            problem = error
    raise problem


def _remaining(end: float) -> float:
    """Return the seconds until `end`. Raise TimeoutError if the time is over."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(f"it takes more than {TIMEOUT_S:g} s")
    return seconds
