"""The times of each request that are reported when it finishes."""

from __future__ import annotations

from ...protocol.messages import EngineCoreOutputs
from .core_times import CoreTimes
from .scheduler_times import SchedulerTimes


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
