"""An engine without HTTP: its processes, and a client on an event loop in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import uvloop
import zmq

from ...protocol.config import EngineConfig
from ..cli.arguments import Settings
from ..cli.engine_config import make_engine_config
from ..client.engine_client import EngineClient, EngineDead
from ..model_source.config import resolve_model
from ..model_source.options import ModelOptions
from ..supervisor.console import Console, StartupProgress
from ..supervisor.engine_processes import engine_processes
from ..supervisor.run_dir import RunDirectory
from ..supervisor.supervisor import ProcessFailed, Supervisor
from ..tokenizer.load import load_tokenizer
from ..tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_INTERVAL_S: Final = 0.1
"""Seconds between checks of the processes."""

END_S: Final = 1.0
"""Seconds after which work that has not ended by itself is cancelled when the engine is closed."""


class LocalEngine:
    """A core and its workers as child processes. `client` must be used on the loop that `run` uses."""

    def __init__(self, settings: Settings) -> None:
        """Start all processes and wait until they are ready.

        Raises:
            ConfigError: The options are invalid.
            CheckpointError: The checkpoint cannot be served.
            EngineDead: A process failed.
        """
        console = Console()
        resolved = resolve_model(ModelOptions(**settings["model"]), console)
        with ExitStack() as resources:
            run_dir = resources.enter_context(RunDirectory())
            self.config: EngineConfig = make_engine_config(settings, resolved, run_dir.path)
            self.tokenizer: Tokenizer = load_tokenizer(self.config.model.tokenizer_path)
            self._loop = uvloop.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
            thread.start()
            resources.callback(self._loop.close)
            resources.callback(thread.join)
            resources.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            context: zmq.Context[Any] = zmq.Context()
            resources.callback(context.term)
            self.client = EngineClient(self.config, 0, self.tokenizer, context=context)
            resources.callback(lambda: self.run(self._stop()))
            self._supervisor: Supervisor | None = None
            self._watcher: asyncio.Task[None] | None = None
            self.run(self._start(StartupProgress(console)))
            self._resources = resources.pop_all()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop and return its result. If the caller is interrupted, `work` is cancelled.

        Raises:
            EngineDead: The engine is closed.
        """
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the engine's loop, and return its future result.

        Raises:
            EngineDead: The engine is closed.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            # The loop is closed.
            work.close()
            raise EngineDead("the engine is closed") from None

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a call of a function on the engine's loop. This does nothing if the engine is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close_together(self, close: Callable[[], None]) -> None:
        """Register `close` to be called when the engine is closed, before its processes are stopped."""
        self._resources.callback(close)

    def close(self) -> None:
        """Stop every process, and end all work. Unfinished requests fail. Later calls have no effect."""
        self._resources.close()

    async def _start(self, progress: StartupProgress) -> None:
        config = self.config
        self._supervisor = Supervisor(
            config, engine_processes(config, config.save(), None), on_status=progress.update
        )
        self._supervisor.start()
        self._watcher = asyncio.create_task(self._watch(self._supervisor))
        await self.client.start()

    async def _watch(self, supervisor: Supervisor) -> None:
        try:
            while True:
                supervisor.poll()
                await asyncio.sleep(WATCH_INTERVAL_S)
        except ProcessFailed as error:
            self.client.fail(str(error))
        except Exception as error:
            logger.exception("the supervisor failed unexpectedly")
            self.client.fail(f"the supervisor failed unexpectedly: {error!r}")

    async def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        is_alive = self.client.dead_reason is None
        self.client.close()
        if self._supervisor is not None:
            with contextlib.closing(self._supervisor), contextlib.suppress(ProcessFailed):
                if is_alive:
                    self._supervisor.drain()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            # The requests have failed, which those who wait for them are yet to see.
            _, pending = await asyncio.wait(others, timeout=END_S)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
