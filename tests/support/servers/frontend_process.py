"""A real frontend process, connected to an echo core and a store."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import psutil
import zmq
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.config import (
    FIRST_EPOCH,
    EngineConfig,
    FrontendConfig,
    ModelConfig,
    SchedulerConfig,
    StoreConfig,
)
from engine.protocol.process import STOP_PROCESS
from engine.protocol.supervisor_messages import ProcessStatus, Stage
from engine.protocol.transport import StatusReceiver
from support.processes.forked import ForkedProcess
from support.servers.echo_core import EchoCoreThread
from support.servers.server import default_model
from support.servers.store_thread import StoreThread

if TYPE_CHECKING:
    import openai

MODEL = "echo"
ECHO_TEMPLATE = "{{ messages[-1]['content'] }}"
"""Makes the echo core answer a chat with the last message."""

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


_load_tokenizer = cache(load_tokenizer)


class FrontendProcess:
    """A frontend that starts on entry. With `with_core=False`, `core` is None and it never becomes ready."""

    def __init__(
        self,
        *,
        with_core: bool = True,
        step_s: float = 0.001,
        max_model_len: int = 512,
        served_names: tuple[str, ...] = (MODEL, "echo-alias"),
        send_buffer: int = 0,
        max_open_files: int = 0,
        scheduler: SchedulerConfig | None = None,
        epoch: int = FIRST_EPOCH,
        tokenizer_path: str | None = None,
        store: StoreConfig | None = None,
        **frontend: Any,
    ) -> None:
        self._send_buffer = send_buffer
        self._max_open_files = max_open_files
        self.run_dir = Path(tempfile.mkdtemp(prefix="frontend-"))
        path = default_model()
        tokenizer_path = tokenizer_path or path
        tokenizer = _load_tokenizer(tokenizer_path)
        assert tokenizer.eos_token_id is not None
        self.tokenizer = tokenizer
        frontend.setdefault("chat_template", ECHO_TEMPLATE)
        self.config = EngineConfig(
            run_dir=str(self.run_dir),
            epoch=epoch,
            model=ModelConfig(
                model="echo-model",
                path=path,
                tokenizer_path=tokenizer_path,
                served_names=served_names,
                architecture="llama",
                vocab_size=tokenizer.vocab_size,
                max_model_len=max_model_len,
                eos_token_ids=(tokenizer.eos_token_id,),
                enable_lora=frontend.get("allow_runtime_lora_updating", False),
            ),
            scheduler=scheduler or SchedulerConfig(),
            frontend=FrontendConfig(**frontend),
            store=store or StoreConfig(),
        )
        self._log = self.run_dir / "log"
        self._context: zmq.Context[Any] = zmq.Context()
        self._status = StatusReceiver(self._context, self.config)
        self._core_thread = EchoCoreThread(self.config, step_s=step_s) if with_core else None
        self._store_thread = StoreThread(self.config)
        self.stages: list[tuple[Stage, str]] = []

    @property
    def core_thread(self) -> EchoCoreThread:
        """The thread of the core, whose `step_s` may be changed."""
        assert self._core_thread is not None
        return self._core_thread

    @property
    def core(self) -> Any:
        assert self._core_thread is not None
        return self._core_thread.core

    def __enter__(self) -> FrontendProcess:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        if self._send_buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        self._listener.listen(512)
        self.port = self._listener.getsockname()[1]
        fd = self._listener.fileno()
        program = ["engine.frontend", str(self.config.save()), "0", str(fd), str(self.config.epoch)]
        with self._log.open("w") as log:
            self.process = ForkedProcess(program, pass_fds=[fd], stdout=log.fileno())
        if self._max_open_files:
            psutil.Process(self.process.pid).rlimit(
                psutil.RLIMIT_NOFILE, (self._max_open_files,) * 2
            )
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"content-type": "application/json"},
            timeout=20,
        )
        self._store_thread.__enter__()
        if self._core_thread is not None:
            self._core_thread.__enter__()
            try:
                self.wait_for_stage(Stage.READY)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def wait_for_stage(self, stage: Stage) -> None:
        """Read the process's reports until it has reached `stage`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while stage not in [reached for reached, _ in self.stages]:
            assert time.monotonic() < deadline, (self.stages, self.process.poll())
            if isinstance(status := self._status.receive(timeout_ms=100), ProcessStatus):
                self.stages.append((status.stage, status.detail))
                assert stage is Stage.FAILED or status.stage is not Stage.FAILED, self.log

    def client(self, api_key: str = "unused") -> openai.OpenAI:
        # It takes a second to import, and most tests do not need it.
        import openai

        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=api_key, max_retries=0
        )

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", model=MODEL, prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @property
    def log(self) -> str:
        return self._log.read_text()

    def begin_stop(self) -> None:
        """Send the signal by which a supervisor stops the frontend."""
        self.process.send_signal(STOP_PROCESS)

    def stop(self) -> int:
        """Stop the frontend as a supervisor does, and return the exit code."""
        self.begin_stop()
        return self.process.wait(STOP_TIMEOUT_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.http.close()
        self._listener.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdin.close()
        if self._core_thread is not None:
            self._core_thread.__exit__(kind, error, traceback)
        self._store_thread.__exit__()
        self._status.close()
        self._context.term()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def sse_events(text: str) -> list[Any]:
    """Return the JSON of each event of a stream that ended with `[DONE]`."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]", text[-500:]
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def sound_frontend(**options: Any) -> Iterator[FrontendProcess]:
    """Run a frontend that must stop cleanly, and must not have logged an exception."""
    with FrontendProcess(**options) as process:
        yield process
        assert process.stop() == 0, process.log
        assert "Traceback" not in process.log, process.log
