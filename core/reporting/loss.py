"""The last message of a failed core to its clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from ...protocol.arrays import int32_bytes
from ...protocol.errors import POISON_REQUEST
from ...protocol.messages import ClientMessage, FinishReason, LossNoted, ReplicaLost
from ...protocol.transport import Hub
from ..scheduler.features.poison_isolation import CrashSuspects
from ..scheduler.interface import SchedulerInterface

logger = logging.getLogger(__name__)

FINAL_ERROR_S: Final = 0.3
"""Seconds that a failed core waits for its clients to confirm its `ReplicaLost` message."""


def report_loss(
    scheduler: SchedulerInterface,
    send_outputs: Callable[[], None],
    clients: Hub[ClientMessage],
    client_indices: Mapping[bytes, int],
    *,
    is_own: bool,
    is_of_peer: bool,
) -> None:
    """Report the requests in the failed steps to the clients, and wait briefly until the clients confirm.

    If the error occurred in the core (`is_own`), or another replica caused the loss (`is_of_peer`), none of these
    requests is suspected. `send_outputs` sends the ends of requests to the clients.
    """
    found = CrashSuspects([], [], [])
    if not is_own and not is_of_peer:
        try:
            found = scheduler.find_crash_suspects()
            scheduler.finish_requests(found.poison_requests, FinishReason.ERROR, POISON_REQUEST)
            send_outputs()
        except Exception:
            logger.exception("could not determine which requests were in the failed steps")
            return
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
