"""What executes a worker's steps, as the worker sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from ...protocol.worker_messages import (
    GrammarOutput,
    HeldRequest,
    ModelRunnerOutput,
    SchedulerOutput,
)

logger = logging.getLogger(__name__)


class PendingOutput(Protocol):
    """The output of a step that a device is computing, while the next one may begin."""

    def is_ready(self) -> bool: ...

    def wait(self) -> None:
        """Sleep until it is ready, in any thread."""

    def output(self) -> ModelRunnerOutput:
        """Wait for it."""


StepResult = ModelRunnerOutput | PendingOutput

GrammarSource = Callable[[int], GrammarOutput | None]
"""Waits for the bitmasks of a step. None when they will not come."""


class Runner(Protocol):
    """`allocate_kv_cache` and `warm_up` come before the first `execute`."""

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None: ...

    def warm_up(self) -> None: ...

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> StepResult:
        """Begin one step. The outputs are ready in the order of the steps, if they are not there at once."""

    def forget_requests(self) -> list[HeldRequest]:
        """Free every slot. Returns what the KV cache holds of the requests that were in them."""

    def close(self) -> None:
        """Send and receive all that other workers of the replica wait for."""
