"""The interface between a worker and the runner that executes its steps."""

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
from ..kv_transfer.connector import KVConnector
from ..lora_loader import LoraLoader

logger = logging.getLogger(__name__)


class PendingOutput(Protocol):
    """The output of a step that a device is still computing."""

    def is_ready(self) -> bool:
        """Return whether the output is ready."""

    def wait(self) -> None:
        """Sleep until the output is ready. May be called from any thread."""

    def output(self) -> ModelRunnerOutput:
        """Wait for the output and return it."""


StepResult = ModelRunnerOutput | PendingOutput

GrammarSource = Callable[[int], GrammarOutput | None]
"""Waits for the bitmasks of a step. Return None if they will not arrive."""


class Runner(Protocol):
    """Executes steps. `allocate_kv_cache` and `warm_up` must precede the first `execute`."""

    @property
    def loras(self) -> LoraLoader | None:
        """The loader of LoRA adapters; None if requests may use none."""

    @property
    def connector(self) -> KVConnector | None:
        """The workers' half of the KV connector, once the KV cache is allocated; None without one."""

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the CPU offload."""

    def warm_up(self) -> None:
        """Prepare everything that would delay the first step."""

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> StepResult:
        """Begin a step. Outputs become ready in the order of the steps, if they are not ready at once."""

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot. Return the requests that were in them, with what the KV cache holds of each."""

    @property
    def invitations_fd(self) -> int | None:
        """A file descriptor that is readable when another replica needs this worker's experts; None without any."""

    def join_rounds(self) -> None:
        """Compute rows of other replicas, which chose experts of this rank, until there is no invitation."""

    def close(self) -> None:
        """Finish all transfers that other workers of the replica wait for."""
