"""The listening socket for clients.

The supervisor opens it before any expensive startup work and passes it to every frontend. So a port in use is
reported immediately, and a restarted frontend accepts the connections that waited for it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat

from ...protocol.config import FrontendConfig
from ...protocol.errors import ConfigError

BACKLOG = 2048


class Listener:
    """A listening TCP or Unix socket and its URL."""

    def __init__(self, config: FrontendConfig, taken_over: socket.socket | None = None) -> None:
        """Open the socket, or use one that was taken over from another engine.

        A Unix socket that was taken over belongs to the other engine until `own_path` is called.

        Raises:
            ConfigError: The socket cannot be opened; the message names the address and the remedy.
        """
        self._uds = config.uds if taken_over is None else None
        self._path = config.uds
        if config.uds is not None:
            self.socket = taken_over or _listen_unix(config.uds)
            self.port = config.port
            self.url = f"unix://{os.path.abspath(config.uds)}"
        else:
            self.socket = taken_over or _listen_tcp(config.host, config.port, config.slow_client_s)
            self.port = self.socket.getsockname()[1]
            scheme = "https" if config.ssl_certfile else "http"
            self.url = f"{scheme}://{_reachable_host(config.host)}:{self.port}{config.root_path}"

    def close(self) -> None:
        """Close the socket and delete its path.

        Later calls do nothing, because the path may belong to another process by then.
        """
        self.socket.close()
        uds, self._uds = self._uds, None
        if uds is not None:
            _unlink_if_present(uds)

    def own_path(self) -> None:
        """Delete the socket's path in `close`, because the other engine no longer does."""
        self._uds = self._path

    def hand_over(self) -> None:
        """Close the socket in this process only, because its path belongs to another engine now."""
        self._uds = None
        self.socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only programs on this machine, including browsers, can connect over TCP."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _reachable_host(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _listen_tcp(host: str, port: int, slow_client_s: float) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            f"cannot listen on host {host!r}: it is not one address of this machine; use --host 127.0.0.1, "
            "--host :: for all interfaces, with IPv4 and IPv6, or --uds PATH for a Unix socket"
        ) from None
    # "localhost" may be ::1 first, but clients also write 127.0.0.1.
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # This limits how long the kernel keeps unsent data of closed connections.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(slow_client_s * 1000))
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_explain_tcp(error, host, port)) from None
    return listener


def _explain_tcp(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {host}:{port}: port {port} is in use; "
            "stop the program that uses it, or choose another port with --port (0 picks a free one)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"cannot listen on {host}:{port}: permission denied; choose a --port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"cannot listen on {host}:{port}: {host} is not an address of this machine; "
            "use --host 127.0.0.1, or --host 0.0.0.0 for every interface"
        )
    return f"cannot listen on {host}:{port}: {error.strerror}; check --host and --port"


def _listen_unix(path: str) -> socket.socket:
    _remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on unix socket {path}: {reason}; choose another with --uds"
        ) from None
    return listener


def _remove_stale_socket(path: str) -> None:
    """Remove a socket that no process listens on. For any other file, `bind` reports the error."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            _unlink_if_present(path)
        except OSError:
            pass


def _unlink_if_present(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
