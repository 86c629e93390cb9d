"""Calls of a frontend that another frontend must carry out, because only that one holds the answer."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...protocol.messages import CallResult, ClientMessage, EndReasoning
from ...protocol.transport import Hub


class _Relay(msgspec.Struct):
    caller: int
    call_id: int
    awaited: set[int]
    detail: str = ""


class RelayedCalls:
    """Sends a frontend's call to all other frontends, and one result to the caller.

    That is a success if there is one, else the first failure with a detail. Frontends are named by their index.
    One that disconnects counts as one that does not hold the answer.
    """

    def __init__(self, clients: Hub[ClientMessage], client_ids: Mapping[int, bytes]) -> None:
        """Store the hub, and the identity in it of each connected frontend."""
        self._clients = clients
        self._client_ids = client_ids
        self._relays: dict[int, _Relay] = {}
        self._num_relays = 0

    def relay(self, caller: int, call: EndReasoning) -> None:
        """Send a call to all frontends but the caller."""
        self._num_relays += 1
        others = {index for index in self._client_ids if index != caller}
        relay = self._relays[self._num_relays] = _Relay(caller, call.call_id, others)
        relayed = msgspec.structs.replace(call, call_id=self._num_relays)
        for index in others:
            self._clients.send(self._client_ids[index], relayed)
        self._end_if_complete(self._num_relays, relay)

    def apply_result(self, client_index: int, result: CallResult) -> None:
        """Apply the result of a frontend. Unexpected results are ignored."""
        relay = self._relays.get(result.call_id)
        if relay is None or client_index not in relay.awaited:
            return
        relay.awaited.discard(client_index)
        if result.ok:
            self._end(result.call_id, relay, ok=True)
            return
        relay.detail = relay.detail or result.detail
        self._end_if_complete(result.call_id, relay)

    def remove_client(self, client_index: int) -> None:
        """Wait no longer for a frontend that has disconnected, and drop its own calls."""
        for number, relay in list(self._relays.items()):
            relay.awaited.discard(client_index)
            if relay.caller == client_index:
                del self._relays[number]
            else:
                self._end_if_complete(number, relay)

    def _end_if_complete(self, number: int, relay: _Relay) -> None:
        if not relay.awaited:
            self._end(number, relay, ok=False)

    def _end(self, number: int, relay: _Relay, *, ok: bool) -> None:
        del self._relays[number]
        detail = "" if ok else relay.detail
        self._clients.send(self._client_ids[relay.caller], CallResult(relay.call_id, ok, detail))
