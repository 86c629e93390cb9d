"""Run a contender: measure points on it, then its memory, then stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import psutil
import uvloop

from .clients import free_port
from .contenders import MIB, Contender
from .load import measure
from .points import WARM_UP, Point

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0
FILLING = Point(prompt=2048, output=1, concurrency=8, requests=8)

SETTLING_S = 10.0
"""Seconds after a server is ready in which it finishes its start: allocating Engine's KV cache may be slow."""


class Running(ABC):
    """A running contender, started by `with`.

    `start_s` is the time until it was ready; `with` waits somewhat longer.
    """

    def __init__(self, contender: Contender, log: TextIO) -> None:
        self.contender = contender
        self._log = log

    def __enter__(self) -> Running:
        begin = time.perf_counter()
        self._process = self._start()
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        self.start_s = time.perf_counter() - begin
        time.sleep(SETTLING_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def measure(self, point: Point, seed: int) -> dict[str, Any]:
        """Return the figures of `measure`, and the CPU seconds that all other programs used meanwhile."""
        before, busy = self._cpu_s(), _busy_cpu_s()
        figures = self._measure(point, seed)
        figures["server_cpu_s"] = self._cpu_s() - before
        figures["other_cpu_s"] = _busy_cpu_s() - busy - figures["server_cpu_s"]
        return figures

    def pss_without_kv_cache(self) -> dict[str, float]:
        """Return the MiB of each process, from which the KV cache is subtracted in the largest one."""
        self._fill_kv_cache()
        named: dict[str, float] = {}
        for process in self._family():
            name = f"{process.pid} {(process.cmdline() or [''])[0]}"
            named[name] = process.memory_full_info().pss / MIB
        largest = max(named, key=lambda name: named[name])
        named[largest] -= self.contender.kv_cache_bytes / MIB
        return named

    @abstractmethod
    def _start(self) -> subprocess.Popen[str]: ...

    @abstractmethod
    def _wait_until_ready(self) -> None: ...

    @abstractmethod
    def _measure(self, point: Point, seed: int) -> dict[str, Any]: ...

    @abstractmethod
    def _fill_kv_cache(self) -> None:
        """Write to the whole KV cache, so that its memory is known."""

    def _family(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._family()]
        return sum(t.user + t.system for t in times)

    def _spawn(self, command: list[str], **pipes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            **{"stdout": self._log, **pipes},
            stderr=self._log,
            text=True,
            env={**os.environ, **self.contender.env},
        )

    def _stop(self) -> None:
        family = self._family() if self._process.poll() is None else []
        self._process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(family, STOP_TIMEOUT_S)
        for process in alive:
            process.kill()
        self._process.wait()


class RunningServer(Running):
    def _start(self) -> subprocess.Popen[str]:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [part.replace("{port}", str(port)) for part in self.contender.command]
        return self._spawn(command, stdin=subprocess.DEVNULL)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.contender.name} exited with {self._process.returncode}")
            try:
                with urllib.request.urlopen(self._url + self.contender.health, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        raise SystemExit(f"{self.contender.name} was not healthy within {START_TIMEOUT_S:.0f} s")

    def _measure(self, point: Point, seed: int) -> dict[str, Any]:
        # Use uvloop, because the client shares the CPU cores with the server.
        return uvloop.run(measure(self._url, "bench", point, seed))

    def _fill_kv_cache(self) -> None:
        """Fill Engine's KV cache, which is written when it is used.

        Peers write zeros to all of theirs when they start.
        """
        if self.contender.is_peer:
            return
        tokens = 0
        while tokens < self._kv_cache_tokens():
            figures = self._measure(FILLING, seed=tokens)
            if figures["failed"]:
                raise SystemExit(f"filling the KV cache: {figures['first_error']}")
            tokens += FILLING.prompt * FILLING.requests

    def _kv_cache_tokens(self) -> int:
        with urllib.request.urlopen(self._url + "/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        labels = next(line for line in lines if "cache_config_info{" in line)
        numbers = dict(
            pair.split("=") for pair in labels[labels.index("{") + 1 :].split("}")[0].split(",")
        )
        return int(numbers["block_size"].strip('"')) * int(numbers["num_gpu_blocks"].strip('"'))


class RunningChild(Running):
    """A program without a server, which answers each line of JSON with one line."""

    def _start(self) -> subprocess.Popen[str]:
        return self._spawn(
            list(self.contender.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def _wait_until_ready(self) -> None:
        self._answer()

    def _measure(self, point: Point, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(point) | {"seed": seed}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _fill_kv_cache(self) -> None:
        pass

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.contender.name} exited; see the log")


@contextmanager
def run(contender: Contender, log_path: Path) -> Iterator[Running]:
    kind = RunningServer if any("{port}" in part for part in contender.command) else RunningChild
    with log_path.open("a") as log, kind(contender, log) as running:
        running.measure(WARM_UP, seed=0)
        yield running


def _busy_cpu_s() -> float:
    """Return the CPU seconds of all programs on the machine except this process."""
    times = psutil.cpu_times()
    busy = sum(times) - times.idle - times.iowait
    if sys.platform == "linux":
        busy -= times.guest + times.guest_nice  # part of user and nice
    own = psutil.Process().cpu_times()
    return float(busy - own.user - own.system)
