"""Run models that are an encoder alone, which needs no KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ....protocol.arrays import int32_bytes, int32_view
from ....protocol.worker_messages import (
    HeldRequest,
    ModelRunnerOutput,
    NewRequestData,
    RowVector,
    SchedulerOutput,
)
from ..runner import GrammarSource

if TYPE_CHECKING:
    from ...kv_transfer.connector import KVConnector
    from ...models.lora.lora_loader import LoraLoader


class RequestEncoder(Protocol):
    """Computes the results of requests."""

    def warm_up(self) -> None:
        """Compute a dummy input, because kernels are prepared on first use."""

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's changes of encoder inputs."""

    def result(self, request: NewRequestData) -> torch.Tensor | str:
        """Return the result of a request, or the reason why it fails."""

    def clear(self) -> None:
        """Discard all inputs and outputs, because the next core starts with an empty cache."""


class EncoderRunner:
    """A runner that replaces `ModelRunner`. The result of a request is computed in one step, by every rank."""

    connector: KVConnector | None = None
    loras: LoraLoader | None = None

    def __init__(self, encoder: RequestEncoder) -> None:
        self._encoder = encoder
        self._waiting: dict[int, NewRequestData] = {}
        """Slot -> its request, until it has a result."""
        self._slots_S = np.zeros(0, np.int32)

    def warm_up(self) -> None:
        """Compute a dummy input, because kernels are prepared on first use."""
        self._encoder.warm_up()

    def allocate_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Do nothing, because there is no KV cache."""

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot. Return no requests, because there is no KV cache."""
        self._encoder.clear()
        self._waiting.clear()
        self._slots_S = np.zeros(0, np.int32)
        return []

    def execute(self, output: SchedulerOutput, await_grammar: GrammarSource) -> ModelRunnerOutput:
        """Compute the inputs of a step, and return the results of its requests."""
        for slot in int32_view(output.removed_slots).tolist():
            self._waiting.pop(slot, None)
        self._encoder.apply(output)
        self._waiting.update((new.slot, new) for new in output.new_requests)
        if output.slots is not None:
            self._slots_S = int32_view(output.slots)
        result = ModelRunnerOutput(output.step)
        ended = [slot for slot in self._slots_S.tolist() if slot in self._waiting]
        for slot in ended:
            found = self._encoder.result(self._waiting.pop(slot))
            if isinstance(found, str):
                result.failed_slots.append((slot, found))
            else:
                result.pooled.append(RowVector(slot, found.float().cpu().numpy().tobytes()))
        result.sampled_token_ids = int32_bytes(np.zeros(len(ended), np.int32))
        return result

    @property
    def invitations_fd(self) -> None:
        """Return None, because this worker has no experts."""

    def join_rounds(self) -> None:
        """Do nothing, because this worker has no experts."""

    def close(self) -> None:
        """Do nothing, because no other worker waits for this one."""
