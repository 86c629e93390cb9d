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
from ..models.lora.lora_loader import LoraLoader

logger = logging.getLogger(__name__)


class PendingOutput(Protocol):
    """The output of a step that a device is still computing."""

    def is_ready(self) -> bool:
        """Return whether the output is ready."""

    def wait(self) -> None:
        """Wait until the output is ready. May be called from any thread."""

    def output(self) -> ModelRunnerOutput:
        """Wait for the output and return it."""


StepResult = ModelRunnerOutput | PendingOutput

GrammarSource = Callable[[int], GrammarOutput | None]
"""Waits for the bitmasks of a step. Returns None if they will not arrive."""


class Runner(Protocol):
    """Executes steps. Call `allocate_kv_cache` and `warm_up` before the first `execute`."""

    @property
    def loras(self) -> LoraLoader | None:
        """The loader of LoRA adapters; None without --enable-lora."""

    @property
    def connector(self) -> KVConnector | None:
        """The worker side of the KV connector, once the KV cache is allocated; None without a connector."""

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the CPU offload."""

    def warm_up(self) -> None:
        """Do all preparations that would otherwise delay the first step."""

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> StepResult:
        """Start a step. Outputs become ready in the order of the steps; on a CPU, they are ready immediately."""

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot.

        Return the requests that were in the slots, with the tokens and blocks that the KV cache holds.
        """

    @property
    def invitations_fd(self) -> int | None:
        """File descriptor that is readable when another replica needs this worker's experts; None if never."""

    def join_rounds(self) -> None:
        """Compute rows of other replicas, which chose experts of this rank, until no replica asks for more."""

    def close(self) -> None:
        """Complete all transfers that other workers of the replica wait for."""
