"""Runs a shard of a simulated fleet in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from ....protocol.errors import EngineError
from .clients import ClientRecords
from .shard import Arrival, Report, Scenario, Shard


class ShardProcess:
    """A shard in a child process, with the methods of `Shard`. `close` ends the process."""

    def __init__(self, scenario: Scenario, indices: Sequence[int]) -> None:
        # A forked process has the trace without a copy.
        context = multiprocessing.get_context("fork")
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, self._connection, scenario, indices), daemon=True
        )
        self._process.start()
        child.close()

    def start(self, arrivals: Sequence[Arrival], until: float) -> None:
        """Begin a run. See `Shard.start`."""
        self._send((arrivals, until))

    def wait(self) -> Report:
        """Wait for the end of the run, and return its report. Raise EngineError if the run failed."""
        report = self._receive()
        assert isinstance(report, Report)
        return report

    def finish(self) -> ClientRecords:
        """Return the records of the clients."""
        self._send(None)
        records = self._receive()
        assert isinstance(records, ClientRecords)
        return records

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._connection.close()

    def _send(self, request: object) -> None:
        try:
            self._connection.send(request)
        except ConnectionError:
            raise self._death() from None

    def _receive(self) -> object:
        try:
            answer: object = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._death() from None
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def _death(self) -> EngineError:
        self._process.join()
        return EngineError(
            f"a process that simulates replicas ended with code {self._process.exitcode}; if it was "
            "killed, there may be too little memory"
        )


def _serve(
    connection: Connection, parent: Connection, scenario: Scenario, indices: Sequence[int]
) -> None:
    # Otherwise this process would not notice the end of its parent.
    parent.close()
    # Ctrl-C reaches both processes, and the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        try:
            shard = Shard(scenario, indices)
            while (request := connection.recv()) is not None:
                shard.start(*request)
                connection.send(shard.wait())
            connection.send(shard.finish())
        except EngineError as error:
            connection.send(error)
        # The parent may still be sending, so the connection stays open.
        while True:
            connection.recv()
