"""The scheduler's half of an encoder-cache connector, which loads encoder outputs from elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ....protocol.worker_messages import SchedulerOutput
from ...state.request import Request


class EncoderCacheConnector(ABC):
    """Loads encoder outputs from elsewhere. An exception of `has_cache_item` fails the request concerned."""

    @abstractmethod
    def has_cache_item(self, request: Request, index: int) -> bool:
        """Return whether the output of a request's encoder input can be loaded."""

    @abstractmethod
    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        """Return the metadata for the workers, which load these inputs. Called once per step."""
