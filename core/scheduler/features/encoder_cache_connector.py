"""The scheduler side of an encoder-cache connector, which loads encoder outputs from an external store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ....protocol.worker_messages import SchedulerOutput
from ...state.request import Request


class EncoderCacheConnector(ABC):
    """Loads encoder outputs from an external store. An exception in `has_cache_item` fails only that request."""

    @abstractmethod
    def has_cache_item(self, request: Request, index: int) -> bool:
        """Return whether the output of a request's encoder input can be loaded."""

    @abstractmethod
    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        """Return the metadata that makes the workers load the inputs `loads`. Called once per step."""
