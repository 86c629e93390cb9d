"""Read the rows of a step message, which omits them if they equal those of the previous step."""

from __future__ import annotations

import numpy as np

from ...protocol.arrays import Int64Array, int32_view
from ...protocol.worker_messages import SchedulerOutput
from ..state.slots import SlotArray


class StepRows:
    """Decodes step messages in order. `slots` are the rows of the message that was read last."""

    def __init__(self, slots: SlotArray | None = None) -> None:
        self.slots: SlotArray = np.zeros(0, np.intp) if slots is None else slots

    def read(self, step: SchedulerOutput) -> Int64Array:
        """Read the next message. Return how many tokens each of `slots` computes."""
        if step.slots is not None:
            self.slots = int32_view(step.slots).astype(np.intp)
        counts: Int64Array = np.ones(len(self.slots), np.int64)
        chunks = int32_view(step.chunks).reshape(-1, 2)
        counts[chunks[:, 0]] = chunks[:, 1]
        return counts
