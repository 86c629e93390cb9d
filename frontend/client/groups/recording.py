"""The interface for recording requests in the store, so that they can outlive their client and their frontend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ....protocol.messages import EngineCoreOutputs


class Recording(Protocol):
    """Records the progress of one request, so that it can outlive its client and its frontend."""

    def record_move(self, old_index: int, position: int) -> None:
        """Record that the sequence at `position` in the group has a new request index."""

    def record_end(self, position: int) -> None:
        """Record that the sequence at `position` in the group has finished."""

    def record_departure(self) -> None:
        """Record that the client has disconnected. The request is then aborted, immediately or after a grace period."""

    def delete(self) -> None:
        """Delete the recording of a request that has ended, because its answer is stored in another form."""


class OutputLog(Protocol):
    """Records the outputs of a frontend's requests before they are applied."""

    def append(
        self, outputs: EngineCoreOutputs, apply: Callable[[EngineCoreOutputs], None]
    ) -> None:
        """Record outputs, and pass them to `apply` as soon as they are durable, in the order of the calls."""

    def close(self) -> None:
        """Stop recording."""
