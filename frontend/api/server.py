"""A frontend process: an HTTP server on the inherited socket and one engine client, from startup to drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import uvloop
from starlette.types import ASGIApp

from ...protocol.config import FIRST_EPOCH, EngineConfig, FrontendConfig
from ...protocol.errors import ConfigError, EngineError
from ...protocol.heartbeat import HeartbeatWriter, seconds_to_beat
from ...protocol.messages import FinishReason
from ...protocol.process import STOP_PROCESS, ignore_stop_signals, return_free_memory
from ...protocol.supervisor_messages import Stage
from ...protocol.transport import StatusReporter
from ..chat import ChatTemplateError, ModelTemplates, prepare_formats
from ..client.engine_client import EngineClient, Overloaded
from ..client.warm_up import warm_up_request
from ..http.certificates import refresh_certificates
from ..http.connection import Connection
from ..http.loop_watch import LoopWatch
from ..http.server import Config, HTTPServer
from ..observability.tracing.tracer import make_tracer
from ..store.client import StoreClient
from ..supervisor.listener import is_loopback
from ..supervisor.parse_journal import ParseJournal, journal_path
from ..tokenizer.load import load_tokenizer
from ..tokenizer.tokenizer import Tokenizer
from .app import App
from .chats.prompt import RESERVED_VARIABLES
from .serving import Serving

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
"""Seconds between checks whether the requests in flight have finished."""
HOLD_BACK_S = 5.0
"""Maximum seconds that a restarted frontend delays accepting connections until it is ready."""

NO_ROOM_S = 0.5
"""Seconds before the warm-up request is retried after the queue was full."""
WARM_UP_S: Final = 2.0
"""Maximum seconds that a restarted frontend waits for the token of its warm-up request."""
IDLE_POLL_S: Final = 1.0
"""Seconds between checks whether no request is running, before grammars are prepared."""

STORE_S: Final = 10.0
"""Maximum seconds that a frontend waits for the store at startup."""

SWITCH_INTERVAL_S = 0.001
"""Maximum seconds that the event loop waits for a thread that runs Python code, at each wake-up."""

COLLECT_S: Final = 2.0
"""Seconds between collections of the oldest garbage generation while few and small requests are running."""
COLLECT_ANYWAY_S: Final = 60.0
"""Seconds after which the oldest generation is collected in any case."""
FEW_SEQUENCES: Final = 512
"""Number of sequences whose objects a collection visits in a few milliseconds."""
FEW_BLOCKS: Final = 100_000
"""Memory blocks allocated since startup whose objects a collection visits in a few milliseconds.

An answer that is being written may have many more, although its sequences have ended.
"""
NEVER: Final = 1_000_000_000

PUBLISH_METRICS_S = 2.0
"""Seconds between publications of this frontend's metrics."""
LAST_ENTRIES_S: Final = 1.0
"""Maximum seconds for the store to record the last ends of requests."""
LAST_WRITES_S = 2.0
"""Seconds for clients to read the ends of their responses after the drain."""

FORCED_EXIT_CODE = 1

_CERT_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

_NO_ROOM = {str(FinishReason.REJECTED), str(FinishReason.THROTTLED)}


def _model_templates(config: EngineConfig, tokenizer: Tokenizer) -> ModelTemplates:
    content_format = config.frontend.chat_template_content_format
    defaults = config.frontend.default_chat_template_kwargs
    if reserved := set(defaults).intersection(RESERVED_VARIABLES):
        raise ConfigError(
            f"--default-chat-template-kwargs must not have {min(reserved)!r}, which is a field of requests"
        )
    try:
        return ModelTemplates(
            tokenizer,
            config.frontend.chat_template or config.model.pooler.chat_template or None,
            content_format,
            config.model.architecture,
            defaults,
        )
    except ChatTemplateError as error:
        raise ConfigError(f"{error}; use another template with --chat-template") from error


def _warn_of_hidden_tools(config: EngineConfig, templates: ModelTemplates) -> None:
    template = templates.choose(with_tools=True)
    parser = config.frontend.tool_call_parser
    if parser not in ("auto", "none") and template is not None and not template.shows_tools:
        logger.warning(
            "the chat template does not show tools to the model, so --tool-call-parser %s finds calls only "
            "if the messages explain the tools; set another template with --chat-template",
            parser,
        )


