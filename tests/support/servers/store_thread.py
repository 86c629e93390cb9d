"""The store of an engine in a thread of the test."""

from __future__ import annotations

import threading
from typing import Any

import zmq
from engine.frontend.store.engine_store import EngineStore
from engine.protocol.config import EngineConfig

POLL_MS = 20


class StoreThread:
    """An `EngineStore` that runs between entry and exit, and can be entered again."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def __enter__(self) -> StoreThread:
        self._stop = threading.Event()
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._has_started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        try:
            store = EngineStore(self._config, context)
            try:
                self._has_started.set()
                while not self._stop.is_set():
                    store.poller.poll(POLL_MS)
                    store.turn()
            finally:
                store.close()
        finally:
            context.term()
