"""The last message of a failed core to its clients."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from ...protocol.arrays import int32_bytes
from ...protocol.messages import ClientMessage, LossNoted, ReplicaLost
from ...protocol.transport import Hub
from ..scheduler.features.poison_isolation import CrashSuspects

FINAL_ERROR_S: Final = 0.3
"""Seconds that a failed core waits for its clients to confirm its `ReplicaLost` message."""


def report_loss(
    clients: Hub[ClientMessage],
    client_indices: Mapping[bytes, int],
    found: CrashSuspects,
    *,
    is_own: bool,
) -> None:
    """Report the requests in the failed steps to the clients, and wait briefly until the clients confirm.

    If `is_own`, the error occurred in the core.
    """
    unconfirmed = set(client_indices)
    for identity, client_index in client_indices.items():
        suspects, unsuspected = (
            int32_bytes([index for client, index in keys if client == client_index])
            for keys in (found.suspects, found.unsuspected)
        )
        clients.send(identity, ReplicaLost(suspects, unsuspected, is_own))
    deadline = time.monotonic() + FINAL_ERROR_S
    while unconfirmed and (remaining := deadline - time.monotonic()) > 0:
        clients.socket.poll(int(remaining * 1000) + 1)
        while (received := clients.receive()) is not None:
            if isinstance(received[1], LossNoted):
                unconfirmed.discard(received[0])
