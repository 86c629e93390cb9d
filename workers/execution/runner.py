"""The interface between a worker and the runner that executes its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...protocol.worker_messages import GrammarOutput, KVConnectorOutput, ModelRunnerOutput


class PendingOutput(Protocol):
    """The output of a step that a device is still computing."""

    def is_ready(self) -> bool:
        """Return whether the output is ready."""

    def wait(self) -> None:
        """Wait until the output is ready. May be called from any thread."""

    def output(self) -> ModelRunnerOutput:
        """Wait for the output and return it."""


class ReportedOutput:
    """A pending output, to which the KV connector's report about the step is added."""

    def __init__(self, pending: PendingOutput, report: KVConnectorOutput) -> None:
        self._pending = pending
        self._report = report

    def is_ready(self) -> bool:
        """Return whether the output is ready."""
        return self._pending.is_ready()

    def wait(self) -> None:
        """Wait until the output is ready."""
        self._pending.wait()

    def output(self) -> ModelRunnerOutput:
        """Wait for the output and return it with the report."""
        output = self._pending.output()
        output.kv_connector_output = self._report
        return output


StepResult = ModelRunnerOutput | PendingOutput

GrammarSource = Callable[[int], GrammarOutput | None]
"""Waits for the bitmasks of a step. Returns None if they will not arrive."""
