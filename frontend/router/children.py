"""The servers of a router: an `engine serve` for each loaded model, on a Unix socket."""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import yaml

from ...protocol.config import ANY_MODEL
from ...protocol.errors import EngineError
from ...protocol.process import send_when_parent_exits
from ..api.logprobs import Json
from .models_file import RoutedModel

logger = logging.getLogger(__name__)

READY_POLL_S: Final = 0.1
WATCH_S: Final = 1.0
"""Seconds between checks for idle models, and for servers that have exited."""


class State(enum.StrEnum):
    """The states of a model, in llama.cpp's words."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


class Child:
    """One model, and its server while it is loaded.

    Attributes:
        model: The model.
        socket: The path of the server's socket.
        state: Its state.
        num_running: The number of requests that its server is answering.
        used_at: The time of its last use, in CLOCK_MONOTONIC seconds.
    """

    def __init__(
        self,
        model: RoutedModel,
        directory: Path,
        number: int,
        on_change: Callable[[Child], None],
    ) -> None:
        self.model = model
        self.socket = str(directory / str(number))
        self._state = State.UNLOADED
        self._on_change = on_change
        self.num_running = 0
        self.used_at = 0.0
        self._config = directory / f"{number}.yaml"
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (*self.model.names, *self.model.adapters)

    @property
    def state(self) -> State:
        """The state of the engine. Each change of it is reported."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self._on_change(self)

    @property
    def has_server(self) -> bool:
        """True if its server runs, starts or stops."""
        return self._process is not None

    def begin_request(self) -> None:
        """Count a request that its server answers."""
        self.num_running += 1
        self._is_idle.clear()

    def end_request(self) -> None:
        """Count the end of a request."""
        self.num_running -= 1
        self.used_at = time.monotonic()
        if not self.num_running:
            self._is_idle.set()

    async def wait_until_loaded(self) -> None:
        """Wait until the model is loaded, and count a request. Raise EngineError if it does not load."""
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(loaded)
        try:
            await loaded
        except asyncio.CancelledError:
            if loaded.done() and not loaded.cancelled() and loaded.exception() is None:
                self.end_request()
            raise

    async def load(self) -> None:
        """Start the server, wait until it is ready, and begin the requests that wait for it.

        They begin here, because the next model may be about to take the place of this one.

        Raises:
            EngineError: It does not start.
        """
        failure: EngineError | None = None
        try:
            await self._start()
        except (EngineError, OSError) as error:
            self.state = State.FAILED
            failure = EngineError(f"the model {self.model.name} does not load: {error}")
        self.end_waiting(failure)
        if failure is not None:
            raise failure

    def end_waiting(self, failure: EngineError | None) -> None:
        """Begin the requests that wait for this model, or let them fail."""
        waiting, self._waiting = self._waiting, []
        for loaded in waiting:
            if not loaded.done() and failure is None:
                self.begin_request()
                loaded.set_result(None)
            elif not loaded.done() and failure is not None:
                loaded.set_exception(failure)

    async def _start(self) -> None:
        self.state = State.LOADING
        self._config.write_text(yaml.safe_dump(self.model.options))
        command = ["-P", "-m", "engine.frontend.cli.main", "serve", "--config", str(self._config)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            "--uds",
            self.socket,
            "--served-model-name",
            *self.model.names,
            process_group=0,
            preexec_fn=_end_with_router,
        )
        while self._process.returncode is None:
            if await _is_ready(self.socket):
                self.state = State.LOADED
                self.used_at = time.monotonic()
                return
            await asyncio.sleep(READY_POLL_S)
        self.notice_exit()
        raise EngineError("its server has exited; see the log of the router")

    async def unload(self) -> None:
        """Stop the server after it has answered all requests. Later ones have to load the model again."""
        if self._process is None:
            return
        self.state = State.UNLOADED
        await self._is_idle.wait()
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        await self._process.wait()
        self._process = None

    def notice_exit(self) -> None:
        """Record that the server has ended by itself, if so."""
        if self._process is not None and self._process.returncode is not None:
            code, self._process, self.state = self._process.returncode, None, State.FAILED
            logger.error("the server of %s has exited with code %d", self.model.name, code)

    def kill(self) -> None:
        """End the server at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


class Children:
    """The servers of all models, of which at most `max_loaded` run at a time.

    Args:
        models: The models.
        read_models: Returns the models of the file as it is now.
        directory: The directory of the sockets.
        max_loaded: The maximum number of loaded models; 0 for no limit.
        idle_s: Seconds after which a model without requests is unloaded; None for never.
    """

    def __init__(
        self,
        models: Sequence[RoutedModel],
        read_models: Callable[[], Sequence[RoutedModel]],
        directory: Path,
        max_loaded: int,
        idle_s: float | None,
    ) -> None:
        self._read_models = read_models
        self._directory = directory
        self._max_loaded = max_loaded
        self._idle_s = idle_s
        self._numbers = itertools.count()
        self._subscribers: set[asyncio.Queue[Json | None]] = set()
        self.all = [self._new_child(model) for model in models]
        self._by_name = self._find_names()
        # One model is loaded or unloaded at a time, because the memory of the one is needed for the other.
        self._changing = asyncio.Lock()
        self._loads: dict[Child, asyncio.Task[None]] = {}

    def _new_child(self, model: RoutedModel) -> Child:
        return Child(model, self._directory, next(self._numbers), self._report_state)

    def _find_names(self) -> dict[str, Child]:
        return {name: child for child in self.all for name in child.names}

    @property
    def max_loaded(self) -> int:
        """The maximum number of loaded models."""
        return self._max_loaded or len(self.all)

    def unload_time(self, child: Child) -> float | None:
        """Return the time at which a loaded model is unloaded without another request; None for never."""
        if self._idle_s is None:
            return None
        idle_s = 0.0 if child.num_running else time.monotonic() - child.used_at
        return time.time() + self._idle_s - idle_s

    @property
    def loaded(self) -> list[Child]:
        """The models whose servers answer requests."""
        return [child for child in self.all if child.state is State.LOADED]

    def find(self, name: str) -> Child | None:
        """Return the model with a name, also in the forms NAME:latest of Ollama and NAME:ADAPTER of SGLang.

        The first model also has SGLang's name for any model, unless another one has it.
        """
        base = name.partition(":")[0]
        found = self._by_name.get(name) or self._by_name.get(base)
        return self.all[0] if found is None and base == ANY_MODEL else found

    @asynccontextmanager
    async def use(self, child: Child) -> AsyncIterator[None]:
        """Load a model if it is not, and keep it until the end of this context.

        Raises:
            EngineError: Its server does not start.
        """
        if child.state is State.LOADED:
            child.begin_request()
        else:
            if child not in self._loads:
                self._loads[child] = load = asyncio.create_task(self.load(child))
                # The requests that wait get the error.
                load.add_done_callback(lambda load: load.cancelled() or load.exception())
            await child.wait_until_loaded()
        try:
            yield
        finally:
            child.end_request()

    async def load(self, child: Child) -> None:
        """Load a model. If that would be too many, unload an idle one, or the one that was used least recently.

        Raises:
            EngineError: Its server does not start.
        """
        async with self._changing:
            if child.state is State.LOADED:
                self._loads.pop(child, None)
                return
            if child not in self.all:
                self._loads.pop(child, None)
                failure = EngineError(f"the model {child.model.name} was removed from the file")
                child.end_waiting(failure)
                raise failure
            while len(running := [each for each in self.all if each.has_server]) >= self.max_loaded:
                oldest = min(running, key=lambda each: (each.num_running > 0, each.used_at))
                logger.info("unloading %s for %s", oldest.model.name, child.model.name)
                await oldest.unload()
            logger.info("loading %s", child.model.name)
            try:
                await child.load()
            finally:
                # Before the next model may take its place, because later requests have to load it again.
                self._loads.pop(child, None)

    async def unload(self, child: Child) -> None:
        """Unload a model, after its requests."""
        async with self._changing:
            await child.unload()

    async def reload(self) -> None:
        """Read the models again. Models that were removed or changed are unloaded, after their requests.

        Raises:
            EngineError: The file is invalid. The models remain what they were.
        """
        async with self._changing:
            models = await asyncio.to_thread(self._read_models)
            known = {child.model.name: child for child in self.all}
            # Requests find the new models at once, and wait for them until the others are unloaded.
            self.all = [
                known.pop(model.name) if model.name in known else self._new_child(model)
                for model in models
            ]
            self._by_name = self._find_names()
            for name, child in known.items():
                await child.unload()
                self._report({"model": name, "event": "model_remove"})
            for child, model in zip(self.all, models, strict=True):
                if child.model != model:
                    await child.unload()
                    child.model = model
                if not child.has_server:
                    child.state = State.UNLOADED
            self._by_name = self._find_names()
        self._report({"model": "*", "event": "models_reload"})

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[Json | None]]:
        """Return a queue of llama.cpp's events: changes of states and of the models. None is the last one."""
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        self._subscribers.add(queue)
        try:
            yield queue
        finally:
            self._subscribers.remove(queue)

    def end_subscriptions(self) -> None:
        """End the queues of all subscribers."""
        self._report(None)

    def _report_state(self, child: Child) -> None:
        status: Json = {"status": child.state}
        self._report({"model": child.model.name, "event": "model_status", "data": status})

    def _report(self, event: Json | None) -> None:
        for queue in self._subscribers:
            queue.put_nowait(event)

    async def watch(self) -> None:
        """Unload models that are idle, and notice servers that have exited, for ever."""
        while True:
            await asyncio.sleep(WATCH_S)
            for child in self.loaded:
                child.notice_exit()
                idle_s = time.monotonic() - child.used_at
                is_idle = child.state is State.LOADED and not child.num_running
                if is_idle and self._idle_s is not None and idle_s > self._idle_s:
                    logger.info("unloading %s, which is idle", child.model.name)
                    await self.unload(child)

    async def close(self) -> None:
        """Stop all servers, after their requests."""
        await asyncio.gather(*(child.unload() for child in self.all))


def _end_with_router() -> None:
    """Let the server drain if the router is killed."""
    send_when_parent_exits(signal.SIGTERM)


async def _is_ready(path: str) -> bool:
    """Return whether the server at a socket answers that it is ready."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