class Frontend:
    """A frontend process: serves until `STOP_PROCESS`, then drains.

    `client_index` is this process's number among the frontends.
    """

    def __init__(
        self,
        config: EngineConfig,
        client_index: int,
        listener: socket.socket,
        reporter: StatusReporter,
        on_retire: Callable[[], None],
    ) -> None:
        self._config = config
        self._on_retire = on_retire
        self._listener = listener
        self._num_blocks = sys.getallocatedblocks()
        self._reporter = reporter
        self._heartbeats = HeartbeatWriter(config, f"frontend {client_index}")
        tokenizer = load_tokenizer(config.model.verified_tokenizer_path())
        tokenizer.move_long_texts()
        journal = ParseJournal(journal_path(config.run_dir, f"frontend {client_index}"))
        self._engine = EngineClient(config, client_index, tokenizer, journal, reporter.context)
        templates = _model_templates(config, tokenizer)
        formats = prepare_formats(config.frontend, templates)
        if client_index == 0 and config.epoch == FIRST_EPOCH:
            logger.info("chat formats: %s", formats)
            _warn_of_hidden_tools(config, templates)
        self._store = StoreClient(config, client_index, reporter.context)
        self._serving = Serving(
            config, tokenizer, templates, formats, self._engine, self._store, client_index
        )
        self._tracer = self._serving.tracer = make_tracer(config, client_index)
        store = self._store
        engine = self._engine
        engine.metrics.watch_store(lambda: store.state)
        engine.metrics.watch_unfinished(lambda: engine.num_inflight)
        self._engine.output_log = self._store.log
        self._app = App(self._serving, is_loopback=is_loopback(listener))
        self._stop = asyncio.Event()
        self._retired = asyncio.Event()

    async def run(self) -> None:
        """Serve until `STOP_PROCESS`, or after SIGUSR1 until all connections have ended.

        Raises:
            EngineError: The engine cannot generate a token.
        """
        http = HTTPServer(
            uvicorn_config(self._app.asgi, self._config.frontend),
            self._config.frontend.slow_client_s,
        )
        self._handle_signals(http)
        stop_task = asyncio.create_task(self._stop.wait())
        retire_task = asyncio.create_task(self._retire(http))
        start_task = asyncio.create_task(self._start())
        http_task = asyncio.create_task(self._answer(http, {start_task, stop_task}))
        publish_task = asyncio.create_task(self._publish_metrics(http))
        collect_task = asyncio.create_task(self._collect_garbage())
        prepare_task = asyncio.create_task(self._prepare_grammars())
        refresh_task = asyncio.create_task(self._refresh_certificates(http))
        take_task = asyncio.create_task(self._take_over(http, start_task))
        watch = LoopWatch(self._heartbeats, self._num_dropped_frames)
        try:
            await asyncio.wait(
                {start_task, stop_task, http_task}, return_when=asyncio.FIRST_COMPLETED
            )
            if start_task.done():
                start_task.result()
                await asyncio.wait(
                    {http_task, stop_task, retire_task}, return_when=asyncio.FIRST_COMPLETED
                )
            start_task.cancel()
            http.end_websockets()
            await self._drain(http)
        finally:
            for task in (
                publish_task,
                collect_task,
                prepare_task,
                retire_task,
                refresh_task,
                take_task,
            ):
                task.cancel()
            watch.close()
            self._app.recovery.close()
            await self._store.log.flush(LAST_ENTRIES_S)
            self._engine.fail("the server has stopped")
            http.exit()
            await http_task
            self._serving.close()
            self._engine.close()
            if self._tracer is not None:
                self._tracer.close()
            self._store.close()

    async def _answer(self, http: HTTPServer, until: set[asyncio.Task[Any]]) -> None:
        # Until this frontend is ready, connections wait or go to another frontend, so none is rejected.
        if self._config.epoch != FIRST_EPOCH:
            await asyncio.wait(until, timeout=HOLD_BACK_S, return_when=asyncio.FIRST_COMPLETED)
        elif self._config.takes_over:
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        await http.serve(sockets=[self._listener])

    async def _start(self) -> None:
        self._store.start()
        self._serving.connections.start()
        await self._engine.start()
        if not await self._store.wait_until_connected(STORE_S):
            logger.warning("the store does not respond; requests that need it fail until it does")
        self._enter(Stage.WARMING, "generating the first token")
        await self._warm_up()
        if self._config.epoch != FIRST_EPOCH and self._engine.watch is not None:
            await self._engine.watch.wait_for_status()
        gc.collect()
        # Most of it held the text of the tokenizer's file.
        return_free_memory()
        gc.freeze()
        gc.enable()
        self._num_blocks = sys.getallocatedblocks()
        self._enter(Stage.READY, "")
        await self._app.load_routes()
        gc.freeze()
        self._app.recovery.start()
        self._serving.start_decoders()
        for work in self._serving.when_ready:
            await work()

    async def _take_over(self, http: HTTPServer, start: asyncio.Task[None]) -> None:
        """Continue the responses of the frontend that this one replaces."""
        if self._config.epoch != FIRST_EPOCH:
            await asyncio.wait({start})
            await self._serving.connections.take_over(http.adopt)

    async def _warm_up(self) -> None:
        """Generate a token, which checks every process and socket that requests use.

        A restarted frontend also accepts a full queue, a pause and sleep, because the engine has generated tokens
        before. It does not wait long for the token: a pause may begin meanwhile, and may last until this frontend is
        ready to end it.
        """
        if self._config.epoch == FIRST_EPOCH:
            while not await self._generate_one_token():
                await asyncio.sleep(NO_ROOM_S)
        elif not (self._engine.calls.is_paused() or self._engine.sleep.is_asleep):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WARM_UP_S):
                    await self._generate_one_token()

    async def _generate_one_token(self) -> bool:
        """Generate one token. Return False if the queue was full."""
        request = warm_up_request(self._config.model)
        try:
            group = await self._engine.submit([request], request_id="warm-up")
        except Overloaded:
            return False
        try:
            [output] = await group.result()
        finally:
            group.abort()
        if output.finish_reason in _NO_ROOM:
            return False
        if len(output.token_ids) != 1:
            raise EngineError(f"the warm-up request failed: {output.error}")
        return True

    async def _retire(self, http: HTTPServer) -> None:
        """Leave new connections to another engine (after SIGUSR1), and wait until all open ones have ended."""
        await self._retired.wait()
        self._on_retire()
        self._serving.is_retired = True
        http.stop_accepting()
        await self._resume()
        while self._engine.num_inflight or not http.is_idle:
            if self._engine.sleep.is_asleep:
                await self._resume()
            await asyncio.sleep(DRAIN_POLL_S)

    async def _drain(self, http: HTTPServer) -> None:
        """Reject new requests, answer those that have arrived, and give up after the shutdown timeout."""
        self._enter(Stage.DRAINING, "finishing the requests in flight")
        self._engine.draining = True
        deadline = time.monotonic() + self._config.frontend.shutdown_timeout_s
        await self._resume()
        while (self._engine.num_inflight or http.is_answering) and time.monotonic() < deadline:
            if self._engine.sleep.is_asleep:
                await self._resume()
            await asyncio.sleep(DRAIN_POLL_S)
        if self._engine.num_inflight:
            logger.warning("%d sequences did not finish in time", self._engine.num_inflight)

    async def _resume(self) -> None:
        """End a pause or a sleep, during which requests would never finish. Without requests, a sleep goes on."""
        is_asleep = self._engine.sleep.is_asleep
        if is_asleep and not self._engine.num_inflight:
            return
        try:
            if is_asleep:
                async with asyncio.timeout(self._config.frontend.shutdown_timeout_s):
                    await self._engine.sleep.wake()
            if self._engine.calls.is_paused():
                await self._engine.calls.resume()
        except (EngineError, TimeoutError) as error:
            logger.warning("a paused engine could not be resumed: %s", error or "it still sleeps")

    async def _prepare_grammars(self) -> None:
        """Load what the grammars of tool calls need, once no request runs, if the operator expects such calls."""
        if not self._config.frontend.expects_tools:
            return
        while self._serving.stage is not Stage.READY or self._engine.num_inflight:
            await asyncio.sleep(IDLE_POLL_S)
        await self._serving.grammar_checks.prepare()

    async def _publish_metrics(self, http: HTTPServer) -> None:
        while True:
            await asyncio.sleep(seconds_to_beat(PUBLISH_METRICS_S))
            self._engine.metrics.publish()
            if http.is_deaf:
                http.listen_again()

    async def _collect_garbage(self) -> None:
        """Collect the oldest garbage generation while few and small requests run, because it visits all objects.

        Python would collect after some number of allocations, often in the middle of the largest request.
        """
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        collected_at = time.monotonic()
        while True:
            await asyncio.sleep(seconds_to_beat(COLLECT_S))
            _, num_young, num_middle = gc.get_count()
            if not num_young and not num_middle:
                # Few objects were allocated since the last collection.
                continue
            now = time.monotonic()
            is_cheap = (
                self._engine.num_inflight <= FEW_SEQUENCES
                and self._serving.request_memory.num_bytes == 0
                and sys.getallocatedblocks() < self._num_blocks + FEW_BLOCKS
            )
            if is_cheap or now - collected_at > COLLECT_ANYWAY_S:
                collected_at = now
                gc.collect()

    def _num_dropped_frames(self) -> int:
        watch = self._engine.watch
        num_dropped = 0 if watch is None else watch.num_dropped_frames
        return num_dropped + self._store.num_dropped_frames

    def _enter(self, stage: Stage, detail: str) -> None:
        self._serving.enter_stage(stage, detail)
        self._reporter.report(stage, detail)

    def _handle_signals(self, http: HTTPServer) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(partial(self._recover, http))
        loop.add_signal_handler(STOP_PROCESS, self._on_terminate)
        loop.add_signal_handler(signal.SIGUSR1, self._retired.set)
        # The event loop has installed its own handler of SIGINT.
        ignore_stop_signals()

    def _recover(
        self, http: HTTPServer, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Log the failure of a callback, for example for lack of memory, and run those again that it may have been."""
        loop.default_exception_handler(context)
        http.listen_again()
        self._engine.resume_outputs()
        self._store.resume()
        for core in self._engine.cores:
            core.resume()

    def _on_terminate(self) -> None:
        if self._stop.is_set():
            os._exit(FORCED_EXIT_CODE)
        self._stop.set()

    async def _refresh_certificates(self, http: HTTPServer) -> None:
        frontend, context = self._config.frontend, http.config.ssl
        if frontend.enable_ssl_refresh and context is not None:
            await refresh_certificates(context, frontend)


def uvicorn_config(app: ASGIApp, frontend: FrontendConfig) -> Config:
    """Return the configuration of the HTTP server. Raise ConfigError if the files for TLS do not belong together."""
    config = Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="info" if frontend.log_requests else "warning",
        access_log=frontend.log_requests,
        server_header=False,
        timeout_keep_alive=frontend.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=LAST_WRITES_S,  # type: ignore[arg-type]
        ssl_keyfile=frontend.ssl_keyfile,
        ssl_keyfile_password=frontend.ssl_keyfile_password,
        ssl_ciphers=frontend.ssl_ciphers or "TLSv1",
        ssl_certfile=frontend.ssl_certfile,
        ssl_ca_certs=frontend.ssl_ca_certs,
        ssl_cert_reqs=_CERT_REQS[
            frontend.ssl_cert_reqs or ("required" if frontend.ssl_ca_certs else "none")
        ],
    )
    try:
        config.load()
    except ssl.SSLError as error:
        authorities = f", or --ssl-ca-certs {frontend.ssl_ca_certs} is invalid"
        raise ConfigError(
            f"--ssl-keyfile {frontend.ssl_keyfile} does not match --ssl-certfile "
            f"{frontend.ssl_certfile}{authorities if frontend.ssl_ca_certs else ''}: {error}; use PEM files of one "
            "key and its certificate"
        ) from error
    return config


def serve(
    config: EngineConfig,
    client_index: int,
    listener: socket.socket,
    reporter: StatusReporter,
    on_retire: Callable[[], None],
) -> None:
    """Run a frontend until it receives `STOP_PROCESS`, or SIGUSR1 and has no open connection left.

    `on_retire` is called when another engine owns the listening socket.

    Raises:
        EngineError: The frontend cannot start.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def main() -> None:
        frontend = Frontend(config, client_index, listener, reporter, on_retire)
        await frontend.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
