"""The interface between a worker and the runner that executes its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...protocol.worker_messages import GrammarOutput, ModelRunnerOutput


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
