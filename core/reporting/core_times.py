"""Measure the CPU or GPU time that the tokens of each request took."""

from __future__ import annotations

import numpy as np

from ...protocol.arrays import float32_bytes, int32_list, int32_view
from ...protocol.messages import F32, I32
from ...protocol.worker_messages import SchedulerOutput
from ..state.request import RequestKey
from ..state.slots import Float64Array, SlotArray


class CoreTimes:
    """The core-seconds that each request took: its share of the tokens of each step.

    A step of s seconds takes s * `num_cores` core-seconds. Steps are recorded when their outputs arrive, so a slot
    belongs to the request that the step computed. Recording a step that changes nothing in the batch is one addition.

    Args:
        max_num_seqs: The number of slots.
        num_cores: The number of CPU cores, or GPUs, that compute a step.
    """

    def __init__(self, max_num_seqs: int, num_cores: int = 1) -> None:
        self._num_cores = num_cores
        self._seconds: Float64Array = np.zeros(max_num_seqs)
        """Core-seconds of the request in each slot since it got the slot, without `_shared`."""
        self._shared = 0.0
        """Core-seconds that must be added to each slot of the batch."""
        self._batch: SlotArray = np.zeros(0, np.intp)
        self._keys: dict[int, RequestKey] = {}
        self._slots: dict[RequestKey, int] = {}
        """The slots of the running requests that have not finished."""
        self._spent: dict[RequestKey, float] = {}
        """Core-seconds of preempted requests that have not finished."""

    def record(self, step: SchedulerOutput, seconds: float) -> None:
        """Record a step that took `seconds`."""
        if not (step.removed_slots or step.new_requests or step.chunks) and step.slots is None:
            if len(self._batch):
                self._shared += seconds * self._num_cores / len(self._batch)
            return
        self._distribute()
        for slot in int32_list(step.removed_slots):
            key = self._keys.pop(slot, None)
            if key is not None and self._slots.get(key) == slot:
                del self._slots[key]
                self._spent[key] = self._spent.get(key, 0.0) + float(self._seconds[slot])
        for data in step.new_requests:
            self._keys[data.slot] = data.request_id
            self._slots[data.request_id] = data.slot
            self._seconds[data.slot] = 0.0
        if step.slots is not None:
            self._batch = int32_view(step.slots).astype(np.intp)
        batch, num_tokens = self._batch, len(self._batch)
        positions, sizes = int32_view(step.chunks).reshape(-1, 2).T
        if step.chunks:
            num_tokens += int(sizes.sum()) - len(sizes)
        if not num_tokens:
            return
        for_each_token = seconds * self._num_cores / num_tokens
        self._seconds[batch] += for_each_token
        if step.chunks:
            self._seconds[batch[positions]] += for_each_token * (sizes - 1)

    def take_times(self, client_index: int, finished_set: I32) -> F32:
        """Return the core-seconds of each finished request of a client, float32, and remove them."""
        self._distribute()
        return float32_bytes(
            [self._end((client_index, index)) for index in int32_list(finished_set)]
        )

    def remove_client(self, client_index: int) -> None:
        """Remove the requests of a client that disconnected."""
        self._distribute()
        for key in [key for key in (*self._slots, *self._spent) if key[0] == client_index]:
            self._end(key)

    def _distribute(self) -> None:
        """Add the time of the steps of an unchanged batch to its slots."""
        if self._shared:
            self._seconds[self._batch] += self._shared
            self._shared = 0.0

    def _end(self, key: RequestKey) -> float:
        slot = self._slots.pop(key, None)
        spent = self._spent.pop(key, 0.0)
        return spent if slot is None else spent + float(self._seconds[slot])
