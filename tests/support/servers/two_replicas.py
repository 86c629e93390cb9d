"""An engine client with two replicas, whose cores echo and whose status the test publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from engine.frontend.client.engine_client import EngineClient
from engine.protocol.config import FIRST_EPOCH, ParallelConfig
from engine.protocol.messages import ReplicaLoadUpdate
from engine.protocol.supervisor_messages import (
    EngineStatus,
    ProcessInfo,
    ReplicaInfo,
    ReplicaState,
    Stage,
)
from engine.protocol.transport import StatusPublisher
from support.servers.echo_core import EchoCore
from support.servers.engine_fixtures import engine_config, opened, smollm2_tokenizer, until


class _Context(zmq.Context[zmq.Socket[bytes]]):
    def close(self) -> None:
        self.term()


class TwoReplicas:
    """A client, its cores, and their supervisor. Everything closes with the test.

    Attributes:
        cores: The cores that run; a test may close and replace them.
    """

    def __init__(self, run_dir: Path, **changes: Any) -> None:
        parallel = ParallelConfig(data_parallel_size=2)
        self.config = engine_config(run_dir, epoch=FIRST_EPOCH, parallel=parallel, **changes)
        self.cores = [opened(EchoCore(self.config, index)) for index in range(2)]
        self.client = opened(EngineClient(self.config, 0, smollm2_tokenizer()))
        self.processes: list[ProcessInfo] = []
        self._publisher = opened(StatusPublisher(opened(_Context()), self.config))

    async def start(self) -> EngineClient:
        """Start the client, and return it."""
        await self.run(self.client.start())
        return self.client

    async def run(self, awaited: Awaitable[Any]) -> Any:
        """Let the cores receive until `awaited` has its result."""
        task = asyncio.ensure_future(awaited)
        await until(task.done, self.receive)
        return task.result()

    def receive(self) -> None:
        """Let the cores receive what the client has sent."""
        for core in self.cores:
            core.receive()

    def info(self, replica: int, **fields: Any) -> ReplicaInfo:
        """Return the state of a replica that serves, except for `fields`."""
        state = {"state": ReplicaState.SERVING, "epoch": self.config.epoch, **fields}
        return ReplicaInfo(replica, num_running=0, num_waiting=0, **state)

    def worker(self, replica: int, *, silent_s: float = 0.0, busy_s: float = 0.0) -> ProcessInfo:
        """Return the state of a replica's worker."""
        times = {"silent_s": silent_s, "busy_s": busy_s, "steps_per_s": 0.0, "kv_cache_usage": 0.0}
        counts = {"num_restarts": 0, "num_running": 0, "num_waiting": 0, "replica": replica}
        return ProcessInfo(
            f"worker {replica}", 1, Stage.READY, "", self.config.epoch, **counts, **times
        )

    def publish(self, infos: Sequence[ReplicaInfo]) -> None:
        """Publish the state of both replicas, and `processes`."""
        self._publisher.publish(EngineStatus(self.processes, list(infos)))

    async def publish_until(
        self, infos: Sequence[ReplicaInfo], condition: Callable[[], bool] | None = None
    ) -> None:
        """Publish a state until the condition is true; by default, until the client has received it."""

        def has_received() -> bool:
            return self.client.watch is not None and self.client.watch.status.replicas == list(
                infos
            )

        await until(condition or has_received, lambda: (self.publish(infos), self.receive()))

    async def report(self, replica: int, update: ReplicaLoadUpdate) -> None:
        """Send a report of a core, and wait until the client has received it."""
        self.cores[replica].hub.send(b"client0", update)
        # The reply to a command comes after it.
        await self.run(self.client.calls.reset_prefix_cache())

    async def arrived(self, *counts: int) -> None:
        """Wait until the cores have this many requests."""
        await until(
            lambda: tuple(len(core.requests) for core in self.cores) == counts, self.receive
        )
