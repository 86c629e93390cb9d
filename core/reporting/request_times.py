"""The times of each request that are reported when it finishes."""

from __future__ import annotations

from ...protocol.arrays import float32_bytes, int32_list
from ...protocol.messages import F32, I32, EngineCoreOutputs
from ...protocol.worker_messages import SchedulerOutput
from ..state.request import RequestKey
from .core_times import CoreTimes


class SchedulerTimes:
    """The seconds that calls of `schedule` took while each request was running.

    A call counts in full for every request that is running after it. The scheduler has no clock, so the core loop
    measures the calls. Recording a step that changes nothing in the batch is one addition.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._spent: dict[RequestKey, float] = {}
        """Seconds from before a request got its current row, or all of its seconds if it has no row."""
        self._started: dict[RequestKey, float] = {}
        """The value of `_total_s` at the time when a running request got its row."""
        self._rows: dict[int, RequestKey] = {}

    def record(self, step: SchedulerOutput | None, seconds: float) -> None:
        """Record a call of `schedule` and its result."""
        before = self._total_s
        self._total_s += seconds
        if step is None:
            return
        for slot in int32_list(step.removed_slots):
            key = self._rows.pop(slot, None)
            if key is not None and (started := self._started.pop(key, None)) is not None:
                self._spent[key] += before - started
        for data in step.new_requests:
            key = self._rows[data.slot] = data.request_id
            self._started[key] = before
            self._spent.setdefault(key, 0.0)

    def take_times(self, client_index: int, finished_set: I32) -> F32:
        """Return the seconds of each finished request of a client, float32, and remove them."""
        return float32_bytes(
            [self._end((client_index, index)) for index in int32_list(finished_set)]
        )

    def remove_client(self, client_index: int) -> None:
        """Remove the requests of a client that disconnected."""
        for key in [key for key in self._spent if key[0] == client_index]:
            self._end(key)

    def _end(self, key: RequestKey) -> float:
        started = self._started.pop(key, self._total_s)
        return self._spent.pop(key, 0.0) + self._total_s - started


class RequestTimes:
    """The scheduler's seconds and the workers' core-seconds that each request took."""

    def __init__(self, max_num_seqs: int, num_cores: int) -> None:
        self.scheduler = SchedulerTimes()
        self.cores = CoreTimes(max_num_seqs, num_cores)

    def write(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Add the times of finished requests to the message that reports their end."""
        if outputs.finished_set:
            ended = outputs.finished_set
            outputs.scheduler_times = self.scheduler.take_times(client_index, ended)
            outputs.core_times = self.cores.take_times(client_index, ended)

    def remove_client(self, client_index: int) -> None:
        """Remove the requests of a client that disconnected."""
        self.scheduler.remove_client(client_index)
        self.cores.remove_client(client_index)
