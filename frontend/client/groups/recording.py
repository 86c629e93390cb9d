"""The interface through which a request that is recorded reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ....protocol.messages import EngineCoreOutputs


class Recording(Protocol):
    """Records a request, so that it can outlive its client and its frontend."""

    def record_move(self, old_index: int, position: int) -> None:
        """Record that the sequence at a position has a new request index."""

    def record_end(self, position: int) -> None:
        """Record that the sequence at a position has finished."""

    def record_departure(self) -> None:
        """Record that the client is gone. The request is aborted now or after some time."""

    def delete(self) -> None:
        """Delete the recording of a request that has ended, because its answer is stored in another form."""


class OutputLog(Protocol):
    """Records the outputs of a frontend's requests before they are applied."""

    def append(
        self, outputs: EngineCoreOutputs, apply: Callable[[EngineCoreOutputs], None]
    ) -> None:
        """Record outputs, and pass them to `apply` as soon as they are safe, in the order of the calls."""

    def close(self) -> None:
        """Stop recording."""
