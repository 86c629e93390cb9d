"""A frontend process: HTTP on the inherited socket, one engine client, from start-up to drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import uvicorn
import uvloop

from ..protocol.config import FIRST_EPOCH, EngineConfig
from ..protocol.errors import ConfigError, EngineError
from ..protocol.heartbeat import BEAT_INTERVAL_S
from ..protocol.messages import FinishReason
from ..protocol.sampling_params import SamplingParams
from ..protocol.supervisor_messages import Heartbeat, Stage
from ..protocol.transport import StatusReporter
from .api.app import create_app
from .api.serving import Serving
from .chat import ChatTemplateError, ContentFormat, ModelTemplates
from .connection import connection_factory
from .engine_client import EngineClient, Overloaded, SequenceRequest
from .tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
HOLD_BACK_S = 5.0
"""How long a frontend that replaces another waits to be ready before it answers connections anyway."""

NO_ROOM_S = 0.5
"""After so long the first token is tried again if the queue was full."""

PUBLISH_METRICS_S = 1.0
LAST_WRITES_S = 2.0
"""What a client may take to read the end of its answer once the drain is over."""

FORCED_EXIT_CODE = 1

_NO_ROOM = {str(FinishReason.REJECTED), str(FinishReason.THROTTLED)}


class _HTTPServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the frontend decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _model_templates(config: EngineConfig, tokenizer: Tokenizer) -> ModelTemplates:
    """Raises ConfigError for a chat template that cannot be used."""
    content_format = cast(ContentFormat, config.frontend.chat_template_content_format)
    try:
        return ModelTemplates(tokenizer, config.frontend.chat_template, content_format)
    except ChatTemplateError as error:
        raise ConfigError(f"{error}; choose another with --chat-template") from error


class Frontend:
    """Serves until SIGTERM, then drains. `client_index` is this process's number among the frontends."""

    def __init__(
        self,
        config: EngineConfig,
        client_index: int,
        listener: socket.socket,
        reporter: StatusReporter,
    ) -> None:
        self._config = config
        self._listener = listener
        self._reporter = reporter
        tokenizer = load_tokenizer(config.model.tokenizer_path)
        self._engine = EngineClient(config, client_index, tokenizer)
        self._serving = Serving(
            config, tokenizer, _model_templates(config, tokenizer), self._engine
        )
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Raises EngineError if the engine cannot generate a token."""
        self._handle_signals()
        http = _HTTPServer(self._uvicorn_config())
        stop_task = asyncio.create_task(self._stop.wait())
        start_task = asyncio.create_task(self._start())
        http_task = asyncio.create_task(self._answer(http, {start_task, stop_task}))
        publish_task = asyncio.create_task(self._publish_metrics())
        beat_task = asyncio.create_task(self._beat())
        try:
            await asyncio.wait(
                {start_task, stop_task, http_task}, return_when=asyncio.FIRST_COMPLETED
            )
            if start_task.done():
                start_task.result()
                await asyncio.wait({http_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            start_task.cancel()
            await self._drain()
        finally:
            publish_task.cancel()
            beat_task.cancel()
            self._engine.fail("the server has stopped")
            http.should_exit = True
            await http_task
            self._engine.close()

    async def _answer(self, http: _HTTPServer, until: set[asyncio.Task[Any]]) -> None:
        if self._config.epoch != FIRST_EPOCH:
            # Connections wait, or go to another frontend: none is refused because this one has just begun.
            await asyncio.wait(until, timeout=HOLD_BACK_S, return_when=asyncio.FIRST_COMPLETED)
        await http.serve(sockets=[self._listener])

    async def _start(self) -> None:
        await self._engine.start()
        self._enter(Stage.WARMING, "generating the first token")
        await self._prove_the_way()
        gc.collect()
        gc.freeze()
        self._enter(Stage.READY, "")

    async def _prove_the_way(self) -> None:
        """Generate a token, which proves that every process and socket on its way works.

        A full queue proves as much to a frontend that replaces another: the engine has generated tokens before.
        """
        while not await self._generate_one_token() and self._config.epoch == FIRST_EPOCH:
            await asyncio.sleep(NO_ROOM_S)

    async def _generate_one_token(self) -> bool:
        """Whether there was room for it. Raises EngineError if it could not be generated."""
        request = SequenceRequest(
            prompt_token_ids=np.zeros(1, np.int32),
            params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        )
        try:
            group = await self._engine.submit([request], request_id="warm-up")
        except Overloaded:
            return False
        [output] = await group.result()
        if output.finish_reason in _NO_ROOM:
            return False
        if len(output.token_ids) != 1:
            raise EngineError(f"the first token could not be generated: {output.error}")
        return True

    async def _drain(self) -> None:
        """Refuse what is new, let what runs finish, end the rest after the shutdown timeout."""
        self._enter(Stage.DRAINING, "finishing the requests in flight")
        self._engine.draining = True
        deadline = time.monotonic() + self._config.frontend.shutdown_timeout_s
        while self._engine.num_inflight and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        if self._engine.num_inflight:
            logger.warning("%d sequences did not finish in time", self._engine.num_inflight)

    async def _publish_metrics(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_METRICS_S)
            self._engine.metrics.publish()

    async def _beat(self) -> None:
        """Sent from the event loop, so that a loop that hangs is noticed."""
        while True:
            watch = self._engine.watch
            num_dropped = 0 if watch is None else watch.num_dropped_frames
            self._reporter.beat(Heartbeat(num_dropped_frames=num_dropped))
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _enter(self, stage: Stage, detail: str) -> None:
        self._serving.enter(stage, detail)
        self._reporter.report(stage, detail)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        # The supervisor answers these for all of its children.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_terminate(self) -> None:
        if self._stop.is_set():
            os._exit(FORCED_EXIT_CODE)
        self._stop.set()

    def _uvicorn_config(self) -> uvicorn.Config:
        frontend = self._config.frontend
        config = uvicorn.Config(
            create_app(self._serving),
            http=connection_factory(frontend.slow_client_s),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="info" if frontend.log_requests else "warning",
            access_log=frontend.log_requests,
            server_header=False,
            timeout_keep_alive=frontend.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=LAST_WRITES_S,  # type: ignore[arg-type]
            ssl_keyfile=frontend.ssl_keyfile,
            ssl_certfile=frontend.ssl_certfile,
        )
        try:
            config.load()
        except ssl.SSLError as error:
            raise ConfigError(
                f"--ssl-keyfile {frontend.ssl_keyfile} does not go with --ssl-certfile "
                f"{frontend.ssl_certfile}: {error}; give PEM files of one key and its certificate"
            ) from error
        return config


def serve(
    config: EngineConfig, client_index: int, listener: socket.socket, reporter: StatusReporter
) -> None:
    """Run a frontend until it is told to stop. Raises EngineError for a start that cannot succeed."""

    async def main() -> None:
        await Frontend(config, client_index, listener, reporter).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
