"""Encoder outputs that come from elsewhere instead of being computed: the scheduler's half."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..protocol.messages import SchedulerOutput
from .request import Request


class EncoderCacheConnector(ABC):
    """An exception of `has_cache_item` ends the request that it is about."""

    @abstractmethod
    def has_cache_item(self, request: Request, index: int) -> bool:
        """Whether the output of a request's encoder input can be had."""

    @abstractmethod
    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        """What the workers must know with this step, which loads these inputs; called once a step."""
