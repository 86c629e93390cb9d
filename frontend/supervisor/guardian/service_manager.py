"""Send notifications to the service manager that started this process, such as systemd."""

from __future__ import annotations

import contextlib
import os
import socket


def notify_service_manager(state: str) -> None:
    """Send state assignments, one per line, as `sd_notify(3)` specifies. Without a service manager, do nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.connect("\0" + address[1:] if address.startswith("@") else address)
        client.sendall(state.encode())
