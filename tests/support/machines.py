"""Two machines for an engine: network namespaces where they are permitted, else addresses of the loopback interface."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from support.server import wait_until

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Machine:
    """What to put before a command line to run it there, and in its environment."""

    address: str
    prefix: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


class Program:
    """An `engine` command on a machine. Use as a context manager, which ends it."""

    def __init__(self, machine: Machine, *args: str, launcher: list[str] | None = None) -> None:
        engine = [sys.executable, "-P", "-m", "engine.frontend.cli"]
        self.process = subprocess.Popen(
            [*machine.prefix, *(launcher or engine), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **machine.env},
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line

    def wait_for(self, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        def has_come() -> bool:
            assert text in self.log or self.process.poll() is None, self.log
            return text in self.log

        wait_until(has_come, timeout_s, f"{text!r} in {self.log!r}")

    def stop(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(5)
        return code

    def __enter__(self) -> Program:
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


def client(uds: Path) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://engine", timeout=120
    )


def free_ports(address: str, count: int) -> int:
    """The first of so many neighbouring ports that nobody uses."""
    while True:
        first = random.randrange(20_000, 30_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    listener = stack.enter_context(socket.socket())
                    listener.bind((address, port))
            except OSError:
                continue
        return first


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    with ExitStack() as stack:
        machines = _namespaces(stack)
        if machines is None:
            env = {"GLOO_SOCKET_IFNAME": "lo"}
            machines = Machine("127.0.0.1", env=env), Machine("127.0.0.2", env=env)
        yield machines


def _namespaces(stack: ExitStack) -> tuple[Machine, Machine] | None:
    """Two network namespaces in one user namespace, with a cable between them; None if the system does not let us."""

    def hold(*command: str) -> int:
        """The id of a process that keeps a namespace."""
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo held; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"held\n":
            raise PermissionError
        return holder.pid

    def enter(pid: int) -> list[str]:
        return ["nsenter", "-t", str(pid), "-U", "-n", "--preserve-credentials"]

    def run(pid: int, script: str) -> None:
        subprocess.run([*enter(pid), "sh", "-ec", script], check=True, capture_output=True)

    try:
        first = hold("unshare", "-Urn")
        second = hold("nsenter", "-t", str(first), "-U", "--preserve-credentials", "unshare", "-n")
        run(first, f"ip link add cable0 type veth peer name cable1 netns {second}")
        for pid, device, address in ((first, "cable0", "10.9.0.1"), (second, "cable1", "10.9.0.2")):
            run(
                pid,
                f"ip addr add {address}/24 dev {device}; ip link set {device} up; ip link set lo up",
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return (
        Machine("10.9.0.1", enter(first), {"GLOO_SOCKET_IFNAME": "cable0"}),
        Machine("10.9.0.2", enter(second), {"GLOO_SOCKET_IFNAME": "cable1"}),
    )
