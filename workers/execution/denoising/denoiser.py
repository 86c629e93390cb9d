"""The interface of what denoises blocks."""

from __future__ import annotations

from typing import Protocol

from ....protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from ...batch import StepPlan
from ...device.dtypes import AnyArray


class Denoiser(Protocol):
    """The blocks that the requests in a worker's slots are denoising."""

    def begin(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Begin blocks, before the model computes a step."""

    def finish(
        self, output: SchedulerOutput, plan: StepPlan, hidden_TD: AnyArray
    ) -> ModelRunnerOutput:
        """End the passes of a step by its hidden states. Return the tokens of the blocks that are complete."""
