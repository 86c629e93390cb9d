"""What a frontend knows of the engine's processes, from the supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import zmq

from ..protocol.config import EngineConfig
from ..protocol.heartbeat import BEAT_INTERVAL_S
from ..protocol.messages import EngineStatus, ProcessInfo, Stage
from ..protocol.transport import StatusSubscriber

SILENCE_S = 3 * BEAT_INTERVAL_S
"""After so many missed heartbeats a process is called stuck, before it is killed for it."""


class EngineWatch:
    """Keeps the newest `EngineStatus`. `on_status` hears each. Belongs to the event loop that made it."""

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        on_status: Callable[[EngineStatus], None],
    ) -> None:
        self._subscriber = StatusSubscriber(context, config)
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._subscriber.socket.FD, self._read)
        self._heard_at = time.monotonic()
        self._heartbeat_timeout_s = config.recovery.heartbeat_timeout_s
        self.status = EngineStatus([])

    def close(self) -> None:
        self._loop.remove_reader(self._subscriber.socket.FD)
        self._subscriber.close()

    def find_trouble(self) -> str:
        """Which process does not make progress, and since when; "" when all do."""
        age_s = self._read()
        if age_s > SILENCE_S and self.status.processes:
            return f"supervisor: silent for {age_s:.1f} s"
        # Who has no machine to run on is waited for by others.
        for process in sorted(self.status.processes, key=lambda process: process.pid != 0):
            if process.stage is not Stage.READY:
                return f"{process.name}: {process.stage} {process.detail}".rstrip()
            if process.silent_s + age_s > SILENCE_S:
                return f"{process.name}: silent for {process.silent_s + age_s:.1f} s"
        return ""

    @property
    def is_beyond_help(self) -> bool:
        """Whether the supervisor, which restarts all others, is silent itself."""
        return bool(self.status.processes) and self._read() > 2 * self._heartbeat_timeout_s

    def process(self, name: str) -> ProcessInfo | None:
        return next((p for p in self.status.processes if p.name == name), None)

    def _read(self) -> float:
        """Take in what has come. Returns the age of the newest status in seconds."""
        while (status := self._subscriber.receive()) is not None:
            self.status, self._heard_at = status, time.monotonic()
            self._on_status(status)
        return time.monotonic() - self._heard_at
