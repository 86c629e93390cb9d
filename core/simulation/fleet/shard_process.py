"""Runs a shard of a simulated fleet in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

from .clients import ClientRecords
from .shard import Arrival, Report, Scenario, Shard


class ShardProcess:
    """A shard in a child process, with the methods of `Shard`. The process ends after `finish`."""

    def __init__(self, scenario: Scenario, indices: Sequence[int]) -> None:
        # A forked process has the trace without a copy.
        context = multiprocessing.get_context("fork")
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, scenario, indices), daemon=True, name="simulated replicas"
        )
        self._process.start()
        child.close()

    def start(self, arrivals: Sequence[Arrival], until: float) -> None:
        """Begin a run. See `Shard.start`."""
        self._connection.send((arrivals, until))

    def wait(self) -> Report:
        """Wait for the end of the run, and return its report.

        Raises:
            Exception: The run failed.
        """
        report = self._receive()
        assert isinstance(report, Report)
        return report

    def finish(self) -> ClientRecords:
        """Return the records of the clients, and end the process."""
        self._connection.send(None)
        records = self._receive()
        assert isinstance(records, ClientRecords)
        self._process.join()
        return records

    def _receive(self) -> object:
        answer: object = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(connection: Connection, scenario: Scenario, indices: Sequence[int]) -> None:
    try:
        shard = Shard(scenario, indices)
        while (request := connection.recv()) is not None:
            shard.start(*request)
            connection.send(shard.wait())
        connection.send(shard.finish())
    except EOFError:
        # The simulation failed in another process.
        pass
    except Exception as error:
        connection.send(error)
